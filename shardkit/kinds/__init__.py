"""Fields of records: one module for each kind of field, and what they have in common."""
