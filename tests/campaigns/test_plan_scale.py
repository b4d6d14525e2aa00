"""Plan, commit, append and merge take as much memory for many images as for few."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import h5py
import lmdb
import numpy as np
import pytest
from campaign import points
from helpers import DEADLINE, execute, shardkit_command, tree, wait_until

from shardkit import convert, verify
from shardkit.cluster.jobs import Jobs
from shardkit.cluster.ledger import Ledger

COUNTS = (100_000, 400_000)
MOST_MORE = 16 << 20
"""Bytes that four times the images may take; a list of their names would take over 100 MB."""

MEASURED = """
import resource, sys
from shardkit import convert, append, merge
from shardkit.cluster.work import commit, plan_jobs

if __name__ == "__main__":
    source, *others, target = sys.argv[1:]
    if source == "append":
        assert append(*others, target).images
    elif source == "merge":
        assert merge(others, target)[""].rows
    elif source == "commit":
        assert commit(target).manifests[""].rows
    else:
        given = {"to": "lmdb", "check": "none", "shard_samples": 2500, "workers": 2}
        assert plan_jobs(source, target, **given).jobs
    print(int(open("/proc/self/status").read().split("VmHWM:")[1].split()[0]) * 1024)
    print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024)
"""


def make_many(folder: Path, count: int) -> Path:
    """Make a folder of tiny files with the names of images, in classes of a thousand."""
    for number in range(count // 1000):
        (folder / f"class {number}").mkdir(parents=True)
        for image in range(1000):
            (folder / f"class {number}" / f"image {image}.jpg").write_bytes(
                b"\xff\xd8\xff\xe0 no more"
            )
    return folder


def peak(script: Path, *arguments: object) -> int:
    """Return the most memory that any process of a command has used."""
    settings: dict[str, Any] = {"env": {"OPENBLAS_NUM_THREADS": "1"}, "timeout": 1000}
    done = execute(sys.executable, script, *arguments, check=True, **settings)
    return max(map(int, done.stdout.split()))


@pytest.mark.measures
@pytest.mark.timeout(1200)
def test_four_times_the_images_take_no_more_memory(tmp_path: Path) -> None:
    (tmp_path / "measured.py").write_text(MEASURED)
    planning, committing = [], []
    for count in COUNTS:
        source = make_many(tmp_path / f"photos-{count}", count)
        target = tmp_path / f"made-{count}"
        planning.append(peak(tmp_path / "measured.py", source, target))
        jobs = Jobs(Ledger(target))
        for number in range(len(jobs)):
            jobs.build(number)
        committing.append(peak(tmp_path / "measured.py", "commit", target))
    assert planning[1] - planning[0] < MOST_MORE, planning
    assert committing[1] - committing[0] < MOST_MORE, committing


@pytest.mark.measures
@pytest.mark.timeout(1200)
def test_four_times_the_rows_take_no_more_memory(tmp_path: Path) -> None:
    (tmp_path / "measured.py").write_text(MEASURED)
    more, other = make_many(tmp_path / "more", 1000), tmp_path / "other"
    for path in more.glob("*/*"):
        path.rename(path.with_name(f"new {path.name}"))
    convert(more, other, to="lmdb", check="none")
    merging, appending = [], []
    for count in (50_000, 200_000):
        target, merged = tmp_path / f"made-{count}", tmp_path / f"merged-{count}"
        source = make_many(tmp_path / f"photos-{count}", count)
        convert(source, target, to="lmdb", check="none", shard_samples=5000)
        merging.append(peak(tmp_path / "measured.py", "merge", target, other, merged))
        appending.append(peak(tmp_path / "measured.py", "append", target, more))
        assert verify(merged).ok
        assert verify(target).ok
    assert merging[1] < 1.1 * merging[0], merging
    assert appending[1] < 1.1 * appending[0], appending


LISTED = """
import json, sys
from shardkit.cluster.work import plan_jobs
from shardkit.registry import open_source

kind, path, options, target = sys.argv[1:]
source = open_source(kind, path, **json.loads(options))
given = {"to": "lmdb", "check": "none", "shard_samples": 5000}
assert plan_jobs(source, target, **given).jobs
print(int(open("/proc/self/status").read().split("VmHWM:")[1].split()[0]) * 1024)
"""


def make_hdf5(folder: Path, count: int) -> tuple[Path, dict[str, object]]:
    with h5py.File(folder / "x.h5", "w") as file:
        file.create_dataset("x", (count, 4, 4, 3), "u1", chunks=(4096, 4, 4, 3))
        file["y"] = np.arange(count) % 100
    return folder / "x.h5", {"label": "y"}


def make_lmdb(folder: Path, count: int) -> tuple[Path, dict[str, object]]:
    with lmdb.open(str(folder / "x"), map_size=1 << 30) as env, env.begin(write=True) as txn:
        for number in range(count):
            txn.put(f"{number % 100:02d}/{number:08d}.jpg".encode(), IMAGE, append=False)
    return folder / "x", {"layout": "images", "label": "folder"}


IMAGE = b"\xff\xd8\xff\xe0 no more"

MAKERS = {"hdf5": make_hdf5, "lmdb": make_lmdb}


@pytest.mark.measures
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("kind", MAKERS)
def test_four_times_the_rows_of_a_source_take_no_more_memory(kind: str, tmp_path: Path) -> None:
    (tmp_path / "listed.py").write_text(LISTED)
    planning = []
    for count in COUNTS:
        folder = tmp_path / f"{count}"
        folder.mkdir()
        source, options = MAKERS[kind](folder, count)
        given = kind, source, json.dumps(options), tmp_path / f"planned-{count}"
        planning.append(peak(tmp_path / "listed.py", *given))
    assert planning[1] < 1.1 * planning[0], planning


@pytest.mark.timeout(1200)
def test_a_plan_that_is_killed_anywhere_is_made_again(tmp_path: Path) -> None:
    source = make_many(tmp_path / "photos", points(5500, 40_000))
    options = ("--to", "lmdb", "--shard-samples", 50, "--plan-only")

    def command(target: Path) -> list[str]:
        return shardkit_command("convert", "imagefolder", source, target, *options)

    subprocess.run(command(tmp_path / "undisturbed"), check=True, timeout=2 * DEADLINE)
    target = tmp_path / "killed"
    state = target / ".shardkit-work/state"
    for pattern in ("scratch/*", "state/.files*", "state/plan.json", "state/jobs/00010*"):
        job = subprocess.Popen(command(target))
        wait_until(
            lambda: any(state.parent.glob(pattern)) or job.poll() is not None,  # noqa: B023
            f"the files {pattern}",
        )
        job.send_signal(signal.SIGKILL)
        job.wait()
    subprocess.run(command(target), check=True, timeout=2 * DEADLINE)
    assert tree(target) == tree(tmp_path / "undisturbed")
