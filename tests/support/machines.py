"""Made-up machines for the tests of the diagnosis."""

from __future__ import annotations

from typing import Any

from shardkit.measure.doctor.facts import Facts
from shardkit.measure.doctor.place import Place
from shardkit.system.machine import OtherLoad

GB = 1 << 30
MB = 1 << 20


def place(**changed: Any) -> Place:
    values: dict[str, Any] = {"path": "made", "filesystem": "ext4", "mount": "/", "bytes": GB}
    return Place(**{**values, "resident": 1.0, **changed})


def facts(**changed: Any) -> Facts:
    """A machine without problems."""
    values: dict[str, Any] = {
        "workers": 8,
        "asked": False,
        "affinity": 8,
        "quota": None,
        "load": OtherLoad(busy=0.1, present=8),
        "shared_memory": (16 * GB, 16 * GB),
        "descriptors": 65536,
        "memory": 32 * GB,
        "available": 30 * GB,
        "swap_used": 0,
        "default_start": "fork",
        "versions": {"torch": "2.7"},
        "libjpeg_turbo": True,
        "turbojpeg": True,
        "torch_threads": 8,
        "variables": {},
        "accelerator": "A Fine GPU",
        "temporary": "tmp",
        "place": place(),
    }
    return Facts(**{**values, **changed})
