"""Results of a run, as Markdown tables and JSON files."""

from __future__ import annotations

import json
import platform
import subprocess
from collections.abc import Sequence
from datetime import date
from pathlib import Path

from harness import ROOT, Result, Table

import shardkit
from shardkit.measure.runner.environment import cpu_model, library_versions
from shardkit.system.machine import usable_cpus


def markdown(tables: Sequence[Table], command: str) -> str:
    """Return the tables of a workload with command, date, versions and machine before them."""
    others = {name: number for table in tables for name, number in table.versions.items()}
    others = {name: number for name, number in others.items() if name not in _OURS}
    versions = "".join(f", {name} {number}" for name, number in sorted(others.items()))
    head = f"`{command}`\n\n{date.today()}, {machine()}{versions}."
    return "\n\n".join([head, *map(table_markdown, tables)])


_OURS = ("shardkit", "imagefolder", "onebyone")
"""Adapters of which the versions stand in the machine's line."""


def table_markdown(table: Table) -> str:
    """Return one table below its title."""
    base = next((one.median for one in table.results if one.name == table.baseline), None)
    lines = [f"**{table.title}**, median of {table.rounds} interleaved rounds", ""]
    lines += [f"| candidate | {table.unit} | lowest to highest | x {table.baseline} | remark |"]
    lines += ["|---|---:|---:|---:|---|"]
    lines += [_row(result, base) for result in table.results]
    return "\n".join(lines)


def machine() -> str:
    """Return one line on this machine and the versions in use."""
    versions = ", ".join(f"{name} {number}" for name, number in library_versions().items())
    system = f"{platform.system()}, Python {platform.python_version()}"
    ours = f"shardkit {shardkit.__version__}{_commit()}"
    return f"{ours}; {usable_cpus()} cores of {cpu_model()}, {system}, {versions}"


def write_json(folder: Path, tables: Sequence[Table], command: str) -> None:
    """Keep every number of the tables."""
    folder.mkdir(parents=True, exist_ok=True)
    source = {"date": str(date.today()), "machine": machine(), "command": command}
    for table in tables:
        text = json.dumps({**source, **table.as_json()}, indent=1, ensure_ascii=False)
        (folder / f"{table.name}.json").write_text(text + "\n", "utf-8")


def _row(result: Result, base: float | None) -> str:
    if result.median is None:
        return f"| {result.name} | | | | {result.note} |"
    low, high = min(result.rates), max(result.rates)
    ratio = f"{result.median / base:.2f}" if base else ""
    return (
        f"| {result.name} | {_number(result.median)} | {_number(low)} to {_number(high)} "
        f"| {ratio} | {result.note} |"
    )


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _commit() -> str:
    """Return the commit of this checkout, if git knows it."""
    command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return ""
    return f" at {done.stdout.strip()}"
