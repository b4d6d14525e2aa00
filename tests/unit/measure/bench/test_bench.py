"""`bench`: what is measured, and invalid requests."""

from __future__ import annotations

import itertools
import re
from pathlib import Path
from typing import Any

import pytest
from bench_reports import result
from helpers import make_folder
from refusals import refused
from staged import Stage

from shardkit import bench, convert
from shardkit.errors import CorruptDataset, UsageError
from shardkit.measure.bench.steps import lines_of_steps, make_steps

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


# `bench --steps`: the loaders, and their speedups.


def test_each_step_contains_all_before_it() -> None:
    steps = list(make_steps(4, 32, accelerator=True).values())
    options = [step.options for step in steps]
    assert options[0] == {"num_workers": 0}
    pairs = list(itertools.pairwise(options[:6]))
    for lower, upper in pairs[1:]:
        assert lower.items() <= upper.items()
    new = [set(upper) - set(lower) for lower, upper in pairs]
    assert new == [{"prefetch_factor"}, {"pin_memory"}, {"persistent_workers"}, set(), {"batched"}]
    assert [step.device for step in steps] == [None] * 4 + ["cuda"] * 3
    assert [step.engine for step in steps] == ["plain"] * 6 + ["auto"]
    assert options[6] == {"num_workers": 4}


def test_without_an_accelerator_steps_do_not_need_it() -> None:
    steps = make_steps(4, 32, accelerator=False)

    names = ["no workers", "+ 4 workers", "+ persistent workers", "+ batched __getitems__"]
    assert list(steps) == [*names, "+ shardkit's engine"]
    assert {step.device for step in steps.values()} == {None}
    assert steps[names[-1]].options.keys() >= {"persistent_workers", "batched"}


def test_a_line_is_compared_with_the_first_and_the_one_above() -> None:
    results = [result("a", rates=(rate, rate)) for rate in (100, 200, 300, 600)]
    results[2] = result("a", problem="a disk hangs")

    lines = lines_of_steps(["no workers", "+ a", "+ b", "+ c"], results)

    names = ["no workers", "+ a (2.00x the row above)", "+ b", "+ c"]
    assert [line.loader for line in lines] == names
    assert [line.baseline for line in lines] == [True, False, False, False]
    speedups = [line.measured and line.measured.speedup for line in lines]
    assert [each and each.median for each in speedups] == [None, 2, None, 6]


@pytest.mark.measures
def test_a_dataset_is_measured_with_a_model(tmp_path: Path) -> None:
    made = tmp_path / "made"
    convert(make_folder(tmp_path / "photos"), made, to="lmdb", workers=1)

    report = bench(
        [made],
        steps=True,
        decode="CenterCrop(8)",
        batch_size=2,
        model="small",
        rounds=1,
        seconds=0.03,
    )

    assert len(report.measured) == len(report.lines)
    assert report.lines[-1].title.endswith(" workers")
    assert 4 <= report.sources[0].images <= report.sources[0].total == 6
