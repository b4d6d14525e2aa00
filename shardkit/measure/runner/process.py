"""A measurement process, seen from outside: requests, timeouts, and its end."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from multiprocessing.connection import Pipe
from typing import Any

import psutil

from shardkit.errors import MeasurementFailed, MeasurementTimeout, UsageError
from shardkit.measure.runner import session
from shardkit.measure.runner.material import Opened
from shardkit.measure.runner.spec import LoaderSpec, StepSpec, StopCondition, Subject
from shardkit.measure.runner.timing import Measurement
from shardkit.system.bootstrap import command

PATIENCE = 120.0
"""Seconds that an answer may take beyond the requested measuring time."""

_MOST_SECONDS = 1e6
"""Longest wait for an answer; more overflows the system's timers."""
_END_SECONDS = 5.0
"""Time for the process to exit by itself, and after a kill."""


class MeasurementProcess:
    """A process that measures loaders of one subject. Use it in a ``with`` statement."""

    def __init__(self, subject: Subject, patience: float = PATIENCE) -> None:
        """Start the process; it imports PyTorch while others may do the same."""
        self.subject = subject
        self.patience = patience
        """Seconds that an answer may take beyond the requested measuring time."""
        self.warnings: tuple[str, ...] = ()
        """Warnings during the last request."""
        self._start()

    def _start(self) -> None:
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - it lives as long as the process
        self._connection, child = Pipe()
        self._busy = False
        program = f"from shardkit.measure.runner.server import main; main({child.fileno()}, "
        try:
            self._process = subprocess.Popen(  # noqa: S603 - our own module
                [sys.executable, "-c", command(f"{program}{os.getpid()})")],
                pass_fds=(child.fileno(),),
                stdin=subprocess.DEVNULL,
                stdout=self._log,
                stderr=self._log,
            )
        finally:
            child.close()

    def __enter__(self) -> MeasurementProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def open(self, subject: Subject | None = None) -> Opened:
        """Open the subject, or another one.

        Raises:
            UsageError: If it does not exist or is not valid.
            MeasurementFailed: If it is damaged.
        """
        self.subject = subject or self.subject
        opened: Opened = self.call(session.open_subject, subject=self.subject)
        return opened

    def measure(
        self, loader: LoaderSpec, stop: StopCondition, step: StepSpec | None = None
    ) -> Measurement:
        """Build a loader and measure it.

        Raises:
            UsageError: If its options are invalid.
            MeasurementTimeout: If it takes too long.
            MeasurementFailed: If it fails, or its process ends.
        """
        arguments = {"loader": loader, "stop": stop, "step": step or StepSpec()}
        found: Measurement = self.call(session.measure, patience=stop.seconds, **arguments)
        return dataclasses.replace(found, warnings=self.warnings)

    def step_seconds(self, loader: LoaderSpec, step: StepSpec) -> float:
        """Return the time of a step on a batch that is ready, in seconds."""
        return float(self.call(session.step_seconds, loader=loader, step=step))

    def warm(self) -> None:
        """Read every image once, so that it is cached."""
        self.call(session.warm)

    def drop(self) -> float | None:
        """Drop the files from the page cache; return the fraction that stayed, None if unknown."""
        stayed: float | None = self.call(session.drop)
        return stayed

    def call(self, function: Callable[..., Any], *, patience: float = 0.0, **arguments: Any) -> Any:
        """Call ``function(session, **arguments)`` in the process and return the result.

        Args:
            function: A function on the top level of a module. It receives the
                `shardkit.measure.runner.session.Session`.
            patience: Seconds that the call takes by its nature.
            arguments: The function's arguments; they and the result travel by `pickle`.

        Raises:
            UsageError: If the request is invalid.
            MeasurementTimeout: If the call takes too long. The process is killed.
            MeasurementFailed: If the call fails, or the process ends.
        """
        self._busy = True
        with contextlib.suppress(OSError):  # the answer reports why
            self._connection.send((function, arguments))
        limit = patience + self.patience
        try:
            if not self._connection.poll(min(limit, _MOST_SECONDS)):
                self._kill()
                raise MeasurementTimeout(
                    f"no answer within {limit:.0f} s: it hangs, or is too slow to measure"
                )
            kind, value, self.warnings = self._connection.recv()
            self._busy = False
        except (EOFError, OSError):
            raise MeasurementFailed(self._how_it_ended()) from None
        if kind == "refused":
            raise UsageError(value)
        if kind == "failed":
            raise MeasurementFailed(value)
        return value

    @property
    def ended(self) -> bool:
        """Whether the process has ended."""
        return self._process.poll() is not None

    def restart_if_ended(self) -> None:
        """Start again and open the subject, if a transform or lack of memory ended the process.

        Raises:
            UsageError: If the subject can no longer be opened.
            MeasurementFailed: If it is damaged.
        """
        if self.ended:
            self.close()
            self._start()
            self.open()

    def close(self) -> None:
        """End the process and its workers."""
        self._connection.close()
        try:
            self._process.wait(0 if self._busy else _END_SECONDS)  # after Ctrl-C it is busy
        except subprocess.TimeoutExpired:
            self._kill()
        self._log.close()

    def _kill(self) -> None:
        """Kill the process and its workers, which would wait for it forever if they hang."""
        workers = []
        with contextlib.suppress(psutil.Error):
            workers = psutil.Process(self._process.pid).children(recursive=True)
        self._process.kill()
        for each in workers:
            with contextlib.suppress(psutil.Error):
                each.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):  # a hanging disk may block the exit
            self._process.wait(_END_SECONDS)

    def _how_it_ended(self) -> str:
        code = self._process.wait()
        self._log.seek(0)
        last = self._log.read().decode("utf-8", "replace").strip().splitlines()[-1:]
        how = f"killed by signal {-code}" if code < 0 else f"exit code {code}"
        return f"its process ended ({how}): {' '.join(last)[:300] or 'without a message'}"
