"""The load of other processes during a measurement."""

from __future__ import annotations

import os

import psutil
import pytest

from shardkit.measure.runner import other_load


def test_the_load_of_other_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 4)
    monkeypatch.setattr(psutil, "cpu_percent", lambda seconds: 50.0)
    load = other_load.other_load()
    assert str(load) == "other processes used 2.0 of 4 CPUs at the start"
    assert load.disturbs
    assert not other_load.OtherLoad(busy=0.0, present=4).disturbs


def test_the_own_cpu_time_is_not_other_load(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([(0.0, 10.0, 1.0), (10.0, 25.0, 6.0)])
    monkeypatch.setattr(other_load, "_cpu_times", lambda: next(times))

    assert other_load.CpuMeter().other_load().busy == 1.0


def test_cpu_times_include_this_process() -> None:
    elapsed, busy, own = other_load._cpu_times()

    assert 0 < own <= busy
    assert elapsed > 0
