"""``python -m shardkit`` is the ``shardkit`` command."""

import os
import sys

# Python puts the working directory first on the module path. The command imports nothing there.
if __name__ == "__main__" and not sys.flags.safe_path:
    if sys.path[0] == os.getcwd():
        del sys.path[0]
    packages = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    if packages not in sys.path:
        sys.path.append(packages)

from shardkit.cli.main import main

if __name__ == "__main__":
    main()
