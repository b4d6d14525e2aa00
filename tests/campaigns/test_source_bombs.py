"""Small files of other programs that state huge sizes, or that took time with their square."""

from __future__ import annotations

import bz2
import gzip
import io
import json
import os
import struct
import tarfile
import time
import tracemalloc
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import brotli  # type: ignore[import-untyped]
import h5py
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from campaign import cases, points
from foreign import write_lmdb, write_tfrecord
from helpers import png, run_main
from hostile.foreign_shards import (
    old_sparse_member,
    pax_header,
    sparse_member,
    tfrecord_record,
    write_mds,
)
from refusals import refused

from shardkit.errors import BadImage, ConversionFailed
from shardkit.kinds import values
from shardkit.registry import get_source
from shardkit.sources import driver, hdf5_reader, inputs, kept, lmdb_reader, tar_members, voc
from shardkit.sources.inputs import OpenedFile

SECONDS = 10
"""CPU time that is enough for linear work on the slowest machine; its square took a minute."""

BYTES = 128 << 20
"""Memory that is enough for the longest line."""


def hdf5(path: Path, shape: Sequence[int], chunk: Sequence[int]) -> list[object]:
    with h5py.File(path, "w") as file:
        file.create_dataset("x", shape, "u1", chunks=tuple(chunk))
    assert path.stat().st_size < 4096
    return ["hdf5", path, "--image", "x"]


def hdf5_of_one_chunk(path: Path) -> list[object]:
    with h5py.File(path, "w") as file:
        sides = (29, 12_000, 12_000)
        data = file.create_dataset("x", sides, "u1", chunks=sides)
        data.id.write_direct_chunk((0, 0, 0), b"a few bytes", filter_mask=0)
    return ["hdf5", path, "--image", "x"]


def idx(path: Path, count: int, height: int, width: int) -> list[object]:
    path.mkdir()
    images = struct.pack(">IIII", 0x803, count, height, width) + bytes(count * height * width)
    labels = struct.pack(">II", 0x801, count) + bytes(count)
    for name, content in (("images-idx3", images), ("labels-idx1", labels)):
        (path / f"train-{name}-ubyte.gz").write_bytes(gzip.compress(content, 6))
    return ["mnist", path, "--split", "train"]


def idx_of_many_pixels(path: Path) -> list[object]:
    arguments = idx(path, 1, 1, 1)
    (file,) = path.glob("*images*")
    file.unlink()
    file = file.with_suffix("")
    file.write_bytes(struct.pack(">IIII", 0x803, 1, 65535, 65535))
    os.truncate(file, 16 + 65535**2)
    return arguments


def npz(path: Path) -> list[object]:
    count = 200_000
    np.savez_compressed(path, images=np.zeros((count, 1, 1), "u1"), labels=np.zeros(count, "u1"))
    return ["npy", path]


def beton(path: Path) -> list[object]:
    """Write a file of FFCV with many samples, all zeros."""
    count = 200_000
    table = 24 + 1041 + 13 * count
    head = struct.pack("<HHIQQ", 2, 1, 1 << 21, count, table) + b"\2image"
    path.write_bytes(gzip.compress(head.ljust(table + 24 * count, b"\0")))
    return ["ffcv", path]


def mds_of_many_samples(path: Path) -> list[object]:
    """Write a shard of zeros, packed, that states more samples than it has bytes."""
    arguments = mds(path, "zstd")
    index = json.loads((path / "index.json").read_text())
    index["shards"][0]["samples"] = 200_000
    (path / "index.json").write_text(json.dumps(index))
    (path / "shard.00000.mds.zstd").write_bytes(zstandard.compress(bytes(900_000)))
    return arguments


