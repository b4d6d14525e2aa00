from __future__ import annotations

import tarfile

import pytest

from shardkit.system.tar_headers import byte_sum, checksum, member_name


@pytest.mark.parametrize("name", ["a.jpg", "é.jpg", f"{'folder/' * 20}a.jpg"])
def test_headers_of_tarfile(name: str) -> None:
    header = tarfile.TarInfo(name).tobuf(tarfile.USTAR_FORMAT)

    assert checksum(header) == int(header[148:154], 8)
    assert member_name(header) == name.encode()


@pytest.mark.parametrize("part", [b"", b"\x7f" * 512, b"\xff" * 512])
def test_the_sum_is_exact(part: bytes) -> None:
    assert byte_sum(part) == sum(part)
