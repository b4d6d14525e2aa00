"""A conversion that is killed and rerun gives the same bytes, in real processes."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest
from foreign import MAKERS
from helpers import DEADLINE, png, tree, wait_until

KINDS = ("coco", "hdf5", "table", "voc")


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_killed_conversion_resumes_to_the_same_bytes(kind: str, tmp_path: Path) -> None:
    images = {f"{name}/{n:02d}.png": png(8, 6, n) for name in ("cat", "dog") for n in range(48)}
    (tmp_path / "source").mkdir()
    path = MAKERS[kind].make(tmp_path / "source", images)
    options = [f"--{name}={value}" for name, value in MAKERS[kind].options.items()]
    shards = ["--to=webdataset", "--shard-samples=2", "--workers=1", "--quiet"]

    def command(target: str) -> list[str]:
        program = [sys.executable, "-m", "shardkit", "convert", kind]
        return [*program, str(path), str(tmp_path / target), *shards, *options]

    subprocess.run(command("whole"), check=True, timeout=DEADLINE)
    with subprocess.Popen(command("made")) as process:
        done = (tmp_path / "made").rglob
        wait_until(lambda: len(list(done("result.json"))) > 2, "some shards")
        process.send_signal(signal.SIGKILL)
    assert process.returncode == -signal.SIGKILL
    assert not (tmp_path / "made" / "shardkit.json").exists()
    subprocess.run(command("made"), check=True, timeout=DEADLINE)
    assert tree(tmp_path / "made") == tree(tmp_path / "whole")
