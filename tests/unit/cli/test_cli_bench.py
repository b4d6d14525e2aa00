"""``shardkit bench``: one real run, and refusals."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from click.testing import Result
from helpers import invoke, make_dataset, make_folder
from parsed import Parsed
from staged import Stage

from shardkit.errors import UsageError


@pytest.fixture
def stage(monkeypatch: pytest.MonkeyPatch) -> Stage:
    return Stage.install(monkeypatch)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("bench")
    make_dataset(make_folder(path / "photos", each=8), path / "made")
    return path


@pytest.fixture(scope="module")
def done(place: Path) -> Result:
    """A real run of a folder and a dataset, warm and cold, in separate processes."""
    return invoke(
        "bench",
        place / "photos",
        place / "made",
        *("--rounds", 2, "--seconds", 0.1, "--batch-size", 4, "--limit", 10),
        *("--decode", "RandomResizedCrop(8)", "--loader", "thread:num_workers=1"),
        *("--json", "--plot", place / "plot.svg", "--html", place / "page.html"),
    )


@pytest.mark.slow
def test_a_run_measures_each_line(done: Result, place: Path) -> None:
    assert done.exit_code == 0, done.output
    told = json.loads(done.stdout)

    assert [(Path(line["path"]).name, line["loader"], line["cache"]) for line in told["lines"]] == [
        (name, "thread:num_workers=1", cache)
        for name in ("photos", "made")
        for cache in ("warm", "cold")
    ]
    for line in told["lines"]:
        found = line["measured"]
        assert line["problem"] == ""
        spread = found["images_per_second"]
        assert 0 < spread["lowest"] <= spread["median"] <= spread["highest"]
        assert 0 <= found["wait_p50"] <= found["wait_p95"]
        assert found["first_batch"] > 0
        assert found["memory"] > 50 << 20
        assert (found["engine"], found["workers"]) == ("thread", 1)
        assert (found["resident"] is None) == (line["cache"] == "warm")
        assert (found["speedup"] is None) == line["baseline"]

    folder, dataset = told["sources"]
    assert (folder["kind"], dataset["kind"]) == ("folder", "dataset")
    assert (folder["images"], folder["total"]) == (dataset["images"], dataset["total"]) == (10, 16)
    assert f"10 of 16 images of {place / 'made'} were read." in told["details"]
    assert told["command"].split()[0] == "shardkit"
    assert told["headline"] in Parsed((place / "page.html").read_text("utf-8")).text
    assert (place / "plot.svg").read_text("utf-8").startswith("<svg")
    assert {path.name for path in place.iterdir()} == {"photos", "made", "plot.svg", "page.html"}


def test_ctrl_c_shows_complete_rounds_and_exits_with_130(place: Path, stage: Stage) -> None:
    stage.interrupt_at = 4

    done = invoke("bench", place / "made", "--cache", "warm", "--loader", "thread")

    assert done.exit_code == 130
    assert "Interrupted: the table shows 2 of 5 rounds." in done.stdout


def test_a_failure_is_shown_and_exits_with_1(place: Path, stage: Stage) -> None:
    stage.failing = {"process"}

    done = invoke("bench", place / "made", "--loader", "thread", "--loader", "process")

    assert done.exit_code == 1
    assert "warm failed: it broke" in done.stdout
    assert "2 of 4 lines could not be measured." in done.stdout
    assert "    warm       100       100..100" in done.stdout


def test_quiet_prints_nothing(place: Path, stage: Stage, tmp_path: Path) -> None:
    target = tmp_path / "plot.svg"
    done = invoke("bench", place / "made", "--quiet", "--rounds", 1, "--plot", target)

    assert (done.exit_code, done.output) == (0, "")
    assert target.read_text("utf-8").startswith("<svg")


def test_one_cache_alone(place: Path, stage: Stage) -> None:
    done = invoke("bench", place / "made", "--cache", "cold", "--rounds", 1, "--json")

    assert {line["cache"] for line in json.loads(done.stdout)["lines"]} == {"cold"}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "nothing to measure"),
        (["nowhere"], "does not exist"),
        (["made", "--loader", "quick"], "'quick' is unknown"),
        (["made", "--loader", "auto:colour=red"], "has no option 'colour'"),
        (["made", "--decode", "flip"], "'flip' is unknown"),
        (["made", "--plot", "plot.png"], "a plot is a file named"),
        (["made", "--plot", "nowhere/plot.svg"], "does not exist"),
        (["made", "--html", "nowhere/page.html"], "does not exist"),
        (["made", "--html", "one.svg", "--plot", "one.svg"], "name the same file"),
        (["made", "--step-ms", "5", "--model", "small"], "either a time in ms or a model"),
    ],
)
def test_invalid_requests_are_refused_before_anything_is_measured(
    place: Path, stage: Stage, monkeypatch: pytest.MonkeyPatch, words: list[str], message: str
) -> None:
    monkeypatch.chdir(place)

    done = invoke("bench", *words)

    assert isinstance(done.exception, UsageError)
    assert message in str(done.exception)
    assert stage.events == []


def test_the_report_contains_the_command(
    place: Path, stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["shardkit", "bench", "a b", "--rounds", "1"])

    done = invoke("bench", place / "made", "--rounds", 1, "--json")

    assert json.loads(done.stdout)["command"] == "shardkit bench 'a b' --rounds 1"