def mds(path: Path, packing: str) -> list[object]:
    """Write a packed shard of zeros: 16 GB, or less where the packer is slow."""
    path.mkdir()
    name = "shard.00000.mds"
    write_mds(path, {"image": "png"}, [[(b"x",)]])
    (path / name).unlink()
    index = json.loads((path / "index.json").read_text())
    index["shards"][0]["zip_data"] = {"basename": f"{name}.{packing}", "bytes": 1, "hashes": {}}
    index["shards"][0]["raw_data"]["bytes"] = 1 << 34
    (path / "index.json").write_text(json.dumps(index))
    (path / f"{name}.{packing}").write_bytes(PACKED[packing]())
    return ["mds", path]


def _zstd() -> bytes:
    zeros = bytes(1 << 24)
    packer = zstandard.ZstdCompressor(level=1).compressobj()
    return b"".join(packer.compress(zeros) for _ in range(1024)) + packer.flush()


def _brotli() -> bytes:
    packer = brotli.Compressor(quality=3, lgwin=24)
    zeros = bytes(1 << 24)
    return bytes(b"".join(packer.process(zeros) for _ in range(64)) + packer.finish())


def _bz2() -> bytes:
    packer = bz2.BZ2Compressor(9)
    zeros = bytes(1 << 20)
    return b"".join(packer.compress(zeros) for _ in range(128)) + packer.flush()


PACKED: dict[str, Callable[[], bytes]] = {
    "zstd": _zstd,
    "br": _brotli,
    "bz2": _bz2,
    "snappy": lambda: b"\xff\xff\xff\xff\x0f" + b"\xfe\x01\x00" * 1000,
}


def tfrecord(path: Path) -> list[object]:
    path.write_bytes(gzip.compress(tfrecord_record(b"") * 20_000))
    return ["tfrecord", path, "--image", "image", "--label", "none"]


def parquet(path: Path) -> list[object]:
    """Write a value of 64 MiB that 64 rows share."""
    values = pa.DictionaryArray.from_arrays(
        pa.array(np.zeros(64, np.int32)), pa.array([b"GIF89a" + bytes(1 << 26)], pa.binary())
    )
    pq.write_table(pa.table({"image": values}), path, compression="zstd", store_schema=False)
    assert path.stat().st_size < 1 << 16
    return ["huggingface", path, "--image", "image"]


def parquet_of_many_rows(path: Path) -> list[object]:
    values = pa.DictionaryArray.from_arrays(
        pa.array(np.zeros(200_000, np.int32)), pa.array([b"GIF89a"], pa.binary())
    )
    pq.write_table(pa.table({"image": values}), path, compression="zstd", store_schema=False)
    return ["huggingface", path, "--image", "image"]


def table_of_many_rows(path: Path) -> list[object]:
    parquet_of_many_rows(path)
    return ["table", path, "--image", "image"]


def endless(path: Path, head: bytes) -> list[object]:
    """Write a line that does not end in many GB, which take no space on the disk."""
    with path.open("wb") as file:
        file.write(head)
        file.truncate(points(1, 16) << 30)
    return ["table", path, "--image", "file_name"]


def many_lines(path: Path) -> list[object]:
    line = b'","' + b"a" * 197  # 200 characters, in which a quoted value ends and another starts
    path.write_bytes(b"file_name,b\n" + b'"' + (line + b"\n") * 90_000)
    return ["table", path, "--image", "file_name"]


def coco(path: Path) -> list[object]:
    path.write_bytes(b"{")
    os.truncate(path, 1 << 40)
    return ["coco", path]


