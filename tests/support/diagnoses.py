"""Made-up measurements for the tests of the diagnosis."""

from __future__ import annotations

from typing import Any

from shardkit.conversion.recipe import Recipe
from shardkit.measure.doctor.changes import Change
from shardkit.measure.doctor.measured import Measured
from shardkit.measure.doctor.profiling import Profile

GB = 1 << 30


WARM = {"read": 0.0001, "checksum": 0.0001, "decode": 0.0001, "transform": 0.0001}


WARM |= {"collate": 0.0001, "transport": 0.0001, "copy to the device": 0.0001}


def profile(**changed: Any) -> Profile:
    """A sample of 0.1 ms in each stage; stages may be given by name."""
    warm = {**WARM, **changed.pop("warm", {})}
    values: dict[str, Any] = {"images": 256, "batch_size": 64, "cold_read": 0.0001, "held": 0.0}
    return Profile(**{**values, "resident": 0.0, "warm": warm, **changed})


def measured(**changed: Any) -> Measured:
    found = changed.pop("profile", None) or profile(warm=changed.pop("warm", {}))
    values: dict[str, Any] = {
        "folder": False,
        "images": 10_000,
        "bytes": GB,
        "memory": 16 * GB,
        "batch_size": 64,
        "decode": "RandomResizedCrop(224)",
        "profile": found,
        "single": 1 / found.total,
        "rates": [1.9 / found.total, 2.1 / found.total, 2 / found.total],
        "workers": 2,
    }
    return Measured(**{**values, **changed})


def change(name: str = "resize", **changed: Any) -> Change:
    recipes = {
        "resize": Recipe(resize=(256, 256)),
        "raw": Recipe(resize=(256, 256), resize_mode="crop", encode="raw", enlarge=True),
        "jpeg": Recipe(encode="jpeg"),
        "convert": Recipe(),
    }
    values: dict[str, Any] = {"images": 24, "before": 0.004, "after": 0.001}
    values |= {"bytes_before": 100_000.0, "bytes_after": 25_000.0}
    recipe = recipes[name].describe() if name in recipes else {}
    return Change(name=name, **{**values, "recipe": recipe, **changed})
