"""A million files: how long their index takes to open, and how much memory."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from helpers import jpeg, make_tree

from shardkit.conversion.assemble import Assembly, Piece, save_manifests
from shardkit.dataset.index import TIMES, IndexPart, as_rows, pack_row
from shardkit.dataset.manifest import AttachedShard
from shardkit.kinds.field import default_schema
from shardkit.recipe import Recipe
from shardkit.system.npy import save_npy

ROWS = 1_000_000
EACH = 1_000
"""Rows of a class, whose names are as long as those of ImageNet."""

OPEN = """
import os, resource, sys, time
from shardkit import open_dataset

def held():
    with open("/proc/self/statm") as file:
        shown, shared = (int(word) for word in file.read().split()[1:3])
    return (shown - shared) * os.sysconf("SC_PAGE_SIZE")

def read(index, root, rows):
    start = time.perf_counter()
    dataset = open_dataset(index, root=root, decode="numpy")
    count = len(dataset)
    images = dataset[list(rows)]
    return dataset, time.perf_counter() - start

small, large, root = sys.argv[1:]
kept = [read(small, root, range(8))]  # loads all modules
before = held()
kept.append(read(large, root, range(8)))
print(kept[-1][1], held() - before)
"""


def make_index(folder: Path, photos: Path, rows: int) -> Path:
    """Write the index of many files, of which the first few exist."""
    image = jpeg(24, 16)
    names = [f"n{n // EACH:08d}/n{n // EACH:08d}_{n % EACH:05d}.JPEG" for n in range(rows)]
    make_tree(photos, dict.fromkeys(names[:8], image))
    for name in names[:8]:
        os.utime(photos / name, ns=(0, 1))
    classes = tuple(f"n{n:08d}" for n in range(-(-rows // EACH)))

    def parts() -> list[IndexPart]:
        found = []
        for label in range(len(classes)):
            some = names[label * EACH : (label + 1) * EACH]
            row = pack_row(offset=0, image=image, label=label, size=(24, 16), field="jpg")
            found.append(IndexPart(as_rows([row] * len(some)), [n[:-5] for n in some], some))
        return found

    (folder / "index").mkdir(parents=True)
    save_npy(folder / TIMES, np.ones(rows, np.int64))
    shards = [
        AttachedShard(name=name, bytes=1, sha256="", rows=min(EACH, rows), modified=0, notes={})
        for name in classes
    ]
    manifest = Assembly(
        folder=folder,
        format="imagefolder",
        schema=default_schema(classes),
        raw_shape=None,
        recipe=Recipe().describe(),
        source={"kind": "imagefolder", "name": "photos", "images": rows},
        software={},
        archives=str(photos),
        others=[TIMES],
    ).finish([Piece(shards=shards, index=parts(), notes={}, skipped=(), ignored=())])
    save_manifests({"": manifest}, folder)
    return folder


@pytest.mark.slow
@pytest.mark.measures
def test_a_million_files_open_at_once_and_take_little_memory(tmp_path: Path) -> None:
    photos = tmp_path / "photos"
    small = make_index(tmp_path / "small", photos, EACH)
    large = make_index(tmp_path / "large", photos, ROWS)
    done = subprocess.run(
        [sys.executable, "-c", OPEN, small, large, photos],
        capture_output=True,
        text=True,
        check=True,
    )
    seconds, held = map(float, done.stdout.split())
    assert seconds < 1, f"{seconds:.2f} s"
    assert held < 100 * ROWS, f"{held / ROWS:.1f} bytes each"
