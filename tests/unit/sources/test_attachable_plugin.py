"""A new source that can be attached is one file and one line in a registry."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from helpers import invoke, jpeg, tree

from shardkit import open_dataset
from shardkit.testing import SourceConformance

THIRD_PARTY = str(Path(__file__).parents[2] / "support" / "thirdparty")


@pytest.fixture(autouse=True)
def third_party(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Make the package importable here and in child processes."""
    monkeypatch.syspath_prepend(THIRD_PARTY)
    inherited = [path for path in (os.environ.get("PYTHONPATH"),) if path]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([THIRD_PARTY, *inherited]))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    yield
    sys.modules.pop("shardkit_pack", None)
    importlib.invalidate_caches()


def write_pack(path: Path, images: Mapping[str, bytes]) -> Path:
    parts = [
        f"{name.partition('/')[0]} {len(data)} {name}\n".encode() + data
        for name, data in images.items()
    ]
    path.write_bytes(b"".join(parts))
    return path


class TestPack(SourceConformance):
    name = "pack"

    def make(self, folder: Path, images: Mapping[str, bytes]) -> Path:
        return write_pack(folder / "images.pack", images)

    def spoil(self, path: Path, image: str) -> None:
        content = path.read_bytes()
        start = content.index(f" {image}\n".encode()) + len(f" {image}\n".encode())
        path.write_bytes(content[:start] + bytes(8) + content[start + 8 :])


@pytest.fixture
def pack(tmp_path: Path) -> Path:
    images = {f"{name}/{n}.jpg": jpeg(seed=n) for name in ("cat", "dog") for n in range(4)}
    return write_pack(tmp_path / "photos.pack", images)


def run(*args: Any) -> str:
    result = invoke(*args)
    assert result.exit_code == 0, result.output
    return result.output


@pytest.mark.slow
def test_it_converts_attaches_and_is_built_by_jobs(pack: Path, tmp_path: Path) -> None:
    assert "Convert the images in .pack files." in run("convert", "--help")
    assert "Files of images end to end." in run("attach", "--help")
    assert "--prefix" in run("attach", "pack", "--help")

    own, more = ("--prefix", "cat/"), ("--to", "lmdb", "--shard-samples", 2, "--quiet")
    made, jobs, index = tmp_path / "made", tmp_path / "jobs", tmp_path / "index"
    run("convert", "pack", pack, made, *own, *more)
    run("verify", made, "--against", pack)

    run("convert", "pack", pack, jobs, *own, *more, "--plan-only")
    run("work", jobs, "--claim", "--kind", "pack")  # its code runs only if trusted
    run("commit", jobs)
    assert tree(jobs) == tree(made)

    before = pack.read_bytes(), pack.stat()
    run("attach", "pack", pack, index, *own)
    run("verify", index, "--level", "decode")
    assert (pack.read_bytes(), pack.stat()) == before
    assert sorted(open_dataset(index).paths) == sorted(open_dataset(made).paths)
    assert "already holds the index" in run("attach", "pack", pack, index, *own)
