"""``python -m shardkit`` is the ``shardkit`` command."""

from shardkit.cli.main import main

if __name__ == "__main__":
    main()
