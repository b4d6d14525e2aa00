"""Converting and verifying, compared with `tar` and a plain Pillow script."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tarfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from contenders.adapter import resized
from harness import Table, contend_here
from PIL import Image
from workloads.rows import Bench

from shardkit import convert, open_dataset, verify
from shardkit.registry import format_names
from shardkit.system.machine import usable_cpus

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
    }
    for name in format_names():
        for check in ("decode", "none"):
            function = partial(_convert, source, work / f"copy-{name}", to=name, check=check)
            found[f"shardkit {name}, --check {check}"] = function
    return found


def _scaling(source: Path, work: Path) -> dict[str, Function]:
    """By the command: workers begin by loading the main script anew, and this one loads much."""
    cores = usable_cpus()
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
        function = partial(_convert, source, work / f"resized-{name}", to=name, resize=256)
        found[f"shardkit {name}, --resize 256"] = function
    return found


def _verifying(source: Path, work: Path) -> dict[str, Function]:
    return {f"verify {name}": partial(_verify, work / f"copy-{name}") for name in format_names()}


def _convert(source: Path, target: Path, **options: Any) -> int:
    _clear(target)
    return convert(source, target, **options).manifests[""].rows


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
