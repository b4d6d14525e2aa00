"""The search for the settings of a loader that are best on this machine."""
