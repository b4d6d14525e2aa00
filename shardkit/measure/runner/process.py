"""A measuring process, seen from outside: it is asked, waited for, and ended."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import selectors
import subprocess
import sys
import tempfile
from typing import Any

import psutil

from shardkit.errors import MeasurementFailed, UsageError
from shardkit.measure.runner.spec import LoaderSpec, Subject
from shardkit.measure.runner.steps import StepSpec
from shardkit.measure.runner.timing import Look, StopCondition
from shardkit.system.bootstrap import command

_BEGIN = "from shardkit.measure.server import main; main(sys.argv[1:])"
"""The process's program."""

PATIENCE = 120.0
"""Seconds that an answer may take beyond what it was asked to take."""

_LONGEST = 1e6
"""Seconds that the system can wait; more of them overflow."""
_END_SECONDS = 5.0
"""How long the process may take to end by itself, and by being killed."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Seen:
    """A look, and the loader that was looked at."""

    look: Look
    engine: str
    reason: str
    workers: int
    warnings: list[str]


class MeasurementProcess:
    """A process that measures one subject; use it in a ``with`` statement."""

    def __init__(self, subject: Subject, patience: float = PATIENCE) -> None:
        """Start the process; it loads PyTorch while others may do the same."""
        self.subject = subject
        self.patience = patience
        """Seconds that an answer may take beyond what it was asked to take."""
        self._start()

    def _start(self) -> None:
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - it lives as long as the process
        incoming, self._out = os.pipe()
        self._in, outgoing = os.pipe()
        try:
            self._process = subprocess.Popen(  # noqa: S603 - our own module
                [
                    sys.executable,
                    "-c",
                    command(_BEGIN),
                    *map(str, (incoming, outgoing, os.getpid())),
                ],
                pass_fds=(incoming, outgoing),
                stdin=subprocess.DEVNULL,
                stdout=self._log,
                stderr=self._log,
            )
        finally:
            os.close(incoming)
            os.close(outgoing)
        self._buffer = b""

    def __enter__(self) -> MeasurementProcess:
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

    def look(self, loading: LoaderSpec, span: StopCondition, step: StepSpec | None = None) -> Seen:
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

    def step_seconds(self, loading: LoaderSpec, step: StepSpec) -> float:
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

    def restart_if_ended(self) -> None:
        """Begin anew and open the subject, if a transform or a lack of memory ended the process.

        Raises:
            UsageError: If the subject cannot be opened any more.
            MeasurementFailed: If it is damaged.
        """
        if self.ended:
            self.close()
            self._start()
            self.open()

    def held(self, seconds: float) -> float:
        """Return the share of time in which making samples holds the interpreter's lock, 0 to 1."""
        return float(self.ask("held", patience=seconds, seconds=seconds)["share"])

    def drop(self) -> float | None:
        """Drop the pages of the subject's files; return which part stayed, None if not known."""
        found: float | None = self.ask("drop")["resident"]
        return found

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
            what: The request's name, one of `shardkit.measure.server.Child`.
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
        self._out = -1  # the number may be another file's by the next time
        try:
            self._process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            self._kill()
        with contextlib.suppress(OSError):
            os.close(self._in)
        self._in = -1
        self._log.close()

    def _kill(self) -> None:
        """Kill the process and its workers, which would wait for it for ever if they hang."""
        started = []
        with contextlib.suppress(psutil.Error):
            started = psutil.Process(self._process.pid).children(recursive=True)
        self._process.kill()
        for each in started:
            with contextlib.suppress(psutil.Error):
                each.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):  # a disk may hang, and hold it
            self._process.wait(_END_SECONDS)

    def _line(self, patience: float) -> bytes:
        while b"\n" not in self._buffer:
            if not _readable(self._in, patience):
                self._kill()
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


def _readable(fd: int, patience: float) -> bool:
    """Wait for something to read; any descriptor will do (``select`` takes none above 1023)."""
    with selectors.DefaultSelector() as selector:
        selector.register(fd, selectors.EVENT_READ)
        return bool(selector.select(min(patience, _LONGEST)))


def _plain(value: Any) -> dict[str, Any]:
    return dataclasses.asdict(value)
