"""Compare a record with its source file (`shardkit verify --against`)."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from shardkit.codecs.image import Pixels, decode_mask
from shardkit.codecs.image_type import RGB, ImageType
from shardkit.codecs.limits import pixels_up_to
from shardkit.contracts import Entry, Source
from shardkit.dataset.decode import decode_shown
from shardkit.dataset.located import EncodedImage
from shardkit.errors import BadImage
from shardkit.kinds.field import Field, Schema
from shardkit.pipeline import convert_record
from shardkit.recipe import CHECK_NOTES, Recipe
from shardkit.record import (
    IMAGE,
    IMAGE_FIELDS,
    LABEL_FIELD,
    META_FIELD,
    Record,
    dump_json,
    image_kind,
)
from shardkit.system.late import load

_ONLY_FIELDS = "shardkit.kinds.packing:only_fields"

ALIKE_PSNR = 40.0
"""Minimum peak signal-to-noise ratio, in decibels, for two images to count as the same picture.

Other versions of a codec or scaler round some values differently by one or two, which gives a
higher ratio. A shift by one pixel gives less: 23 to 33 dB on photographs and drawings. Close
variants, such as qualities 85 and 90 or two filters, are indistinguishable (39 to 52 dB); only a
comparison with the same library versions proves those.
"""


@dataclass(frozen=True, kw_only=True)
class SourceComparison:
    """The source files and the recipe to compare a shard's records with."""

    source: Source
    split: str
    entries: Sequence[Entry | None]
    """Source image of each row; None if the source lacks it."""
    recipe: Recipe
    schema: Schema
    """The fields of all records."""
    changed: Collection[str]
    """Names of those that did not come from the source."""
    exact: bool
    """Whether the library versions are those of the conversion, so the bytes must be equal."""


@dataclass(kw_only=True)
class ComparisonResult:
    """The result of comparing some records with their files."""

    same: int = 0
    """Records that are identical, byte for byte."""
    converted: int = 0
    """Identical records whose image is not that of the source, since it was converted."""
    alike: int = 0
    """Records with similar pixels, encoded by other library versions."""
    least_psnr: float | None = None
    """Lowest peak signal-to-noise ratio of the similar records, in decibels."""
    bytes: int = 0
    """Size of the source files in bytes."""
    files: dict[str, str] = field(default_factory=dict)
    """SHA-256 of each source file, by path."""

    def add(self, other: ComparisonResult) -> None:
        """Add the result for other records."""
        self.same += other.same
        self.converted += other.converted
        self.alike += other.alike
        self.bytes += other.bytes
        self.files.update(other.files)
        psnrs = [psnr for psnr in (self.least_psnr, other.least_psnr) if psnr is not None]
        self.least_psnr = min(psnrs, default=None)


class RecordComparison:
    """Compares the records of one shard, one at a time."""

    def __init__(self, against: SourceComparison) -> None:
        self._against = against
        recipe = against.recipe
        # Images stored unchanged need no decoding: their bytes are compared.
        self._recipe = replace(recipe, check="header") if recipe.check == "decode" else recipe
        against.source.ahead(against.split, [entry for entry in against.entries if entry])
        self.result = ComparisonResult()

    def difference(self, record: Record, row: int) -> str:
        """Return how the record at ``row`` of the shard differs from its file, or ""."""
        entry = self._against.entries[row]
        if entry is None:
            return "the source does not contain its file"
        try:
            with pixels_up_to(self._recipe.max_pixels):
                original, comparison = self._against.source.read_given(self._against.split, entry)
            checked = record.meta.keys() & CHECK_NOTES
            recipe = self._against.recipe if checked else self._recipe
            expected = convert_record(recipe, original, self._against.schema).record
            lossless = expected if recipe.keeps_bytes else original
            wrong = comparison(lossless, self._against.schema)
        except BadImage as error:
            return f"its file cannot be converted: {error}"
        data = _content(original)
        self.result.files[entry.path] = hashlib.sha256(data).hexdigest()
        self.result.bytes += len(data)
        if self._against.changed:
            wanted = self._against.schema.keys() - self._against.changed
            record = load(_ONLY_FIELDS)(record, self._against.schema, wanted)
        if record == expected:
            self.result.same += 1
            self.result.converted += _is_converted(record, original)
            return wrong
        other = _other_fields(record, expected)
        return other or self._other_bytes(record, expected, original) or wrong

    def _other_bytes(self, record: Record, expected: Record, original: Record) -> str:
        """Return which field of a record differs from its file, unless it is a similar image."""
        psnrs = []
        for stored, content in expected.fields.items():
            if record.fields[stored] == content or stored == META_FIELD:
                continue
            before, _, kind = stored.rpartition(".")
            name = before or (IMAGE if kind in IMAGE_FIELDS else kind)
            field = self._against.schema.get(name)
            if content in original.fields.values() or kind not in IMAGE_FIELDS:
                return f"its {name} differs from its file"
            if self._against.exact:
                return (
                    f"its {name} differs from its converted file, although the libraries are the "
                    "same"
                )
            try:
                psnrs.append(_likeness(record, expected, stored, field))
            except BadImage as error:
                return str(error)
        return self._note(min(psnrs, default=100.0))

    def _note(self, psnr: float) -> str:
        if psnr < ALIKE_PSNR:
            return (
                f"its image does not resemble its converted file: PSNR {psnr:.1f} dB, "
                f"under {ALIKE_PSNR:.0f}"
            )
        self.result.alike += 1
        self.result.least_psnr = min(psnr, self.result.least_psnr or psnr)
        return ""


