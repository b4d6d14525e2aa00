"""Converting and verifying, compared with `tar` and a plain Pillow script."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

import h5py
import lmdb
import numpy as np
from contenders.adapter import resized
from harness import Table, contend_here
from PIL import Image
from workloads.rows import Bench

from shardkit import open_dataset, verify
from shardkit.conversion.build_all import Builder
from shardkit.conversion.convert import convert_scan
from shardkit.conversion.plan import ConvertOptions
from shardkit.recipe import Recipe
from shardkit.registry import format_names
from shardkit.sources.imagefolder import scan_imagefolder

Function = Callable[[], int]
"""Does the work once, from the beginning, and returns the number of images."""


def run(bench: Bench) -> list[Table]:
    """Time copying, its scaling with workers, resizing and verifying."""
    source, work = bench.work / "originals", bench.work / "converted"
    work.mkdir(exist_ok=True)
    tables = [
        (_table("convert-copy", "convert, bytes as they are, 1 worker", _TAR), _copying),
        (_table("convert-workers", "convert, --check decode, by workers", "1 worker"), _scaling),
        (_table("convert-resize", "convert, shorter side 256, 1 worker", _PILLOW), _resizing),
        (_table("verify", "verify, level full, 1 worker", "verify hdf5"), _verifying),
    ]
    done = [contend_here(table, work_of(source, work), bench.rounds) for table, work_of in tables]
    _clear(work)
    return done


_TAR = "tarfile, no checks"
_PILLOW = "Pillow script"


def _table(name: str, title: str, baseline: str) -> Table:
    return Table(name=name, title=title, baseline=baseline)


def _copying(source: Path, work: Path) -> dict[str, Function]:
    found: dict[str, Function] = {
        _TAR: partial(_tar_python, source, work / "x.tar"),
        "tar cf": partial(_tar_command, source, work / "y.tar"),
        "lmdb, no checks": partial(_lmdb, source, work / "z.lmdb"),
        "h5py, no checks": partial(_h5py, source, work / "z.h5"),
    }
    for name in format_names():
        for check in ("decode", "none"):
            options = ConvertOptions(to=name, recipe=Recipe(check=check))
            function = partial(_convert, source, work / f"copy-{name}", options, 1)
            found[f"shardkit {name}, --check {check}"] = function
    return found


def _scaling(source: Path, work: Path) -> dict[str, Function]:
    """By the command: workers begin by loading the main script anew, and this one loads much."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 2
    counts = sorted({1, 2, cores // 2 or 1, cores})
    return {
        f"{workers} worker{'s' * (workers > 1)}": partial(
            _convert_by_command, source, work / "scaling", workers
        )
        for workers in counts
    }


def _convert_by_command(source: Path, target: Path, workers: int) -> int:
    _clear(target)
    options = ["--to", "webdataset", "--shard-size", "16MiB", "--workers", str(workers), "--quiet"]
    command = [sys.executable, "-m", "shardkit", "convert", "imagefolder"]
    subprocess.run([*command, str(source), str(target), *options], check=True)
    return len(open_dataset(target))


def _resizing(source: Path, work: Path) -> dict[str, Function]:
    found: dict[str, Function] = {_PILLOW: partial(_pillow, source, work / "pillow")}
    for name in format_names():
        options = ConvertOptions(to=name, recipe=Recipe(resize=256))
        function = partial(_convert, source, work / f"resized-{name}", options, 1)
        found[f"shardkit {name}, --resize 256"] = function
    return found


def _verifying(source: Path, work: Path) -> dict[str, Function]:
    return {f"verify {name}": partial(_verify, work / f"copy-{name}") for name in format_names()}


def _convert(source: Path, target: Path, options: ConvertOptions, workers: int) -> int:
    _clear(target)
    return (
        convert_scan(scan_imagefolder(source), target, options, Builder(workers=workers))
        .manifests[""]
        .rows
    )


def _verify(directory: Path) -> int:
    result = verify(directory)
    assert result.ok
    return result.records


def _tar_python(source: Path, target: Path) -> int:
    """Pack the tree with Python's tarfile: the least that any packing does."""
    files = _files(source)
    with tarfile.open(target, "w") as archive:
        for path in files:
            archive.add(path, arcname=str(path.relative_to(source)))
    return len(files)


def _tar_command(source: Path, target: Path) -> int:
    subprocess.run(["tar", "cf", str(target), "-C", str(source), "."], check=True)
    return len(_files(source))


def _lmdb(source: Path, target: Path) -> int:
    """Put the files into one transaction: the least that LMDB does."""
    _clear(target)
    files = _files(source)
    place = lmdb.open(str(target), subdir=False, map_size=1 << 34, lock=False)
    with place, place.begin(write=True) as transaction:
        for number, path in enumerate(files):
            transaction.put(f"{number:08}".encode(), path.read_bytes(), append=True)
    return len(files)


def _h5py(source: Path, target: Path) -> int:
    """Append the files to one dataset of bytes, and sync: the least that HDF5 does."""
    files = _files(source)
    total = sum(path.stat().st_size for path in files)
    with h5py.File(target, "w") as place:
        values, end = place.create_dataset("bytes", total, np.uint8), 0
        for path in files:
            content = np.frombuffer(path.read_bytes(), np.uint8)
            values[end : end + len(content)] = content
            end += len(content)
    with target.open("rb") as file:
        os.fsync(file.fileno())
    return len(files)


def _pillow(source: Path, target: Path) -> int:
    """Open, resize, save at quality 90: the plain script."""
    _clear(target)
    files = _files(source)
    for path in files:
        place = target / path.relative_to(source)
        place.parent.mkdir(parents=True, exist_ok=True)
        with Image.open(path) as image:
            resized(image.convert("RGB")).save(place, "JPEG", quality=90)
    return len(files)


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def _clear(path: Path) -> None:
    """Remove a file or folder, if it is there."""
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
