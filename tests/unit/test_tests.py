"""Rules that all tests keep."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

TESTS = Path(__file__).parents[1]

PROSE = re.compile(r"\b[A-Za-z][a-z']*(?:[\s,]+[A-Za-z][a-z']*){2}\b")
"""Three words in a row."""


def _wording(tree: ast.AST) -> Iterator[ast.expr]:
    """Yield each ``match`` of `pytest.raises` that is prose."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "pytest.raises":
            for keyword in node.keywords:
                if keyword.arg == "match" and PROSE.search(ast.unparse(keyword.value)):
                    yield keyword.value


def test_errors_are_recognized_by_facts() -> None:
    """So that a reworded message changes one golden file: see `refused`."""
    places = [
        f"{path.relative_to(TESTS)}:{value.lineno}: {ast.unparse(value)}"
        for path in sorted(TESTS.rglob("test_*.py"))
        for value in _wording(ast.parse(path.read_text("utf-8")))
    ]
    assert not places
