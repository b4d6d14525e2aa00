"""Samples of the stack name the lines that take the time."""

from __future__ import annotations

import importlib.util
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest
from diagnoses import profile
from helpers import DEADLINE

from shardkit.cli.doctor_report import _line
from shardkit.measure.doctor.lines import Line, LineSampler, is_library

CODE = """
import time
import json

def wait(seconds):
    time.sleep(seconds)

def parse(text):
    return json.loads(text)

def compute():
    for _ in range(300_000): pass
    time.sleep(0)

def both(seconds, text):
    wait(seconds)
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        parse(text)
"""


@pytest.fixture
def own(tmp_path: Path) -> Iterator[ModuleType]:
    """A module of a user."""
    path = tmp_path / "own_code.py"
    path.write_text(CODE)
    spec = importlib.util.spec_from_file_location("own_code", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    yield module
    sys.modules.pop("own_code", None)


def sampled(work: Callable[[], object]) -> list[Line]:
    """Run something until its lines are known."""
    lines, end = LineSampler(), time.perf_counter() + DEADLINE
    with lines.running():
        while not lines.lines() and time.perf_counter() < end:
            work()
    return lines.lines()


def test_a_line_that_waits_is_named(own: ModuleType) -> None:
    first, *_ = sampled(lambda: own.wait(0.05))
    assert (Path(first.file).name, first.line, first.function) == ("own_code.py", 6, "wait")
    assert first.text == "time.sleep(seconds)"
    assert first.time > 0.8


def test_the_time_of_a_library_is_that_of_the_line_that_calls_it(own: ModuleType) -> None:
    text = str(list(range(3_000)))
    lines = sampled(lambda: own.both(0.05, text))
    assert {line.line for line in lines} == {6, 9}
    assert all(0.1 < line.time < 0.9 for line in lines)


def test_a_line_that_releases_the_gil_does_not_attract_samples(own: ModuleType) -> None:
    first, *_ = sampled(own.compute)
    assert first.line == 12
    assert first.time > 0.5


def test_lines_of_libraries_are_named_without_code_of_the_user() -> None:
    lines = LineSampler()
    lines._others.update({("/lib/a.py", 1, "f"): 90, ("/lib/b.py", 2, "g"): 5})
    lines._own.update({("/own.py", 3, "h"): 15})
    assert [(line.file, line.line) for line in lines.lines()] == [("/own.py", 3), ("/lib/a.py", 1)]


def test_few_samples_name_nothing() -> None:
    lines = LineSampler()
    lines._own.update({("/own.py", 3, "h"): 19})
    assert lines.lines() == []


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
    line = Line(file="/a/own.py", line=24, function="Own.load", text="x" * 200, time=0.61)
    text = _line("lines", line)
    assert text.startswith("lines       61%  own.py:24 Own.load: xxx")
    assert text.endswith("x...")
    assert len(text) == 100
    assert profile().lines == ()
