"""Planning and committing take as much memory for many images as for few."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from helpers import shardkit_command, tree, wait_until

from shardkit.conversion.jobs import Jobs

COUNTS = (100_000, 400_000)
MOST_MORE = 16 << 20
"""Bytes that four times the images may take; a list of their names would take over 100 MB."""

MEASURED = """
import resource, sys
from shardkit import convert
from shardkit.conversion.convert import commit

if __name__ == "__main__":
    source, target = sys.argv[1:]
    if source == "commit":
        assert commit(target).manifests[""].rows
    else:
        given = {"to": "lmdb", "check": "none", "shard_samples": 2500, "workers": 2}
        assert convert(source, target, plan_only=True, **given).jobs
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
    done = subprocess.run(
        [sys.executable, script, *map(str, arguments)],
        check=True,
        capture_output=True,
        timeout=600,
        env={**os.environ, "OPENBLAS_NUM_THREADS": "1"},
    )
    return max(map(int, done.stdout.split()))


@pytest.mark.timeout(1200)
def test_four_times_the_images_take_no_more_memory(tmp_path: Path) -> None:
    (tmp_path / "measured.py").write_text(MEASURED)
    planning, committing = [], []
    for count in COUNTS:
        source = make_many(tmp_path / f"photos-{count}", count)
        target = tmp_path / f"made-{count}"
        planning.append(peak(tmp_path / "measured.py", source, target))
        jobs = Jobs(target)
        for number in range(len(jobs)):
            jobs.build(number)
        committing.append(peak(tmp_path / "measured.py", "commit", target))
    assert planning[1] - planning[0] < MOST_MORE, planning
    assert committing[1] - committing[0] < MOST_MORE, committing


def test_a_plan_that_is_killed_anywhere_is_made_again(tmp_path: Path) -> None:
    source = make_many(tmp_path / "photos", 20_000)
    options = ("--to", "lmdb", "--shard-samples", 100, "--plan-only")

    def command(target: Path) -> list[str]:
        return shardkit_command("convert", "imagefolder", source, target, *options)

    subprocess.run(command(tmp_path / "undisturbed"), check=True, timeout=120)
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
    subprocess.run(command(target), check=True, timeout=120)
    assert tree(target) == tree(tmp_path / "undisturbed")
