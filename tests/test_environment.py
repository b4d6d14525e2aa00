"""Where something was measured."""

from __future__ import annotations

import re
from dataclasses import asdict

import shardkit
from shardkit.machine import processors
from shardkit.measure.comparison.environment import environment


def test_machine_and_versions_are_told() -> None:
    where = environment()

    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", where.date)
    assert where.processors == processors()
    assert where.memory > 1 << 20
    assert where.versions["shardkit"] == shardkit.__version__
    assert set(where.versions) > {"torch", "pillow", "simplejpeg", "TurboJPEG 3"}
    assert all(isinstance(text, str) for text in asdict(where)["versions"].values())
