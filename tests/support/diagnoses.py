"""Made-up measurements for the tests of doctor."""

from __future__ import annotations

from typing import Any

from shardkit.measure.doctor.pipeline import Setup
from shardkit.measure.doctor.profile import Profile, Stage


def setup(**changed: Any) -> Setup:
    """A shardkit loader of JPEGs."""
    values: dict[str, Any] = {
        "stock": False,
        "engine": "thread",
        "workers": 8,
        "batch_size": 64,
        "dataset": "LMDBDataset",
        "converted": True,
    }
    return Setup(**{**values, **changed})


def stage(milliseconds: float, busy: float = 1.0) -> Stage:
    return Stage(seconds=milliseconds / 1000, busy=busy)


def profile(**changed: Any) -> Profile:
    """Decoding takes 8 of 10 ms; stages may be given by name."""
    stages = {"read": stage(1), "decode": stage(8), "collate": stage(1)}
    given = {name: changed.pop(name) for name in [*stages, "transform"] if name in changed}
    values: dict[str, Any] = {
        "setup": setup(),
        "cpus": 8,
        "images": 10_000,
        "rows": [0],
        "stages": {**stages, **given},
        "p50": 0.01,
        "p95": 0.02,
        "kind": "jpg",
        "side": 375.0,
        "pixels": 500.0 * 375,
        "stored_bytes": 100_000.0,
        "crop": 224,
        "step_seconds": 0.08,
    }
    return Profile(**{**values, **changed})
