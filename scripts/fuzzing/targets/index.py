"""The files of the index, read through the dataset that they belong to."""

from __future__ import annotations

import random
import zlib
from pathlib import Path

import numpy as np

from scripts.fuzzing.material import dataset
from scripts.fuzzing.target import SECRET, Target, broken, put
from shardkit.dataset import index_reader as columns
from shardkit.dataset.index import ROW
from shardkit.dataset.located import LocatedRows
from shardkit.dataset.shardset import ShardSet, open_shards
from shardkit.errors import CorruptDataset
from shardkit.system.npy import npy_header

_NAMES = ("rows", "keys", "keys-ends", "paths", "paths-ends")
_ROWS_HEADER = len(npy_header((1,), ROW))


class IndexTarget(Target):
    """An input is a byte that says which file, and the file's bytes.

    Each row's own check is made to fit again; its checksum, which covers the image, never is. So
    what is read is right, or another of the dataset's images where whole rows changed places.
    """

    name = "index"
    allowed = (CorruptDataset,)
    tokens = (
        *(b"'|O'", b"'descr': '|O'", b"True", b"__import__('os')"),
        *(b"\x93NUMPY\x02\0", b"\x80\x04."),
        *(bytes(7) + b"\x80", bytes(8), b"\xff" * 8, b"\xff" * 4),
    )

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.place = dataset("webdataset", folder)
        whole = open_shards(self.place)
        self._texts = {"keys": list(whole.keys), "paths": list(whole.paths)}
        self._images = [
            _sample(whole.find(np.arange(len(whole))), row) for row in range(len(whole))
        ]
        self._files = [(self.place / f"index/{name}.npy").read_bytes() for name in _NAMES]
        self.seeds = [bytes((number,)) + data for number, data in enumerate(self._files)]
        self.seeds += [self.seeds[0]] * 4  # the rows count for most

    def check(self, data: bytes) -> str:
        number = data[0] % len(_NAMES) if data else 0
        path = self.place / f"index/{_NAMES[number]}.npy"
        limits = columns._HASHED, columns._HELD
        try:
            # Digests would refuse every input; here it is tried what stands behind them.
            columns._HASHED = columns._HELD = 0
            put(path, data[1:])
            return self._read(open_shards(self.place))
        finally:
            columns._HASHED, columns._HELD = limits
            put(path, self._files[number])

    def _read(self, shards: ShardSet) -> str:
        right = 0
        for row in range(len(shards)):
            try:
                if _sample(shards.find(np.array([row])), 0) not in self._images:
                    broken("an image is read that was never stored", row)
                right += 1
            except CorruptDataset:
                continue
        try:
            _sample(shards.find(np.arange(len(shards))), 0)
        except CorruptDataset:
            right -= 1
        shards.announce(np.arange(len(shards)))
        for name, expected in self._texts.items():
            texts = list(getattr(shards, name))
            if len(texts) != len(expected) or [*getattr(shards, name)[0:3]] != texts[:3]:
                broken("a text is another when it is read in another way", name)
            if [getattr(shards, name)[row] for row in range(len(texts))] != texts:
                broken("a text is another when it is read alone", name)
            if any(SECRET.decode() in text for text in texts):
                broken("what stands outside came out")
        _ = shards.labels
        return "all right" if right == len(shards) else "some right"

    def mend(self, data: bytes, rng: random.Random) -> bytes:
        if data[:1] != b"\0" or rng.random() < 0.2:
            return data
        mended = bytearray(data)
        for start in range(1 + _ROWS_HEADER, len(data) - ROW.itemsize + 1, ROW.itemsize):
            check = zlib.crc32(mended[start : start + 29]) & 0xFFFFFF
            mended[start + 29 : start + 32] = check.to_bytes(3, "little")
        return bytes(mended)


def _sample(found: LocatedRows, number: int) -> tuple[bytes, str, int, int, int]:
    image = found.read(number, memoryview(bytearray(found.lengths[number])))
    return bytes(image.data), image.field, image.label, image.width, image.height
