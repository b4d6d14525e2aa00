"""What this machine offers to a loader: processors, shared memory, descriptors."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from typing import Any

from torch.utils.data import ConcatDataset, Subset

from shardkit.machine import processors
from shardkit.torch.datasets import ShardDataset
from shardkit.torch.ops import ImageOp

SHARED_MEMORY = "/dev/shm"  # noqa: S108 - where PyTorch's shared tensors live on Linux

_SAMPLED_ROWS = 1024
SPARE_FILES = 64
"""That a process needs for what has nothing to do with batches."""


def default_workers() -> int:
    """Return the processors that this process may use, divided among the ranks of this machine."""
    return max(1, processors() // local_ranks())


def local_ranks() -> int:
    """Return how many processes of a training share this machine, as torchrun says it."""
    ranks = os.environ.get("LOCAL_WORLD_SIZE", "1")
    return max(1, int(ranks) if ranks.isdecimal() else 1)


def parts(dataset: Any) -> Iterator[Any]:
    """Give the datasets that a ``Subset`` or ``ConcatDataset`` is made of, or itself."""
    if isinstance(dataset, Subset):
        yield from parts(dataset.dataset)
    elif isinstance(dataset, ConcatDataset):
        for part in dataset.datasets:
            yield from parts(part)
    else:
        yield dataset


def why_processes(dataset: Any) -> str | None:
    """Return what in a dataset may hold the GIL and so asks for processes, or None."""
    for part in parts(dataset):
        if not isinstance(part, ShardDataset):
            return f"{type(part).__name__} is not a dataset of shardkit and may hold the GIL"
        for name in ("transform", "target_transform"):
            function = getattr(part, name)
            if function is not None and not getattr(function, "takes_rng", False):
                called = getattr(function, "__name__", type(function).__name__)
                return f"the {name} {called} may hold the GIL"
    return None


def batch_bytes(dataset: Any, batch_size: int) -> int | None:
    """Return about how large a batch is, in bytes; None if it cannot be foreseen.

    A transform is taken to make float32 of as many pixels as it is given.
    """
    sizes = []
    for part in parts(dataset):
        if not isinstance(part, ShardDataset) or not len(part):
            return None
        fixed = part.decode.fixed_size if isinstance(part.decode, ImageOp) else None
        pixels = fixed[0] * fixed[1] if fixed else part.mean_pixels(_SAMPLED_ROWS)
        sizes.append(pixels * 3 * (1 if part.transform is None else 4))
    return batch_size * max(sizes, default=0)


def shared_memory() -> tuple[int, int] | None:
    """Return the bytes of the file system of shared memory, in all and free; None without one."""
    try:
        status = os.statvfs(SHARED_MEMORY)
    except OSError:
        return None  # PyTorch shares memory in another way here
    return status.f_blocks * status.f_frsize, status.f_bavail * status.f_frsize


def open_files_limit() -> int | None:
    """Return how many files this process may have open at once; None without a limit."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return None if limit == resource.RLIM_INFINITY else limit


def shared_memory_problem(needed: int) -> str | None:
    """Return what is wrong if ``needed`` bytes do not fit into shared memory, or None."""
    has = shared_memory()
    if has is None or needed <= has[1]:
        return None
    return (
        f"batches under way need {needed / 1e6:.0f} MB of shared memory, and {SHARED_MEMORY} has "
        f"{has[1] / 1e6:.0f} MB free (in Docker: --shm-size, or --ipc=host)"
    )


def descriptor_problem(needed: int) -> str | None:
    """Return what is wrong if ``needed`` more files cannot be open at once, or None."""
    limit = open_files_limit()
    if limit is None or needed + SPARE_FILES <= limit:
        return None
    return (
        f"batches under way need {needed} open files, and this process may have {limit} "
        "(`ulimit -n` raises the limit)"
    )
