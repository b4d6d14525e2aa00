"""Samples of the stacks of all engines name the lines that take the time."""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from helpers import DEADLINE, wait_until
from torch.utils.data import DataLoader

from shardkit import make_loader
from shardkit.measure.doctor.lines import (
    _READING,
    CodeLine,
    Line,
    SampledCollate,
    _code_line,
    _largest,
    end_sampling,
    named_lines,
)
from shardkit.measure.doctor.pipeline import Loading, Remedy
from shardkit.measure.doctor.trials import Trial, sample_lines
from shardkit.measure.runner.own_code import is_library, raised_at
from shardkit.measure.runner.session import Session
from shardkit.measure.runner.spec import Subject

CODE = """
import json
import sys
import threading
import time

import torch
from shardkit.measure.doctor.lines import _READING, _code_line
from torch.utils.data import Dataset, IterableDataset

TEXT = json.dumps(list(range(3_000)))
GATE = threading.Event()


class Own(Dataset):
    def __len__(self):
        return 64

    def wait(self):
        time.sleep(0.004)

    def compute(self):
        for _ in range(600_000): pass
        time.sleep(0)

    def parse(self):
        end = time.thread_time() + 0.004
        while time.thread_time() < end:
            json.loads(TEXT)

    def __getitem__(self, row):
        self.wait()
        self.parse()
        return torch.zeros(3, 4, 4), row


class Computing(Own):
    def __getitem__(self, row):
        self.compute()
        return torch.zeros(3, 4, 4), row


class Stuck(Own):
    def wait(self):
        GATE.wait()


class Asking(Own):
    '''Its labels are the lines that its own stack counts for.'''

    def __init__(self, is_stock):
        self.reading = is_stock

    def __getitem__(self, row):
        place = _code_line(sys._getframe(), _READING[self.reading])
        return torch.zeros(3, 4, 4), 0 if place is None else place.line


class AskingStream(IterableDataset):
    def __iter__(self):
        return map(Asking(True).__getitem__, range(64))


def asking(samples):
    return None, torch.tensor([_code_line(sys._getframe(), _READING[True]).line])
"""
WAIT, PARSE, COMPUTE, STUCK, ASK, ASK_JOINED = (
    next(n for n, line in enumerate(CODE.splitlines(), 1) if text in line)
    for text in (
        *("sleep(0.004)", "json.loads", "600_000", "GATE.wait"),
        *("place = _code_line", "None, torch.tensor"),
    )
)


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ModuleType]:
    """A module of a user, which worker processes can import."""
    folder = tmp_path_factory.mktemp("own")
    (folder / "own_code.py").write_text(CODE)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        patch.setenv("PYTHONPATH", str(folder), prepend=os.pathsep)
        yield importlib.import_module("own_code")
    sys.modules.pop("own_code", None)


ENGINES: dict[str, Callable[[Any], Any]] = {
    "no workers": lambda dataset: DataLoader(dataset, 4),
    "stock": lambda dataset: DataLoader(dataset, 4, num_workers=1),
    "thread": lambda dataset: make_loader(dataset, 4, engine="thread", num_workers=1),
    "process": lambda dataset: make_loader(dataset, 4, engine="process", num_workers=1),
    "helper": lambda dataset: make_loader(dataset, 4, engine="helper", num_workers=1),
}


@pytest.mark.parametrize(
    "engine",
    ["no workers", "stock", "thread", "process", pytest.param("helper", marks=pytest.mark.slow)],
)
def test_the_stack_of_each_engine_counts_for_the_line_of_the_user(
    own: ModuleType, engine: str
) -> None:
    loader = ENGINES[engine](own.Asking(engine in ("no workers", "stock")))
    _, labels = next(iter(loader))
    assert labels.tolist() == [ASK] * 4
    getattr(loader, "close", lambda: None)()


def test_the_stack_of_a_stream_and_of_a_collate_function_counts(own: ModuleType) -> None:
    assert next(iter(DataLoader(own.AskingStream(), 2)))[1].tolist() == [ASK] * 2
    assert next(iter(DataLoader(own.Own(), 1, collate_fn=own.asking)))[1].tolist() == [ASK_JOINED]


def test_a_stack_that_does_not_read_does_not_count() -> None:
    assert all(_code_line(sys._getframe(), reading) is None for reading in _READING.values())


