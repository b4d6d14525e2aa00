"""Writes shardkit/__init__.pyi, the types of the public names, which are imported lazily.

python scripts/make_stub.py           write it
python scripts/make_stub.py --check   write nothing; exit with 1 if it is stale
"""

from __future__ import annotations

import sys
from pathlib import Path

import shardkit

STUB = Path(shardkit.__file__).with_suffix(".pyi")


def stub() -> str:
    """Return the content of the file."""
    imports = [
        f"from shardkit.{module} import {name} as {name}"
        for module, names in sorted(vars(shardkit)["_PUBLIC"].items())
        for name in names.split()
    ]
    lines = [
        "# Made by scripts/make_stub.py from __init__.py.",
        "from shardkit._version import __version__ as __version__",
        *imports,
        "",
        "__all__: list[str]",
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    if sys.argv[1:] == ["--check"]:
        sys.exit(STUB.read_text("utf-8") != stub() and f"{STUB} is stale: run {sys.argv[0]}")
    STUB.write_text(stub(), "utf-8")
