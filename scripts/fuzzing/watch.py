"""Run `child.py` for a target, restart it if it dies, and collect its findings."""

from __future__ import annotations

import json
import math
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
from typing import Any

from scripts.fuzzing.guard import Finding
from scripts.fuzzing.isolated import died

ROOT = Path(__file__).resolve().parents[2]

DEADLINE = 60.0
"""Seconds after which an input is taken for one that hangs."""

_STARTING = 300.0
"""Seconds that a child may take to begin."""


@dataclass(kw_only=True)
class Summary:
    """What came of fuzzing one target."""

    target: str
    seconds: float = 0.0
    slowest: float = 0.0
    restarts: int = 0
    outcomes: Counter[str] = field(default_factory=Counter)
    times: Counter[str] = field(default_factory=Counter)
    """How often each finding was met, by signature."""
    found: dict[str, tuple[Finding, bytes]] = field(default_factory=dict)
    """A finding of each signature, and an input that leads to it."""

    @property
    def executions(self) -> int:
        """Number of inputs."""
        return self.outcomes.total()

    def add(self, stats: dict[str, Any]) -> None:
        """Add what a child has left."""
        self.outcomes.update(stats["outcomes"])
        self.times.update(stats["times"])
        self.slowest = max(self.slowest, stats["slowest"])
        for *finding, data in stats["found"]:
            self.keep(Finding(*finding), bytes.fromhex(data))

    def keep(self, finding: Finding, data: bytes) -> None:
        """Keep a finding, unless it is known."""
        self.found.setdefault(finding.signature, (finding, data))


def fuzz(target: str, *, seconds: float, count: int, seed: int) -> Summary:
    """Fuzz one target for so many seconds or inputs at most; another seed gives other inputs."""
    summary = Summary(target=target)
    begun = time.monotonic()
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(prefix="fuzz-", dir=memory) as temporary:
        folder = Path(temporary)
        while (left := seconds - (time.monotonic() - begun)) > 0 and summary.executions < count:
            options = {"target": target, "seed": seed + summary.restarts}
            options |= {"seconds": left, "count": count - summary.executions}
            if _run(folder, options, summary):
                break
            summary.restarts += 1
    summary.seconds = time.monotonic() - begun
    return summary


def _run(folder: Path, options: dict[str, Any], summary: Summary) -> bool:
    """Run one child to its end; tell whether that was a natural one."""
    shutil.rmtree(folder / "work", ignore_errors=True)
    present, stats = folder / "input", folder / "stats.json"
    present.unlink(missing_ok=True)
    stats.unlink(missing_ok=True)
    command = [sys.executable, "-m", "scripts.fuzzing.child", str(folder), json.dumps(options)]
    with (folder / "log").open("w+b") as log:
        process = subprocess.Popen(command, cwd=ROOT, env=environment(), stdout=log, stderr=log)
        hung = _wait(process, present, options["seconds"])
    text = (folder / "log").read_text("utf-8", "replace")
    if stats.exists():
        summary.add(json.loads(stats.read_text()))
    if process.returncode == 0:
        return True
    if process.returncode > 0 or not present.exists():
        raise RuntimeError(f"the target {summary.target} itself is broken:\n{text[-4000:]}")
    finding = died(summary.target, -process.returncode, text, hung=hung)
    summary.outcomes[finding.kind] += 1
    summary.times[finding.signature] += 1
    summary.keep(finding, present.read_bytes())
    return False


def _wait(process: subprocess.Popen[bytes], present: Path, seconds: float) -> bool:
    """Wait for the end of a child; tell whether it had to be killed."""
    end = time.monotonic() + seconds + _STARTING
    while True:
        try:
            process.wait(0.1)
        except subprocess.TimeoutExpired:
            since = present.stat().st_mtime if present.exists() else math.inf
            if time.time() - since < DEADLINE and time.monotonic() < end:
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
