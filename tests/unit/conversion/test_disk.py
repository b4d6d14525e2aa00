"""Errors of a disk: those of too little space, and all others."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
from refusals import refused

from shardkit import ConversionFailed
from shardkit.conversion.disk import DiskReservation, as_failure
from shardkit.errors import DiskFull


@pytest.mark.parametrize(
    ("code", "kind", "said"),
    [
        (errno.ENOSPC, DiskFull, ()),
        (errno.EDQUOT, DiskFull, ()),
        (errno.EMFILE, ConversionFailed, ()),
        (errno.ENFILE, ConversionFailed, ()),
        (errno.EIO, ConversionFailed, ("a/b",)),
    ],
)
def test_an_error_names_its_remedy(
    tmp_path: Path, code: int, kind: type[ConversionFailed], said: tuple[str, ...]
) -> None:
    found = as_failure(OSError(code, os.strerror(code), "a/b"), tmp_path)
    assert type(found) is kind
    with refused(kind, *said):
        raise found


@pytest.mark.parametrize(("code", "kind"), [(errno.ENOSPC, DiskFull), (errno.EIO, OSError)])
def test_only_a_lack_of_space_is_a_shortage(
    tmp_path: Path, code: int, kind: type[Exception]
) -> None:
    space = DiskReservation(tmp_path, [1], ahead=1)
    with pytest.raises(kind), space.reserved(exact=False):
        raise OSError(code, os.strerror(code))
