"""The benchmark suite at small size: it times only results that were checked."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from campaign import in_full
from helpers import DEADLINE, execute, python
from PIL import Image

pytestmark = in_full

ROOT = Path(__file__).parents[2]
BENCH = ROOT / "scripts" / "bench"

_SMALL = """
import dataclasses, sys
from pathlib import Path

import contenders.adapter, harness, material, report
from workloads.rows import Rows

photos, work = map(Path, sys.argv[1:])
material.make(photos, work, 2)
rows = Rows("crop", "jpeg256", "crop")
folder = rows.other("folder", "imagefolder")
contenders = [
    folder,
    rows.shardkit("lmdb", format="lmdb", engine="thread"),
    dataclasses.replace(folder, name="mirrored", adapter="mirrored", near=harness.NEAR),
    dataclasses.replace(folder, name="neighbours", adapter="neighbours", near=harness.NEAR),
    dataclasses.replace(folder, name="too few", folder="large"),
    dataclasses.replace(folder, name="other labels", adapter="relabelled"),
    dataclasses.replace(folder, name="no shuffling", adapter="unshuffled"),
    dataclasses.replace(folder, name="a lost image", adapter="losing"),
    dataclasses.replace(folder, name="another library", peer="ffcv", environment="ffcv"),
    dataclasses.replace(folder, name="half a library", peer="litdata", adapter="litdata_"),
]
table = harness.Table(name="small", title="small", baseline="folder")
harness.run_interleaved(table, contenders, work, 1)
report.write_json(work / "results", [table], "a command")
"""

_SMOKE = """
import sys
from importlib import import_module

import harness, run, serve
from contenders.adapter import Task


class Inside(harness.MeasurementProcess):
    # A candidate in this process: the start of its own would take most of the time.
    def __init__(self, contender, work):
        self.contender, self._work = contender, work
        harness._interpreter(contender)
        adapter = import_module(f"contenders.{contender.adapter}").Adapter
        options = dict(contender.options)
        folder, sets = work / contender.folder, work / "sets"
        task = Task(kind=contender.kind, folder=folder, sets=sets, options=options)
        self._server = serve.Server(task, adapter)

    def _answer(self):
        return {}

    def ask(self, what, **request):
        try:
            return getattr(self._server, what)(request)
        except Exception as error:
            raise harness.Failed(f"{type(error).__name__}: {error}") from error

    def close(self):
        del self._server


harness.MeasurementProcess = Inside
photos, name, work, results = sys.argv[1:]
common = ["--rounds", "1", "--copies", "1", "--work", work, "--results", results]
run.main([photos, "--only", name, *common])
"""

_WORKLOADS = ("crop", "raw", "arrays", "random", "convert")

_WRONG = {
    "mirrored": "def ordered(self): return ((i.flip(3), n) for i, n in super().ordered())",
    "neighbours": "def ordered(self): return ((i.roll(1, 0), n) for i, n in super().ordered())",
    "relabelled": "def ordered(self): return ((i, n + 1) for i, n in super().ordered())",
    "unshuffled": "def shuffled(self): return self.ordered()",
    "losing": "def shuffled(self): return ((i[:-1], n[:-1]) for i, n in super().shuffled())",
}
"""Adapters that look like the folder's and do one thing wrong."""


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three images in two classes, no two alike, one too small to be taken."""
    folder = tmp_path_factory.mktemp("photos")
    random = np.random.default_rng(0)
    for name, side in (("a/one", 300), ("a/two", 280), ("b/three", 320), ("b/small", 200)):
        blocks = random.integers(0, 256, (8, 10, 3), np.uint8)
        path = folder / f"{name}.jpg"
        path.parent.mkdir(exist_ok=True)
        Image.fromarray(blocks).resize((side + 60, side)).save(path)
    return folder


@pytest.fixture(scope="module")
def small(photos: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The work folder of a small run."""
    work = tmp_path_factory.mktemp("work")
    wrong = work / "wrong" / "contenders"
    wrong.mkdir(parents=True)
    for name, method in _WRONG.items():
        (wrong / f"{name}.py").write_text(
            "from contenders.imagefolder import Adapter as _Folder\n\n"
            f"class Adapter(_Folder):\n    {method}\n",
            "utf-8",
        )
    environment = {
        **os.environ,
        "PYTHONPATH": f"{BENCH}{os.pathsep}{wrong.parent}",
        "SHARDKIT_PEERS": str(work / "nothing"),
    }
    command = [sys.executable, "-c", _SMALL, str(photos), str(work)]
    made = execute(*command, env=environment, timeout=2 * DEADLINE)
    assert made.returncode == 0, made.stderr
    return work


