"""What a setting needs of a machine, and the reason if that is missing."""

from __future__ import annotations

import os
import resource
from types import SimpleNamespace

import pytest

from shardkit.measure.tune import setting
from shardkit.measure.tune.setting import Limits, Setting
from shardkit.torch.engine import preflight

MB = 1_000_000
FOUR = Setting(engine="process", workers=4, batch_size=50)
"""It has 8 batches ahead and 3 more slots per worker: 20 batches of 10 MB."""


def exceeded(candidate: Setting, **limits: int) -> str:
    return Limits(**limits).exceeded(candidate, sample_bytes=0.2 * MB, worker_bytes=300 * MB)


def test_memory_shared_memory_files_and_short_epochs_are_limits() -> None:
    threads = FOUR.changed(engine="thread")  # 6 batches ahead, 2 in use
    assert exceeded(FOUR) == exceeded(threads, shared=0, files=0) == ""
    assert exceeded(FOUR, shared=200 * MB) == exceeded(FOUR, memory=1400 * MB) == ""
    assert exceeded(FOUR, files=104) == exceeded(FOUR, images=151) == ""
    assert exceeded(threads, memory=80 * MB) == ""

    assert exceeded(FOUR, shared=199 * MB) == (
        "its batches need 190.7 MiB of shared memory, and /dev/shm has 189.8 MiB free "
        "(in Docker: --shm-size, or --ipc=host)"
    )
    assert exceeded(FOUR, memory=1300 * MB).startswith("it needs 1.3 GiB of memory")
    assert exceeded(threads, memory=79 * MB).startswith("it needs 76.3 MiB of memory")
    assert "need 104 open files, and a process may have 103" in exceeded(FOUR, files=103)
    assert exceeded(FOUR, images=150) == "an epoch of 150 images has only 3 such batches"
    assert exceeded(FOUR.changed(workers=1), images=10) == "", "one worker is always possible"


def test_limits_are_those_of_the_system(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(setting, "memory_available", lambda: 1000 * MB)
    blocks = SimpleNamespace(f_blocks=20, f_bavail=10, f_frsize=4096)
    monkeypatch.setattr(os, "statvfs", lambda _: blocks)
    monkeypatch.setattr(resource, "getrlimit", lambda _: (512, 1024))
    assert Limits.here(7) == Limits(memory=800 * MB, shared=40_960, files=512, images=7)

    monkeypatch.setattr(preflight, "SHARED_MEMORY", "/nowhere")
    monkeypatch.undo()
