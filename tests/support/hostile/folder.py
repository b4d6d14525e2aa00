"""A folder of all hostile cases, among healthy images."""

from __future__ import annotations

from pathlib import Path

from helpers import jpeg, make_tree, png

from hostile.images import CASES

NEIGHBOURS = {
    f"{name}/{number:02d}.{kind}": (jpeg if kind == "jpg" else png)(23, 17, 500 + number)
    for name, kind in (("a-first", "jpg"), ("odd", "png"), ("z-last", "jpg"))
    for number in range(3)
}
"""Healthy images in classes before, among and after the odd ones."""


def make_source(root: Path) -> Path:
    """Make a folder of all cases, and healthy neighbours."""
    make_tree(root, NEIGHBOURS)
    for case in CASES:
        folder = root / "odd" / case.folder
        folder.mkdir(parents=True)
        case.make(folder)
    return root
