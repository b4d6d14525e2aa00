"""Contenders side by side: tables, pages, plots, and the ladder."""
