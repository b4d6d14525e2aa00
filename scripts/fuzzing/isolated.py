"""Try and minimize inputs in a separate process, which may crash or hang.

    python -m scripts.fuzzing.isolated FOLDER < JOBS > RESULTS

A job is a line of JSON: ``target``, ``data`` in hexadecimal, and the ``signature`` of its finding
if the input is to be made smaller. A result is a line with ``data``, ``outcome`` and
``finding``, in the order of the jobs.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import re
import select
import signal
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import IO, Any

import psutil

from scripts.fuzzing.guard import PACKAGE, Finding, Result, attempt, limit_process
from scripts.fuzzing.target import Target
from scripts.fuzzing.targets import make

DEADLINE = 5.0
"""CPU seconds after which an input is taken for one that hangs; the slowest takes a tenth."""

_PATIENCE = 100.0
"""Seconds after which an input that waits is taken for one that hangs."""


def isolated(target: Target, data: bytes) -> Result:
    """Try an input in a forked child; only a process without threads may call it."""
    reading, writing = os.pipe()
    with tempfile.TemporaryFile() as log:
        child = os.fork()
        if not child:
            _run_child(target, data, writing, log)
        os.close(writing)
        with os.fdopen(reading, "rb") as answers:
            hung = not _answers(answers, child)
            if hung:
                os.kill(child, signal.SIGABRT)
                if not select.select([answers], [], [], 5)[0]:
                    os.kill(child, signal.SIGKILL)
            answer = answers.read()
        _, status = os.waitpid(child, 0)
        if answer:
            value = json.loads(answer)
            found = value["finding"]
            return Result(value["outcome"], Finding(**found) if found else None)
        log.seek(0)
        text = log.read().decode(errors="replace")
    return Result("died", died(target.name, os.WTERMSIG(status), text, hung=hung))


def _answers(answers: IO[bytes], child: int) -> bool:
    """Wait for an answer of a child; return whether it came in time."""
    end = time.monotonic() + _PATIENCE
    while not select.select([answers], [], [], 0.2)[0]:
        if time.monotonic() > end or _cpu_seconds(child) > DEADLINE:
            return False
    return True


def _cpu_seconds(child: int) -> float:
    times = psutil.Process(child).cpu_times()
    return times.user + times.system


def _run_child(target: Target, data: bytes, writing: int, log: IO[bytes]) -> None:
    with contextlib.suppress(BaseException):
        faulthandler.enable(log)
        limit_process()
        result = attempt(target, data)
        found = result.finding._asdict() if result.finding else None
        os.write(
            writing, json.dumps({"outcome": result.outcome, "finding": found}).encode()[:60000]
        )
    os._exit(0)


def died(target: str, killer: int, trace: str, *, hung: bool) -> Finding:
    """Return the finding that a process is, of which the log of `faulthandler` is left.

    Args:
        target: Name of the target.
        killer: The signal that ended it; 0 if it ended by itself.
        trace: The log.
        hung: Whether it was killed for taking too long.
    """
    kind = "hang" if hung else "crash"
    how = "hangs" if hung else (signal.Signals(killer).name if killer else "exits")
    start = trace.rfind("Fatal Python error")
    trace = trace[start:] if start >= 0 else trace[-4000:]
    match = re.search(rf'File "{re.escape(PACKAGE)}([^"]*)\.py", line \d+ in (\w+)', trace)
    where = ".".join(match.groups()) if match else "?"
    return Finding(kind, f"{target} {how} in {where}", f"{how}\n{trace[:4000]}")


def shrink(target: Target, data: bytes, signature: str, seconds: float = 8.0) -> bytes:
    """Return a smaller input that leads to the same finding."""
    end = time.monotonic() + seconds

    def same(smaller: bytes) -> bool:
        finding = isolated(target, smaller).finding
        return finding is not None and finding.signature == signature

    size = max(1, len(data) // 2)
    while size >= 1 and time.monotonic() < end:
        start = 0
        while start < len(data) and time.monotonic() < end:
            piece = data[start : start + size]
            without = data[:start] + data[start + size :]
            cleared = data[:start] + bytes(len(piece)) + data[start + size :]
            if same(without):
                data = without
                continue
            if piece.strip(b"\0") and same(cleared):
                data = cleared
            start += size
        size //= 2
    return data


def main(folder: Path) -> None:
    """Answer jobs until there are no more."""
    warnings.simplefilter("ignore")
    targets: dict[str, Target] = {}
    for line in sys.stdin:
        job: dict[str, Any] = json.loads(line)
        name, data = job["target"], bytes.fromhex(job["data"])
        if name not in targets:
            place = folder / name / "place"
            place.mkdir(parents=True, exist_ok=True)
            targets[name] = make(name, place)
        if job.get("signature"):
            data = shrink(targets[name], data, job["signature"])
        result = isolated(targets[name], data)
        found = result.finding._asdict() if result.finding else None
        answer = {"data": data.hex(), "outcome": result.outcome, "finding": found}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
