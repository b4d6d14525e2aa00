"""One command for a machine with a GPU: loading, training and checks, in nine minutes.

    python scripts/bench/gpu.py [PHOTOS] [--results DIR] [--minutes 8.5] [--only data]

PHOTOS is a folder of JPEG files; without it, photographs are generated. Nothing else is needed: no
network, no torchvision. Each part runs in its own process with a share of the time, so one that
fails, hangs or crashes ends no other, and Ctrl-C keeps what is there. The folder of results gets
``gpu.json`` with every number, ``gpu.md`` with one table, and a log of each part. The exit code is
1 if a part or a check failed.

``--device cpu`` runs everything that needs no GPU, at small size: it shows that the script works,
and its figures mean nothing.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from isolation import COMPLETE, FAILED, NOT_RUN, STOPPED, Outcome, Part, run_parts

PARTS = (
    Part(name="environment", function="gpu_parts.environment:run", weight=1.5),
    Part(name="data", function="gpu_parts.data:run", weight=1.5),
    *(
        Part(
            name=f"training-{layers}-{cores or 'all'}",
            function="gpu_parts.training:run",
            weight=3,
            options={"layers": layers, "most_cores": cores},
        )
        for cores in (None, 4)
        for layers in (50, 18)
    ),
    Part(name="checks", function="gpu_parts.checks:run", weight=1.5),
    *(
        Part(
            name=f"scaling-{kind}",
            function="gpu_parts.scaling:run",
            weight=weight,
            options={"kind": kind},
        )
        for kind, weight in (("jpeg", 1.5), ("planes", 1), ("raw", 1))
    ),
    Part(name="memory", function="gpu_parts.checks:memory", weight=0.7),
)
"""In this order: what matters most comes first. The first may wait for PyTorch to come from a disk;
it leaves the rest of its time to the others."""

RATIOS = {
    "training": "of one cached batch",
    "scaling": "efficiency",
}
"""What the ratios of a part compare with."""


def main(arguments: list[str] | None = None) -> int:
    """Run the parts; return the exit code."""
    given = _parse(arguments)
    signal.signal(signal.SIGTERM, _interrupt)
    given.results.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=given.work) as work:
        job = {
            "work": work,
            "device_name": given.device,
            "photos": None if given.photos is None else str(given.photos.absolute()),
            "is_small": given.device == "cpu",
        }
        parts = [part for part in PARTS if not given.only or part.name in given.only]
        outcomes = run_parts(parts, job, given.results.absolute(), 60 * given.minutes)
    values = {"device": given.device, "parts": [asdict(outcome) for outcome in outcomes]}
    (given.results / "gpu.json").write_text(json.dumps(values, indent=1) + "\n", "utf-8")
    table = markdown(outcomes)
    (given.results / "gpu.md").write_text(table + "\n", "utf-8")
    print(table)
    return int(any(map(has_failed, outcomes)))


def has_failed(outcome: Outcome) -> bool:
    """Return whether a part or one of its checks failed, or did not end."""
    failures = any(row["is_failure"] for row in outcome.rows)
    return failures or outcome.status in (FAILED, STOPPED, NOT_RUN)


def markdown(outcomes: Sequence[Outcome]) -> str:
    """Return one table: a line for each result, and one for each part that is not complete."""
    lines = ["| part | case | result | ratio | remark |", "|---|---|---:|---:|---|"]
    for outcome in outcomes:
        lines += [_line(outcome.name, row) for row in outcome.rows]
        if outcome.status != COMPLETE:
            lines.append(f"| {outcome.name} | | | | {_cell(outcome.status, outcome.remark)} |")
    ratios = [f"{name}: {meaning}" for name, meaning in RATIOS.items()]
    return "\n".join([*lines, "", f"Ratio: {'; '.join(ratios)}."])


def _line(part: str, row: dict[str, Any]) -> str:
    value, ratio = row["value"], row["ratio"]
    number = "" if value is None else f"{_number(value)} {row['unit']}".strip()
    compared = "" if ratio is None else f"{ratio:.2f}"
    return f"| {part} | {_cell(row['case'])} | {number} | {compared} | {_cell(row['remark'])} |"


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 or value == int(value) else f"{value:.3g}"


def _cell(*texts: str) -> str:
    """Return texts as one cell."""
    return ": ".join(filter(None, texts)).replace("|", "\\|").replace("\n", " ")


def _interrupt(*_: object) -> None:
    raise KeyboardInterrupt


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    photos = "A folder of JPEG files, at any depth (default: photographs are generated)."
    parser.add_argument("photos", type=Path, nargs="?", help=photos)
    results = "Folder for gpu.json, gpu.md and logs (default: gpu-results)."
    parser.add_argument("--results", type=Path, default=Path("gpu-results"), help=results)
    parser.add_argument("--minutes", type=float, default=8.5, help="Time for all (8.5).")
    device = "cpu runs a small version without a GPU (default: cuda)."
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help=device)
    names = [part.name for part in PARTS]
    only = "One of the parts; again for more. All but environment need data."
    parser.add_argument("--only", action="append", choices=names, help=only)
    parser.add_argument("--work", type=Path, help="Folder for datasets, which are removed.")
    given = parser.parse_args(arguments)
    if given.photos is not None and not given.photos.is_dir():
        parser.error(f"{given.photos} is not a folder")
    return given


if __name__ == "__main__":
    sys.exit(main())
