"""Why the GPU waits for data, and what helps."""
