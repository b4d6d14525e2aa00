"""A record against the file that it was made from: `shardkit verify --against`."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from shardkit.codecs.image import Pixels
from shardkit.decode import decode_stored
from shardkit.errors import BadImage
from shardkit.recipe import Recipe
from shardkit.record import Record
from shardkit.shardset import StoredImage
from shardkit.sources.imagefolder import Entry, ImageFolder

ALIKE_PSNR = 40.0
"""Decibels of a peak signal-to-noise ratio from which on two images count as the same picture.

Other versions of a codec or a scaler round some values otherwise, by one or two: that leaves more.
A shift by one pixel leaves less, 23 to 33 dB on photographs and drawings. What is as near to each
other as qualities 85 and 90, or two filters, is not told apart (39 to 52 dB): only equal versions
prove those.
"""


@dataclass(frozen=True, kw_only=True)
class Against:
    """What the records of a shard are to be compared with."""

    root: Path
    """The source's folder."""
    entries: Sequence[Entry | None]
    """The file of each row; None if the source has none."""
    recipe: Recipe
    exact: bool
    """Whether the libraries are those that made the dataset, so that they must give its bytes."""


@dataclass(kw_only=True)
class Compared:
    """What came of the comparison of some records."""

    same: int = 0
    """Records of which every byte is as it must be."""
    alike: int = 0
    """Records whose pixels are alike, made by other versions of libraries."""
    least_psnr: float | None = None
    """The worst of those, in decibels."""
    bytes: int = 0
    """Bytes of the source's files."""
    files: dict[str, str] = field(default_factory=dict)
    """Path to the SHA-256 of each of the source's files."""

    def add(self, other: Compared) -> None:
        """Take in what came of others."""
        self.same += other.same
        self.alike += other.alike
        self.bytes += other.bytes
        self.files.update(other.files)
        known = [psnr for psnr in (self.least_psnr, other.least_psnr) if psnr is not None]
        self.least_psnr = min(known, default=None)


class Comparison:
    """Compares the records of one shard, one after the other."""

    def __init__(self, against: Against) -> None:
        self._against = against
        recipe = against.recipe
        # The pixels of what passes through untouched need not be looked at: its bytes are.
        self._recipe = replace(recipe, check="header") if recipe.check == "decode" else recipe
        self.result = Compared()

    def at_work(self) -> AbstractContextManager[None]:
        """Return a context to compare many records in."""
        return self._recipe.at_work()

    def difference(self, record: Record, row: int) -> str:
        """Return how the record at ``row`` of the shard differs from what its file gives, or ""."""
        entry = self._against.entries[row]
        if entry is None:
            return "the source has no such file"
        try:
            (original,) = ImageFolder(self._against.root, [entry]).read([0])
            expected = self._recipe.apply(original)
        except BadImage as error:
            return f"its file does not give it: {error}"
        data = original.fields[original.image_field or ""]
        self.result.files[entry.path] = hashlib.sha256(data).hexdigest()
        self.result.bytes += len(data)
        if record == expected:
            self.result.same += 1
            return ""
        return _other_fields(record, expected) or self._other_image(record, expected, data)

    def _other_image(self, record: Record, expected: Record, data: bytes) -> str:
        if expected.fields[expected.image_field or ""] == data:
            return "its image is not that of its file, byte for byte"
        if self._against.exact:
            return "its image is not what the recipe makes of its file with the same libraries"
        try:
            psnr = _psnr(_pixels(record), _pixels(expected))
        except BadImage as error:
            return str(error)
        if psnr < ALIKE_PSNR:
            return (
                f"its image is not like what the recipe makes of its file: PSNR {psnr:.1f} dB, "
                f"under {ALIKE_PSNR:.0f}"
            )
        self.result.alike += 1
        self.result.least_psnr = min(psnr, self.result.least_psnr or psnr)
        return ""


def _other_fields(record: Record, expected: Record) -> str:
    """Return what is wrong with a record beside its image, or ""."""
    if record.key != expected.key:
        return f"its key is not that of its file, {expected.key!r}"
    if record.label != expected.label:
        return f"its label is {record.label}; that of its file is {expected.label}"
    if record.image_field != expected.image_field:
        return f"it is stored as {record.image_field}; its file gives {expected.image_field}"
    size, wanted = (f"{m['width']} x {m['height']}" for m in (record.meta, expected.meta))
    if size != wanted:
        return f"its size is {size} pixels; its file gives {wanted}"
    same = record.fields.keys() == expected.fields.keys() and record.meta == expected.meta
    return "" if same else "its metadata are not those of its file"


def _pixels(record: Record) -> Pixels:
    field, meta = record.image_field or "", record.meta
    size = int(meta["width"]), int(meta["height"])
    return decode_stored(StoredImage(record.fields[field], field, record.label, *size))


def _psnr(one: Pixels, other: Pixels) -> float:
    """Return the peak signal-to-noise ratio of two images of one size, at most 100 dB."""
    error = float(np.mean((one.astype(np.float32) - other) ** 2))
    return min(100.0, 10 * float(np.log10(255**2 / max(error, 1e-10))))