BOMBS: dict[str, tuple[str, Callable[[Path], list[object]], str]] = {
    "a billion rows of HDF5": (
        "a.h5",
        lambda path: hdf5(path, (10**9, 8, 8), (8, 8, 8)),
        "has 1,000,000,000 rows",
    ),
    "images of HDF5 with too many pixels": (
        "a.h5",
        lambda path: hdf5(path, (2, 30_000, 30_000, 3), (1, 100, 100, 3)),
        "its shape is 30000x30000x3, over the limit of 178,956,970 pixels",
    ),
    "one chunk of 4 GB": ("a.h5", hdf5_of_one_chunk, "a chunk of x has 3.9 GiB, over the limit"),
    "many images of IDX": ("raw", lambda path: idx(path, 200_000, 1, 1), "has 200,000 rows"),
    "images of IDX with too many pixels": (
        "raw",
        idx_of_many_pixels,
        "its shape is 65535x65535, over the limit",
    ),
    "many images of NumPy": ("a.npz", npz, "has 200,000 rows"),
    "many samples of FFCV": ("a.beton.gz", beton, "has 200,000 rows"),
    "many samples of MDS": ("mds", mds_of_many_samples, "has 200,000 rows"),
    "many records in little space": ("a.tfrecord.gz", tfrecord, "has 1,001 rows"),
    "a value that rows of Parquet share": ("a.parquet", parquet, "it needs over 2.0 GiB of memory"),
    "many rows of Parquet": ("a.parquet", parquet_of_many_rows, "has 200,000 rows"),
    "a table of many rows": ("a.parquet", table_of_many_rows, "has 200,000 rows"),
    "a line of CSV": (
        "a.csv",
        lambda path: endless(path, b"file_name\n"),
        "row at line 2 is longer than 16.0 MiB",
    ),
    "a row of CSV in many lines": ("a.csv", many_lines, "a.csv: the row at line 83470"),
    "a header of CSV": ("a.csv", lambda path: endless(path, b"a"), "row at line 1 is longer than"),
    "a line of JSON": (
        "a.jsonl",
        lambda path: endless(path, b'{"file_name": 1}\n{'),
        "row at line 2 is longer than 16.0 MiB",
    ),
    "a first line of JSON": (
        "a.jsonl",
        lambda path: endless(path, b"{"),
        "row at line 1 is longer than",
    ),
    "annotations of a terabyte": ("a.json", coco, "has 1.0 TiB, over the limit of 16.0 GiB"),
}


@pytest.mark.parametrize("name", cases(BOMBS, 6))
def test_a_bomb_is_named_in_little_memory(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, make, reason = BOMBS[name]
    monkeypatch.setattr(inputs, "_FREE_ROWS", 1000)
    arguments = make(tmp_path / file)
    tracemalloc.start()
    try:
        done = run_main("convert", *arguments, "--to", "lmdb", "--dry-run", tmp_path / "out")
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert done.returncode == 1, done.stderr
    assert reason in done.stderr
    assert str(tmp_path / file) in done.stderr
    assert peak < BYTES


@pytest.mark.parametrize("packing", cases(PACKED, 1))
def test_a_packed_shard_has_a_limit(packing: str, tmp_path: Path) -> None:
    arguments = mds(tmp_path / "packed", packing)
    tracemalloc.start()
    try:
        (problem,) = get_source("mds").open(Path(str(arguments[1]))).scan().problems[""]
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    stated = (
        "it cannot be unpacked: it declares" if packing == "snappy" else "too many for its size"
    )
    assert stated in problem.reason
    assert peak < BYTES


def test_labels_are_not_read_if_they_are_too_many(tmp_path: Path) -> None:
    path = tmp_path / "a.h5"
    with h5py.File(path, "w") as file:
        file.create_dataset("x", (100, 8, 8), "u1")
        file.create_dataset("y", (10**9,), "i8", chunks=(1000,))
    done = run_main(
        *("convert", "hdf5", path, tmp_path / "out", "--to", "lmdb"),
        *("--image", "x", "--label", "y"),
    )
    assert done.returncode == 2
    assert "it has 1,000,000,000 values" in done.stderr


def test_a_limited_number_of_problems_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(driver, "_MOST_PROBLEMS", 100)
    path = tmp_path / "a.tfrecord"
    write_tfrecord(path, [{"image": (png(), "byte")}])
    with path.open("ab") as file:
        file.write(tfrecord_record(b"") * 1000 + b"cut")
    problems = get_source("tfrecord").open(path, image="image", label="none").scan().problems[""]
    assert [problem.path for problem in problems[98:]] == [
        "a/00000099",
        "a/00000100",
        "a.tfrecord (rest)",
        "(and 900 more)",
    ]


def test_a_source_of_many_rows_is_read_if_it_has_bytes_for_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inputs, "_FREE_ROWS", 3)
    arguments = idx(tmp_path / "raw", 50, 20, 20)
    (path,) = (tmp_path / "raw").glob("*images*")
    assert path.stat().st_size > 50
    done = run_main("convert", *arguments, "--to", "lmdb", "--dry-run", tmp_path / "out")
    assert done.returncode == 0, done.stderr


