"""Run `child.py` for a target, restart it if it dies, and collect its findings."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from scripts.fuzzing.isolated import died
from scripts.fuzzing.shared import Progress

ROOT = Path(__file__).resolve().parents[2]

_STARTING = 300.0
"""Seconds that a child may take to begin."""


class FoundInput(NamedTuple):
    """A finding, and the input that leads to it."""

    kind: str
    signature: str
    detail: str
    data: bytes


@dataclass(kw_only=True)
class Summary:
    """What came of fuzzing one target."""

    target: str
    seconds: float = 0.0
    executions: int = 0
    sites: int = 0
    """Places where inputs were decided on: of the exceptions, by line."""
    slowest: float = 0.0
    restarts: int = 0
    outcomes: Counter[str] = field(default_factory=Counter)
    times: Counter[str] = field(default_factory=Counter)
    """How often each finding was met, by signature."""
    found: dict[str, FoundInput] = field(default_factory=dict)
    """The shortest input of each signature."""

    def keep(self, found: FoundInput) -> None:
        """Keep a finding, unless a shorter input leads to it."""
        known = self.found.setdefault(found.signature, found)
        if len(found.data) < len(known.data):
            self.found[found.signature] = found


def fuzz(
    target: str,
    *,
    seconds: float,
    count: int,
    seed: int,
    deadline: float = 60.0,
) -> Summary:
    """Fuzz one target for a time, or for a number of inputs.

    Args:
        target: Its name.
        seconds: When to end at the latest.
        count: After how many inputs to end at the latest.
        seed: Another one gives other inputs.
        deadline: Seconds after which an input is taken for one that hangs.
    """
    summary = Summary(target=target)
    begun = time.monotonic()
    folder = Path(tempfile.mkdtemp(prefix="fuzz-", dir=_fast_folder()))
    try:
        while (left := seconds - (time.monotonic() - begun)) > 0 and summary.executions < count:
            options = {"target": target, "seed": seed + summary.restarts}
            options |= {"seconds": left, "count": count - summary.executions}
            if _run(folder, options, summary, deadline):
                break
            summary.restarts += 1
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    summary.seconds = time.monotonic() - begun
    return summary


def _fast_folder() -> str | None:
    """Return a folder in memory, where there is one."""
    return "/dev/shm" if os.access("/dev/shm", os.W_OK) else None


def _run(folder: Path, options: dict[str, Any], summary: Summary, deadline: float) -> bool:
    """Run one child to its end; tell whether that was a natural one."""
    shutil.rmtree(folder / "found", ignore_errors=True)
    shutil.rmtree(folder / "work", ignore_errors=True)
    for name in ("progress", "stats.json"):
        (folder / name).unlink(missing_ok=True)
    progress = Progress(folder / "progress")
    command = [sys.executable, "-m", "scripts.fuzzing.child", str(folder), json.dumps(options)]
    with (folder / "log").open("w+b") as log:
        process = subprocess.Popen(command, cwd=ROOT, env=environment(), stdout=log, stderr=log)
        hung = _wait(process, progress, options["seconds"], deadline)
    text = (folder / "log").read_text("utf-8", "replace")
    executions, _, data = progress.look()
    _collect(folder, summary, executions)
    if process.returncode == 0:
        return True
    if process.returncode > 0 or not (executions or data):
        raise RuntimeError(f"the target {summary.target} itself is broken:\n{text[-4000:]}")
    finding = died(summary.target, -process.returncode, text, hung=hung)
    summary.executions += 1
    summary.outcomes[finding.kind] += 1
    summary.times[finding.signature] += 1
    summary.keep(FoundInput(*finding, data))
    return False


def _wait(
    process: subprocess.Popen[bytes], progress: Progress, seconds: float, deadline: float
) -> bool:
    """Wait for the end of a child; tell whether it had to be killed."""
    end = time.monotonic() + seconds + _STARTING
    while True:
        try:
            process.wait(0.1)
        except subprocess.TimeoutExpired:
            if progress.look()[1] < deadline and time.monotonic() < end:
                continue
            process.send_signal(signal.SIGABRT)  # it says where it was
            try:
                process.wait(5)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            return True
        return False


def environment() -> dict[str, str]:
    """Return the variables with which children find this checkout."""
    places = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(places), "PYTHONHASHSEED": "0"}


def _collect(folder: Path, summary: Summary, executions: int) -> None:
    summary.executions += executions
    try:
        stats = json.loads((folder / "stats.json").read_text())
    except FileNotFoundError:
        stats = {"outcomes": {}, "sites": 0, "slowest": 0.0, "findings": {}}
    summary.outcomes.update(stats["outcomes"])
    summary.times.update(stats["findings"])
    summary.sites = max(summary.sites, stats["sites"])
    summary.slowest = max(summary.slowest, stats["slowest"])
    for path in sorted((folder / "found").glob("*.json")):
        value = json.loads(path.read_text())
        data = bytes.fromhex(value.pop("data"))
        summary.times.setdefault(value["signature"], 1)
        summary.keep(FoundInput(**value, data=data))


def replay(jobs: Sequence[dict[str, str]], folder: Path) -> list[dict[str, Any]]:
    """Try inputs, each in a process of its own; see `isolated.py` for jobs and results."""
    done = subprocess.run(
        [sys.executable, "-m", "scripts.fuzzing.isolated", str(folder)],
        cwd=ROOT,
        env=environment(),
        input="".join(json.dumps(job) + "\n" for job in jobs),
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return [json.loads(line) for line in done.stdout.splitlines()]
