"""Exceptions of worker processes, with their type and causes: PyTorch would send only text."""

from __future__ import annotations

import pickle
import traceback


class WorkerTraceback(Exception):
    """The traceback in the worker process; the last cause of an exception from there."""

    def __init__(self, text: str) -> None:
        """Store the text."""
        super().__init__(text)
        self._text = text

    def __str__(self) -> str:
        return f'\n"""\n{self._text}"""'


class Failure:
    """An exception and its causes, picklable."""

    def __init__(self, error: BaseException) -> None:
        """Store ``error``, its causes and its traceback."""
        self._text = "".join(traceback.format_exception(error))
        self._chain: list[bytes] = []
        cause: BaseException | None = error
        while cause is not None:
            self._chain.append(_pickled(cause))
            cause = cause.__cause__

    def rebuild(self) -> BaseException:
        """Return the exception; its last cause is the worker's traceback."""
        cause: BaseException = WorkerTraceback(self._text)
        for pickled in reversed(self._chain):
            error: BaseException = pickle.loads(pickled)  # noqa: S301 - from our own worker
            error.__cause__ = cause
            cause = error
        return cause


def is_from_worker(error: BaseException | None) -> bool:
    """Return whether a worker raised ``error``, rather than PyTorch in this process."""
    while error is not None and not isinstance(error, WorkerTraceback):
        error = error.__cause__
    return error is not None


def _pickled(error: BaseException) -> bytes:
    """Return the exception, or a ``RuntimeError`` with its text if it cannot be pickled."""
    try:
        pickled = pickle.dumps(error)
        if type(pickle.loads(pickled)) is type(error):  # noqa: S301 - made above
            return pickled
    except Exception:  # noqa: S110 - a user's exception may fail in any way
        pass
    return pickle.dumps(RuntimeError(f"{type(error).__name__}: {error}"))
