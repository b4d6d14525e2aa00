"""Conversions by many machines."""
