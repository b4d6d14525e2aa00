"""The command line: the only place that wires parts together, prints, and exits."""
