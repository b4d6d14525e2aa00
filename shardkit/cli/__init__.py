"""The command line: the only code that wires the packages together, prints, and exits."""