def _is_converted(record: Record, original: Record) -> bool:
    """Return whether a record has an image that is not in its source."""
    return any(
        image_kind(name) in IMAGE_FIELDS and data not in original.fields.values()
        for name, data in record.fields.items()
    )


def _other_fields(record: Record, expected: Record) -> str:
    """Return what is wrong with a record other than its image, or ""."""
    if record.key != expected.key:
        return f"its key differs from that of its file, {expected.key!r}"
    if record.label != expected.label:
        return f"its label is {record.label}; that of its file is {expected.label}"
    if record.image_field != expected.image_field:
        return f"it is stored as {record.image_field}, but its file becomes {expected.image_field}"
    size, wanted = (f"{m.get('width')} x {m.get('height')}" for m in (record.meta, expected.meta))
    if size != wanted:
        return f"its size is {size} pixels, but its file becomes {wanted}"
    same = record.fields.keys() == expected.fields.keys() and record.meta == expected.meta
    return "" if same else "its metadata differs from that of its file"


def _content(record: Record) -> bytes:
    """Return what a record is made of: the file of its image, or all fields with their names."""
    fields = {name: value for name, value in record.fields.items() if name not in _ADDED}
    meta = record.meta
    if len(fields) == 1 and meta.keys() <= {"path"} and record.image_field in (*fields, None):
        (data,) = fields.values()
        return data
    named = b"".join(b"%b %d\n%b" % (k.encode(), len(v), v) for k, v in sorted(fields.items()))
    return named + dump_json({name: value for name, value in meta.items() if name != "path"})


_ADDED = (META_FIELD, LABEL_FIELD)
"""Fields that a source adds to the file of an image."""


def _likeness(record: Record, expected: Record, stored: str, field: Field | None) -> float:
    """Return the PSNR of two images; for masks, 0 unless they are equal."""
    if field is not None and field.type.follows:
        mask, expected_mask = (
            decode_mask(stored_record.fields[stored], "png") for stored_record in (record, expected)
        )
        return 100.0 if np.array_equal(mask, expected_mask) else 0.0
    kind = RGB if field is None else field.image_type
    return _psnr(_pixels(record, stored, kind), _pixels(expected, stored, kind))


def _pixels(record: Record, stored: str, pixels: ImageType) -> Pixels:
    name, _, kind = stored.rpartition(".")
    meta = record.meta[name] if name else record.meta
    size = int(meta["width"]), int(meta["height"])
    return decode_shown(EncodedImage(record.fields[stored], kind, record.label, *size, pixels))


def _psnr(pixels: Pixels, expected: Pixels) -> float:
    """Return the peak signal-to-noise ratio of two images of equal size, at most 100 dB."""
    error = float(np.mean((pixels.astype(np.float32) - expected) ** 2))
    return min(100.0, 10 * float(np.log10(255**2 / max(error, 1e-10))))
