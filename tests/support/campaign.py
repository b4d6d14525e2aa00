"""Plugin: which points of the campaigns are tried, and how to try them again.

`scripts/test --all` tries a share of them, always the same one. `scripts/campaigns` tries as many
as it has time for, with the date as the seed, so that each night explores others.
"""

from __future__ import annotations

import itertools
import os
import random
import shlex
import time
from collections import Counter
from collections.abc import Hashable, Iterable
from pathlib import Path
from typing import TypeVar

import pytest

FULL = "SHARDKIT_CAMPAIGN_SEED" in os.environ
"""Whether `scripts/campaigns` runs the tests."""

SEED = int(os.environ.get("SHARDKIT_CAMPAIGN_SEED", "5"))
"""What all points depend on. A test draws from it alone, so it draws the same if it runs alone."""

in_full = pytest.mark.skipif(not FULL, reason="left to scripts/campaigns")
"""Mark tests of which even one takes long."""

CAMPAIGNS = Path(__file__).parents[1] / "campaigns"

_END = float(os.environ.get("SHARDKIT_CAMPAIGN_END", "inf"))
_LATE = "the minutes are over"

T = TypeVar("T", bound=Hashable)


def points(share: int, full: int) -> int:
    """Return how many points a test tries: few as a share, or all of a campaign."""
    return full if FULL else share


def draw(*what: object) -> random.Random:
    """Return the random numbers of a test, which ``what`` names."""
    return random.Random(" ".join(map(str, (SEED, *what))))


def cases(every: Iterable[T], share: int) -> list[T]:
    """Return the cases of a test: in a campaign all, else ``share`` of them.

    These are tuples with as many different values, and then pairs of values, as can be.
    """
    left = list(every)
    if FULL or len(left) <= share:
        return left
    order = {case: number for number, case in enumerate(left)}
    draw(len(left)).shuffle(left)
    chosen: list[T] = []
    met: set[object] = set()
    for _ in range(share):
        best = max(left, key=lambda case: [len(each - met) for each in _values(case)])
        left.remove(best)
        chosen.append(best)
        met.update(*_values(best))
    return sorted(chosen, key=order.__getitem__)


def _values(case: Hashable) -> tuple[set[object], set[object]]:
    """Return the values of a case, with their places, and all pairs of them."""
    values = list(enumerate(case if isinstance(case, tuple) else (case,)))
    return {*values}, {*itertools.combinations(values, 2)}


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark campaigns `slow`: no limit of CPU time counts for them."""
    for item in items:
        if CAMPAIGNS in item.path.parents:
            item.add_marker(pytest.mark.slow)


def pytest_report_header() -> str | None:
    """Print the seed."""
    return f"seed of the campaigns: {SEED}" if FULL else None


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Start no test after the last minute."""
    if time.time() > _END:
        pytest.skip(_LATE)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print the commands that repeat failures, and what was not run."""
    if not FULL:
        return
    stats = terminalreporter.stats
    if failed := [report.nodeid for kind in ("failed", "error") for report in stats.get(kind, ())]:
        terminalreporter.section("to repeat a failure")
        for name in dict.fromkeys(failed):
            terminalreporter.line(command(name))
    late = Counter(
        report.nodeid.partition("::")[0]
        for report in stats.get("skipped", ())
        if _LATE in str(report.longrepr)
    )
    if late:
        terminalreporter.section(f"not run, as {_LATE}")
        for name, count in sorted(late.items()):
            terminalreporter.line(f"{name}: {count} tests")


def command(name: str) -> str:
    """Return the command that runs one test again, with the same points."""
    file, _, test = name.partition("::")
    campaign = file.removeprefix("tests/campaigns/test_").removesuffix(".py")
    if "/" in campaign:  # a test that measures
        return f".venv/bin/python -m pytest {shlex.quote(name)}"
    return f"scripts/campaigns --seed {SEED} {shlex.quote(f'{campaign}::{test}')}"
