"""Object stores: a process that talks to them, and a cache of their files."""
