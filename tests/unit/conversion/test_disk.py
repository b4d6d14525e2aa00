"""Errors of a disk: those of too little space, and all others."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from shardkit import ConversionFailed
from shardkit.conversion.disk import DiskReservation, as_failure
from shardkit.errors import DiskFull


@pytest.mark.parametrize(
    ("code", "kind", "said"),
    [
        (errno.ENOSPC, DiskFull, "the disk of .* is full"),
        (errno.EDQUOT, DiskFull, "the disk quota of .* is full"),
        (errno.EMFILE, ConversionFailed, "ulimit -n"),
        (errno.ENFILE, ConversionFailed, "ulimit -n"),
        (errno.EIO, ConversionFailed, r"cannot be read or written: .* \(a/b\). Rerun"),
    ],
)
def test_an_error_names_its_remedy(
    tmp_path: Path, code: int, kind: type[ConversionFailed], said: str
) -> None:
    found = as_failure(OSError(code, os.strerror(code), "a/b"), tmp_path)
    assert type(found) is kind
    with pytest.raises(kind, match=said):
        raise found


@pytest.mark.parametrize(("code", "kind"), [(errno.ENOSPC, DiskFull), (errno.EIO, OSError)])
def test_only_a_lack_of_space_is_a_shortage(
    tmp_path: Path, code: int, kind: type[Exception]
) -> None:
    space = DiskReservation(tmp_path, [1], ahead=1)
    with pytest.raises(kind), space.reserved(exact=False):
        raise OSError(code, os.strerror(code))
