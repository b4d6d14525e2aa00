"""What a loader would take of this machine, and whether the machine has it: before it is tried."""

from __future__ import annotations

from dataclasses import dataclass

from shardkit.measure.tune.candidate import Candidate
from shardkit.system.formatting import size
from shardkit.system.machine import memory_available
from shardkit.torch.data.memory import SHARED_MEMORY
from shardkit.torch.engine.preflight import (
    SPARE_FILES,
    open_files_limit,
    shared_memory,
)
from shardkit.torch.engine.processes import SPARE_SLOTS
from shardkit.torch.loader import FILES_PER_BATCH

MEMORY_SHARE = 0.8
"""Part of the memory that is available which loading may take: training needs some too."""


@dataclass(frozen=True, kw_only=True)
class ResourceLimits:
    """What there is to take; None is no limit."""

    memory: int | None = None
    """Bytes."""
    shared: int | None = None
    """Bytes of shared memory, in which worker processes hand over batches."""
    files: int | None = None
    """That may be open at once in one process."""
    images: int | None = None
    """In an epoch."""


@dataclass(frozen=True, kw_only=True)
class Footprint:
    """What was seen of a loader's needs; 0 where nothing was yet."""

    sample_bytes: float = 0.0
    """Bytes of one sample in a batch."""
    worker_bytes: int = 0
    """The most memory that a worker process had."""


@dataclass(frozen=True, kw_only=True)
class LeftOut:
    """A candidate that was not measured, or failed."""

    candidate: Candidate
    reason: str
    remedy: str = ""
    failed: bool = False
    """Whether it was tried."""


def room_here(images: int) -> ResourceLimits:
    """Return what this machine has for a loader now."""
    shared = shared_memory()
    return ResourceLimits(
        memory=int(MEMORY_SHARE * memory_available()),
        shared=None if shared is None else shared[1],
        files=open_files_limit(),
        images=images,
    )


def what_forbids(candidate: Candidate, needs: Footprint, room: ResourceLimits) -> LeftOut | None:
    """Return why a candidate cannot be used here, or None."""
    batch = needs.sample_bytes * candidate.batch_size
    processes = candidate.engine == "process"
    batches = candidate.ahead + (SPARE_SLOTS * candidate.workers if processes else 2)
    if room.images is not None:
        epoch = -(-room.images // candidate.batch_size)
        if candidate.workers > max(1, epoch):
            reason = f"an epoch of {room.images:,} images has {epoch} batches of that size, "
            reason += "and more workers than that have nothing to do"
            return LeftOut(candidate=candidate, reason=reason)
    memory = batch * batches + (needs.worker_bytes * candidate.workers if processes else 0)
    if room.memory is not None and memory > room.memory:
        return LeftOut(
            candidate=candidate,
            reason=f"it needs {size(memory)} of memory, and loading may take {size(room.memory)}",
            remedy="end other programs, or give the container more memory",
        )
    if not processes:
        return None
    if room.shared is not None and batch * batches > room.shared:
        return LeftOut(
            candidate=candidate,
            reason=f"batches under way need {size(batch * batches)} of shared memory, and "
            f"{SHARED_MEMORY} has {size(room.shared)} free",
            remedy="in Docker: --shm-size, or --ipc=host",
        )
    files = FILES_PER_BATCH * batches + SPARE_FILES
    if room.files is not None and files > room.files and not _is_by_name(candidate):
        return LeftOut(
            candidate=candidate,
            reason=f"batches under way need {files} open files, and a process may have "
            f"{room.files}",
            remedy="`ulimit -n` raises the limit",
        )
    return None


def _is_by_name(candidate: Candidate) -> bool:
    """Tell whether shared memory is found by its name, so that no file stays open for it."""
    return candidate.sharing_strategy == "file_system"
