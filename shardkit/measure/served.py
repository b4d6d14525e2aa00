"""A measuring process, seen from outside: it is asked, waited for, and ended."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import select
import subprocess
import sys
import tempfile
from typing import Any

from shardkit.errors import MeasurementFailed, UsageError
from shardkit.measure.spec import Loading, Subject
from shardkit.measure.steps import StepSpec
from shardkit.measure.timing import Look, Span

PATIENCE = 120.0
"""Seconds that an answer may take beyond what it was asked to take."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Seen:
    """A look, and the loader that was looked at."""

    look: Look
    engine: str
    reason: str
    workers: int
    warnings: list[str]


class Served:
    """A process that measures one subject; use it in a ``with`` statement."""

    def __init__(self, subject: Subject, patience: float = PATIENCE) -> None:
        """Start the process; it loads PyTorch while others may do the same."""
        self.subject = subject
        self.patience = patience
        """Seconds that an answer may take beyond what it was asked to take."""
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - it lives as long as the process
        incoming, self._out = os.pipe()
        self._in, outgoing = os.pipe()
        try:
            self._process = subprocess.Popen(  # noqa: S603 - our own module
                [sys.executable, "-m", "shardkit.measure.child", str(incoming), str(outgoing)],
                pass_fds=(incoming, outgoing),
                stdin=subprocess.DEVNULL,
                stdout=self._log,
                stderr=self._log,
            )
        finally:
            os.close(incoming)
            os.close(outgoing)
        self._buffer = b""

    def __enter__(self) -> Served:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def open(self) -> dict[str, Any]:
        """Open the subject.

        Returns:
            ``images`` that are read, of ``total``; ``mean_bytes`` of one, ``bytes`` of all files;
            ``processes``, what asks for worker processes, or nothing.

        Raises:
            UsageError: If that is not possible.
            MeasurementFailed: If it is damaged.
        """
        return self.ask("open", subject=dataclasses.asdict(self.subject))

    def look(self, loading: Loading, span: Span, step: StepSpec | None = None) -> Seen:
        """Measure one loader.

        Raises:
            UsageError: If its options do not go together.
            MeasurementFailed: If it fails, or takes too long, or its process ends.
        """
        found = self.ask(
            "look",
            patience=max(span.seconds, span.most or 0.0),
            loading=_plain(loading),
            span=_plain(span),
            step=_plain(step or StepSpec()),
        )
        return Seen(
            look=Look(**found["look"]),
            engine=found["engine"] or loading.engine,
            reason=found["reason"],
            workers=found["workers"],
            warnings=found["warnings"],
        )

    def step_seconds(self, loading: Loading, step: StepSpec) -> float:
        """Return how long a step takes by itself, in seconds."""
        found = self.ask("step", loading=_plain(loading), step=_plain(step))
        return float(found["seconds"])

    def warm(self) -> None:
        """Read every image once, so that the kernel has it in memory."""
        self.ask("warm")

    @property
    def ended(self) -> bool:
        """Whether the process has ended, and so can answer no more."""
        return self._process.poll() is not None

    def held(self, seconds: float) -> float:
        """Return the share of time in which making samples holds the interpreter's lock, 0 to 1."""
        return float(self.ask("held", patience=seconds, seconds=seconds)["share"])

    def drop(self) -> float:
        """Drop the pages of the subject's files; return which part stayed in memory."""
        return float(self.ask("drop")["resident"])

    def resident(self) -> float | None:
        """Return which part of the subject's files is in memory, 0 to 1; None if not known.

        Raises:
            MeasurementFailed: If it cannot be looked at.
        """
        found: float | None = self.ask("resident")["resident"]
        return found

    def ask(self, what: str, *, patience: float = 0.0, **more: Any) -> dict[str, Any]:
        """Send a request and return the answer.

        Args:
            what: The request's name, one of `shardkit.measure.child.Child`.
            patience: Seconds that the answer takes by its nature.
            more: The request's arguments, as JSON values.

        Raises:
            UsageError: If it cannot be done as it was asked.
            MeasurementFailed: If it failed.
        """
        request = json.dumps({"ask": what, **more}).encode() + b"\n"
        with contextlib.suppress(BrokenPipeError):  # what follows says why
            os.write(self._out, request)
        found: dict[str, Any] = json.loads(self._line(patience + self.patience))
        if "refused" in found:
            raise UsageError(found["refused"])
        if "failed" in found:
            raise MeasurementFailed(found["failed"])
        return found

    def close(self) -> None:
        """End the process and what it started."""
        with contextlib.suppress(OSError):
            os.close(self._out)
        try:
            self._process.wait(5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        with contextlib.suppress(OSError):
            os.close(self._in)
        self._log.close()

    def _line(self, patience: float) -> bytes:
        while b"\n" not in self._buffer:
            if not select.select([self._in], [], [], patience)[0]:
                self._process.kill()
                raise MeasurementFailed(
                    f"no answer came for {patience:.0f} s: a transform or a disk hangs"
                )
            more = os.read(self._in, 1 << 16)
            if not more:
                raise MeasurementFailed(self._how_it_ended())
            self._buffer += more
        line, _, self._buffer = self._buffer.partition(b"\n")
        return line

    def _how_it_ended(self) -> str:
        code = self._process.wait()
        self._log.seek(0)
        last = self._log.read().decode("utf-8", "replace").strip().splitlines()[-1:]
        how = f"killed by signal {-code}" if code < 0 else f"exit code {code}"
        return f"its process ended ({how}): {' '.join(last)[:300] or 'it said nothing'}"


def _plain(value: Any) -> dict[str, Any]:
    return dataclasses.asdict(value)
