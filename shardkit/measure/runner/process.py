"""A measurement process, seen from outside: requests, timeouts, and its end."""

from __future__ import annotations

import contextlib
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

_END_SECONDS = 5.0
"""Time for the process to exit by itself, and after a kill."""


class MeasurementProcess:
    """A process that measures loaders of one subject. Use it in a ``with`` statement.

    Every request raises `UsageError` if it is invalid, `MeasurementTimeout` if it takes too long,
    and `MeasurementFailed` if it fails or the process ends. The next request starts a new process.
    """

    def __init__(self, subject: Subject, patience: float = PATIENCE) -> None:
        """Start the process; it imports PyTorch while others may do the same."""
        self.subject = subject
        self.patience = patience
        """Seconds that an answer may take beyond the requested measuring time."""
        self._start()

    def _start(self) -> None:
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - it lives as long as the process
        self._connection, child = Pipe()
        self._busy = False
        program = f"from shardkit.measure.runner.session import main; main({child.fileno()}, "
        with child:
            self._process = subprocess.Popen(  # noqa: S603 - our own module
                [sys.executable, "-c", command(f"{program}{os.getpid()})")],
                pass_fds=(child.fileno(),),
                stdin=subprocess.DEVNULL,
                stdout=self._log,
                stderr=self._log,
            )

    def __enter__(self) -> MeasurementProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def open(self) -> Opened:
        """Open the subject."""
        opened: Opened = self._ask(session.open_subject, 0.0, {"subject": self.subject})
        return opened

    def measure(
        self, loader: LoaderSpec, stop: StopCondition, step: StepSpec | None = None
    ) -> Measurement:
        """Build a loader and measure it."""
        arguments = {"loader": loader, "stop": stop, "step": step or StepSpec()}
        found: Measurement = self.call(session.measure, patience=stop.seconds, **arguments)
        return found

    def call(self, function: Callable[..., Any], *, patience: float = 0.0, **arguments: Any) -> Any:
        """Call ``function(session, **arguments)``, of a module, there, and return the result.

        The arguments and the result are pickled. ``patience`` is the usual duration in seconds.
        """
        if self._process.poll() is not None:  # a transform or lack of memory ended it
            self.close()
            self._start()
            self.open()
        return self._ask(function, patience, arguments)

    def _ask(self, function: Callable[..., Any], patience: float, arguments: dict[str, Any]) -> Any:
        self._busy = True
        with contextlib.suppress(OSError):  # the answer reports why
            self._connection.send((function, arguments))
        limit = patience + self.patience
        try:
            if not self._connection.poll(limit):
                self._kill()
                raise MeasurementTimeout(
                    f"no answer within {limit:.0f} s: it hangs, or is too slow to measure"
                )
            kind, value = self._connection.recv()
        except (EOFError, OSError):
            raise MeasurementFailed(self._how_it_ended()) from None
        self._busy = False
        if kind == "done":
            return value
        raise UsageError(value) if kind == "refused" else MeasurementFailed(value)

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
