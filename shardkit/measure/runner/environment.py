"""Where something was measured: machine, limits and versions, for reports to state."""

from __future__ import annotations

import platform
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path

import torch

from shardkit._version import __version__
from shardkit.codecs import turbo
from shardkit.measure.runner.versions import library_versions
from shardkit.system import native
from shardkit.system.machine import memory_limit, usable_cpus


@dataclass(frozen=True, kw_only=True)
class Environment:
    """A machine and its software at one time."""

    date: str
    """UTC, in ISO 8601, to the second."""
    system: str
    python: str
    processor: str
    """The model's name; empty if the system does not tell."""
    processors: int
    """That this process may use."""
    memory: int
    """Bytes that this process may use."""
    accelerator: str
    """Its name, or empty if there is none."""
    versions: dict[str, str] = field(default_factory=dict)
    """Of shardkit and the libraries that read and decode."""


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


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text("utf-8", "replace").splitlines()
    except OSError:
        return platform.processor()
    found = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return found[0] if found else platform.processor()
