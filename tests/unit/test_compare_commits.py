"""``scripts/compare_commits.py``: the list of its scenarios, and its verdicts."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from table import for_each

from scripts.compare_commits import needed, row
from scripts.comparing.scenarios import WORDS, scenarios
from shardkit.exporting.export import LAYOUTS
from shardkit.registry import format_names, source_names

SCRIPT = Path(__file__).parents[2] / "scripts/compare_commits.py"


def result(code: int = 0, output: str = "done\n", **files: str) -> dict[str, Any]:
    return {"steps": [{"step": "work", "exit": code, "output": output}], "files": files}


def test_scenarios_cover_sources_formats_layouts_and_commands() -> None:
    every = list(scenarios())
    steps = [step for scenario in every for step in scenario.first + scenario.second]
    assert len({scenario.name for scenario in every}) == len(every)
    assert set(WORDS["format"]) == set(format_names())
    assert set(WORDS["layout"]) == set(LAYOUTS)
    for source in source_names():
        for to in format_names():
            assert any(f"convert {source} " in step and f"--to {to}" in step for step in steps)
    assert sum(scenario.name.startswith("wrong-") for scenario in every) >= 10


def test_a_pattern_selects_what_the_scenarios_read_too() -> None:
    names = [scenario.name for scenario in needed(list(scenarios()), "merge")]
    assert names == ["imagefolder-lmdb", "more", "merge"]


@for_each(
    ("new", "first"),
    [
        (result(a="1"), ""),
        (result(a="2"), "a differs"),
        (result(a="1", b="1"), "b is new"),
        (result(), "a is missing"),
        (result(a="1", output="finished\n"), "-done"),
        (result(1, a="1"), "-exit 0"),
    ],
)
def test_any_difference_fails(new: dict[str, Any], first: str) -> None:
    found = row("name", result(a="1"), new)
    assert (found.first, found.failed) == (first, bool(first))


def test_a_hand_over_may_be_refused_with_one_message_and_exit_code_2() -> None:
    error = "shardkit: error: this plan is of another version\n"
    assert not row("name", result(a="1"), result(2, error), handed=True).failed
    assert row("name", result(a="1"), result(2, error)).failed
    assert row("name", result(a="1"), result(1, error), handed=True).failed
    assert row("name", result(a="1"), result(2, error * 2), handed=True).failed


@pytest.mark.slow
def test_a_commit_equals_itself() -> None:
    command = [sys.executable, str(SCRIPT), "HEAD", "HEAD"]
    done = subprocess.run(
        [*command, "--only", "jobs-lmdb"],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert (done.returncode, "2 of 2 scenarios equal" in done.stdout) == (0, True), done.stdout
