"""A dataset with one damaged file: all damage is found, and no read is wrong."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np

from scripts.fuzzing.material import dataset
from scripts.fuzzing.target import Target, broken, put
from shardkit.dataset.decode import decode_shown
from shardkit.dataset.handles import forget
from shardkit.dataset.manifest import MANIFEST_NAME
from shardkit.dataset.shardset import ShardSet, open_shards
from shardkit.errors import BadImage, CorruptDataset, UsageError
from shardkit.verification.verify import verify

_Sample = tuple[bytes, int]
_WIDTHS = (1, 1, 2, 4, 8, 16, 64, 512, 4096)
_DEEDS = ("flip", "set", "clear", "cut", "insert", "delete", "swap", "extend", "replace")


class DatasetTarget(Target):
    """An input says which file of a small dataset is damaged, where and how.

    Byte 0: the file; 1: the deed; 2: how many bytes of it; 3 to 6: where; the rest: new bytes.
    Reads compare the checksum of each record. A swap within the index may put whole rows in each
    other's places: then another stored sample is read, and only `verify` finds out.
    """

    to: str
    allowed = (CorruptDataset, UsageError)
    tokens = (b"\0" * 8, b"\xff" * 8, b"[" * 2000, b"{}", b"../", b"\x80\x04.")

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.places = [dataset(self.to, folder, raw=raw) for raw in (False, True)]
        self._whole = [_read(open_shards(place, verify=True)) for place in self.places]
        self._files = [
            (number, path, path.read_bytes())
            for number, place in enumerate(self.places)
            for path in sorted(place.rglob("*"))
            if path.is_file()
        ]
        rng = random.Random(0)
        self.seeds = [
            bytes((file, deed)) + rng.randbytes(13)
            for file in range(len(self._files))
            for deed in range(len(_DEEDS))
        ]

    def check(self, data: bytes) -> str:
        data = data.ljust(7, b"\0")
        number, path, content = self._files[data[0] % len(self._files)]
        changed = self._damaged(content, data)
        if changed == content:
            return "no damage"
        place = self.places[number]
        identities = [(place / s.name, s.sha256) for s in open_shards(place).manifest.shards]
        try:
            put(path, changed)
            for identity in identities:
                forget(*identity)
            return self._examine(place, number, str(path.relative_to(place)), data)
        finally:
            put(path, content)
            for identity in identities:
                forget(*identity)

    def _examine(self, place: Path, number: int, name: str, data: bytes) -> str:
        level = "decode" if data[2] % 4 == 0 else "full"
        try:
            found = verify(place, level).findings
        except UsageError:
            found = None  # the manifest is of a newer version, or cannot be read
        # A manifest that is sound, of another dataset, makes all that it names look damaged.
        blamed = name == MANIFEST_NAME or name in [finding.file for finding in found or ()]
        if found is not None and not (found and blamed):
            broken("verify does not find the damage", (name, [f.file for f in found]))
        shards = open_shards(place, verify=True)
        right = 0
        for row, (one, whole) in enumerate(zip(_read(shards), self._whole[number], strict=True)):
            if one is None:
                continue
            right += one == whole
            moved = name.startswith("index/") and one in self._whole[number]
            if one != whole and not moved:
                broken("a read gives another sample", (name, row))
        return "some right" if right < len(self._whole[number]) else "all right"

    def _damaged(self, content: bytes, data: bytes) -> bytes:
        deed = _DEEDS[data[1] % len(_DEEDS)]
        width = _WIDTHS[data[2] % len(_WIDTHS)]
        start = int.from_bytes(data[3:7], "little") % (len(content) + 1)
        new = data[7:] or b"\0"
        changed = bytearray(content)
        if deed == "flip" and content:
            changed[start % len(content)] ^= 1 << data[2] % 8
        elif deed == "set":
            changed[start : start + len(new)] = new[: len(content) - start]
        elif deed == "clear":
            changed[start : start + width] = bytes(len(content[start : start + width]))
        elif deed == "cut":
            del changed[start:]
        elif deed == "insert":
            changed[start:start] = new
        elif deed == "delete":
            del changed[start : start + width]
        elif deed == "swap":
            other = int.from_bytes(new[:4], "little") % (len(content) + 1)
            one, two = start - start % width, other - other % width
            if abs(one - two) >= width and max(one, two) + width <= len(content):
                changed[one : one + width] = content[two : two + width]
                changed[two : two + width] = content[one : one + width]
        elif deed == "extend":
            changed += new
        elif deed == "replace":
            return self._files[new[0] % len(self._files)][2]
        return bytes(changed)


class LmdbDatasetTarget(DatasetTarget):
    name = "dataset-lmdb"
    to = "lmdb"


class Hdf5DatasetTarget(DatasetTarget):
    name = "dataset-hdf5"
    to = "hdf5"


class TarDatasetTarget(DatasetTarget):
    name = "dataset-tar"
    to = "webdataset"


def _read(shards: ShardSet) -> list[_Sample | None]:
    """Return pixels and label of each row; None where reading it is refused."""
    return [_sample(shards, row) for row in range(len(shards))]


def _sample(shards: ShardSet, row: int) -> _Sample | None:
    try:
        found = shards.find(np.array([row]))
        image = found.read(0, memoryview(bytearray(found.lengths[0])))
        return decode_shown(image).tobytes(), image.label
    except (CorruptDataset, BadImage):
        return None
