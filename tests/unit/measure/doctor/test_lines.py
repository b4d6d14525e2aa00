"""Samples of the stacks of all engines name the lines that take the time."""

from __future__ import annotations

import importlib.util
import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from diagnoses import profile
from helpers import DEADLINE
from torch.utils.data import DataLoader

from shardkit import make_loader
from shardkit.cli.doctor_report import _line
from shardkit.measure.doctor.lines import Line, Place, SampledCollate, _largest, end_sampling
from shardkit.measure.doctor.pipeline import Loading, Remedy, Trial, sample_lines
from shardkit.measure.runner.own_code import is_library, raised_at
from shardkit.measure.runner.session import Session
from shardkit.measure.runner.spec import Subject

CODE = """
import json
import time

import torch
from torch.utils.data import Dataset, IterableDataset

TEXT = json.dumps(list(range(3_000)))


class Own(Dataset):
    def __len__(self):
        return 64

    def wait(self):
        time.sleep(0.004)

    def compute(self):
        for _ in range(600_000): pass
        time.sleep(0)

    def parse(self):
        end = time.perf_counter() + 0.004
        while time.perf_counter() < end:
            json.loads(TEXT)

    def __getitem__(self, row):
        self.wait()
        self.parse()
        return torch.zeros(3, 4, 4), row


class Computing(Own):
    def __getitem__(self, row):
        self.compute()
        return torch.zeros(3, 4, 4), row


class Stream(IterableDataset):
    def __iter__(self):
        return map(Own().__getitem__, range(64))


def joined(samples):
    time.sleep(0.02)
    return torch.stack([image for image, _ in samples]), None
"""
WAIT, PARSE, COMPUTE, JOIN = (
    next(n for n, line in enumerate(CODE.splitlines(), 1) if text in line)
    for text in ("sleep(0.004)", "json.loads", "600_000", "sleep(0.02)")
)


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ModuleType]:
    """A module of a user, which worker processes can import."""
    folder = tmp_path_factory.mktemp("own")
    (folder / "own_code.py").write_text(CODE)
    sys.path.insert(0, str(folder))
    usual = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(folder), usual)))
    yield importlib.import_module("own_code")
    sys.path.remove(str(folder))
    os.environ.pop("PYTHONPATH")
    if usual is not None:
        os.environ["PYTHONPATH"] = usual
    sys.modules.pop("own_code", None)


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


ENGINES: dict[str, Callable[[Any], Any]] = {
    "stock": lambda dataset: DataLoader(dataset, 4, num_workers=2),
    "forkserver": lambda dataset: DataLoader(
        dataset, 4, num_workers=2, multiprocessing_context="forkserver"
    ),
    "no workers": lambda dataset: DataLoader(dataset, 4),
    "thread": lambda dataset: make_loader(dataset, 4, engine="thread", num_workers=2),
    "helper": lambda dataset: make_loader(dataset, 4, engine="helper", num_workers=2),
    "process": lambda dataset: make_loader(dataset, 4, engine="process", num_workers=2),
}


@pytest.mark.parametrize("engine", ENGINES)
def test_the_lines_of_each_engine_are_named(own: ModuleType, engine: str) -> None:
    """Waiting and computing share the time; that of a library is its caller's."""
    named = lines_of(ENGINES[engine](own.Own()))
    lines = {line.line: line for line in named[:2]}
    assert lines.keys() == {WAIT, PARSE}
    assert all(line.is_own for line in named[:2])
    assert lines[WAIT].function == "Own.wait"
    assert lines[WAIT].text == "time.sleep(0.004)"
    assert lines[WAIT].is_native
    assert not lines[PARSE].is_native
    assert all(0.1 < line.time < 0.9 for line in lines.values())


def test_the_lines_of_a_stream_are_named(own: ModuleType) -> None:
    lines = lines_of(DataLoader(own.Stream(), 4, num_workers=1))
    assert {WAIT, PARSE} <= {line.line for line in lines}


def test_a_line_that_releases_the_gil_does_not_attract_samples(own: ModuleType) -> None:
    first, *_ = lines_of(make_loader(own.Computing(), 4, engine="thread", num_workers=1))
    assert first.line == COMPUTE
    assert first.time > 0.5


def test_a_collate_function_is_sampled(own: ModuleType) -> None:
    lines = lines_of(DataLoader(own.Own(), 1, num_workers=1, collate_fn=own.joined))
    assert lines[0].line == JOIN
    assert lines[0].function == "joined"


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
    with pytest.raises(TypeError) as caught:
        own.joined([1])
    assert raised_at(caught.value).startswith(f"own_code.py:{JOIN + 1} joined")
    with pytest.raises(ValueError) as caught_here:  # noqa: PT011 - any
        int("x")
    assert raised_at(caught_here.value).startswith("test_lines.py:")


def place(file: str, line: int, *, is_own: bool) -> Place:
    return Place(file, line, "f", is_own, is_native=False)


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


def test_at_most_three_lines_are_named() -> None:
    counts = Counter({place("/own.py", line, is_own=True): 20 for line in range(5)})
    assert len(_largest(counts)) == 3


def test_few_samples_name_nothing() -> None:
    assert _largest(Counter({place("/own.py", 3, is_own=True): 24})) == []


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


def test_the_report_cuts_a_long_line() -> None:
    line = Line(
        file="/a/own.py",
        line=24,
        function="Own.load",
        text="x" * 200,
        time=0.61,
        is_own=True,
        is_native=True,
    )
    text = _line("lines", line)
    assert text.startswith("lines       61%  own.py:24 Own.load, in native code: xxx")
    assert text.endswith("x...")
    assert len(text) == 100
    assert profile().lines == ()
