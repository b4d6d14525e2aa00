"""Machine, limits and versions, for reports."""

from __future__ import annotations

import contextlib
import platform
from datetime import UTC, datetime
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from shardkit._version import __version__
from shardkit.system import native
from shardkit.system.machine import memory_limit, usable_cpus

LIBRARIES = ("torch", "numpy", "PIL", "simplejpeg", "lmdb", "h5py")


def environment() -> dict[str, Any]:
    """Return where this process runs, as JSON values; memory is in bytes."""
    return {
        "date": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "system": platform.platform(terse=True),
        "python": platform.python_version(),
        "processor": cpu_model(),
        "processors": usable_cpus(),
        "memory": memory_limit(),
        "accelerator": torch.cuda.get_device_name(0) if torch.cuda.is_available() else "",
        "versions": {
            "shardkit": __version__,
            **library_versions(),
            "compiled module": native.describe(),
        },
    }


def library_versions() -> dict[str, str]:
    """Return the versions of the libraries that read and decode; empty if unknown or missing."""
    versions = dict.fromkeys(LIBRARIES, "")
    for name in LIBRARIES:
        with contextlib.suppress(ImportError):  # simplejpeg is optional
            # A fork, such as pillow-simd, has the module of the original.
            versions[name] = getattr(import_module(name), "__version__", "")
    return versions


def cpu_model() -> str:
    """Return the name of the CPU; empty if unknown."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text("utf-8", "replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor()
