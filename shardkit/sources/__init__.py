"""Sources of records, one module for each kind."""
