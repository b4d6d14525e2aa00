"""The environment in reports."""

from __future__ import annotations

import re
from dataclasses import asdict

import pytest

import shardkit
from shardkit.measure.runner.environment import LIBRARIES, environment, library_versions
from shardkit.system.machine import usable_cpus


def test_machine_and_versions_are_reported() -> None:
    where = environment()

    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", where.date)
    assert where.processors == usable_cpus()
    assert where.memory > 1 << 20
    assert where.versions["shardkit"] == shardkit.__version__
    assert set(where.versions) > {"torch", "pillow", "simplejpeg", "TurboJPEG 3"}
    assert all(isinstance(text, str) for text in asdict(where)["versions"].values())


def test_the_version_of_a_fork_is_its_modules(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(LIBRARIES, "pillow-of-others", "PIL")
    monkeypatch.setitem(LIBRARIES, "no-such-library", "no_such_library")

    found, told = library_versions(), environment().versions

    assert found["pillow-of-others"] == found["pillow"] != ""
    assert (found["no-such-library"], told["no-such-library"]) == ("", "unknown")
