"""docs/benchmarks.md: every cell is filled, every source is known, and README's chart is of it."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from types import ModuleType

import pytest
from refusals import refused

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "benchmarks.md").read_text("utf-8")


def _rows() -> list[list[str]]:
    """Return the cells of the rows of all tables with a column of sources, headings left out."""
    rows: list[list[str]] = []
    is_result = False
    for line in PAGE.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if not line.startswith("|"):
            is_result = False
        elif is_result and not line.startswith("|---"):
            rows.append(cells)
        else:
            is_result = is_result or cells[-1] == "source"
    return rows


def test_every_cell_has_a_figure_or_says_that_it_was_not_measured() -> None:
    rows = _rows()
    assert len(rows) > 50
    for name, *figures, _ in rows:
        assert all(re.search(r"\d", cell) or cell == "not measured" for cell in figures), name


def test_every_figure_has_a_source() -> None:
    known = set(re.findall(r"^\| ([AX]\d) \|", PAGE, re.MULTILINE))
    for name, *figures, sources in _rows():
        cited = set(sources.split(", ")) - {""}
        assert cited <= known, name
        assert bool(cited) == any(cell != "not measured" for cell in figures), name


@pytest.fixture(scope="module")
def plots() -> ModuleType:
    """The script that draws the chart; it is not in a package."""
    spec = importlib.util.spec_from_file_location("plots", ROOT / "scripts" / "bench" / "plots.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_chart_finds_its_rows_in_the_page(plots: ModuleType) -> None:
    bars = plots.speedups(PAGE)
    assert all(any(isinstance(value, tuple) for value in bar) for bar in bars.values())
    assert bars["JPEG, center crop, threads"] == [(1.17, 1.18), (1.21, 1.31)]


def test_a_renamed_row_of_the_chart_is_an_error(plots: ModuleType) -> None:
    with refused(ValueError, "'exact, threads'", "JPEGs", "256"):
        plots.speedups(PAGE.replace("| exact, threads |", "| threads |"))
