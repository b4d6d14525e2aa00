"""``shardkit bench --ladder``: what the command takes, and what it refuses before it measures."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner
from helpers import make_folder

from shardkit.cli.main import cli
from shardkit.errors import UsageError


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
        (["--workers", "3", "a"], "--loader thread:workers=3"),
        (["--ladder", "nowhere"], "nowhere does not exist"),
        (["--ladder", "--decode", "pil", "."], "decode pil needs a transform"),
    ],
)
def test_what_the_ladder_cannot_do_is_refused(arguments: list[str], message: str) -> None:
    result = CliRunner().invoke(cli, ["bench", *arguments], standalone_mode=False)

    assert isinstance(result.exception, UsageError)
    assert message in str(result.exception)


def test_the_command_climbs(tmp_path: Path) -> None:
    make_folder(tmp_path / "photos", each=6)
    given = ["--rounds", "1", "--seconds", "0.05", "--workers", "1", "--batch-size", "4"]

    chosen = [*given, "--json", "--decode", "CenterCrop(8)"]
    result = CliRunner().invoke(cli, ["bench", "--ladder", str(tmp_path / "photos"), *chosen])

    report = json.loads(result.stdout)
    assert result.exit_code == 0
    assert report["request"]["workers"] == 1
    assert report["request"]["batch_size"] == 4
    assert report["rungs"][0]["images_per_second"]["alone"] > 0
