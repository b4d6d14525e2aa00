"""Commands that change datasets: append, merge, split, and fields in layers."""
