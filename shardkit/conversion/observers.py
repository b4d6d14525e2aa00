"""Observers: they examine the images of a conversion while these are in memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from shardkit.dataset.located import EncodedImage
from shardkit.dataset.manifest import FACTS_NAME
from shardkit.system.compiled import Waves
from shardkit.system.files import sync
from shardkit.system.late import load
from shardkit.system.npy import NpyWriter, StoredValues
from shardkit.system.safe_paths import UNFIT

Observed = npt.NDArray[Any]
"""The results of an observer: one element for each record."""


class Observer(NamedTuple):
    """Examines the images that a conversion stores, and writes a file next to the shards."""

    measures: np.dtype[Any]
    """The values that the compiled module measures of an image that it reads."""
    waves: Waves
    values: np.dtype[Any]
    """An element of the file."""
    observe: Callable[[Callable[[int], EncodedImage | None], npt.NDArray[Any]], Observed]
    """Returns what there is to know about the image of each number, given its measures."""
    bind: Callable[[Observed, npt.NDArray[np.uint32]], None]
    """Adds the checksums of the records."""


OBSERVERS = {FACTS_NAME: "shardkit.reporting.image_facts:OBSERVER"}
"""An `Observer` for each file."""


def get_observer(file: str) -> Observer:
    """Return the observer that leaves a file."""
    observer: Observer = load(OBSERVERS[file])
    return observer


def save_observed(folder: Path, shards: Sequence[tuple[Path, int]]) -> None:
    """Write what observers found in shards next to them; zeros for shards built without.

    ``shards`` are the folder of the result of each, and its number of rows.
    """
    for name in OBSERVERS:
        if any((result / name).exists() for result, _ in shards):
            values = get_observer(name).values
            with closing(NpyWriter(folder / name, values)) as writer:
                for result, rows in shards:
                    try:
                        observed = StoredValues(result / name, values, rows)[:]
                    except (*UNFIT, ValueError):
                        observed = np.zeros(rows, values)
                    writer.append(observed)
            sync(folder / name)
