"""`bench`: what is measured, and invalid requests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from helpers import make_dataset, make_folder
from staged import Stage

from shardkit.dataset.manifest import MANIFEST_NAME
from shardkit.errors import CorruptDataset, UsageError
from shardkit.measure.bench.bench import bench
from shardkit.measure.bench.report import BenchReport
from shardkit.system.machine import usable_cpus

PLAIN = f"plain:num_workers={usable_cpus()},persistent_workers=true"


@pytest.fixture
def stage(monkeypatch: pytest.MonkeyPatch) -> Stage:
    return Stage.install(monkeypatch)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("bench")
    make_dataset(make_folder(path / "photos"), path / "made")
    return path


def lines(report: BenchReport) -> list[tuple[str, str, str, bool]]:
    return [(Path(line.path).name, line.loader, line.cache, line.baseline) for line in report.lines]


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


def test_invalid_paths_are_refused(place: Path, tmp_path: Path, stage: Stage) -> None:
    wrong: list[tuple[list[Path], str]] = [
        ([], "nothing to measure"),
        ([tmp_path / "nowhere"], "does not exist"),
        ([place / "made" / MANIFEST_NAME], "is not a folder"),
    ]
    for paths, message in wrong:
        with pytest.raises(UsageError, match=message):
            bench(paths)
    make_folder(tmp_path / "made")
    (tmp_path / "made" / MANIFEST_NAME).write_text("{")
    with pytest.raises(CorruptDataset, match="made"):
        bench([tmp_path / "made"])
    assert stage.events == []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rounds": 0}, "rounds=0"),
        ({"limit": True}, "limit=True"),
        ({"seconds": float("nan")}, "seconds=nan"),
        ({"caches": ("hot",)}, "caches"),
        ({"loaders": ("quick",)}, "'quick' is unknown"),
        ({"loaders": ("auto:num_workers=x",)}, "not of type int"),
        ({"loaders": ("plain",), "batch_size": 0}, "batch_size=0"),
        ({"step_ms": 5.0, "model": "small"}, "either a time in ms or a model"),
    ],
)
def test_invalid_options_are_refused(place: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        bench([place / "made"], **options)
