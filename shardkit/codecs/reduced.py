"""JPEGs decoded at a few eighths of their size, which saves most of the inverse DCT.

libjpeg rounds sides up: at 3/8, 349 pixels become 131, and the image covers 130.875 of them. To
scale a reduced image exactly, resize that fractional box.
"""

from __future__ import annotations

LEAST_SIDE = 8
"""Smaller images are not reduced: several scales give them one size."""


def sufficient_eighths(size: tuple[int, int], at_least: tuple[int, int]) -> int:
    """Return the scale, in eighths, at which to decode a JPEG: 1 to 4, or 8.

    This is simplejpeg's rule, so a region has the same pixels whether or not it is decoded alone.
    Scales from five to seven eighths save nothing. ``size`` and ``at_least`` are width and height;
    (0, 0) means all pixels.
    """
    if not any(at_least) or 2 * at_least[0] > size[0] + 1:
        return 8  # the most common case
    for eighths in range(1, 5):
        if all(
            reduced_side(side, eighths) >= least for side, least in zip(size, at_least, strict=True)
        ):
            return eighths
    return 8


def same_scale(size: tuple[int, int], at_least: tuple[int, int]) -> tuple[int, int]:
    """Return values that are equal for minimum sizes at which any decoder chooses one scale.

    They are the scale of `sufficient_eighths`, and that of Pillow's ``draft`` if it is reduced.
    """
    eighths = sufficient_eighths(size, at_least)
    if eighths == 8:
        return 8, 1
    fitting = min(side // max(1, least) for side, least in zip(size, at_least, strict=True))
    return eighths, max(scale for scale in (1, 2, 4, 8) if scale <= max(1, fitting))


def reduction(decoded: tuple[int, ...], full: tuple[int, ...]) -> float | None:
    """Return the scale at which a JPEG was decoded, or None if the shapes do not fit.

    Both are height and width.
    """
    if decoded[:2] == full[:2]:
        return 1.0
    for eighths in range(7, 0, -1):
        if decoded[:2] == tuple(reduced_side(side, eighths) for side in full[:2]):
            return eighths / 8
    return None


def reduced_side(side: int, eighths: int) -> int:
    """Return a side length in pixels after libjpeg's scaling: 3/8 of 900 is 338, not 337.5."""
    return -(-side * eighths // 8)
