"""TFRecord files: the same values as the tfrecord package reads, and all that is reported."""

from __future__ import annotations

import io
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tfrecord
from crc32c import crc32c as reference
from foreign import Features, problems, write_tfrecord
from helpers import png, run_main
from refusals import refused
from table import for_each

from shardkit import convert, open_dataset, open_source, verify
from shardkit.dataset.shardset import open_shards
from shardkit.errors import BadImage, UsageError
from shardkit.registry import get_source
from shardkit.sources.crc32c import crc32c
from shardkit.sources.inputs import OpenedFile
from shardkit.sources.tfrecord_file import features, records

A, B, C = (png(8, 6, seed) for seed in range(3))


def scan(path: str | Path, **options: Any) -> Any:
    return open_source("tfrecord", path, **options).scan()


def labels(found: Any) -> list[str | None]:
    entries = found.splits[""].entries
    return [(found.classes or ())[each.label] if each.label >= 0 else None for each in entries]


def imagenet(path: Path) -> Path:
    rows: list[Features] = [
        {
            "image/encoded": (data, "byte"),
            "image/class/label": (number, "int"),
            "image/class/text": (b"thing", "byte"),
            "image/filename": (b"n01/%d.png" % number, "byte"),
            "image/object/bbox/xmin": ([0.25, 0.5], "float"),
        }
        for number, data in enumerate((A, B, C), 1)
    ]
    return write_tfrecord(path, rows)


@for_each("size", [0, 1, 4, 63, 64, 65, 127, 128, 1000, 4097, 100_003])
def test_the_checksum_equals_that_of_the_crc32c_package(size: int) -> None:
    data = np.random.default_rng(size).bytes(size)
    assert crc32c(data) == reference(data)


@pytest.mark.parametrize("name", ["x.tfrecord", "x.tfrecord.gz"])
def test_features_equal_those_of_the_tfrecord_package(name: str, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    rows: list[Features] = [
        {
            "bytes": (rng.bytes(int(rng.integers(0, 40_000))), "byte"),
            "many": ([rng.bytes(3), b"", rng.bytes(200)], "byte"),
            "numbers": ([int(n) for n in rng.integers(-(2**62), 2**62, 20)], "int"),
            "one": (-1, "int"),
            "floats": ([0.5, 1.5], "float"),
        }
        for _ in range(20)
    ]
    path = write_tfrecord(tmp_path / name, rows)
    packed = "gzip" if name.endswith(".gz") else None
    known = tfrecord.reader.tfrecord_iterator(str(path), compression_type=packed)
    count = 0
    with OpenedFile(str(path), ahead=1 << 14) as view:
        for place, data in zip(records(view), known, strict=True):
            expected = tfrecord.example_pb2.Example.FromString(bytes(data)).features.feature
            found = features(view.read, place.start, place.start + place.length)
            count += 1
            assert found.keys() == set(expected)
            for key, feature in found.items():
                values = [view.read(*each) for each in feature.ranges]
                assert values == list(expected[key].bytes_list.value)
                assert feature.numbers == list(expected[key].int64_list.value)
                floats = b"".join(view.read(*each) for each in feature.floats)
                assert np.frombuffer(floats, "<f4").tolist() == list(expected[key].float_list.value)
                assert f"{feature.kind}_list" == expected[key].WhichOneof("kind")
    assert count == 20


def test_the_usual_features_are_found_and_labels_shifted(tmp_path: Path) -> None:
    path = imagenet(tmp_path / "train-00000-of-00001")
    found = scan(path, label_offset=-1, name="image/filename")
    assert labels(found) == ["0", "1", "2"]
    assert [entry.path for entry in found.splits[""].entries] == [f"n01/{n}.png" for n in (1, 2, 3)]
    assert [r.fields["png"] for r in found.splits[""].read(range(3))] == [A, B, C]
    assert found.understood["image"] == "image/encoded: encoded images"
    assert found.understood["label"].endswith(" -1: 3 integers from 0 to 2")
    assert found.understood["unused"] == "image/class/text (text), image/object/bbox/xmin (float 2)"
    assert scan(path).splits[""].entries[0].path == "train-00000-of-00001/00000000"
    (tmp_path / "names.txt").write_text("one\ntwo\nthree\n")
    named = scan(path, label_offset=-1, classes=str(tmp_path / "names.txt"))
    assert labels(named) == ["one", "two", "three"]
    again = get_source("tfrecord").find(path, {"": named.source.describe("")})
    assert labels(again.scan(named.classes)) == ["one", "two", "three"]
    (problem,) = scan(path, label_offset=-2).problems[""]
    assert "label 1 becomes negative with the option label_offset=-2" in problem.reason


def test_missing_features_are_named(tmp_path: Path) -> None:
    rows: list[Features] = [
        {"image": (A, "byte"), "label": (1, "int")},
        {"label": (1, "int")},
        {"image": (B, "byte")},
        {"image": (B, "byte"), "label": ([1, 2], "int")},
        {"image": (7, "int"), "label": (1, "int")},
    ]
    path = write_tfrecord(tmp_path / "x.tfrecord", rows)
    assert problems(scan(path)) == {
        "x/00000001": "its record has no feature 'image'",
        "x/00000002": "its row has no label",
        "x/00000003": "its 'label' feature has 2 values, not one",
        "x/00000004": "its 'image' feature has int64, not one bytes value",
    }
    assert labels(scan(path, label="none")) == [None] * 3
    two = write_tfrecord(tmp_path / "y.tfrecord", [{"a": (A, "byte"), "b": (B, "byte")}])
    with refused(UsageError):
        scan(two)
    empty = write_tfrecord(tmp_path / "z.tfrecord", [])
    with refused(UsageError):
        scan(empty)


def test_damage_is_reported_after_the_good_records(tmp_path: Path) -> None:
    path = imagenet(tmp_path / "x.tfrecord")
    data = bytearray(path.read_bytes())
    second = struct.unpack_from("<Q", data)[0] + 16
    found = scan(path)
    path.write_bytes(data[:-3])
    assert problems(scan(path))["x.tfrecord (rest)"].startswith(
        "the file is truncated in the record"
    )
    data[data.index(B) + 20] ^= 1
    path.write_bytes(data)
    with refused(BadImage):
        found.splits[""].read([1])
    assert len(found.splits[""].read([0, 2])) == 2
    data[second] ^= 1
    path.write_bytes(data)
    (reason,) = problems(scan(path)).values()
    assert reason.startswith(f"the length at byte {second} does not match its checksum")
    assert len(scan(path).splits[""]) == 1
    path.write_bytes(path.read_bytes()[:second] + data[second:])
    path.write_bytes(bytes(data[:second]) + b"")
    with pytest.raises(BadImage):
        found.splits[""].read([2])


def test_a_first_record_that_is_no_example_is_a_bad_record(tmp_path: Path) -> None:
    path = imagenet(tmp_path / "x.tfrecord")
    wrong = b"\x0a\x7f"  # a message of 127 bytes, of which there are none
    length = struct.pack("<Q", len(wrong))
    path.write_bytes(length + masked(length) + wrong + masked(wrong) + path.read_bytes())
    found = scan(path)
    assert labels(found) == ["1", "2", "3"]
    (reason,) = problems(found).values()
    assert "tf.train.Example" in reason


def masked(data: bytes) -> bytes:
    """Return the CRC-32C of TFRecord, rotated and with a number added."""
    crc = reference(data)
    return struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF)


