"""Resources of this machine, and the engine and the memory that a dataset needs of them."""

from __future__ import annotations

import os
import resource
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np

from shardkit.system.machine import usable_cpus
from shardkit.torch.data.datasets import ShardDataset
from shardkit.torch.data.memory import SHARED_MEMORY
from shardkit.torch.data.nested import inner_datasets
from shardkit.torch.data.ops import ImageOp

_SAMPLED_ROWS = 1024
SPARE_FILES = 64
"""Open files that a process needs for other purposes than batches."""


def default_workers() -> int:
    """Return the processors that this process may use, divided among the ranks of this machine."""
    return max(1, usable_cpus() // local_ranks())


def local_ranks() -> int:
    """Return the number of ranks on this machine, as set by ``torchrun``."""
    ranks = os.environ.get("LOCAL_WORLD_SIZE", "1")
    return max(1, int(ranks) if ranks.isdecimal() else 1)


def why_processes(dataset: Any) -> str | None:
    """Return why a dataset may hold the GIL, and so needs processes, or None."""
    for inner in inner_datasets(dataset):
        if not isinstance(inner, ShardDataset):
            return f"{type(inner).__name__} is not a shardkit dataset and may hold the GIL"
        for name, function in inner.reader.transforms.named.items():
            if not getattr(function, "takes_rng", False):
                called = getattr(function, "__name__", type(function).__name__)
                return f"the {name} {called} may hold the GIL"
    return None


def suited_engine(why_processes: str | None) -> tuple[str, str]:
    """Return the engine that ``auto`` means, and why; given why a dataset needs processes."""
    # The helper may suit a training loop on a GPU better than threads: not measured yet.
    if why_processes is not None:
        return "process", why_processes
    return "thread", "nothing in this dataset holds the GIL for long"


def why_threads(dataset: Any) -> str | None:
    """Return why threads suit a dataset that may hold the GIL, or None.

    Other datasets than those of shardkit may not be safe in threads, even without a GIL.
    """
    if _has_gil() or not all(isinstance(inner, ShardDataset) for inner in inner_datasets(dataset)):
        return None
    return "this Python runs without a GIL"


def _has_gil() -> bool:
    """Return whether a GIL lets only one thread at a time run Python.

    Importing an extension module that does not support free-threaded Python brings the GIL back.
    """
    return bool(getattr(sys, "_is_gil_enabled", lambda: True)())


def batch_bytes(dataset: Any, batch_size: int, views: Sequence[ImageOp | None] = ()) -> int | None:
    """Return the estimated bytes of a batch, of all its views; None if unknown."""
    sizes = []
    for inner in inner_datasets(dataset):
        if not isinstance(inner, ShardDataset) or not len(inner):
            return None
        sizes.append(sum(sample_bytes(inner, op) for op in views or (None,)))
    return batch_size * max(sizes, default=0)


def sample_bytes(dataset: ShardDataset, op: ImageOp | None = None) -> int:
    """Return the estimated bytes of a sample, given the mean size of the first images.

    A transform is assumed to return float32 of the same number of pixels. ``op`` is the operation
    that a view sets for images, if any.
    """
    reader = dataset.reader if op is None else dataset.reader.with_op(op)
    total = 0
    for name, kind in reader.fields.kinds.items():
        frames = 1 if reader.windows is None else reader.windows.frames(name)
        field = dataset.schema.get(name)
        if field is not None and kind.is_picture:
            decode = reader.decode_of(name)
            fixed = decode.fixed_size if isinstance(decode, ImageOp) else None
            pixels = fixed[0] * fixed[1] if fixed else _mean_pixels(dataset, name)
            size = pixels * (1 if kind.follows else field.image_type.bytes)
            total += size * frames * (4 if reader.transforms.change(name) else 1)
        elif field is not None and field.is_uniform:
            total += field.bytes * frames
    return total


def _mean_pixels(dataset: ShardDataset, name: str) -> int:
    """Return the mean number of pixels of the first images of a field."""
    rows = dataset.stored_rows(np.arange(min(_SAMPLED_ROWS, len(dataset))))
    sizes = dataset.shards.entries_of(name).read(rows)
    return int((sizes["width"].astype(np.int64) * sizes["height"]).mean()) if len(sizes) else 0


def shared_memory() -> tuple[int, int] | None:
    """Return the total and free bytes of shared memory; None without a file system for it."""
    try:
        status = os.statvfs(SHARED_MEMORY)
    except OSError:
        return None  # PyTorch shares memory differently on this system
    return status.f_blocks * status.f_frsize, status.f_bavail * status.f_frsize


def open_files_limit() -> int | None:
    """Return the maximum number of open files of this process; None without a limit."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return None if limit == resource.RLIM_INFINITY else limit


def shared_memory_problem(needed: int) -> str | None:
    """Return a message if ``needed`` bytes do not fit into shared memory, or None."""
    has = shared_memory()
    if has is None or needed <= has[1]:
        return None
    return (
        f"prefetched batches need {needed / 1000000.0:.0f} MB of shared memory, but "
        f"{SHARED_MEMORY} has only {has[1] / 1000000.0:.0f} MB free (in Docker: --shm-size, or "
        "--ipc=host)"
    )


def descriptor_problem(needed: int) -> str | None:
    """Return a message if this process cannot open ``needed`` more files, or None."""
    limit = open_files_limit()
    if limit is None or needed + SPARE_FILES <= limit:
        return None
    return (
        f"prefetched batches need {needed} open files, but this process may have only {limit} "
        "(`ulimit -n` raises the limit)"
    )
