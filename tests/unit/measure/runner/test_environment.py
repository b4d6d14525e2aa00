"""The environment in reports."""

from __future__ import annotations

import json
import re

import shardkit
from shardkit.measure.runner.environment import LIBRARIES, environment
from shardkit.system.machine import usable_cpus


def test_machine_and_versions_are_reported() -> None:
    where = json.loads(json.dumps(environment()))

    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", where["date"])
    assert where["processors"] == usable_cpus()
    assert where["memory"] > 1 << 20
    assert where["versions"]["shardkit"] == shardkit.__version__
    assert set(where["versions"]) > {*LIBRARIES, "compiled module"}
    assert all(where["versions"].values())
