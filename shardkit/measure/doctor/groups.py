"""Which few images take most of the time: one class, one encoding, or the largest images."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from shardkit.measure.doctor.stored import Header

_LARGEST = 0.1
"""Fraction of the images that count as the largest."""

_MOST_IMAGES, _LEAST_TIME, _RATIO, _TIE = 0.4, 0.5, 2.0, 0.05
"""A group has at most, and takes at least, these fractions; its time exceeds its part of the images
by this factor. Groups within the last fraction explain the time equally well."""


@dataclass(frozen=True, kw_only=True)
class Group:
    """Images that take more than their part of the time."""

    by: str
    """``class``, ``encoding`` or ``size``."""
    name: str
    """Class or encoding; empty for the largest images."""
    images: float
    """Their fraction of all images."""
    time: float
    """Their fraction of the time."""
    kind: str
    """Their most frequent encoding."""
    megapixels: float
    """Their median size."""


def slowest_group(
    seconds: Sequence[float], headers: Sequence[Header], classes: Sequence[str] | None
) -> Group | None:
    """Return the group of images that dominates the time, or None.

    Of groups that explain it equally well: a class before an encoding before the largest images.

    Args:
        seconds: Time of each image.
        headers: Its properties.
        classes: Class names, by label; None if unknown.
    """
    times = np.array(seconds)
    pixels = np.array([header.width * header.height for header in headers])
    labels = np.array([header.label for header in headers])
    kinds = np.array([header.kind for header in headers])
    names = {label: classes[label] if classes else str(label) for label in set(labels.tolist())}
    largest = np.argsort(np.argsort(pixels, kind="stable")) >= (1 - _LARGEST) * len(pixels)
    groups = [("class", name, labels == label) for label, name in sorted(names.items())]
    groups += [("encoding", kind, kinds == kind) for kind in sorted(set(kinds.tolist()))]
    groups += [("size", "", largest)]
    found = []
    for by, name, own in groups:
        images, time = float(own.mean()), float(times[own].sum() / times.sum())
        if images > _MOST_IMAGES or time < max(_LEAST_TIME, _RATIO * images):
            continue
        if np.median(times[own]) < _RATIO * np.median(times[~own]):
            continue  # one outlier
        (kind, _), *_rest = Counter(kinds[own].tolist()).most_common()
        group = Group(
            by=by,
            name=name,
            images=images,
            time=time,
            kind=kind,
            megapixels=float(np.median(pixels[own])) / 1e6,
        )
        found.append(group)
    best = max((group.time - group.images for group in found), default=0.0)
    return next((each for each in found if each.time - each.images > best - _TIE), None)