def test_more_features_are_kept(tmp_path: Path) -> None:
    rows: list[Features] = [
        {
            "image": (A, "byte"),
            "text": ("größe".encode(), "byte"),
            "meta": (b'{"age": 7}', "byte"),
            "score": (1.5, "float"),
            "many": ([0.5, 2.0], "float"),
            "ids": ([3, -4], "int"),
            "mask": (C, "byte"),
        },
        {
            "image": (B, "byte"),
            "text": (b"b", "byte"),
            "meta": (b'{"age": 8}', "byte"),
            "score": (2.5, "float"),
            "many": ([], "float"),
            "ids": (5, "int"),
        },
        {"image": (B, "byte"), "text": (b"b", "byte")},
    ]
    path = write_tfrecord(tmp_path / "x.tfrecord", rows)
    keep = "caption=text,age=meta:/age:int64,score=score,many=many:array,ids=ids,other=mask:image?"
    found = scan(path, image="image", keep=keep)
    assert problems(found) == {
        "x/00000002": "its row has no meta; to allow this, write meta?",
    }
    assert found.understood["ids"] == "ids (int64 2): json"
    convert(found.source, tmp_path / "made", to="hdf5", shuffle=False, on_error="skip")
    assert verify(tmp_path / "made", against=path).findings == []
    shards = open_shards(tmp_path / "made")
    assert shards.column("caption").tolist() == ["größe", "b"]
    assert shards.column("age").tolist() == [7, 8]
    assert shards.column("score").tolist() == [1.5, 2.5]
    assert shards.column("ids").tolist() == [[3, -4], [5]]
    first, second = found.splits[""].read([0, 1])
    assert first.fields["other.png"] == C
    assert "other.png" not in second.fields
    assert np.load(io.BytesIO(first.fields["many.npy"])).tolist() == [0.5, 2.0]
    with refused(BadImage, "id", "[3, -4]"):
        scan(path, image="image", keep="id=ids:int64").splits[""].read([0])


def test_names_of_tensorflow_datasets_are_recognized(tmp_path: Path) -> None:
    """As ``tfds`` writes: the number of the part follows the suffix."""
    source = tmp_path / "mnist/3.0.1"
    source.mkdir(parents=True)
    for name in ("train.tfrecord-00000-of-00002", "train.tfrecord-00001-of-00002"):
        imagenet(source / f"mnist-{name}")
    (source / "features.json").write_text("{}")
    assert len(scan(source).splits[""]) == 6
    imagenet(source / "mnist-test.tfrecord-00000-of-00001")
    with refused(UsageError, source, "*train*", f"shardkit convert {source}"):
        scan(source)
    command = ("convert", tmp_path / "mnist", tmp_path / "out", "--to", "lmdb", "--workers", "1")
    assert run_main(*command).returncode == 0
    sizes = {split: len(open_dataset(tmp_path / "out" / split)) for split in ("train", "test")}
    assert sizes == {"train": 6, "test": 3}
