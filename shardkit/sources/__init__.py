"""Where records come from, one file for each kind of source."""
