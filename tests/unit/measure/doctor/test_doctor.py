"""`shardkit doctor` refuses wrong requests, and checks the machine alone."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from helpers import invoke, jpeg, make_dataset, make_folder, make_tree

from shardkit import UsageError
from shardkit.errors import MeasurementFailed

MODULE = """
import os


def die(image):
    os._exit(7)


def nothing():
    return [1]
"""


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with a module in it."""
    (tmp_path / "planted.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_without_data_only_the_machine_is_checked() -> None:
    done = invoke("doctor", "--workers", "2")
    assert done.exit_code == 0
    assert re.match(r"machine     .*checks? passed", done.stdout)
    found = json.loads(invoke("doctor", "--json").stdout)
    assert found["subject"] is found["diagnosis"] is found["profile"] is None
    assert {each["name"] for each in found["findings"]} >= {"processors", "libraries"}
    assert invoke("doctor", "--quiet").output == ""


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--step-ms", "5"], "--model require a dataset"),
        (["photos", "--loader", "planted:nothing"], "--loader excludes a dataset"),
        (["--loader", "planted:nothing", "--workers", "2"], "--loader excludes a dataset"),
        (["missing"], "missing does not exist"),
        (["photos", "--decode", "Crop"], "decode 'Crop' is unknown"),
        (["photos", "--step-ms", "5", "--model", "small"], "either a time in ms or a model"),
    ],
)
def test_a_wrong_request_is_refused(place: Path, arguments: list[str], message: str) -> None:
    make_folder(place / "photos")
    refused(UsageError, message, *arguments)


def refused(error: type[Exception], message: str, *arguments: object) -> None:
    done = invoke("doctor", *arguments)
    assert isinstance(done.exception, error), done.output
    assert re.search(message, str(done.exception))
    assert not done.stdout


@pytest.mark.slow
def test_a_loader_that_cannot_be_measured_is_refused(place: Path) -> None:
    made = make_dataset(make_tree(place / "photos", {"a/1.jpg": jpeg(8, 8, 1)}), place / "made")

    refused(MeasurementFailed, "exit code 7", made, "--transform", "planted:die")
    refused(UsageError, "returns a list", "--loader", "planted:nothing")
