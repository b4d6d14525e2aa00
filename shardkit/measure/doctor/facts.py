"""What surrounds loading on this machine, as values; `surroundings` judges them."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass

import psutil
import torch
from PIL import features

from shardkit.codecs import turbo
from shardkit.measure.doctor.place import Place
from shardkit.measure.runner.environment import library_versions
from shardkit.system import machine
from shardkit.torch.engine.preflight import default_workers, open_files_limit, shared_memory

_THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What was seen of the machine and of this process."""

    workers: int
    """That were asked for, or that a loader takes by itself."""
    asked: bool
    """Whether a user named their number."""
    affinity: int
    """Those that the kernel may run this process on."""
    quota: float | None
    """Processors' worth of time that the control group has; None without a limit."""
    load: machine.OtherLoad
    """What others did, while nothing of ours ran."""
    shared_memory: tuple[int, int] | None
    """Bytes of the file system of shared memory, in all and free; None if there is none."""
    descriptors: int | None
    """Files that may be open at once; None without a limit."""
    memory: int
    """Bytes of memory that this process may use."""
    available: int
    """Bytes of it that are free, or can be made so."""
    swap_used: int
    """Bytes that lie in the swap space."""
    default_start: str
    """How Python's multiprocessing starts processes."""
    versions: Mapping[str, str]
    """Of the libraries that loading stands on; an empty one could not be found out."""
    libjpeg_turbo: bool
    """Whether Pillow decodes JPEGs with libjpeg-turbo."""
    turbojpeg: bool
    """Whether TurboJPEG 3 is there, which decodes pieces of JPEGs."""
    torch_threads: int
    """Threads that one operation of PyTorch takes."""
    variables: Mapping[str, str]
    """Environment variables that set numbers of threads, as far as they are set."""
    accelerator: str
    """Name of the accelerator; empty without one."""
    temporary: str
    """Where temporary files go."""
    place: Place | None = None
    """What was seen of the data; None if nothing was to be read."""


def gather(workers: int | None = None) -> Facts:
    """Look at the machine and at this process; it takes a third of a second.

    Args:
        workers: That the user asked for; None takes what `make_loader` would.
    """
    load = machine.other_load()
    return Facts(
        workers=default_workers() if workers is None else workers,
        asked=workers is not None,
        affinity=machine.affinity(),
        quota=machine.cpu_quota(),
        load=load,
        shared_memory=shared_memory(),
        descriptors=open_files_limit(),
        memory=machine.memory_limit(),
        available=machine.memory_available(),
        swap_used=_swap_used(),
        default_start=_default_start(),
        versions={"python": sys.version.split()[0], **library_versions()},
        libjpeg_turbo=bool(features.check_feature("libjpeg_turbo")),
        turbojpeg=turbo.available(),
        torch_threads=torch.get_num_threads(),
        variables={name: os.environ[name] for name in _THREAD_VARIABLES if name in os.environ},
        accelerator=torch.cuda.get_device_name() if torch.cuda.is_available() else "",
        temporary=tempfile.gettempdir(),
    )


def _swap_used() -> int:
    with contextlib.suppress(OSError, RuntimeError):  # a container may hide it
        return int(psutil.swap_memory().used)
    return 0


def _default_start() -> str:
    """Return Python's choice, without making it: others may still set another."""
    return (
        multiprocessing.get_start_method(allow_none=True)
        or multiprocessing.get_all_start_methods()[0]
    )
