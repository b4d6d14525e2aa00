"""`bench`: what is measured, and invalid requests."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from helpers import make_folder
from refusals import refused
from staged import Stage

from shardkit import CorruptDataset, UsageError, bench, convert

PLAIN = "plain:num_workers=N,persistent_workers=true"
"""N are the usable CPUs."""


@pytest.fixture
def stage(monkeypatch: pytest.MonkeyPatch) -> Stage:
    return Stage.install(monkeypatch)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("bench")
    convert(make_folder(path / "photos"), path / "made", to="lmdb", workers=1)
    return path


def lines(report: Any) -> list[tuple[str, str, str, bool]]:
    return [
        (Path(line.path).name, re.sub(r"=\d+,", "=N,", line.loader), line.cache, line.baseline)
        for line in report.lines
    ]


def test_a_folder_is_the_baseline(place: Path, stage: Stage) -> None:
    report = bench([place / "made", place / "photos"], rounds=1, caches=("warm",))

    assert lines(report) == [
        ("made", PLAIN, "warm", False),
        ("made", "auto", "warm", False),
        ("photos", PLAIN, "warm", True),
    ]
    assert [source.kind for source in report.sources] == ["dataset", "folder"]
    assert report.folders == {str(place / "photos")}
    report = bench([place / "photos"], rounds=1, caches=("warm",), loaders=("process", "plain"))
    assert lines(report)[1] == ("photos", "plain", "warm", True), "PyTorch's own loader"


def test_without_a_folder_the_first_line_is_the_baseline(place: Path, stage: Stage) -> None:
    loaders = ("thread", "process:num_workers=1")

    report = bench([place / "made"], rounds=2, seconds=0.5, loaders=loaders, batch_size=7)

    assert lines(report) == [
        ("made", "thread", "warm", True),
        ("made", "thread", "cold", True),
        ("made", "process:num_workers=1", "warm", False),
        ("made", "process:num_workers=1", "cold", False),
    ]
    assert [bool(found.speedup) for _, found in report.measured] == [False, False, True, True]
    settings = {"rounds": 2, "complete": 2, "length": "0.5 s", "batch_size": 7, "step_ms": None}
    assert report.settings.items() >= {**settings, "decode": "RandomResizedCrop(224)"}.items()


def test_a_failure_is_reported_in_its_line(place: Path, stage: Stage) -> None:
    stage.failing = {"process"}

    report = bench([place / "made"], rounds=1, caches=("warm",), loaders=("thread", "process"))

    assert [line.problem for line in report.lines] == ["", "it broke"]
    assert report.failed
    assert report.lines[0].measured


def test_invalid_requests_are_refused(place: Path, tmp_path: Path, stage: Stage) -> None:
    made = [place / "made"]
    wrong: list[tuple[list[Path], dict[str, Any], str]] = [
        ([], {}, ""),
        ([tmp_path / "nowhere"], {}, "/nowhere"),
        ([place / "made/shardkit.json"], {}, "/shardkit.json"),
        (made, {"rounds": 0}, "rounds=0"),
        (made, {"limit": True}, "limit=True"),
        (made, {"seconds": float("nan")}, "seconds=nan"),
        (made, {"caches": ("hot",)}, "caches"),
        (made, {"loaders": ("quick",)}, "'quick'"),
        (made, {"loaders": ("auto:num_workers=x",)}, "int"),
        (made, {"loaders": ("plain",), "batch_size": 0}, "batch_size=0"),
        (made, {"step_ms": 5.0, "model": "small"}, "model"),
    ]
    for paths, options, fact in wrong:
        with refused(UsageError, fact):
            bench(paths, **options)
    (make_folder(tmp_path / "made") / "shardkit.json").write_text("{")
    with refused(CorruptDataset, "/made"):
        bench([tmp_path / "made"])
    assert stage.events == []
