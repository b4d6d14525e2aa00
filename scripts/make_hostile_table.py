"""Writes docs/hostile-images.md from the cases in tests/support/hostile/.

python scripts/make_hostile_table.py           write it
python scripts/make_hostile_table.py --check   write nothing; exit with 1 if it is stale
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "hostile-images.md"


def main(arguments: list[str]) -> int:
    """Write the page, or with ``--check`` compare it; return the exit code."""
    if arguments not in ([], ["--check"]):
        print(__doc__, file=sys.stderr)
        return 2
    sys.path.insert(0, str(ROOT / "tests/support"))
    from hostile.page import page

    if not arguments:
        PAGE.write_text(page(), "utf-8")
        return 0
    if PAGE.exists() and PAGE.read_text("utf-8") == page():
        return 0
    print(
        "docs/hostile-images.md is stale: run `python scripts/make_hostile_table.py` and commit it"
    )
    return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