def test_values_of_lmdb_have_a_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Many keys may share the pages of one value, and a file may be sparse."""
    path = write_lmdb(tmp_path / "a", {b"a": png(), b"b": bytes(2000)}) / "data.mdb"
    monkeypatch.setattr(lmdb_reader, "MAX_VALUE", 1999)
    assert lmdb_reader.read(str(path), 1, "images", b"a", b"")[8:] == png()
    for key, text in ((b"b", b""), (b"a", b"b")):
        with refused(BadImage):
            lmdb_reader.read(str(path), 1, "images", key, text)


def test_a_table_of_holes_is_not_read_to_its_end(tmp_path: Path) -> None:
    path = tmp_path / "a.beton"
    count = 1 << 34
    table = 24 + 1041 + 13 * count
    path.write_bytes(struct.pack("<HHIQQ", 2, 1, 1 << 21, count, table) + b"\2image")
    os.truncate(path, table + 24 * count)
    tracemalloc.start()
    try:
        done = run_main("convert", "ffcv", path, tmp_path / "out", "--to", "hdf5")
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert done.returncode == 2
    assert "its allocation table points outside its data" in done.stderr
    assert peak < BYTES


def test_a_pipe_is_no_lmdb_environment(tmp_path: Path) -> None:
    """The library waited for its other end."""
    os.mkfifo(tmp_path / "data.mdb")
    for path in (tmp_path, tmp_path / "data.mdb"):
        done = run_main("convert", "lmdb", path, tmp_path / "out", "--to", "hdf5")
        assert done.returncode == 2
        assert "data.mdb is not a file" in done.stderr


def sparse(path: Path, count: int) -> Path:
    """Write sparse files of 64 MiB each: all is a hole but a PNG file."""
    members = [old_sparse_member(f"{n}.png", png(), 1 << 26) for n in range(count)]
    path.write_bytes(b"".join(members) + bytes(1024))
    return path


def test_attaching_does_not_fill_the_holes_of_sparse_members(tmp_path: Path) -> None:
    path = sparse(tmp_path / "a.tar", 8)
    tracemalloc.start()
    try:
        done = run_main("attach", path, tmp_path / "out", "--workers", "1")
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert done.returncode == 1
    assert "its image is not stored as one byte range" in done.stderr
    assert peak < 1 << 25


def test_a_sparse_member_is_converted(tmp_path: Path) -> None:
    done = run_main(
        *("convert", "webdataset", sparse(tmp_path / "a.tar", 1), tmp_path / "out"),
        *("--to", "lmdb", "--dry-run"),
    )
    assert done.returncode == 0, done.stderr


def listed(path: Path, content: bytes) -> int:
    path.write_bytes(content)
    with OpenedFile(str(path)) as view:
        return len(list(tar_members.members(view)))


def linked(path: Path) -> None:
    """Write groups that contain each other."""
    with h5py.File(path, "w") as file:
        file["x"] = np.zeros((2, 8, 8), np.uint8)
        groups = [file.create_group(str(number)) for number in range(12)]
        for group in groups:
            for name, other in enumerate(groups):
                group[str(name)] = other


def linear(function: Callable[[], Any]) -> Any:
    start = time.process_time()
    answer = function()
    assert time.process_time() - start < SECONDS
    return answer


@pytest.mark.measures
def test_a_sparse_map_takes_time_for_its_bytes_alone(tmp_path: Path) -> None:
    def without_line_ends() -> None:
        with refused(BadImage, "0"):
            listed(tmp_path / "a.tar", sparse_member("a.png", b"1" * (32 << 20)))

    linear(without_line_ends)
    many = b"65536\n" + b"0\n0\n" * 65536
    assert (
        linear(lambda: listed(tmp_path / "b.tar", sparse_member("a.png", many) + bytes(1024))) == 1
    )


@pytest.mark.measures
def test_pax_records_take_time_for_their_bytes_alone(tmp_path: Path) -> None:
    records = pax_header(b"5 a=\n" * 200_000 + bytes(500)) * 4
    content = records + tarfile.TarInfo("a.png").tobuf() + bytes(1024)
    assert linear(lambda: listed(tmp_path / "a.tar", content)) == 1


@pytest.mark.measures
def test_an_object_of_many_tags_takes_time_for_its_bytes_alone() -> None:
    tags = "".join(f"<t{number}/>" for number in range(60_000))
    tree = voc.parse(f"<object>{tags}<part>1</part><part>2</part></object>".encode())
    found = linear(lambda: voc._plain(tree))
    assert len(found) == 60_001
    assert found["part"] == ["1", "2"]


def test_groups_that_contain_each_other_are_walked_once(tmp_path: Path) -> None:
    path = tmp_path / "a.h5"
    linked(path)
    source = get_source("hdf5").open(path)
    assert len(source.scan().splits[""]) == 2


def test_a_value_is_kept_without_a_walk_through_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.h5"
    linked(path)
    monkeypatch.setattr(hdf5_reader, "_walk", None)
    try:
        for name in ("z", "0/z", "x/z", "0"):
            assert hdf5_reader.value(str(path), 1, name, 0, optional=True) == b""
        value = hdf5_reader.value(str(path), 1, "x", 0, optional=True)
        assert np.load(io.BytesIO(value[1:])).shape == (8, 8)
    finally:
        hdf5_reader._OPEN.pop(str(path))[1].close()


def test_keys_of_pages_that_refer_to_each_other_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both children of the root become the first one, which has all keys again."""
    path = write_lmdb(tmp_path / "a", {b"%04d" % number: png() for number in range(400)})
    data = bytearray((path / "data.mdb").read_bytes())
    roots = [
        page
        for page in range(8192, len(data), 4096)
        if data[page + 10] == 1 and int.from_bytes(data[page : page + 8], "little") == page // 4096
    ]
    assert roots
    for page in roots:
        count = (int.from_bytes(data[page + 12 : page + 14], "little") - 16) // 2
        nodes = [
            page + int.from_bytes(data[page + 16 + 2 * n : page + 18 + 2 * n], "little")
            for n in range(count)
        ]
        for node in nodes[1:]:
            data[node : node + 4] = data[nodes[0] : nodes[0] + 4]
    (path / "data.mdb").write_bytes(data)
    monkeypatch.setattr(inputs, "_FREE_ROWS", 1000)
    with refused(ConversionFailed):
        get_source("lmdb").open(path, layout="images").scan()


def test_heaps_of_hdf5_that_overlap_are_read_once(tmp_path: Path) -> None:
    """Every reference may name another heap, whose objects are all that follow."""
    path = tmp_path / "a.h5"
    heads = struct.pack("<4s4xQ", b"GCOL", 1 << 15) * 2048
    path.write_bytes(heads + struct.pack("<IQI", 1, 16, 1) + struct.pack("<IQI", 1, 32, 1))
    with path.open("rb") as file:
        heaps = hdf5_reader._Heaps(file, 0)
        heaps.find(len(heads))
        with refused(BadImage):
            heaps.find(len(heads) + 16)


def test_a_value_of_json_has_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(values, "_MOST_JSON", 9)
    for option in ("a=a:json", "a=a:/0:text"):
        (field,) = kept.parse_keep(option)
        assert kept.value_of(field, field.field("json"), b'["b","c"]')
        with pytest.raises(BadImage, match=r"a: a .*has over 9 bytes"):
            kept.value_of(field, field.field("json"), b'["b", "c"]')
