"""How batches are loaded: threads or worker processes, and their memory."""
