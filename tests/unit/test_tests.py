"""Rules that all tests keep."""

from __future__ import annotations

import ast
import itertools
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
from pairwise import pairwise

TESTS = Path(__file__).parents[1]

PROSE = re.compile(r"\b[A-Za-z][a-z']*(?:[\s,]+[A-Za-z][a-z']*){2}\b")
"""Three words in a row."""


def _wording(text: str) -> Iterator[str]:
    """Yield each ``match`` of `pytest.raises` that is prose, with its line."""
    for node in ast.walk(ast.parse(text) if "match=" in text else ast.Module([], [])):
        if isinstance(node, ast.keyword) and node.arg == "match":
            pattern = ast.unparse(node.value)
            if PROSE.search(pattern):
                yield f"{node.lineno}: {pattern}"


@pytest.mark.slow
def test_errors_are_recognized_by_facts() -> None:
    """So that a reworded message changes one golden file: see `refused`."""
    files = sorted(TESTS.rglob("test_*.py"))
    places = [
        f"{path.relative_to(TESTS)}:{place}"
        for path in files
        for place in _wording(path.read_text("utf-8"))
    ]
    assert not places, "\n".join(places)


def test_all_pairs_of_values_are_covered() -> None:
    axes: list[Iterable[Any]] = ["abcdef", range(3), [None, 1, 2], {"x": 0, "y": 1}]
    rows = pairwise(*axes)
    for (i, one), (j, other) in itertools.combinations(enumerate(axes), 2):
        assert {(row[i], row[j]) for row in rows} == set(itertools.product(one, other))
    assert len(rows) < 25
