"""Files of other programs that sources parse: tar, TFRecord, FFCV, IDX, .npy and .npz."""

from __future__ import annotations

import io
import random
import struct
import tempfile
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any
from zipfile import ZIP_DEFLATED, ZIP_STORED, ZipFile

import numpy as np
from hostile.foreign_shards import (
    BetonColumn,
    beton_of,
    old_sparse_member,
    sparse_member,
    tfrecord_record,
)

from scripts.fuzzing.target import SECRET, Target, broken
from scripts.fuzzing.targets.tar import TarTarget
from shardkit.codecs.foreign import identify
from shardkit.contracts import Entry, Scan
from shardkit.errors import BadImage, ConversionFailed, UsageError
from shardkit.registry import get_source

GIF = b"GIF89a\1\0\1\0\0\0\0;"


class SourceTarget(Target):
    """One file of a source, scanned and read."""

    allowed = (UsageError, BadImage, ConversionFailed)
    kind: str
    """Name of the source in the registry."""
    file: str
    """Name of the file in the folder."""
    whole: bool = False
    """Whether the source is the folder."""
    options: Sequence[dict[str, Any]] = ({},)

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        tempfile.tempdir = str(folder)  # where unpacked files are put
        identify(io.BytesIO(b"?"))  # loads all readers of Pillow, which guards would notice

    def check(self, data: bytes) -> str:
        path = self.folder / self.file
        path.write_bytes(data)
        path = self.folder if self.whole else path
        seen = [self._one(path, data, options) for options in self.options]
        return " ".join(sorted(set(seen)))

    def _one(self, path: Path, data: bytes, options: dict[str, Any]) -> str:
        found: Scan = get_source(self.kind).open(path, **options).scan()
        outcome = "listed" if not any(found.problems.values()) else "problems"
        for images in found.splits.values():
            if len(images) > len(data) + 1:
                broken("more images than bytes", len(images))
            for row in range(min(len(images), 500)):
                images.locate(row)
                try:
                    (record,) = images.read([row])
                except BadImage:
                    outcome = "bad"
                    continue
                if images.read([row]) != [record]:
                    broken("reading again gives another record", record.key)
                if any(SECRET in value for value in record.fields.values()):
                    broken("what stands outside of the file came out", record.key)
        return outcome


def require_in_place(found: Iterable[Any], data: bytes) -> None:
    """Require that records that can be attached have these bytes at their offsets in a file."""
    for located in found:
        if not isinstance(located, BadImage):
            for name, start in located.offsets.items():
                content = located.record.fields[name]
                if data[start : start + len(content)] != content:
                    broken("an attached file has other bytes there", located.record.key)


class ArchiveTarget(SourceTarget):
    """Archives whose images can be attached."""

    def _one(self, path: Path, data: bytes, options: dict[str, Any]) -> str:
        source: Any = get_source(self.kind).open(path, **options)
        for images in source.scan().splits.values():
            stored = images.of([entry for entry in images.entries[:500] if self.is_stored(entry)])
            require_in_place(source.located(images.split, stored.entries), data)
        return super()._one(path, data, options)

    def is_stored(self, entry: Entry) -> bool:
        return True


class ZipTarget(ArchiveTarget):
    """Members that are stored, or compressed."""

    name = "source-zip"
    kind = "zip"
    file = "x.zip"
    tokens = (
        *(b"PK\1\2", b"PK\3\4", b"PK\5\6", b"PK\6\6", b"PK\6\7"),
        *(b"../", b"a/1.gif", b"\xff" * 4),
    )

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.seeds = [_zip(names, how) for names in _NAMES for how in (ZIP_STORED, ZIP_DEFLATED)]

    def is_stored(self, entry: Entry) -> bool:
        return not entry.values


_NAMES = (
    ("a/1.gif", "b/2.gif"),
    ("x/train/a/1", "x/train/b/2.gif", "x/val/a/3.gif", "__MACOSX/x/._1"),
)


def _zip(names: Sequence[str], how: int) -> bytes:
    file = io.BytesIO()
    with ZipFile(file, "w", how) as archive:
        for name in names:
            archive.writestr(name, GIF)
    return file.getvalue()


