"""Parts of a long measurement: each in a process with a deadline, so that none can end another.

A part is a function of a job (JSON values) and its `Progress`. This module knows no part, and
imports nothing that takes time, since it is the main module of each part's process.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

RESERVE = 0.1
"""Fraction of a part's time that it should leave, to end by itself before it is killed."""

COMPLETE, FAILED, STOPPED = "complete", "failed", "stopped"
NOT_AVAILABLE, NOT_RUN = "not available", "not run"


class NotAvailable(Exception):
    """This machine lacks what a part needs; the message says what."""


@dataclass(frozen=True, kw_only=True)
class Part:
    """A function, and how much of the time it may take."""

    name: str
    function: str
    """``module:name``; it takes a job and a `Progress`."""
    weight: float
    """Time relative to the other parts. What a part leaves is for those after it."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Added to its job."""


@dataclass(kw_only=True)
class Row:
    """One result."""

    case: str
    value: float | None = None
    unit: str = ""
    ratio: float | None = None
    """Compared with the baseline of the part."""
    remark: str = ""
    is_failure: bool = False
    """Whether a check failed."""
    details: dict[str, Any] = field(default_factory=dict)


@dataclass(kw_only=True)
class Outcome:
    """What became of a part."""

    name: str
    status: str = NOT_RUN
    remark: str = ""
    seconds: float = 0.0
    rows: list[dict[str, Any]] = field(default_factory=list)


class Progress:
    """The results of a part, on disk as soon as they are known, and the time that it has left."""

    def __init__(self, path: Path, seconds: float) -> None:
        """Start the clock.

        Args:
            path: A JSON file for the results.
            seconds: Until the part is killed.
        """
        self._path, self._end = path, time.monotonic() + (1 - RESERVE) * seconds
        self._rows: list[Row] = []

    @property
    def left(self) -> float:
        """Seconds that the part should still take; 0 if none."""
        return max(0.0, self._end - time.monotonic())

    def add(self, case: str, value: float | None = None, unit: str = "", **others: Any) -> None:
        """Add a result; the other arguments are the fields of `Row`."""
        self._rows.append(Row(case=case, value=value, unit=unit, **others))
        self.write("running")

    @contextlib.contextmanager
    def case(self, name: str) -> Iterator[None]:
        """Add what a block raises as a result, so that one case ends no other."""
        try:
            yield
        except NotAvailable as error:
            self.add(name, remark=f"{NOT_AVAILABLE}: {error}")
        except Exception as error:
            traceback.print_exc()  # to the log
            self.add(name, remark=f"{FAILED}: {in_one_line(error)}", is_failure=True)

    def write(self, status: str, remark: str = "") -> None:
        """Replace the file, so that a kill at any moment leaves a readable one."""
        values = {"status": status, "remark": remark, "rows": [asdict(row) for row in self._rows]}
        beside = self._path.with_suffix(".partial")
        beside.write_text(json.dumps(values), "utf-8")
        os.replace(beside, self._path)


def in_one_line(error: BaseException) -> str:
    """Return type and message of an error."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"


def run_parts(
    parts: Sequence[Part], job: Mapping[str, Any], folder: Path, seconds: float
) -> list[Outcome]:
    """Run parts one after the other, whatever becomes of each.

    Args:
        parts: In this order.
        job: Passed to each, as JSON.
        folder: For results and logs.
        seconds: For all of them.

    Returns:
        An outcome for each. After Ctrl-C, those of the parts that have not run say so.
    """
    end = time.monotonic() + seconds
    outcomes = [Outcome(name=part.name) for part in parts]
    with contextlib.suppress(KeyboardInterrupt):
        for number, (part, outcome) in enumerate(zip(parts, outcomes, strict=True)):
            show(f"{part.name}: part {number + 1} of {len(parts)}")
            share = part.weight / sum(later.weight for later in parts[number:])
            run_part(part, job, folder, share * max(0.0, end - time.monotonic()), outcome)
    return outcomes


def run_part(
    part: Part, job: Mapping[str, Any], folder: Path, seconds: float, outcome: Outcome
) -> None:
    """Run one part in a process of its own; fill ``outcome``, also if it is interrupted."""
    results, log = folder / f"{part.name}.json", folder / f"{part.name}.log"
    results.unlink(missing_ok=True)
    task = {"function": part.function, "job": {**job, **part.options}, "results": str(results)}
    command = [sys.executable, __file__, json.dumps({**task, "seconds": seconds})]
    start, code, remark = time.monotonic(), None, "interrupted"
    with open(log, "wb") as output:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # its workers and helpers are killed with it
        )
    try:
        code = wait_for(process, seconds)
    except subprocess.TimeoutExpired:
        remark = f"killed after {seconds:.0f} s"
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):  # a driver may keep it
            process.wait(10)
        outcome.seconds = round(time.monotonic() - start, 1)
        _fill(outcome, results, log, code, remark)


def wait_for(process: subprocess.Popen[bytes], seconds: float) -> int:
    """Return the exit code of a process; raise ``TimeoutExpired`` if it takes longer."""
    return process.wait(seconds)


def show(text: str) -> None:
    """Say what is going on."""
    print(text, file=sys.stderr, flush=True)


def _fill(outcome: Outcome, results: Path, log: Path, code: int | None, remark: str) -> None:
    """Fill an outcome with what a process left."""
    try:
        values = json.loads(results.read_text("utf-8"))
    except FileNotFoundError:
        values = {"status": "running", "remark": "", "rows": []}
    outcome.rows = values["rows"]
    if values["status"] != "running":
        outcome.status, outcome.remark = values["status"], values["remark"]
    elif code is None:
        outcome.status, outcome.remark = STOPPED, remark
    else:
        last = log.read_text("utf-8", "replace").strip().splitlines()[-1:]
        ended = signal.Signals(-code).name if code < 0 else f"exit code {code}"
        outcome.status = FAILED
        outcome.remark = f"its process ended with {ended}: {' '.join(last)[:300]}"


def main(text: str) -> None:
    """Run a part in this process, and write its results."""
    task = json.loads(text)
    progress = Progress(Path(task["results"]), task["seconds"])
    module, name = task["function"].split(":")
    try:
        getattr(importlib.import_module(module), name)(task["job"], progress)
    except NotAvailable as error:
        progress.write(NOT_AVAILABLE, str(error))
    except Exception as error:
        traceback.print_exc()  # to the log
        progress.write(FAILED, in_one_line(error))
    else:
        progress.write(COMPLETE)


if __name__ == "__main__":
    # Under the name by which parts import it: `NotAvailable` would be another class otherwise.
    importlib.import_module("isolation").main(sys.argv[1])
