"""``shardkit bench --ladder``: what the command takes, and what it refuses before it measures."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner
from helpers import make_folder

from shardkit.cli.ladder import ladder_request
from shardkit.cli.main import cli
from shardkit.errors import UsageError
from shardkit.measure.comparison.ladder import LadderRequest
from shardkit.measure.spec import Subject


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--ladder"], "--ladder takes one dataset or image folder, or --case; 0 paths given"),
        (["--ladder", "a", "b"], "2 paths given"),
        (["--case", "tutorial", "a"], "--ladder takes a case instead of a path; 1 path given"),
        (["--ladder", "--loader", "auto", "a"], "--loader has no meaning for --ladder"),
        (["--ladder", "--html", "a.html", "a"], "--html has no meaning for --ladder"),
        (["--ladder", "--step-ms", "3", "a"], "--step-ms has no meaning for --ladder"),
        (["--case", "tutorial", "--decode", "pil"], "--decode has no meaning for --case"),
        (["--case", "tutorial", "--seconds", "3"], "--seconds has no meaning for --case, which re"),
        (["--workers", "3", "a"], "--loader thread:workers=3"),
        (["--ladder", "nowhere"], "nowhere does not exist"),
        (["--ladder", "--decode", "pil", "."], "decode pil needs a transform"),
    ],
)
def test_what_the_ladder_cannot_do_is_refused(arguments: list[str], message: str) -> None:
    result = CliRunner().invoke(cli, ["bench", *arguments], standalone_mode=False)

    assert isinstance(result.exception, UsageError)
    assert message in str(result.exception)


def test_the_model_can_be_left_out() -> None:
    """The other options stay what they are without it."""
    chosen = {"case": "tutorial", "ladder": True, "model": "none", "workers": 2}
    assert ladder_request((), chosen) == LadderRequest(
        subject=Subject(case="tutorial"), model=None, workers=2
    )


def test_the_help_tells_the_defaults_of_the_ladder() -> None:
    shown = " ".join(CliRunner().invoke(cli, ["bench", "--help"]).stdout.split())
    request = LadderRequest(subject=Subject(path="x"))
    size = request.resolved().batch_size
    assert (
        f"--rounds {request.rounds}, --batch-size {size}, and --seconds {request.seconds:g}, "
        in shown
    )
    assert "--model none leaves the model out" in shown


def test_the_command_climbs(tmp_path: Path) -> None:
    make_folder(tmp_path / "photos", each=6)
    given = ["--rounds", "1", "--seconds", "0.05", "--workers", "1", "--batch-size", "4"]

    chosen = [*given, "--json", "--decode", "CenterCrop(8)", "--model", "none"]
    result = CliRunner().invoke(cli, ["bench", "--ladder", str(tmp_path / "photos"), *chosen])

    report = json.loads(result.stdout)
    assert result.exit_code == 0
    assert report["request"]["workers"] == 1
    assert report["request"]["batch_size"] == 4
    assert report["model_problem"] == "not asked for"
    assert list(report["conclusion"]) == ["alone"]
    assert [rung["note"] for rung in report["rungs"]] == [*[""] * 5, "a folder has none", ""]
    assert report["rungs"][0]["images_per_second"]["alone"] > 0
