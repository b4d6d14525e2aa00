"""``shardkit ladder``: arguments that it accepts and refuses before measuring."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from helpers import invoke, make_folder

from shardkit.cli import ladder as command
from shardkit.errors import UsageError
from shardkit.measure.bench.ladder import LadderReport, LadderRequest
from shardkit.measure.runner.spec import Subject


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "ladder needs one dataset or image folder, or --case"),
        (["--case", "tutorial", "a"], "ladder needs one dataset or image folder, or --case"),
        (["--case", "tutorial", "--decode", "pil"], "--decode has no effect with --case"),
        (["--case", "tutorial", "--seconds", "3"], "which has its own number of epochs"),
        (["nowhere"], "nowhere does not exist"),
        (["--decode", "pil", "."], "decode pil needs a transform"),
    ],
)
def test_requests_that_the_ladder_does_not_support_are_refused(
    arguments: list[str], message: str
) -> None:
    result = invoke("ladder", *arguments)

    assert isinstance(result.exception, UsageError)
    assert message in str(result.exception)


@pytest.mark.parametrize("arguments", [["--loader", "auto", "a"], ["a", "b"], ["--html", "x", "a"]])
def test_arguments_that_the_ladder_lacks_exit_with_2(arguments: list[str]) -> None:
    assert invoke("ladder", *arguments).exit_code == 2


def test_the_model_can_be_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """The other options keep their defaults."""
    requests: list[LadderRequest] = []

    def ladder(request: LadderRequest, watch: object) -> LadderReport:
        requests.append(request)
        raise UsageError("enough")

    monkeypatch.setattr(command, "ladder", ladder)
    invoke("ladder", "--case", "tutorial", "--model", "none", "--workers", 2)
    assert requests == [LadderRequest(subject=Subject(case="tutorial"), model=None, workers=2)]


def test_the_help_shows_the_defaults() -> None:
    shown = " ".join(invoke("ladder", "--help").stdout.split())
    request = LadderRequest(subject=Subject(path="x"))
    assert f"[default: {request.seconds:g}" in shown
    assert f"[default: {request.rounds};" in shown
    assert f"[default: {request.resolved().batch_size}, or the case's own" in shown


def test_the_command_climbs(tmp_path: Path) -> None:
    make_folder(tmp_path / "photos", each=6)
    given = ["--rounds", "1", "--seconds", "0.05", "--workers", "1", "--batch-size", "4"]

    chosen = [*given, "--json", "--decode", "CenterCrop(8)", "--model", "none"]
    result = invoke("ladder", tmp_path / "photos", *chosen)

    report = json.loads(result.stdout)
    assert result.exit_code == 0
    assert report["request"]["workers"] == 1
    assert report["request"]["batch_size"] == 4
    assert report["model_problem"] == "not asked for"
    assert list(report["conclusion"]) == ["alone"]
    assert [rung["note"] for rung in report["rungs"]] == [*[""] * 5, "a folder has none", ""]
    assert report["rungs"][0]["images_per_second"]["alone"] > 0
