"""docs/benchmarks.md: each cell has a figure; those of AMD and of the GPU are in the results."""

from __future__ import annotations

import importlib.util
import json
import re
import statistics
from pathlib import Path
from types import ModuleType

import pytest
from refusals import refused

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "benchmarks.md").read_text("utf-8")
RESULTS = ROOT / "docs" / "results" / "amd-2026-11-26"
GPU_RESULTS = ROOT / "docs" / "results" / "h200-2026-11-27"


def _tables() -> list[list[list[str]]]:
    """Return the cells of all tables, the heading first, without the line below it."""
    found = re.findall(r"(?:^\|.*\n)+", PAGE, re.MULTILINE)
    rows = [[line.strip("|").split("|") for line in table.splitlines()] for table in found]
    return [[[cell.strip() for cell in row] for row in [table[0], *table[2:]]] for table in rows]


def _medians() -> set[str]:
    """Return the rounded median of each result, as the page writes it."""
    results = [
        result
        for path in sorted(RESULTS.glob("*.json"))
        for result in json.loads(path.read_text("utf-8"))["results"]
    ]
    return {f"{statistics.median(result['rates']):,.0f}" for result in results if result["rates"]}


def test_every_cell_has_a_figure() -> None:
    tables = _tables()
    assert len(tables) > 10
    for _, *rows in tables:
        assert all(re.search(r"\d", cell) for _, *figures in rows for cell in figures), rows


def test_figures_of_amd_are_medians_of_the_results() -> None:
    known = _medians()
    columns = [(table, table[0].index("AMD, images/s")) for table in _tables() if _is_amd(table)]
    figures = {
        figure for table, at in columns for row in table[1:] for figure in row[at].split(" to ")
    }
    assert len(figures) > 40
    assert figures - known == set()


def test_figures_of_the_gpu_are_in_the_results() -> None:
    values = json.loads((GPU_RESULTS / "gpu.json").read_text("utf-8"))
    cells = {(part["name"], row["case"]): row for part in values["parts"] for row in part["rows"]}
    training = [row for (name, _), row in cells.items() if name.startswith("training-")]
    tables = [table for table in _tables() if table[0][0] in ("16 cores", "4 cores")]
    assert len(tables) == 2
    shown = {tuple(row[at : at + 3]) for table in tables for row in table[1:] for at in (1, 4)}
    assert shown == {
        (f"{row['value']:,.0f}", f"{row['details']['idle']:.0%}", f"{row['details']['cores']:.1f}")
        for row in training
    }
    (scaling,) = [table for table in _tables() if table[0] == ["", "1", "4", "8", "16"]]
    kinds = ("scaling-jpeg", "scaling-planes", "scaling-raw")
    engines = ("thread", "helper", "process")
    workers = ("1 worker", "4 workers", "8 workers", "16 workers")
    expected = [
        [f"{cells[kind, f'{engine}, {count}']['value']:,.0f}" for count in workers]
        for kind in kinds
        for engine in engines
    ]
    assert [row[1:] for row in scaling[1:]] == expected


def test_the_readme_has_figures_of_the_page() -> None:
    readme = (ROOT / "README.md").read_text("utf-8")
    section = readme.partition("## What it costs")[2].partition("\n## ")[0]
    figures = set(re.findall(r"\d+,\d{3}", section))
    assert len(figures) > 10
    assert figures <= set(re.findall(r"\d+,\d{3}", PAGE))


def _is_amd(table: list[list[str]]) -> bool:
    return "AMD, images/s" in table[0]


@pytest.fixture(scope="module")
def plots() -> ModuleType:
    """The script that draws the chart; it is not in a package."""
    spec = importlib.util.spec_from_file_location("plots", ROOT / "scripts" / "bench" / "plots.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_chart_has_the_medians_of_the_page(plots: ModuleType) -> None:
    bars = plots.medians((RESULTS / "crop.json").read_text("utf-8"))
    assert list(bars)[-2:] == ["shardkit", "shardkit, planes"]
    assert {f"{rate:,.0f}" for rate in bars.values()} <= set(re.findall(r"[\d,]+", PAGE))


def test_a_missing_candidate_of_the_chart_is_an_error(plots: ModuleType) -> None:
    with refused(ValueError, "FFCV"):
        plots.medians((RESULTS / "crop.json").read_text("utf-8").replace('"FFCV"', '"other"'))
