"""Candidates side by side: tables, pages and plots; and the ablation of a loader."""
