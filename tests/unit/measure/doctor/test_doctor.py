"""`shardkit doctor` refuses wrong requests, and checks the machine alone."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from helpers import jpeg, make_folder, make_tree, run_main
from refusals import refuses

from shardkit import convert

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
    done = run_main("doctor", "--workers", "2")
    assert done.returncode == 0
    assert re.match(r"machine     .*checks? passed", done.stdout)
    found = json.loads(run_main("doctor", "--json").stdout)
    assert found["subject"] is found["diagnosis"] is found["profile"] is None
    assert {each["name"] for each in found["findings"]} >= {"processors", "libraries"}
    assert run_main("doctor", "--quiet").stdout == ""


def test_wrong_requests_are_refused(place: Path) -> None:
    make_folder(place / "photos")
    for words, fact in {
        "--step-ms 5": "--model",
        "photos --loader planted:nothing": "--loader",
        "--loader planted:nothing --workers 2": "--loader",
        "missing": "missing",
        "photos --decode Crop": "'Crop'",
        "photos --step-ms 5 --model small": "model",
    }.items():
        assert refuses(2, "doctor", *words.split(), facts=(fact,)).stdout == ""


@pytest.mark.slow
def test_a_loader_that_cannot_be_measured_is_refused(place: Path) -> None:
    source = make_tree(place / "photos", {"a/1.jpg": jpeg(8, 8, 1)})
    convert(source, place / "made", to="lmdb", workers=1)

    refuses(1, "doctor", "made", "--transform", "planted:die", facts=("exit code 7",))
    refuses(2, "doctor", "--loader", "planted:nothing", facts=("list",))