class SourceTarTarget(ArchiveTarget):
    """Archives of other programs."""

    name = "source-tar"
    kind = "webdataset"
    file = "x.tar"
    options = ({}, {"grouping": "basename", "label": "json:/a/0"})
    tokens = (
        *TarTarget.tokens,
        *(b"30 GNU.sparse.realsize=999999999\n", b"25 GNU.sparse.name=a.gif\n", b"1\n0\n6\n"),
        *(b"22 GNU.sparse.size=10\n", b"24 GNU.sparse.map=0,5,6\n", b"a.cls", b"a.json", b"S"),
    )

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._tar = TarTarget(folder)
        old = old_sparse_member("a.gif", GIF, 100 + len(GIF), start=100)
        new = sparse_member("b.gif", b"1\n0\n%d\n" % len(GIF), GIF)
        self.seeds = [*self._tar.seeds, old + bytes(1024), new + bytes(1024)]

    def mend(self, data: bytes, rng: random.Random) -> bytes:
        return self._tar.mend(data, rng)


class TFRecordTarget(SourceTarget):
    """Lengths that lie, Examples that are none."""

    name = "source-tfrecord"
    kind = "tfrecord"
    file = "x.tfrecord"
    options = ({"image": "image", "label": "label"},)
    tokens = (
        *(b"\x0a\x05image\x12", b"\x0a\x05label\x12", b"\x1a\x03\x0a\x01\x07", b"\x1a\x02\x08\x07"),
        *(b"\xff" * 9 + b"\x01", b"\xff" * 10, b"\x80\x01", b"\x0a\x00", b"\x12\x00", GIF),
    )

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        numbers, packed = b"\x1a\x02\x08\x03", b"\x1a\x03\x0a\x01\x03"
        examples = [
            _example(image=_bytes(GIF), label=label) for label in (numbers, packed, _bytes(b"cat"))
        ]
        self.seeds = [
            tfrecord_record(examples[0]) * 2 + tfrecord_record(examples[1]),
            b"".join(map(tfrecord_record, examples)),
            tfrecord_record(_example(image=_bytes(GIF), other=b"\x12\x06\x0a\x04\0\0\0\0")),
            b"",
        ]

    def mend(self, data: bytes, rng: random.Random) -> bytes:
        """Divide the input into records again, with right lengths and checksums."""
        if rng.random() < 0.2:
            return data
        records: list[bytes] = []
        start = 0
        while start < len(data) and len(records) < 50:
            (length,) = struct.unpack_from("<Q", data.ljust(start + 8, b"\0"), start)
            length = min(length, len(data) - start - 12) if length < 1 << 20 else 20
            records.append(tfrecord_record(data[start + 12 : start + 12 + max(0, length)]))
            start += max(0, length) + 16
        return b"".join(records)


class BetonTarget(ArchiveTarget):
    """Fields, offsets, sizes and owners that lie."""

    name = "source-ffcv"
    kind = "ffcv"
    file = "x.beton"
    tokens = (
        *(bytes([kind]) for kind in range(8)),
        *(b'[["", "<f2"]]', b'[["", "|O"]]', b"[1]\0", GIF, b"\xff" * 8, bytes(8)),
    )

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        two = struct.pack("<33Q", 2, *[0] * 31, 13) + b'[["", "<i2"]]'
        image = BetonColumn("image", 2, "u1 <u2 <u2 <u8", [(0, 1, 1, None)] * 2, [GIF] * 2)
        raw = BetonColumn("image", 2, "u1 <u2 <u2 <u8", [(1, 2, 1, None)] * 2, [b"123456"] * 2)
        label = BetonColumn("label", 1, "<i8", [(3,)] * 2)
        others = (
            BetonColumn("info", 5, "<u8 <u8", [(None, 4)] * 2, [b"[1]\0"] * 2),
            BetonColumn("array", 4, "<u8", [(None,)] * 2, [b"1234"] * 2, two),
            BetonColumn("weight", 0, "<f8", [(1.5,)] * 2),
        )
        columns = ([image, label], [raw, label], [image, *others])
        self.seeds = [beton_of(each, page=8) for each in columns]

    def mend(self, data: bytes, rng: random.Random) -> bytes:
        """State version, and a table of allocations as large as it must be, at the end."""
        if rng.random() < 0.2 or len(data) < 24:
            return data
        _, fields, page, rows, _ = struct.unpack_from("<HHIQQ", data)
        kinds = data[24 : 24 + 1041 * fields : 1041]
        size = 24 * min(rows, 4) * sum(kind > 1 for kind in kinds)
        head = struct.pack("<HHIQQ", 2, fields, page, min(rows, 4), max(0, len(data) - size))
        return head + data[24:]


