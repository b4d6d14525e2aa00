"""Timing: each candidate in a separate process, checked first, measured once in each round.

One round that does not count comes first. In each round the order is turned by one, so that no
contender always follows the same other; the medians over the rounds stand in the tables.
"""

from __future__ import annotations

import json
import os
import select
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from shardkit.measure.runner.rounds import turn

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]

NEAR = 5.0
"""Mean absolute difference, of 255, that an image may have if it is decoded with fast transforms;
over all images it may be half of that. On 176 photographs of 256 pixels FFCV has 1.0 in the mean
and 1.1 at most, fast upsampling 1.5 and 3.8; shifting all by one pixel has 9.3 in the mean, and two
photographs differ by 23.6 at the least."""

PATIENCE = 900.0
"""Seconds that an answer may take; preparing a dataset is the longest."""


@dataclass(frozen=True, kw_only=True)
class Contender:
    """One row of a table: an adapter with its options, in an environment."""

    name: str
    adapter: str
    """A module of `contenders`."""
    kind: str
    """What it does: one of `contenders.adapter.KINDS`."""
    folder: str
    """Name of the image folder, in the work folder, that it reads."""
    reference: str
    """Name of the reference that it must deliver."""
    environment: str = "shardkit"
    """``shardkit`` is the interpreter that runs this; ``scripts/bench/peers`` makes others."""
    peer: str = ""
    """What ``scripts/bench/peers`` calls it."""
    near: float = 0.0
    """Mean absolute difference that an image may have, of 255, and twice what all may have in the
    mean; 0 asks for equal pixels."""
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(kw_only=True)
class Result:
    """What was measured of one contender."""

    name: str
    rates: list[float] = field(default_factory=list)
    """Images/s of each round."""
    note: str = ""
    """Why it was not measured; or how near its images are to the reference."""

    @property
    def median(self) -> float | None:
        """The middle one of the rates, or None."""
        return statistics.median(self.rates) if self.rates else None


@dataclass(kw_only=True)
class Table:
    """The results of contenders that do the same work."""

    name: str
    """Of its file, and of the plot."""
    title: str
    baseline: str
    """The contender that the others are compared with."""
    results: list[Result] = field(default_factory=list)
    unit: str = "images/s"
    versions: dict[str, str] = field(default_factory=dict)
    rounds: int = 0

    def as_json(self) -> dict[str, Any]:
        """Return all of it as JSON values."""
        return asdict(self)


class Failed(Exception):
    """A contender cannot be measured; the message says why."""


Epoch = Callable[[], tuple[int, float]]
"""Does the work of a contender once; returns the number of images and the seconds they took."""


