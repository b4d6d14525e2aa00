"""Candidates side by side: tables, pages and plots."""
