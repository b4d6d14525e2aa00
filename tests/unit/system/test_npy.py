from __future__ import annotations

import io
import os
import pickle
import tarfile
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st
from refusals import refused

from shardkit.system.npy import NpyWriter, StoredValues, npy_header, npy_values, save_npy
from shardkit.system.tar_headers import byte_sum, checksum, member_name

SHAPES = st.tuples(st.integers(1, 60), st.integers(1, 60), st.integers(1, 4))


@given(SHAPES)
def test_header_and_values_equal_numpys_file(shape: tuple[int, ...]) -> None:
    values = np.arange(np.prod(shape)).astype(np.uint8).reshape(shape)
    buffer = io.BytesIO()
    np.save(buffer, values)
    assert npy_header(shape) + values.tobytes() == buffer.getvalue()
    assert npy_values(buffer.getvalue()) == (len(npy_header(shape)), shape)


def test_the_header_of_any_image_has_128_bytes() -> None:
    for shape in ((1, 1, 1), (224, 224, 3), (65535, 65535, 3), (10**6, 10**6, 4)):
        assert len(npy_header(shape)) == 128


@pytest.mark.parametrize(
    "values",
    [
        np.zeros((2, 2, 3), np.float32),
        np.zeros((2, 2, 3), np.int8),
        np.asfortranarray(np.zeros((2, 3, 3), np.uint8)),
    ],
)
def test_other_arrays_are_refused(values: npt.NDArray[np.generic]) -> None:
    buffer = io.BytesIO()
    np.save(buffer, values)
    with pytest.raises(ValueError, match="uint8"):
        npy_values(buffer.getvalue())


@pytest.mark.parametrize("change", [-1, 1, 100])
def test_too_few_or_too_many_values_are_refused(change: int) -> None:
    content = npy_header((2, 2, 3)) + bytes(12 + change)
    with pytest.raises(ValueError, match="complete"):
        npy_values(content)


@given(st.binary(max_size=200))
def test_junk_is_a_value_error(content: bytes) -> None:
    with pytest.raises(ValueError):  # noqa: PT011 - numpy words it
        npy_values(content)


@pytest.mark.filterwarnings("error")
def test_a_header_with_any_changed_byte_is_a_value_error_or_another_header() -> None:
    whole = npy_header((2, 2, 3)) + bytes(12)
    for position in range(128):
        for value in (0, 10, 32, *b"{}()[]'\"\\,:#-19LuO|>", 255, whole[position] ^ 1):
            content = whole[:position] + bytes([value]) + whole[position + 1 :]
            try:
                start, shape = npy_values(content)
            except ValueError:
                continue
            assert start + np.prod(shape) == len(content)
            assert all(side >= 0 for side in shape)


@pytest.mark.parametrize("counts", [(), (0,), (3, 0, 12345)])
def test_a_file_written_in_pieces_is_that_of_the_whole(
    tmp_path: Path, counts: tuple[int, ...]
) -> None:
    pieces = [np.arange(count, dtype=np.int64) for count in counts]
    writer = NpyWriter(tmp_path / "pieces", np.int64)
    for piece in pieces:
        writer.append(piece)
    writer.close()
    save_npy(tmp_path / "whole", np.concatenate([np.zeros(0, np.int64), *pieces]))
    assert (tmp_path / "pieces").read_bytes() == (tmp_path / "whole").read_bytes()


def test_stored_values_are_read_and_not_mapped(tmp_path: Path) -> None:
    values = np.arange(100, dtype=np.int64)
    save_npy(tmp_path / "values.npy", values)
    stored = StoredValues(tmp_path / "values.npy", np.int64, 100)
    assert len(stored) == 100
    for part in (slice(0, 100), slice(3, 7), slice(99, 100), slice(5, 5), slice(90, 200)):
        assert stored[part].tolist() == values[part].tolist()
    copied = pickle.loads(pickle.dumps(stored))
    assert copied[2:4].tolist() == [2, 3]
    os.truncate(tmp_path / "values.npy", 200)
    assert stored[0:2].tolist() == [0, 1]
    with refused(ValueError, "byte 200"):
        stored[50:60]
    with refused(ValueError, "100"):
        StoredValues(tmp_path / "values.npy", np.int64, 100)


# Headers of tar archives.


@pytest.mark.parametrize("name", ["a.jpg", "é.jpg", f"{'folder/' * 20}a.jpg"])
def test_headers_of_tarfile(name: str) -> None:
    header = tarfile.TarInfo(name).tobuf(tarfile.USTAR_FORMAT)

    assert checksum(header) == int(header[148:154], 8)
    assert member_name(header) == name.encode()


@pytest.mark.parametrize("part", [b"", b"\x7f" * 512, b"\xff" * 512])
def test_the_sum_is_exact(part: bytes) -> None:
    assert byte_sum(part) == sum(part)
