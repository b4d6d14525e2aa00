"""A conversion that is killed and rerun gives the same bytes, in real processes."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from buckets import BUCKET, Bucket
from campaign import cases
from foreign import MAKERS, class_of, pixels_of, png_of
from helpers import DEADLINE, tree, wait_until

from shardkit.registry import source_names


def test_every_source_is_killed() -> None:
    assert {maker.kind for maker in MAKERS.values()} == set(source_names())


@pytest.mark.parametrize("case", cases(MAKERS, 3))
def test_a_killed_conversion_resumes_to_the_same_bytes(case: str, tmp_path: Path) -> None:
    kind, make, _, few, stated, *_ = MAKERS[case]
    shape = pixels_of(next(iter(few().values()))).shape
    classes = sorted({class_of(name) for name in few()})
    (tmp_path / "source").mkdir()
    path = make(tmp_path / "source", _images(shape, classes))
    _kill_and_rerun(tmp_path, kind, path, [f"--{name}={value}" for name, value in stated.items()])


def test_a_killed_conversion_of_arrays_resumes(tmp_path: Path) -> None:
    for name, content in _images((24, 24, 3), ["cat", "dog"]).items():
        path = tmp_path / "arrays" / f"{name}.npy"
        path.parent.mkdir(parents=True, exist_ok=True)
        np.save(path, pixels_of(content).astype("float16"))

    _kill_and_rerun(tmp_path, "npy", tmp_path / "arrays", ["--arrays"])


def test_a_killed_conversion_of_a_folder_in_a_store_resumes(bucket: Bucket, tmp_path: Path) -> None:
    for name, content in _images((24, 24, 3), ["cat", "dog"]).items():
        bucket.put(f"photos/{name}", content)

    _kill_and_rerun(tmp_path, "imagefolder", f"s3://{BUCKET}/photos", [])


def _images(shape: tuple[int, ...], classes: Sequence[str]) -> dict[str, bytes]:
    rng = np.random.default_rng(0)
    return {
        f"{classes[n * len(classes) // 96]}/{n:02d}.png": png_of(
            rng.integers(0, 256, shape, np.uint8)
        )
        for n in range(96)
    }


def _kill_and_rerun(tmp_path: Path, kind: str, path: Path | str, options: list[str]) -> None:
    shards = ["--to=webdataset", "--shard-samples=2", "--workers=1", "--quiet"]

    def command(target: str) -> list[str]:
        program = [sys.executable, "-m", "shardkit", "convert", kind]
        return [*program, str(path), str(tmp_path / target), *shards, *options]

    subprocess.run(command("whole"), check=True, timeout=DEADLINE)
    with subprocess.Popen(command("made")) as process:
        work = tmp_path / "made" / ".shardkit-work"
        wait_until(lambda: len(list(work.glob("state/parts/[0-9]*"))) > 2, "some shards")
        process.send_signal(signal.SIGKILL)
    assert process.returncode == -signal.SIGKILL
    assert not (tmp_path / "made" / "shardkit.json").exists()
    subprocess.run(command("made"), check=True, timeout=DEADLINE)
    assert tree(tmp_path / "made") == tree(tmp_path / "whole")
