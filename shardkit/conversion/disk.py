"""Disk space: checked before a conversion starts, reserved while it runs."""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Iterator, Sequence
from pathlib import Path

from shardkit.codecs.decode_errors import raise_interruption
from shardkit.errors import ConversionFailed, DiskFull
from shardkit.system.files import Reservation, free_bytes

FULL = (errno.ENOSPC, errno.EDQUOT)
"""Errors of a full disk, or of a user's full quota."""


class DiskReservation:
    """Disk space for the shards that are not built yet."""

    def __init__(self, folder: Path, needs: Sequence[int], *, ahead: int, copies: int = 1) -> None:
        """Create a reservation; `reserved` makes it.

        ``needs`` are the approximate bytes of each shard, in the order in which they are built:
        ``ahead`` at the same time, each with ``copies`` of its bytes on the disk meanwhile.
        """
        self._temporary = (copies - 1) * sum(sorted(needs)[-ahead:])
        self._folder = folder
        self._needs = needs
        self._ahead = ahead
        self._done = 0
        self._written = 0
        self._held: Reservation | None = None

    @contextlib.contextmanager
    def reserved(self, *, exact: bool) -> Iterator[DiskReservation]:
        """Check the free space, and reserve it within the block if the needs are ``exact``.

        Space for the shards being built stays free. The kernel releases the rest if the process is
        killed. DiskFull if the disk lacks space.
        """
        if self._remaining + self._temporary > free_bytes(self._folder):
            raise self._shortage()
        try:
            if exact:
                self._held = Reservation(self._folder, self._waiting)
            yield self
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise
            raise self._shortage() from error
        finally:
            if self._held:
                self._held.close()

    def release(self, written: int) -> None:
        """Release space for the next shard, after one of ``written`` bytes was finished."""
        self._done += 1
        self._written += written
        if self._held:
            self._held.shrink(self._waiting)

    def need(self) -> str:
        """Return a sentence on the space needed and the space free."""
        free = free_bytes(self._folder)
        more = f" and temporarily {_mib(self._temporary)} more" if self._temporary else ""
        return f"The conversion needs about {_mib(self._remaining)}{more}; {_mib(free)} are free."

    def _shortage(self) -> DiskFull:
        """Return the error for a disk that lacks space."""
        missing = max(self._remaining + self._temporary - free_bytes(self._folder), 1 << 20)
        return DiskFull(
            f"the disk of {self._folder} is too full. {self.need()}",
            remedy=f"Free {_mib(missing)}, then rerun the same command: finished shards are kept.",
        )

    @property
    def _remaining(self) -> int:
        return max(sum(self._needs) - self._written, 0)

    @property
    def _waiting(self) -> int:
        """Bytes of the shards that cannot have been started yet."""
        return sum(self._needs[self._done + self._ahead :])


def _mib(count: int) -> str:
    return f"{count / 2**20:,.1f} MiB"


def as_failure(error: OSError, folder: Path) -> ConversionFailed:
    """Return the error to raise for a failure of the disk of ``folder``, with the remedy."""
    raise_interruption(error)
    if error.errno in FULL:
        resource = "disk" if error.errno == errno.ENOSPC else "disk quota"
        return DiskFull(
            f"the {resource} of {folder} is full",
            remedy="Free some space and rerun the same command: finished shards are kept.",
        )
    where = f" ({error.filename})" if error.filename else ""
    if error.errno in (errno.EMFILE, errno.ENFILE):
        return ConversionFailed(
            f"too many files are open{where}",
            remedy="Raise the limit (`ulimit -n`) and rerun the same command: finished shards "
            "are kept.",
        )
    return ConversionFailed(
        f"{folder} cannot be read or written: {error.strerror or error}{where}",
        remedy="Rerun the same command: finished shards are kept.",
    )
