"""Mean and standard deviation of red, green and blue over all images, for `Normalize`."""

from __future__ import annotations

import contextlib

import numpy as np
import numpy.typing as npt

from shardkit.codecs.measures import SIDE, measure
from shardkit.dataset.decode import decode_shown
from shardkit.errors import BadImage
from shardkit.record import STORED_KINDS
from shardkit.reporting.collection import Collection
from shardkit.reporting.fields import sampled_rows

_SAMPLE = 64
"""Reduced images whose details are measured: enough for a standard deviation within 1%."""


def channel_statistics(images: Collection) -> tuple[list[float], list[float]]:
    """Return mean and standard deviation of all pixels, from 0 to 1; all images weigh the same.

    Facts of reduced JPEGs lack their details. A random sample, decoded at full size, shows how much
    that is.
    """
    rows = np.flatnonzero(images.measured)
    facts = images.facts[rows]
    mean = facts["mean"].astype(np.float64).reshape(-1, 3)
    if not len(mean):
        return [0.0] * 3, [0.0] * 3
    middle = mean.mean(0)
    squares = _squares(facts).mean(0)
    large = images.index["field"][rows] == STORED_KINDS.index("jpg")
    reduced = rows[large & (images.sizes[rows].min(1) > SIDE)]
    if len(reduced):
        sample = reduced[sampled_rows(len(reduced), _SAMPLE)]
        lost = np.zeros(3)
        for row, image in images.read(sample):
            with contextlib.suppress(BadImage):  # its facts are wrong
                lines = decode_shown(image)[::2]  # the others differ little
                lost += _squares(measure(lines)) - _squares(images.facts[row])
        squares += lost / len(sample) * (len(reduced) / len(rows))
    std = np.sqrt(np.maximum(squares - middle**2, 0))
    return (middle / 255).tolist(), (std / 255).tolist()


def _squares(facts: npt.NDArray[np.void] | np.void) -> npt.NDArray[np.float64]:
    """Return the mean square of each channel."""
    std, mean = (facts[name].astype(np.float64) for name in ("std", "mean"))
    return np.asarray(std**2 + mean**2)
