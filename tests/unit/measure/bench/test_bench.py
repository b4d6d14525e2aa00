"""`bench`: what is measured of which paths, and what is refused before anything is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from helpers import make_dataset, make_folder
from staged import Stage

from shardkit.dataset.manifest import MANIFEST_NAME
from shardkit.errors import CorruptDataset, UsageError
from shardkit.measure.bench.bench import BenchOptions, bench, default_loaders
from shardkit.measure.bench.report import BenchReport
from shardkit.system.machine import usable_cpus

PLAIN = f"plain:num_workers={usable_cpus()},persistent_workers=true"


@pytest.fixture
def stage(monkeypatch: pytest.MonkeyPatch) -> Stage:
    return Stage.put_up(monkeypatch)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("bench")
    make_dataset(make_folder(path / "photos"), path / "made")
    return path


def lines(report: BenchReport) -> list[tuple[str, str, str, bool]]:
    return [(Path(line.path).name, line.loader, line.cache, line.baseline) for line in report.lines]


def test_a_folder_is_what_datasets_are_compared_with(place: Path, stage: Stage) -> None:
    report = bench([place / "made", place / "photos"], BenchOptions(rounds=1, caches=("warm",)))

    assert lines(report) == [
        ("made", PLAIN, "warm", False),
        ("made", "auto", "warm", False),
        ("photos", PLAIN, "warm", True),
    ]
    assert [source.kind for source in report.sources] == ["dataset", "folder"]
    assert report.against_folder


def test_without_a_folder_it_is_the_first_line(place: Path, stage: Stage) -> None:
    options = BenchOptions(rounds=1, loaders=("thread", "process:num_workers=1"))

    report = bench([place / "made"], options)

    assert lines(report) == [
        ("made", "thread", "warm", True),
        ("made", "thread", "cold", True),
        ("made", "process:num_workers=1", "warm", False),
        ("made", "process:num_workers=1", "cold", False),
    ]
    assert all(line.measured and line.measured.gain for line in report.lines)


def test_of_a_folder_pytorchs_own_loader_is_the_base(place: Path, stage: Stage) -> None:
    options = BenchOptions(rounds=1, caches=("warm",), loaders=("process", "plain"))

    report = bench([place / "photos"], options)

    assert lines(report)[1] == ("photos", "plain", "warm", True)


def test_default_loaders() -> None:
    assert default_loaders(dataset=True) == (PLAIN, "auto")
    assert default_loaders(dataset=False) == (PLAIN,)


def test_settings_are_told(place: Path, stage: Stage) -> None:
    options = BenchOptions(rounds=2, seconds=0.5, caches=("warm",), batch_size=7)

    settings = bench([place / "made"], options).settings

    assert settings["rounds"] == 2
    assert settings["seconds"] == 0.5
    assert settings["batch_size"] == 7
    assert settings["decode"] == "RandomResizedCrop(224)"
    assert (settings["transform"], settings["step_ms"], settings["model"]) == (None, None, None)


def test_one_that_failed_is_in_the_report(place: Path, stage: Stage) -> None:
    stage.failing = {"process"}
    options = BenchOptions(rounds=1, caches=("warm",), loaders=("thread", "process"))

    report = bench([place / "made"], options)

    assert [line.problem for line in report.lines] == ["", "it broke"]
    assert report.failed
    assert report.lines[0].measured


def test_wrong_paths_are_refused(place: Path, tmp_path: Path, stage: Stage) -> None:
    with pytest.raises(UsageError, match="nothing to measure"):
        bench([])
    with pytest.raises(UsageError, match="does not exist"):
        bench([tmp_path / "nowhere"])
    with pytest.raises(UsageError, match="is no folder"):
        bench([place / "made" / MANIFEST_NAME])
    with pytest.raises(UsageError, match="given twice"):
        bench([place / "made", place / "photos" / ".." / "made"])
    assert stage.events == []


@pytest.mark.parametrize(
    ("content", "error"), [("{", CorruptDataset), ('{"shardkit_dataset": 99}', Exception)]
)
def test_a_damaged_manifest_makes_no_folder(
    tmp_path: Path, stage: Stage, content: str, error: type[Exception]
) -> None:
    make_folder(tmp_path / "made")
    (tmp_path / "made" / MANIFEST_NAME).write_text(content)

    with pytest.raises(error, match="made"):
        bench([tmp_path / "made"])
    assert stage.events == []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rounds": 0}, "rounds=0"),
        ({"limit": True}, "limit=True"),
        ({"seconds": float("nan")}, "seconds=nan"),
        ({"seconds": 0.0}, "seconds=0.0"),
        ({"caches": ()}, "caches"),
        ({"caches": ("hot",)}, "caches"),
        ({"loaders": ("quick",)}, "'quick' is unknown"),
        ({"loaders": ("auto:num_workers=x",)}, "not an integer"),
        ({"loaders": ("plain:num_workers=1", "plain:num_workers=1")}, "given twice"),
        ({"batch_size": 0}, "batch_size=0"),
    ],
)
def test_wrong_options_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        BenchOptions(**options)
