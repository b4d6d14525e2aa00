"""A table of a million rows is planned in less than a minute, and in less than a gigabyte."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from helpers import python

FOLDERS = 1000
MOST_SECONDS = 60
"""It took 24 s of CPU time on a busy machine."""
MOST_BYTES = 256 << 20
"""Two million rows took 111 MiB; with all rows in memory, half a million took 259 MiB."""

PLAN = """
import json, sys, time
from shardkit.conversion.plan import ConvertOptions, make_plan
from shardkit.registry import get_source

source = get_source("table").open(sys.argv[1], root=sys.argv[2], image="path", label="class")
plan = make_plan(source.scan(), ConvertOptions(to="lmdb"))
memory = int(open("/proc/self/status").read().split("VmHWM:")[1].split()[0]) * 1024
print(json.dumps([len(plan.splits[0].source), time.process_time(), memory]))
"""


@pytest.mark.measures
@pytest.mark.timeout(900)
def test_a_million_rows_are_planned(tmp_path: Path) -> None:
    root = tmp_path / "files"
    root.mkdir()
    with (tmp_path / "t.csv").open("w") as table:
        table.write("path,class\n")
        for folder in range(FOLDERS):
            (root / f"{folder:03d}").mkdir()
            for number in range(1000):
                name = f"{folder:03d}/{number:03d}.png"
                (root / name).touch()
                table.write(f"{name},class {number % 100}\n")

    done = python(PLAN, tmp_path / "t.csv", root, check=True, timeout=800)

    rows, seconds, memory = json.loads(done.stdout)
    assert rows == 1000 * FOLDERS
    assert seconds < MOST_SECONDS, f"{seconds:.1f} s of CPU time"
    assert memory < MOST_BYTES, f"{memory >> 20} MiB"
