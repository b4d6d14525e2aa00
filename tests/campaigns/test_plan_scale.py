"""Planning and committing take as much memory for many images as for few."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from shardkit.conversion.jobs import Jobs

COUNTS = (50_000, 200_000)
MOST_MORE = 16 << 20
"""Bytes that four times the images may take; a list of their names would take 25 MB."""

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
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
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
