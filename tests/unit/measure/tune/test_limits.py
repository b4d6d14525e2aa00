"""What a loader would take of a machine, and what is said if there is not enough."""

from __future__ import annotations

import os
import resource
from types import SimpleNamespace

import pytest

from shardkit.measure.tune import limits
from shardkit.measure.tune.candidate import Candidate
from shardkit.measure.tune.limits import Footprint, ResourceLimits, room_here, what_forbids
from shardkit.torch.engine import preflight

MB = 1_000_000
FOUR = Candidate(engine="process", workers=4, batch_size=50)
"""It has 8 batches ahead and 3 slots more for each worker: 20."""
NEEDS = Footprint(sample_bytes=0.2 * MB, worker_bytes=300 * MB)
"""10 MB a batch."""


def reason(candidate: Candidate, room: ResourceLimits) -> str:
    found = what_forbids(candidate, NEEDS, room)
    return "" if found is None else f"{found.reason} ({found.remedy})"


def test_without_limits_all_may_be_tried() -> None:
    assert what_forbids(FOUR, NEEDS, ResourceLimits()) is None


def test_shared_memory_counts_for_processes_alone() -> None:
    assert reason(FOUR, ResourceLimits(shared=200 * MB)) == ""
    assert reason(FOUR, ResourceLimits(shared=199 * MB)) == (
        "batches under way need 190.7 MiB of shared memory, and /dev/shm has 189.8 MiB free "
        "(in Docker: --shm-size, or --ipc=host)"
    )
    assert reason(FOUR.changed(engine="thread"), ResourceLimits(shared=0)) == ""


def test_memory_counts_workers_and_batches() -> None:
    assert reason(FOUR, ResourceLimits(memory=1400 * MB)) == ""
    assert reason(FOUR, ResourceLimits(memory=1300 * MB)).startswith("it needs 1.3 GiB of memory")
    threads = FOUR.changed(engine="thread")  # 6 batches ahead, 2 in use
    assert reason(threads, ResourceLimits(memory=80 * MB)) == ""
    assert reason(threads, ResourceLimits(memory=79 * MB)).startswith("it needs 76.3 MiB of memory")


def test_open_files_count_unless_memory_is_shared_by_name() -> None:
    assert reason(FOUR, ResourceLimits(files=104)) == ""
    assert "need 104 open files, and a process may have 103" in reason(
        FOUR, ResourceLimits(files=103)
    )
    assert reason(FOUR.changed(sharing_strategy="file_system"), ResourceLimits(files=103)) == ""


def test_more_workers_than_batches_have_nothing_to_do() -> None:
    assert reason(FOUR, ResourceLimits(images=151)) == ""
    assert "an epoch of 150 images has 3 batches of that size" in reason(
        FOUR, ResourceLimits(images=150)
    )
    assert reason(FOUR.changed(workers=1), ResourceLimits(images=10)) == "", "one always may"


def test_what_is_here_is_what_the_system_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "memory_available", lambda: 1000 * MB)
    blocks = SimpleNamespace(f_blocks=20, f_bavail=10, f_frsize=4096)
    monkeypatch.setattr(os, "statvfs", lambda _: blocks)
    monkeypatch.setattr(resource, "getrlimit", lambda _: (512, 1024))

    assert room_here(7) == ResourceLimits(memory=800 * MB, shared=40_960, files=512, images=7)

    monkeypatch.undo()
    monkeypatch.setattr(limits, "memory_available", lambda: 1000 * MB)
    monkeypatch.setattr(preflight, "SHARED_MEMORY", "/nowhere")
    monkeypatch.setattr(resource, "getrlimit", lambda _: (resource.RLIM_INFINITY, 0))
    assert room_here(7) == ResourceLimits(memory=800 * MB, shared=None, files=None, images=7)
