"""Suffixes of image files, by kind of image."""

from __future__ import annotations

from shardkit.record import IMAGE_FIELDS

SUFFIXES: dict[str, tuple[str, ...]] = {
    **{kind: (kind,) for kind in IMAGE_FIELDS},
    "jpg": ("jpg", "jpeg", "jpe", "jfif"),
    "tiff": ("tif", "tiff"),
    "ppm": ("ppm", "pgm", "pbm", "pnm"),
}
"""The suffixes of each kind in `IMAGE_FIELDS`, without the dot."""

KIND_OF_SUFFIX = {suffix: kind for kind, suffixes in SUFFIXES.items() for suffix in suffixes}
