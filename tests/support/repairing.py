"""Helpers for repair tests: a source, its dataset, and ways to damage it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from helpers import FORMATS, jpeg, make_dataset, make_folder, make_tree, tree
from stated import stated

from shardkit import repair


def make_source(root: Path) -> Path:
    """Make a source of eleven good images, two bad ones, and other files."""
    make_folder(root, ("ant", "bee", "cow"))
    make_tree(root, {"bee/x.jpg": jpeg(seed=5), "bee/y.jpg": jpeg(seed=6)})
    make_tree(root, {"ant/bad.jpg": b"bad", "bee/000.png": b"bad", "cow/list.txt": b"x"})
    return make_tree(root, {"ant/.hidden": b"x", "notes": b"x"})


def make_each(source: Path, root: Path) -> Path:
    """Make the dataset of ``source`` in each format, below ``root``; return that."""
    for to in FORMATS:
        make(source, root / to, to)
    return root


def make(source: Path, target: Path, to: str = "lmdb", **options: Any) -> Path:
    return make_dataset(source, target, to=to, **{"on_error": "skip", **options})


def files_of(place: Path) -> list[str]:
    return [entry.name for entry in stated(place).entries]


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-7])


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 0x40
    path.write_bytes(data)


def healed(place: Path, source: Path, before: dict[str, str], **options: Any) -> Any:
    """Repair everything; return the result."""
    result = repair(place, source, **options)
    assert result.findings == []
    assert tree(place) == before
    return result
