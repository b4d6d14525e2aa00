"""Fields of records: one module for each kind of field, and their common base."""
