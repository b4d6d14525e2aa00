"""``shardkit bench``: real runs, and refusals."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from helpers import make_folder, run_main
from refusals import refuses
from staged import Stage

from shardkit import convert


@pytest.fixture
def stage(monkeypatch: pytest.MonkeyPatch) -> Stage:
    return Stage.install(monkeypatch)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("bench")
    convert(make_folder(path / "photos", each=8), path / "made", to="lmdb", workers=1)
    return path


@pytest.mark.measures
def test_a_run_measures_each_line(place: Path) -> None:
    """A folder and a dataset, warm and cold, in separate processes."""
    done = run_main(
        "bench",
        place / "photos",
        place / "made",
        *("--rounds", 2, "--seconds", 0.1, "--batch-size", 4, "--limit", 10),
        *("--decode", "RandomResizedCrop(8)", "--loader", "thread:num_workers=1"),
        "--json",
    )
    assert done.returncode == 0, done.stderr
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
    assert {path.name for path in place.iterdir()} == {"photos", "made"}


def test_ctrl_c_shows_complete_rounds_and_exits_with_130(place: Path, stage: Stage) -> None:
    stage.interrupt_at = 4

    done = run_main("bench", place / "made", "--cache", "warm", "--loader", "thread")

    assert done.returncode == 130
    assert "2 of 5 rounds" in done.stdout


def test_a_failure_is_shown_and_exits_with_1(place: Path, stage: Stage) -> None:
    stage.failing = {"process"}

    done = run_main("bench", place / "made", "--loader", "thread", "--loader", "process")

    assert done.returncode == 1
    assert "warm failed: it broke" in done.stdout
    assert "2 of 4 lines" in done.stdout
    assert "    warm       100       100..100" in done.stdout


def test_quiet_prints_nothing(place: Path, stage: Stage) -> None:
    done = run_main("bench", place / "made", "--quiet", "--rounds", 1)

    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_json_has_the_command_and_the_lines_of_one_cache(place: Path, stage: Stage) -> None:
    options = ("--cache", "cold", "--rounds", 1, "--decode", "CenterCrop(8)", "--json")
    done = run_main("bench", place / "made", *options)

    told = json.loads(done.stdout)
    assert {line["cache"] for line in told["lines"]} == {"cold"}
    assert told["command"].startswith(f"shardkit bench {place / 'made'} --cache cold --rounds 1 ")
    assert told["command"].endswith(" --decode 'CenterCrop(8)' --json")


def test_invalid_requests_are_refused_before_anything_is_measured(
    place: Path, stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(place)
    for words, facts in {
        "bench": (),
        "bench nowhere": ("nowhere",),
        "bench made --loader quick": ("'quick'",),
        "bench made --loader auto:colour=red": ("'colour'",),
        "bench made --decode flip": ("'flip'",),
        "bench made --step-ms 5 --model small": ("step", "model"),
        "bench --steps nowhere": ("nowhere",),
        "bench --steps made photos": ("one path",),
        "bench --steps made --loader thread": ("loaders",),
        "bench --steps made --cache cold": ("warm",),
    }.items():
        assert refuses(2, *words.split(), facts=facts).stdout == ""
    assert stage.events == []
