"""Find pictures that are similar, also mirrored and rotated ones."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from shardkit.codecs.measures import TURNS
from shardkit.reporting.collection import Collection
from shardkit.reporting.identical import Identical, Rows
from shardkit.reporting.neighbors import Pairs, different_bits, near_pairs

DISTANCE = 6
"""Default maximum distance of similar pictures: with it, 91 to 100% of the photographs are found
again after JPEG compression, scaling, cropping 5% and a brightness of 130%."""

BLANK = 2.0
"""Contrast in levels below which an image has nothing to compare."""

_TURNED = 4
"""Maximum distance of mirrored and rotated pictures: 99.8% of the copies of the photographs differ
less, and more ways to be similar are more ways to be so by chance."""

_CHROMA = 0.03
_LEVELS = 0.45
_ASPECT = 0.15
"""Maximum difference of similar pictures in their color, as a fraction of red, green and blue, in
the logarithms of brightness and contrast, and in that of the aspect ratio. These remove most pairs
that are similar by chance."""

_CROWD = 64
"""Maximum images of one hash whose pairs are all compared."""

NOTES = ("similar", *sorted({str(turn) for turn in TURNS}))
"""Notes on pairs. Pictures can be similar even if no bit of their hashes differs."""


class SimilarPairs(NamedTuple):
    """Pairs of rows with similar pictures: arrays with one element for each pair."""

    first: Rows
    second: Rows
    """The rows, the lower one first unless the pair is of a crowd."""
    distance: npt.NDArray[np.uint8]
    """Number of bits in which their hashes differ."""
    note: npt.NDArray[np.uint8]
    """Position in `NOTES`."""
    crowded: npt.NDArray[np.bool_]
    """Whether the pair is of a crowd, of which not all pairs are listed."""
    complete: bool
    """Whether these are all pairs but those of crowds."""

    def at(self, numbers: npt.NDArray[np.int64]) -> SimilarPairs:
        """Return some of the pairs."""
        return self._replace(
            first=self.first[numbers],
            second=self.second[numbers],
            distance=self.distance[numbers],
            note=self.note[numbers],
            crowded=self.crowded[numbers],
        )


def similar_pairs(images: Collection, same: Identical, distance: int = DISTANCE) -> SimilarPairs:
    """Return pairs of rows whose pictures are similar, one pair for those with the same pixels.

    Their hashes differ in at most ``distance`` bits.
    """
    twins = _twins(images, same)
    rows = np.sort(np.unique(twins, return_index=True)[1])  # the first of each
    rows = rows[twins[rows] >= 0]
    rows, leaders, followers = _crowds(images, rows)
    facts = images.facts[rows]
    near = near_pairs(facts["hash"], distance, queries=facts["crops"])
    agree = _agree(images, rows[near.first], rows[near.second])
    upright = Pairs(near.first[agree], near.second[agree], near.distance[agree], near.complete)
    turned, note = _turned_pairs(images, rows, min(distance, _TURNED), upright)
    count = len(upright.first)
    crowded = np.zeros(len(leaders), np.uint8)
    return SimilarPairs(
        np.concatenate([rows[upright.first], rows[turned.first], leaders]),
        np.concatenate([rows[upright.second], rows[turned.second], followers]),
        np.concatenate([upright.distance, turned.distance, crowded]),
        np.concatenate([np.zeros(count, np.uint8), note, crowded]),
        np.arange(count + len(note) + len(leaders)) >= count + len(note),
        near.complete and turned.complete,
    )


def _turned_pairs(
    images: Collection, rows: Rows, distance: int, upright: Pairs
) -> tuple[Pairs, npt.NDArray[np.uint8]]:
    """Return pairs that are similar only if one is turned, as positions in ``rows``; and notes."""
    hashes = images.facts["hash"][rows]
    turned = images.facts["turned"][rows]
    near = near_pairs(hashes, distance, queries=turned)
    count = max(len(rows), 1)
    fresh = ~np.isin(near.first * count + near.second, upright.first * count + upright.second)
    first = near.first[fresh]
    second = near.second[fresh]
    least = np.full(len(first), distance + 1, np.uint8)
    note = np.zeros(len(first), np.uint8)
    agree = {
        transposed: _agree(images, rows[first], rows[second], transposed=transposed)
        for transposed in (False, True)
    }
    for number, turn in enumerate(TURNS):
        different = np.minimum(
            different_bits(hashes[first], turned[second, number]),
            different_bits(hashes[second], turned[first, number]),
        )
        closer = agree[turn.transposed] & (different < least)
        least[closer], note[closer] = different[closer], NOTES.index(str(turn))
    noted = np.flatnonzero(note)
    return Pairs(first[noted], second[noted], least[noted], near.complete), note[noted]


def _twins(images: Collection, same: Identical) -> npt.NDArray[np.int64]:
    """Return the same number for rows with the same pixels, dataset and label.

    It is -1 for images without texture, whose hash is noise, and without pixels.
    """
    rows = np.flatnonzero(images.measured & (images.facts["contrast"] >= BLANK))
    values = np.zeros(len(rows), [("pixels", "<i8"), ("dataset", "<i8"), ("label", "<i8")])
    columns = (same.pixels, images.member, images.labels)
    for name, column in zip(values.dtype.names or (), columns, strict=True):
        values[name] = column[rows]
    twins = np.full(len(images), -1)
    twins[rows] = np.unique(values, return_inverse=True)[1].reshape(-1)
    return twins


def _crowds(images: Collection, rows: Rows) -> tuple[Rows, Rows, Rows]:
    """Where many rows have one hash, pair those of one dataset with one or a few of them.

    Otherwise 10,000 frames of one scene would be 50 million pairs. Not all pairs are found, but all
    rows are.
    """
    hashes = images.facts["hash"][rows]
    _, same, counts = np.unique(hashes, return_inverse=True, return_counts=True)
    many = np.flatnonzero(counts[same.reshape(-1)] > _CROWD)
    keys = (images.member[rows[many]], hashes[many])
    order = np.lexsort(keys)
    changes = np.any([key[order][1:] != key[order][:-1] for key in keys], axis=0)
    pairs = [np.zeros((2, 0), np.int64)]
    for crowd in np.split(rows[many[order]], np.flatnonzero(changes) + 1):
        for _ in range(_CROWD):
            if len(crowd) < 2:
                break
            agree = _agree(images, crowd[:1], crowd)
            members = crowd[agree]
            pairs.append(np.stack([np.full(len(members) - 1, members[0]), members[1:]]))
            crowd = crowd[~agree]  # noqa: PLW2901
    leaders, followers = np.concatenate(pairs, axis=1)
    return np.setdiff1d(rows, followers), leaders, followers


def _agree(
    images: Collection, first_rows: Rows, second_rows: Rows, *, transposed: bool = False
) -> npt.NDArray[np.bool_]:
    """Return whether pairs agree in what hashes do not show: aspect ratio, light and color."""
    first = images.facts[first_rows]
    second = images.facts[second_rows]
    sizes = [np.log(np.maximum(images.sizes[rows], 1)) for rows in (first_rows, second_rows)]
    aspects = [logarithms[:, 0] - logarithms[:, 1] for logarithms in sizes]
    if transposed:
        aspects[1] = -aspects[1]
    agree: npt.NDArray[np.bool_] = np.abs(aspects[0] - aspects[1]) <= _ASPECT
    for name in ("brightness", "contrast"):
        agree &= np.abs(np.log((first[name] + 2) / (second[name] + 2))) <= _LEVELS
    chroma = [
        (facts["mean"] + 1) / (facts["mean"].sum(1, keepdims=True) + 3) for facts in (first, second)
    ]
    agree &= (np.abs(chroma[0] - chroma[1]) <= _CHROMA).all(1)
    return agree
