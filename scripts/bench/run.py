"""Compare shardkit with other data loaders on this machine.

    python scripts/bench/run.py PHOTOS [--only crop] [--only raw] [--rounds 5] [--copies 10]
                                [--work DIR] [--results DIR]

PHOTOS is an image folder of photographs (class folders); those whose shorter side has 256 pixels or
more are taken ``--copies`` times. ``scripts/bench/peers`` installs the other libraries; what is not
installed is named in the tables. With ``--work`` the data are kept for another run, with
``--results`` every number, as JSON: one file for each table. docs/benchmarks.md cites them.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable
from pathlib import Path

import material
import report
from harness import Table
from workloads import conversion, loading
from workloads.rows import Bench

WORKLOADS: dict[str, Callable[[Bench], list[Table]]] = {
    "crop": loading.crop,
    "raw": loading.raw,
    "arrays": loading.arrays,
    "random": loading.random,
    "convert": conversion.run,
}
"""Name on the command line and in the page, and the function."""


def main(arguments: list[str] | None = None) -> None:
    given = _parse(arguments)
    with tempfile.TemporaryDirectory() as temporary:
        work = (given.work or Path(temporary)).absolute()
        material.make(given.photos, work, given.copies)
        print("\n".join(material.describe(work)))
        for name in given.only or WORKLOADS:
            _run(name, given, Bench(work, given.rounds, given.copies))


def _run(name: str, given: argparse.Namespace, bench: Bench) -> None:
    """Measure one workload; print and keep its results."""
    tables = WORKLOADS[name](bench)
    command = (
        f"python scripts/bench/run.py PHOTOS --only {name} --rounds {given.rounds} "
        f"--copies {given.copies}"
    )
    print(f"\n{report.markdown(tables, command)}", flush=True)
    if given.results:
        report.write_json(given.results, tables, command)


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("photos", type=Path, help="An image folder of photographs.")
    only = "One of them; again for more."
    parser.add_argument("--only", action="append", choices=list(WORKLOADS), help=only)
    rounds, copies = "Rounds that count (5).", "How often each photograph is taken (10)."
    parser.add_argument("--rounds", type=int, default=5, help=rounds)
    parser.add_argument("--copies", type=int, default=10, help=copies)
    work = "Where data are kept for another run, which then begins at once (default: nowhere)."
    parser.add_argument("--work", type=Path, help=work)
    parser.add_argument("--results", type=Path, help="Folder for JSON files (default: none).")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