@pytest.fixture(scope="module")
def notes(small: Path) -> dict[str, str]:
    """The remark on each contender."""
    results = json.loads((small / "results" / "small.json").read_text("utf-8"))["results"]
    return {one["name"]: one["note"] for one in results}


def test_what_delivers_the_images_is_timed_and_what_does_not_is_not(
    small: Path,
) -> None:
    results = json.loads((small / "results" / "small.json").read_text("utf-8"))["results"]
    assert [one["name"] for one in results if one["rates"]] == ["folder", "shardkit lmdb"]
    assert [len(one["rates"]) for one in results[:2]] == [1, 1]


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("folder", ""),
        ("shardkit lmdb", ""),
        ("mirrored", "failed the check: gives other images: "),
        ("neighbours", "failed the check: gives other images: "),
        ("too few", "failed the check: gives 3 images, not all"),
        ("other labels", "failed the check: gives 6 wrong labels"),
        ("no shuffling", "failed the check: an epoch is not shuffled"),
        ("a lost image", "failed the check: an epoch has other labels"),
        ("another library", "not installed: `scripts/bench/peers ffcv`"),
        ("half a library", "not installed: `scripts/bench/peers litdata`"),
    ],
)
def test_a_contender_that_cannot_be_measured_says_why(
    notes: dict[str, str], name: str, reason: str
) -> None:
    assert notes[name].startswith(reason)
    assert bool(notes[name]) == bool(reason)


@pytest.fixture(scope="module")
def twenty(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Twenty tiny photographs in two classes."""
    folder = tmp_path_factory.mktemp("twenty")
    random = np.random.default_rng(0)
    for number in range(20):
        blocks = random.integers(0, 256, (8, 10, 3), np.uint8)
        path = folder / "ab"[number % 2] / f"{number:02d}.jpg"
        path.parent.mkdir(exist_ok=True)
        Image.fromarray(blocks).resize((320, 260)).save(path)
    return folder


@pytest.fixture(scope="module")
def smoke_work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of material and datasets, which the workloads share."""
    return tmp_path_factory.mktemp("smoke")


@pytest.mark.parametrize("workload", _WORKLOADS)
def test_every_workload_measures_all_candidates_that_are_installed(
    twenty: Path, smoke_work: Path, tmp_path: Path, workload: str
) -> None:
    done = _run_smoke(_SMOKE, twenty, workload, smoke_work, tmp_path / "results")
    assert done.returncode == 0, done.stderr
    tables = [json.loads(path.read_text("utf-8")) for path in (tmp_path / "results").iterdir()]
    results = [result for table in tables for result in table["results"]]
    unmeasured = {one["name"]: one["note"] for one in results if not one["rates"]}
    assert len(unmeasured) < len(results)
    assert all(note.startswith("not installed: ") for note in unmeasured.values()), unmeasured


def _run_smoke(script: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    """Run a script that imports the suite, without any peers."""
    environment = {**os.environ, "PYTHONPATH": str(BENCH), "SHARDKIT_PEERS": os.devnull}
    return python(script, *arguments, env=environment, timeout=8 * DEADLINE)
