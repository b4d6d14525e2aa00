"""Machine, limits and versions, for reports."""

from __future__ import annotations

import contextlib
import platform
from dataclasses import dataclass, field
from datetime import datetime, timezone
from importlib import import_module, metadata
from pathlib import Path

import torch

from shardkit._version import __version__
from shardkit.codecs import turbo
from shardkit.system import native
from shardkit.system.machine import memory_limit, usable_cpus

LIBRARIES = {
    "torch": "torch",
    "numpy": "numpy",
    "pillow": "PIL",
    "simplejpeg": "simplejpeg",
    "lmdb": "lmdb",
    "h5py": "h5py",
}
"""Distributions that read and decode, and their modules."""


@dataclass(frozen=True, kw_only=True)
class Environment:
    """A machine and its software at one time."""

    date: str
    """UTC in ISO 8601, to the second."""
    system: str
    python: str
    processor: str
    """CPU model; empty if unknown."""
    processors: int
    """CPUs that this process may use."""
    memory: int
    """Bytes of memory that this process may use."""
    accelerator: str
    """Name of the accelerator; empty without one."""
    versions: dict[str, str] = field(default_factory=dict)
    """Versions of shardkit and the libraries that read and decode."""


def environment() -> Environment:
    """Return where this process runs."""
    versions = {"shardkit": __version__}
    versions |= {name: found or "unknown" for name, found in library_versions().items()}
    versions["compiled module"] = native.describe()
    versions["TurboJPEG 3"] = "found" if turbo.available() else "not found"
    return Environment(
        date=datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"),
        system=platform.platform(terse=True),
        python=platform.python_version(),
        processor=_processor(),
        processors=usable_cpus(),
        memory=memory_limit(),
        accelerator=torch.cuda.get_device_name(0) if torch.cuda.is_available() else "",
        versions=versions,
    )


def library_versions() -> dict[str, str]:
    """Return the version of each of `LIBRARIES`; empty if unknown."""
    return {name: _version(name, module) for name, module in LIBRARIES.items()}


def _version(name: str, module: str) -> str:
    """Return a version; of a fork, such as pillow-simd, its module's."""
    with contextlib.suppress(metadata.PackageNotFoundError):
        return metadata.version(name)
    with contextlib.suppress(ImportError):
        return str(getattr(import_module(module), "__version__", ""))
    return ""


def _processor() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text("utf-8", "replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor()
