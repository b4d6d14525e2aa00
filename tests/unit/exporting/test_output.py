"""Files of an export: names that lead elsewhere, links and collisions."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from helpers import make_tree, tree
from refusals import refused

from shardkit import UsageError
from shardkit.exporting.output import OutputFolder


def test_names_that_lead_elsewhere_are_refused(tmp_path: Path) -> None:
    (tmp_path / "root").mkdir()
    for name in (
        "../x.png",
        "/srv/x.png",
        "a/../../x.png",
        "a//b.png",
        "",
        "./a.png",
        "a\0.png",
    ):
        with refused(UsageError, repr(name)):
            OutputFolder(tmp_path / "root").write(name, b"")
    assert sorted(tree(tmp_path)) == ["root"]


def test_links_are_not_followed(tmp_path: Path) -> None:
    root = make_tree(tmp_path, {"root": None, "outside": None}) / "root"
    (root / "link").symlink_to(tmp_path / "outside")
    with pytest.raises(UsageError):
        OutputFolder(root).write("link", b"")
    with pytest.raises(OSError, match="symbolic link"):
        OutputFolder(root).write("link/file", b"")
    assert list((tmp_path / "outside").iterdir()) == []


def test_names_that_collide_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    output = OutputFolder(tmp_path)
    output.write("a/B.png", b"")
    with refused(UsageError, "'a/B.png'"):
        output.write("a/B.png", b"")
    for name in ("a", "a/B.png/c"):
        with refused(UsageError, "'a"):
            output.write(name, b"")
    output.write("a/ü.png", b"")
    real = os.open

    def without_case(path: Any, *rest: Any, **named: Any) -> int:
        if path == "u\u0308.PNG":
            raise FileExistsError(17, "File exists")
        return real(path, *rest, **named)

    monkeypatch.setattr(os, "open", without_case)
    with refused(UsageError, "a/u\u0308.PNG"):
        output.write("a/u\u0308.PNG", b"")
