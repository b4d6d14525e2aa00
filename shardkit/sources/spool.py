"""The samples of an iterable as a sequence: each is read once, into a temporary file."""

from __future__ import annotations

import pickle
from array import array
from collections.abc import Iterable, Mapping
from typing import Any

from shardkit.codecs.decode_errors import raise_interruption
from shardkit.errors import UsageError
from shardkit.system.temporary import TemporaryFolder
from shardkit.system.text import shortened

_LONGEST = 200
"""Maximum characters of a message of an exception of the user's code."""


class Spool:
    """The samples of an iterable, such as a generator, pickled one after another to a file.

    The file is in the folder for temporary files (``TMPDIR``), readable by its user only. It is
    removed with the last reference in the process that made it.
    """

    def __init__(self, samples: Iterable[Any]) -> None:
        self._folder = TemporaryFolder()
        self._path = str(self._folder.path / "samples")
        ends = array("q", [0])
        with open(self._path, "xb") as file:
            try:
                for sample in samples:
                    pickle.dump(sample, file, pickle.HIGHEST_PROTOCOL)
                    ends.append(file.tell())
            except (OSError, MemoryError):
                raise
            except Exception as error:
                raise_interruption(error)
                reason = shortened(f"{type(error).__name__}: {error}", _LONGEST)
                raise UsageError(f"sample {len(ends) - 1} cannot be read: {reason}") from error
        self._ends = ends

    def __len__(self) -> int:
        return len(self._ends) - 1

    def __getitem__(self, number: int) -> Any:
        return _read(self._path, self._ends[number], self._ends[number + 1])

    def only(self, numbers: Iterable[int]) -> SpoolPart:
        """Return some samples by number, for a worker process; this object must outlive it."""
        return SpoolPart(self._path, {n: (self._ends[n], self._ends[n + 1]) for n in numbers})


class SpoolPart:
    """Some samples of a `Spool`."""

    def __init__(self, path: str, spans: Mapping[int, tuple[int, int]]) -> None:
        self._path = path
        self._spans = spans

    def __len__(self) -> int:
        return len(self._spans)

    def __getitem__(self, number: int) -> Any:
        return _read(self._path, *self._spans[number])


def _read(path: str, start: int, end: int) -> Any:
    with open(path, "rb") as file:
        file.seek(start)
        return pickle.loads(file.read(end - start))  # noqa: S301 - written by this process
