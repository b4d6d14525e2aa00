"""Made-up machines and measurements for the tests of doctor."""

from __future__ import annotations

from typing import Any

from shardkit.measure.doctor.machine import Facts, Place
from shardkit.measure.doctor.pipeline import Setup
from shardkit.measure.doctor.profile import Profile, Stage
from shardkit.measure.doctor.remedies import Situation
from shardkit.system.machine import OtherLoad

GB, MB = 1 << 30, 1 << 20


def place(**changed: Any) -> Place:
    values: dict[str, Any] = {
        "path": "made",
        "filesystem": "ext4",
        "bytes": GB,
        "resident": 1.0,
        "processes": False,
        "shared_needed": 0,
        "files_needed": 0,
        "opencv_threads": 0,
    }
    return Place(**{**values, **changed})


def facts(**changed: Any) -> Facts:
    """Facts of a machine without faults."""
    values: dict[str, Any] = {
        "workers": 8,
        "affinity": 8,
        "quota": None,
        "load": OtherLoad(busy=0.1, present=8),
        "shared_memory": (16 * GB, 16 * GB),
        "open_files": 65536,
        "memory": 32 * GB,
        "swap_used": 0,
        "versions": {"torch": "2.7"},
        "libjpeg_turbo": True,
        "turbojpeg": True,
        "variables": {},
        "place": place(),
    }
    return Facts(**{**values, **changed})


def setup(**changed: Any) -> Setup:
    """A shardkit loader of JPEGs."""
    values: dict[str, Any] = {
        "stock": False,
        "engine": "thread",
        "workers": 8,
        "batch_size": 64,
        "dataset": "LMDBDataset",
        "decode": "RandomResizedCrop(size=224)",
        "jpeg": "exact",
    }
    return Setup(**{**values, **changed})


def stage(milliseconds: float, busy: float = 1.0) -> Stage:
    seconds = milliseconds / 1000
    return Stage(seconds=seconds, busy=busy, p50=seconds, p95=2 * seconds)


def profile(**changed: Any) -> Profile:
    """Decoding takes 8 of 10 ms; stages may be given by name."""
    stages = {"read": stage(1), "decode": stage(8), "collate": stage(1)}
    given = {name: changed.pop(name) for name in [*stages, "transform"] if name in changed}
    values: dict[str, Any] = {
        "rows": [0],
        "stages": {**stages, **given},
        "kinds": {"jpg": 200},
        "side": 375.0,
        "stored_bytes": 100_000.0,
        "shape": (3, 224, 224),
    }
    return Profile(**{**values, **changed})


def situation(found: Profile | None = None, **changed: Any) -> Situation:
    values = {"cpus": 8, "images": 10_000, "memory": 32 * GB}
    values |= {name: changed.pop(name) for name in list(changed) if name in values}
    return Situation(setup=setup(**changed), profile=found or profile(), **values)
