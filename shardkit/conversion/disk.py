"""Room on the disk: asked for before a conversion begins, held while it lasts, and missed."""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Iterator, Sequence
from pathlib import Path

from shardkit.errors import ConversionFailed, DiskFull
from shardkit.system.files import Reservation, free_bytes

FULL = (errno.ENOSPC, errno.EDQUOT)
"""What a disk says that has no more room, or none for this user."""


class DiskReservation:
    """What the shards that are still to be made will take."""

    def __init__(self, folder: Path, needs: Sequence[int], *, ahead: int, copies: int = 1) -> None:
        """Describe it.

        Args:
            folder: Where they are made.
            needs: Bytes of each, about, in the order in which they are begun.
            ahead: How many are in work at the same time.
            copies: How often one's bytes are on the disk while it is in work.
        """
        self._beside = (copies - 1) * sum(sorted(needs)[-ahead:])
        self._folder = folder
        self._needs = needs
        self._ahead = ahead
        self._done = 0
        self._written = 0
        self._held: Reservation | None = None

    @contextlib.contextmanager
    def held(self, *, known: bool) -> Iterator[DiskReservation]:
        """Hold the room while the block runs, if the needs are ``known`` and not guessed.

        What shards in work need is free, for them to take. On a kill the kernel gives it all back.

        Raises:
            DiskFull: If there is not enough.
        """
        if self._left + self._beside > free_bytes(self._folder):
            raise self.lacking()
        try:
            if known:
                self._held = Reservation(self._folder, self._waiting)
            yield self
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise
            raise self.lacking() from error
        finally:
            if self._held:
                self._held.close()

    def give(self, written: int) -> None:
        """Note that the next shard is done, and give its room to the one that is begun now."""
        self._done += 1
        self._written += written
        if self._held:
            self._held.shrink(self._waiting)

    def lacking(self) -> DiskFull:
        """Return the error that says how much is missing before a shard is begun."""
        lack = max(self._left + self._beside - free_bytes(self._folder), 1 << 20)
        return DiskFull(
            f"the disk of {self._folder} is full, or too small. {self.need()} Make room for "
            f"{_mib(lack)} more and give the same command again: the shards that are done are kept."
        )

    def need(self) -> str:
        """Return a sentence on what is still to be written, and what room there is."""
        free = free_bytes(self._folder)
        beside = f", and {_mib(self._beside)} taken for a while" if self._beside else ""
        return f"About {_mib(self._left)} are still to be written{beside}; {_mib(free)} are free."

    @property
    def _left(self) -> int:
        return max(sum(self._needs) - self._written, 0)

    @property
    def _waiting(self) -> int:
        """Bytes of the shards that cannot have been begun yet."""
        return sum(self._needs[self._done + self._ahead :])


def _mib(count: int) -> str:
    return f"{count / 2**20:,.1f} MiB"


def as_failure(error: OSError, folder: Path) -> ConversionFailed:
    """Return what a failure to write below ``folder`` means, as an error that says what to do."""
    if error.errno in FULL:
        what = "disk" if error.errno == errno.ENOSPC else "disk quota"
        return DiskFull(
            f"the {what} of {folder} is full. Make room and give the same command again: the "
            "shards that are done are kept."
        )
    if error.errno in (errno.EMFILE, errno.ENFILE):
        return ConversionFailed(
            "too many files are open. Raise the limit (`ulimit -n`) and give the same command "
            "again: the shards that are done are kept."
        )
    where = f" ({error.filename})" if error.filename else ""
    return ConversionFailed(f"{folder} cannot be written: {error.strerror or error}{where}")
