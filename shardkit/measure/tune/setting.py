"""One setting of a loader that `shardkit tune` measures, and what it needs of the machine."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from shardkit.measure.runner.spec import LoaderSpec
from shardkit.system.formatting import size
from shardkit.system.machine import memory_available
from shardkit.torch.data.memory import SHARED_MEMORY
from shardkit.torch.engine.options import LoaderOptions
from shardkit.torch.engine.preflight import SPARE_FILES, open_files_limit, shared_memory
from shardkit.torch.engine.processes import SPARE_SLOTS
from shardkit.torch.loader import FILES_PER_BATCH

_MEMORY_FRACTION = 0.8
"""Fraction of the available memory that loading may use; training needs some too."""


@dataclass(frozen=True, kw_only=True)
class Setting:
    """Engine, workers, prefetch and batch size of `make_loader`."""

    engine: str
    """``thread`` or ``process``."""
    workers: int
    batch_size: int
    prefetch_factor: int | None = None
    """None uses the engine's default."""

    def __str__(self) -> str:
        text = f"{self.engine}, {self.workers} worker{'s' * (self.workers != 1)}"
        if self.prefetch_factor is not None:
            text += f", prefetch factor {self.prefetch_factor}"
        return f"{text}, batches of {self.batch_size}"

    def changed(self, **fields: Any) -> Setting:
        """Return a copy with some fields changed."""
        return dataclasses.replace(self, **fields)

    def options(self) -> dict[str, Any]:
        """Return the fields of `LoaderOptions` that it sets."""
        options: dict[str, Any] = {"engine": self.engine, "num_workers": self.workers}
        if self.prefetch_factor is not None:
            options["prefetch_factor"] = self.prefetch_factor
        return options

    def loader(self) -> LoaderSpec:
        """Return what the runner measures."""
        options = self.options()
        return LoaderSpec(engine=options.pop("engine"), batch_size=self.batch_size, options=options)

    @property
    def ahead(self) -> int:
        """Batches in progress or ready."""
        options = LoaderOptions(prefetch_factor=self.prefetch_factor)
        settings = options.resolved(self.workers, pinned=False)
        return settings.thread_prefetch if self.engine == "thread" else settings.process_prefetch

    @property
    def cost(self) -> tuple[int, ...]:
        """Sort key: of two equally fast settings, the one with the lower cost is better.

        Processes cost more than threads: they need time to start and memory of their own. Then
        fewer workers, less memory, and fewer options count.
        """
        processes = self.engine == "process"
        return processes, self.workers, self.ahead * self.batch_size, len(self.options())


@dataclass(frozen=True, kw_only=True)
class LeftOut:
    """A setting that was not measured, or failed."""

    setting: Setting
    reason: str


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What the machine and the dataset have for loading; None is no limit."""

    memory: int | None = None
    """Bytes of memory."""
    shared: int | None = None
    """Bytes of shared memory, which holds the batches of worker processes."""
    files: int | None = None
    """Open files in a process."""
    images: int | None = None
    """Images in an epoch."""

    @classmethod
    def here(cls, images: int) -> Limits:
        """Return the limits of this machine now."""
        shared = shared_memory()
        return cls(
            memory=int(_MEMORY_FRACTION * memory_available()),
            shared=None if shared is None else shared[1],
            files=open_files_limit(),
            images=images,
        )

    def exceeded(self, setting: Setting, sample_bytes: float, worker_bytes: int) -> str:
        """Return why a setting does not fit here; empty if it does.

        Args:
            setting: The setting.
            sample_bytes: Bytes of a sample in a batch, as measured so far.
            worker_bytes: Private memory of a worker process, as measured so far.
        """
        processes = setting.engine == "process"
        spare = SPARE_SLOTS * setting.workers if processes else 2
        batches = setting.ahead + spare
        held = sample_bytes * setting.batch_size * batches
        needed = held + (worker_bytes * setting.workers if processes else 0)
        if self.images is not None and setting.workers > 1:
            epoch = -(-self.images // setting.batch_size)
            if setting.workers > epoch:
                return f"an epoch of {self.images:,} images has only {epoch} such batches"
        if self.memory is not None and needed > self.memory:
            return f"it needs {size(needed)} of memory, and {size(self.memory)} are available"
        if processes and self.shared is not None and held > self.shared:
            return (
                f"its batches need {size(held)} of shared memory, and {SHARED_MEMORY} has "
                f"{size(self.shared)} free (in Docker: --shm-size, or --ipc=host)"
            )
        files = FILES_PER_BATCH * batches + SPARE_FILES
        if processes and self.files is not None and files > self.files:
            return (
                f"its batches need {files} open files, and a process may have {self.files} "
                "(`ulimit -n` raises the limit)"
            )
        return ""
