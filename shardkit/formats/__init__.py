"""The storage formats: each has a writer, a reader and a ``FORMAT``. They never decode."""
