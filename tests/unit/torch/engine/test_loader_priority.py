"""``priority="low"`` lowers the loader's threads or processes, and nothing else."""

from __future__ import annotations

import os
import sys
from contextlib import closing
from typing import Any

import pytest
from refusals import refused
from torch.utils.data import Dataset

from shardkit import make_loader
from shardkit.errors import UsageError
from shardkit.measure.runner.spec import parse_loader
from shardkit.system.priority import LOW
from shardkit.torch.engine.options import LoaderOptions

linux = pytest.mark.skipif(sys.platform != "linux", reason="only Linux has threads' priorities")

ENGINES = ("thread", "process")


class Nice(Dataset[int]):
    """Samples are the nice value of the thread that reads them."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, row: int) -> int:
        return os.getpriority(os.PRIO_PROCESS, 0)


def values_of(**options: Any) -> set[int]:
    """Return the nice values of all threads that read samples, in two epochs."""
    with closing(make_loader(Nice(), 2, **options)) as loader:
        return {value for _ in range(2) for batch in loader for value in batch.tolist()}


@linux
@pytest.mark.parametrize("engine", ENGINES)
def test_low_priority_is_that_of_the_workers_only(engine: str) -> None:
    before = os.getpriority(os.PRIO_PROCESS, 0)
    assert values_of(engine=engine, num_workers=2, priority="low") == {LOW}
    assert os.getpriority(os.PRIO_PROCESS, 0) == before
    assert values_of(engine=engine, num_workers=1) == {before}


@linux
def test_the_loader_states_its_priority() -> None:
    assert make_loader([1], 1, num_workers=1).priority == "normal"
    assert make_loader([1], 1, num_workers=1, engine="thread", priority="low").priority == "low"


@pytest.mark.parametrize("engine", ENGINES)
def test_without_workers_it_warns_and_the_training_thread_stays(engine: str) -> None:
    before = os.getpriority(os.PRIO_PROCESS, 0)
    with pytest.warns(RuntimeWarning, match="priority='low' .*: with 0") as caught:
        values = values_of(engine=engine, num_workers=0, priority="low")
    assert values == {before}
    assert caught[0].filename == __file__


@pytest.mark.parametrize("engine", ENGINES)
def test_elsewhere_it_warns_and_loads_at_normal_priority(
    engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("engine.options", "loader"):
        monkeypatch.setattr(f"shardkit.torch.{module}.priority_problem", lambda: "no such thing")
    before = os.getpriority(os.PRIO_PROCESS, 0)
    with pytest.warns(RuntimeWarning, match="priority='low' .*: no such"):
        loader = make_loader(Nice(), 2, engine=engine, num_workers=1, priority="low")
    with closing(loader):
        assert loader.priority == "normal"
        assert {value for batch in loader for value in batch.tolist()} == {before}


def test_it_is_checked_and_measured_as_any_option() -> None:
    with refused(UsageError, "priority='high'"):
        LoaderOptions(priority="high")
    assert parse_loader("thread:priority=low", 8).loader_options().priority == "low"