class TwoFilesTarget(SourceTarget):
    """Two files, one after the other; a number of two bytes divides them."""

    second: str
    """Name of the other file."""
    whole = True

    def check(self, data: bytes) -> str:
        (cut,) = struct.unpack(">H", data[:2].ljust(2, b"\0"))
        (self.folder / self.second).write_bytes(data[2 + cut :])
        return super().check(data[2 : 2 + cut])


class IdxTarget(TwoFilesTarget):
    """Images and labels of MNIST."""

    name = "source-idx"
    kind = "mnist"
    file = "train-images-idx3-ubyte"
    second = "train-labels-idx1-ubyte"
    options = ({"split": "train"},)
    tokens = (b"\0\0\x08\x03", b"\0\0\x08\x01", b"\xff\xff\xff\xff", b"\0\0\0\0", b"\x80\0\0\0")

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        images = struct.pack(">IIII", 0x803, 3, 2, 2) + bytes(range(12))
        self.seeds = [
            struct.pack(">H", len(images)) + images + struct.pack(">II", 0x801, count) + labels
            for count, labels in ((3, b"\0\1\2"), (3, b"\0\0\0"), (2, b"\0\1"))
        ]


class NpyTarget(TwoFilesTarget):
    """Two arrays: headers that are code, lie, or state objects."""

    name = "source-npy"
    kind = "npy"
    file = "images.npy"
    second = "labels.npy"
    tokens = (
        *(b"'|O'", b"'<U9'", b"'|u1'", b"(3, 2, 2)", b"(3,)", b"(999999999999, 2, 2)", b"True"),
        *(b"\x93NUMPY\x01\0", b"\x93NUMPY\x03\0", b"__import__('os')", b"()", b"(3, 0, 2)"),
    )

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        pixels = np.arange(12, dtype=np.uint8).reshape(3, 2, 2)
        for images, labels in (
            (pixels, np.array(["a", "b", "a"])),
            (pixels, np.arange(3)),
            (np.asfortranarray(pixels), np.array([b"a", b"b", b"c"])),
            (np.array([None, 1], object), np.arange(2)),
        ):
            first = _saved(np.save, images)
            self.seeds.append(struct.pack(">H", len(first)) + first + _saved(np.save, labels))


class NpyRowsTarget(SourceTarget):
    """An array whose rows are samples of a field."""

    name = "source-npy-rows"
    kind = "npy"
    file = "x.npy"
    options = ({"arrays": True},)
    tokens = NpyTarget.tokens

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        for dtype in ("<f4", ">f8", "|b1", "<c8", "|V2", "|O"):
            self.seeds.append(_saved(np.save, np.zeros((3, 2, 2), dtype)))


class NpzSampleTarget(SourceTarget):
    """A folder with one archive: a sample of several fields."""

    name = "source-npz-sample"
    kind = "npy"
    file = "x.npz"
    whole = True
    options = ({"arrays": True},)
    tokens = (*NpyTarget.tokens, b"PK\x03\x04", b"PK\x01\x02", b"PK\x05\x06", b"mel.npy", b"\x08\0")

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        mel = np.asfortranarray(np.zeros((3, 2), "<f4"))
        for save in (np.savez, np.savez_compressed):
            self.seeds.append(_saved(save, mel=mel, text=np.arange(3)))


class NpzTarget(SourceTarget):
    """Archives of arrays, stored or packed."""

    name = "source-npz"
    kind = "npy"
    file = "x.npz"
    options = ({},)
    tokens = (
        *(b"PK\x03\x04", b"PK\x01\x02", b"PK\x05\x06", b"labels.npy", b"images.npy", b"\x08\0"),
    )

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        images = np.arange(12, dtype=np.uint8).reshape(3, 2, 2)
        for save in (np.savez, np.savez_compressed):
            self.seeds.append(_saved(save, images=images, labels=np.array(["a", "b", "a"])))


def _saved(save: Callable[..., None], *arrays: Any, **named: Any) -> bytes:
    file = io.BytesIO()
    save(file, *arrays, **named)
    return file.getvalue()


def _example(**features: bytes) -> bytes:
    entries = b""
    for name, feature in features.items():
        entry = _field(1, name.encode()) + _field(2, feature)
        entries += _field(1, entry)
    return _field(1, entries)


def _bytes(value: bytes) -> bytes:
    return _field(1, _field(1, value))


def _field(number: int, value: bytes) -> bytes:
    return bytes([number << 3 | 2, len(value)]) + value
