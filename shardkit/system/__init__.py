"""Files, processes, memory and text. Nothing here knows about datasets."""