class MeasurementProcess:
    """A contender in a process of its own, which idles while the others are timed."""

    def __init__(self, contender: Contender, work: Path) -> None:
        self.contender = contender
        self._work = work
        interpreter = _interpreter(contender)
        task = {
            "adapter": contender.adapter,
            "kind": contender.kind,
            "folder": str(work / contender.folder),
            "sets": str(work / "sets"),
            "options": dict(contender.options),
        }
        (work / "logs").mkdir(exist_ok=True)
        self.log = work / "logs" / f"{_slug(contender.name)}.log"
        with open(self.log, "wb") as log:
            self._process = subprocess.Popen(
                [str(interpreter), str(HERE / "serve.py"), json.dumps(task)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
            )

    def start(self) -> str:
        """Wait until it is up and its dataset is made; return the version of its library."""
        found = self.ask("prepare")
        if "missing" in found:
            raise Failed(_not_installed(self.contender))
        return str(found["version"])

    def check(self) -> str:
        """Raise `Failed` unless it delivers the images and labels; return how near they were."""
        place = self._work / "references" / self.contender.reference
        return _judge(self.ask("check", reference=str(place)), self.contender.near)

    def epoch(self) -> tuple[int, float]:
        """Read one epoch."""
        found = self.ask("epoch")
        return found["images"], found["seconds"]

    def ask(self, what: str, **more: Any) -> dict[str, Any]:
        """Send a request and return the answer."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps({"ask": what, **more}).encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            pass  # what follows says why
        return self._answer()

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.close()
            self._process.wait(10)
        except (subprocess.TimeoutExpired, BrokenPipeError):
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        if not select.select([self._process.stdout], [], [], PATIENCE)[0]:
            raise Failed(f"no answer within {PATIENCE:.0f} s")
        line = self._process.stdout.readline()
        if not line:
            last = self.log.read_text("utf-8", "replace").strip().splitlines()[-1:]
            raise Failed(f"its process ended: {' '.join(last)[:200]}")
        found: dict[str, Any] = json.loads(line)
        if "failed" in found:
            raise Failed(found["failed"])
        return found


def run_interleaved(
    table: Table, contenders: Sequence[Contender], work: Path, rounds: int
) -> Table:
    """Start, check and time contenders with a warm page cache; fill and return the table."""
    results = {contender.name: Result(name=contender.name) for contender in contenders}
    served: dict[str, MeasurementProcess] = {}
    for contender in contenders:  # all at once: they import while the first are checked
        try:
            served[contender.name] = MeasurementProcess(contender, work)
        except Failed as error:
            results[contender.name].note = str(error)
    versions: dict[str, str] = {}
    try:
        for name, one in list(served.items()):
            show(f"checking {name}")
            try:
                versions[one.contender.peer or one.contender.adapter.rstrip("_")] = one.start()
                results[name].note = one.check()
            except Failed as error:
                results[name].note = str(error)
                served.pop(name).close()
        time_rounds({name: one.epoch for name, one in served.items()}, results, rounds)
    finally:
        for one in served.values():
            one.close()
    table.results, table.versions, table.rounds = list(results.values()), versions, rounds
    return table


def time_rounds(epochs: Mapping[str, Epoch], results: Mapping[str, Result], rounds: int) -> None:
    """Time each contender once in each round, into its result.

    Args:
        epochs: By the name of the contender.
        results: By the same names.
        rounds: That count; one comes first that does not.
    """
    names = list(epochs)
    for number in range(-1, rounds):
        for name in turn(names, number):
            if results[name].note.startswith("failed"):
                continue
            show(f"round {number + 1} of {rounds}, {name}")
            try:
                images, seconds = epochs[name]()
            except Failed as error:
                results[name].note, results[name].rates = f"failed: {error}", []
                continue
            if number >= 0:
                results[name].rates.append(images / seconds)
    show("")


def contend_here(table: Table, work: Mapping[str, Callable[[], int]], rounds: int) -> Table:
    """Time functions of this process; fill and return the table."""
    results = {name: Result(name=name) for name in work}
    epochs = {name: partial(_timed, function) for name, function in work.items()}
    time_rounds(epochs, results, rounds)
    table.results, table.rounds = list(results.values()), rounds
    return table


def _timed(work: Callable[[], int]) -> tuple[int, float]:
    begun = time.perf_counter()
    return work(), time.perf_counter() - begun


def show(text: str) -> None:
    """Show what is going on, where somebody watches."""
    if sys.stderr.isatty():
        print(f"\r{text:100.100}", end="\r", file=sys.stderr, flush=True)


def _interpreter(contender: Contender) -> Path:
    if contender.environment == "shardkit":
        return Path(sys.executable)
    peers = Path(os.environ.get("SHARDKIT_PEERS", ROOT / ".venv-peers")).absolute()
    interpreter = peers / contender.environment / "bin" / "python"
    if not interpreter.exists():
        raise Failed(_not_installed(contender))
    return interpreter


def _not_installed(contender: Contender) -> str:
    return f"not installed: `scripts/bench/peers {contender.peer}`"


def _judge(found: dict[str, Any], near: float) -> str:
    """Raise `Failed` if a contender's answer to ``check`` is not good enough; say how near."""
    largest, mean = found["difference"]
    problems = {
        f"gives {abs(found['images'])} images, not all": found["images"] < 0,
        f"gives {found['labels_wrong']} wrong labels": found["labels_wrong"],
        f"gives other images: {found['worst']} differs by {largest:.2f} of 255": largest > near,
        f"gives other images: they differ by {mean:.2f} of 255 in the mean": mean > near / 2,
        "an epoch has other labels": found["epoch_labels_wrong"],
        "an epoch is not shuffled": found["epoch_in_order"],
        "an epoch has other images": (found["epoch_difference"] or 0) > near,
    }
    for problem, present in problems.items():
        if present:
            raise Failed(f"failed the check: {problem}")
    return f"differs by {mean:.2f} of 255, at most {largest:.2f}" if largest else ""


def _slug(name: str) -> str:
    return "".join(letter if letter.isalnum() else "-" for letter in name)[:100]
