"""The storage formats, one file each: a writer, a reader and a ``FORMAT``. They never decode."""
