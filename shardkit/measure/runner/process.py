"""A measurement process, seen from outside: requests, timeouts, and its end.

A user's transform may allocate memory, start threads, hold the GIL forever or crash. Candidates
must not warm each other's caches or share workers, and peak memory is a property of a process. So
each subject has a process of its own, and only there user modules are imported.
"""

from __future__ import annotations

import pickle
import tempfile
from collections.abc import Callable
from typing import Concatenate, ParamSpec, TypeVar

from shardkit.errors import MeasurementFailed, MeasurementTimeout
from shardkit.measure.runner import session
from shardkit.measure.runner.material import SubjectInfo
from shardkit.measure.runner.session import Session
from shardkit.measure.runner.spec import LoaderSpec, StepSpec, StopCondition, Subject
from shardkit.measure.runner.timing import Measurement
from shardkit.system.helper import Helper, HelperEnded, HelperLate

_P = ParamSpec("_P")
_R = TypeVar("_R")

PATIENCE = 120.0
"""Seconds that an answer may take beyond the requested measuring time."""

_END_SECONDS = 5.0
"""Time for the process to exit by itself."""


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
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - it lives as long as the process
        self._helper = Helper(log=self._log)
        self._helper.start()

    def __enter__(self) -> MeasurementProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def open(self) -> SubjectInfo:
        """Open the subject."""
        return self._ask(0.0, session.open_subject, subject=self.subject)

    def measure(
        self, loader: LoaderSpec, stop: StopCondition, step: StepSpec | None = None
    ) -> Measurement:
        """Build a loader and measure it."""
        return self.call_for(
            stop.seconds, session.measure, loader=loader, stop=stop, step=step or StepSpec()
        )

    def call(
        self,
        function: Callable[Concatenate[Session, _P], _R],
        /,
        *args: _P.args,
        **kwargs: _P.kwargs,
    ) -> _R:
        """Call a function of a module with the session there, and return the result.

        The arguments and the result are pickled.
        """
        return self.call_for(0.0, function, *args, **kwargs)

    def call_for(
        self,
        seconds: float,
        function: Callable[Concatenate[Session, _P], _R],
        /,
        *args: _P.args,
        **kwargs: _P.kwargs,
    ) -> _R:
        """As `call`, of a function that usually takes ``seconds``."""
        if self._helper.process is None:  # a transform or lack of memory ended it
            self._log.seek(0)
            self._log.truncate()
            self.open()
        return self._ask(seconds, function, *args, **kwargs)

    def _ask(
        self,
        seconds: float,
        function: Callable[Concatenate[Session, _P], _R],
        /,
        *args: _P.args,
        **kwargs: _P.kwargs,
    ) -> _R:
        self._helper.seconds = limit = seconds + self.patience
        try:
            # The child runs the user's code anyway, so its results may be any objects.
            answer = self._helper.call(session.answer, function, args, kwargs)
        except HelperLate:
            raise MeasurementTimeout(
                f"no answer within {limit:.0f} s: it hangs, or is too slow to measure"
            ) from None
        except HelperEnded as error:
            raise MeasurementFailed(self._how_it_ended(error.status)) from None
        result: _R = pickle.loads(answer)  # noqa: S301 - our own session's
        return result

    def close(self) -> None:
        """End the process and its workers."""
        self._helper.end(_END_SECONDS)
        self._log.close()

    def _how_it_ended(self, code: int) -> str:
        self._log.seek(0)
        last = self._log.read().decode("utf-8", "replace").strip().splitlines()[-1:]
        how = f"killed by signal {-code}" if code < 0 else f"exit code {code}"
        return f"its process ended ({how}): {' '.join(last)[:300] or 'it left no message'}"