def test_a_thread_that_reads_is_sampled_until_the_measurement_ends(
    own: ModuleType, tmp_path: Path
) -> None:
    """One thread is stuck in a line of the user. It is sampled until that has enough samples."""
    folder, collate = tmp_path / "counts", SampledCollate(list, str(tmp_path / "counts"), True)
    folder.mkdir()
    usual = sys.getswitchinterval()
    stuck = threading.Thread(target=lambda: next(iter(DataLoader(own.Stuck(), 1))), daemon=True)
    stuck.start()
    try:
        assert collate([1]) == [1]
        wait_until(lambda: named_lines(folder), "enough samples")
        ended = folder.rename(tmp_path / "ended")
        end_sampling(folder)
    finally:
        own.GATE.set()
        stuck.join(DEADLINE)
    first = named_lines(ended)[0]
    assert (first.line, first.function, first.text) == (STUCK, "Stuck.wait", "GATE.wait()")
    assert first.is_own
    assert not first.is_native  # it is in Python's threading
    assert first.time > 0.5
    assert sys.getswitchinterval() == usual


def lines_of(loader: Any) -> list[Line]:
    """Sample a loader until its lines are known."""
    session = Session(subject=Subject(loader="made:up"), dataset=loader.dataset, loader=loader)
    trial, end = Trial(remedy=Remedy(), seconds=2.0), time.perf_counter() + DEADLINE
    with tempfile.TemporaryDirectory() as scratch:
        while time.perf_counter() < end:
            if lines := sample_lines(
                session, loading=Loading(), trial=trial, scratch=Path(scratch)
            ):
                return lines
    raise AssertionError("no lines were named in time")


@pytest.mark.measures
def test_the_lines_of_a_live_engine_are_named(own: ModuleType) -> None:
    """Waiting and computing share the time; that of a library is its caller's."""
    named = lines_of(ENGINES["thread"](own.Own()))
    lines = {line.line: line for line in named[:2]}
    assert lines.keys() == {WAIT, PARSE}
    assert all(line.is_own for line in named[:2])
    assert lines[WAIT].function == "Own.wait"
    assert lines[WAIT].text == "time.sleep(0.004)"
    assert lines[WAIT].is_native
    assert not lines[PARSE].is_native
    assert all(0.1 < line.time < 0.9 for line in lines.values())


@pytest.mark.measures
def test_a_line_that_releases_the_gil_does_not_attract_samples(own: ModuleType) -> None:
    first, *_ = lines_of(ENGINES["thread"](own.Computing()))
    assert first.line == COMPUTE
    assert first.time > 0.5


def test_nothing_is_sampled_after_the_measurement(tmp_path: Path) -> None:
    """Whatever comes next has the usual switch interval, also after several runs."""
    usual = sys.getswitchinterval()
    for number in range(3):
        folder = tmp_path / f"{number}"
        folder.mkdir()
        assert SampledCollate(len, str(folder), is_stock=True)([1, 2]) == 2
        folder.rename(tmp_path / f"{number}.ended")
        end_sampling(folder)
        assert sys.getswitchinterval() == usual
    end_sampling(tmp_path / "never")


def test_an_error_names_the_line_of_the_user(own: ModuleType) -> None:
    with pytest.raises(AttributeError) as caught:
        own.Asking.__getitem__(None, 1)
    assert raised_at(caught.value).startswith(f"own_code.py:{ASK} Asking.__getitem__")
    with pytest.raises(ValueError) as caught_here:  # noqa: PT011 - any
        int("x")
    assert raised_at(caught_here.value).startswith("test_lines.py:")


def place(file: str, line: int, *, is_own: bool) -> CodeLine:
    return CodeLine(file, line, "f", is_own, is_native=False)


def test_which_lines_are_named() -> None:
    few = {place("/own.py", 3, is_own=True): 24}
    assert _largest(Counter(few)) == []
    many = {place("/own.py", line, is_own=True): 20 for line in range(5)}
    assert len(_largest(Counter(many))) == 3
    whole = {place("/own.py", 3, is_own=True): 20}
    in_native = {key._replace(is_native=True): 21 for key in whole}
    (line,) = _largest(Counter(whole | in_native))
    assert (line.time, line.is_native) == (1.0, True)


def test_lines_of_the_user_come_first() -> None:
    counts = Counter(
        {
            place("/lib/a.py", 1, is_own=False): 80,
            place("/lib/b.py", 2, is_own=False): 5,
            place("/own.py", 3, is_own=True): 15,
        }
    )
    assert [(line.file, line.line) for line in _largest(counts)] == [
        ("/own.py", 3),
        ("/lib/a.py", 1),
    ]


@pytest.mark.parametrize(
    ("file", "library"),
    [
        (__file__, False),
        ("/usr/src/app/train.py", False),
        (time.__name__, False),
        ("<frozen importlib._bootstrap>", True),
        ("/opt/venv/lib/python3.12/site-packages/PIL/Image.py", True),
        (importlib.util.__file__, True),
        (sys.modules["shardkit"].__file__, True),
    ],
)
def test_libraries_are_told_from_code_of_the_user(file: str, library: bool) -> None:
    assert is_library(file) == library
