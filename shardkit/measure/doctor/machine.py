"""Facts about the machine and the place of the data; `checks` judges them."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass

import psutil
from PIL import features

from shardkit.codecs import turbo
from shardkit.measure.doctor.pipeline import Pipeline
from shardkit.measure.runner import page_cache
from shardkit.measure.runner.environment import library_versions
from shardkit.measure.runner.session import Session
from shardkit.system import machine, native
from shardkit.torch.engine import preflight
from shardkit.torch.engine.processes import SPARE_SLOTS
from shardkit.torch.loader import FILES_PER_BATCH

_FITS = 0.7
"""Fraction of the memory that files may fill and still stay cached during training."""

_THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where the data are, and what worker processes need."""

    path: str
    filesystem: str
    """Type, such as ext4; empty if unknown."""
    bytes: int
    """Size of all files."""
    resident: float | None
    """Fraction of the files that was cached at first, 0 to 1; None if unknown."""
    processes: bool
    """Whether the loader uses, or should use, worker processes."""
    shared_needed: int
    """Bytes of shared memory of the batches in flight with worker processes; 0 if unknown."""
    files_needed: int
    """Open files of these batches."""
    opencv_threads: int
    """Threads of one OpenCV operation; 0 if OpenCV is not loaded."""


@dataclass(frozen=True, kw_only=True)
class Facts:
    """The machine and this process."""

    workers: int
    """Planned workers."""
    affinity: int
    """CPUs that this process may run on."""
    quota: float | None
    """CPU quota of the control group, in CPUs; None without one."""
    load: machine.OtherLoad
    shared_memory: tuple[int, int] | None
    """Total and free bytes; None without a file system for it."""
    open_files: int | None
    """Maximum open files; None without a limit."""
    memory: int
    """Bytes of memory that this process may use."""
    swap_used: int
    versions: Mapping[str, str]
    """Library versions; empty if unknown."""
    libjpeg_turbo: bool
    """Whether Pillow decodes with libjpeg-turbo."""
    turbojpeg: bool
    """Whether TurboJPEG 3 is available."""
    variables: Mapping[str, str]
    """Environment variables that set numbers of threads."""
    place: Place | None = None
    """None without a dataset."""
    compiled: str = ""
    """The compiled module, from `native.describe`; empty if unknown."""

    @property
    def cpus(self) -> float:
        """CPUs that this process may use, as a fraction if the quota is one."""
        return self.affinity if self.quota is None else min(self.affinity, self.quota)


def gather(workers: int | None = None) -> Facts:
    """Return the facts, after watching the load for a third of a second.

    Args:
        workers: Planned workers; None uses as many as `make_loader`.
    """
    swap = 0
    with contextlib.suppress(OSError, RuntimeError):  # a container may hide it
        swap = int(psutil.swap_memory().used)
    versions = {"python": sys.version.split()[0], **library_versions()}
    versions["compiled module"] = native.describe()
    return Facts(
        workers=preflight.default_workers() if workers is None else workers,
        affinity=machine.affinity(),
        quota=machine.cpu_quota(),
        load=machine.other_load(),
        shared_memory=preflight.shared_memory(),
        open_files=preflight.open_files_limit(),
        memory=machine.memory_limit(),
        swap_used=swap,
        versions=versions,
        libjpeg_turbo=bool(features.check_feature("libjpeg_turbo")),
        turbojpeg=turbo.available(),
        compiled=native.describe(),
        variables={name: os.environ[name] for name in _THREAD_VARIABLES if name in os.environ},
    )


def place_of(session: Session, *, batch_size: int, workers: int | None) -> Place:
    """Return where the data are; runs in the measurement process, before anything is read."""
    pipeline = Pipeline(session, batch_size, workers)
    setup, wants = pipeline.setup(), preflight.why_processes(pipeline.dataset) is not None
    in_flight = 2 * setup.workers
    if not setup.stock and setup.workers:
        settings = pipeline.options.resolved(setup.workers, pinned=False)
        in_flight = settings.process_prefetch + SPARE_SLOTS * setup.workers
    batch_bytes = preflight.batch_bytes(pipeline.dataset, setup.batch_size) or 0
    opencv = sys.modules.get("cv2")
    return Place(
        path=session.subject.name,
        filesystem=machine.filesystem(session.files[0])[0] if session.files else "",
        bytes=sum(path.stat().st_size for path in session.files),
        resident=page_cache.resident(page_cache.sample(session.files)),
        processes=setup.engine == "process" or (wants and not setup.stock),
        shared_needed=in_flight * batch_bytes,
        files_needed=in_flight * FILES_PER_BATCH,
        opencv_threads=0 if opencv is None else int(opencv.getNumThreads()),
    )


def fits_in_memory(count: int, memory: int) -> bool:
    """Return whether files of ``count`` bytes stay cached after the first epoch."""
    return count <= _FITS * memory
