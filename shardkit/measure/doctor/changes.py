"""What storing images in another way would change: some are re-encoded in memory, and decoded.

It runs in the measuring process.
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from shardkit.codecs.scaling import one_thread
from shardkit.conversion.recipe import Recipe
from shardkit.dataset.decode import Decoding
from shardkit.dataset.shardset import EncodedImage
from shardkit.errors import BadImage
from shardkit.measure.doctor.stages import Batch, Staged, decode_batch, identified, staged
from shardkit.measure.runner.folder import PlainFolder
from shardkit.record import META_FIELD, Record, dump_json, load_json
from shardkit.torch.data.ops import CenterCrop
from shardkit.torch.data.read_context import ReadContext, reading

IMAGES = 24
"""Images that are re-encoded."""

PASSES = 3
"""Each way is timed so many times, in turn, and the least counts: other work only adds."""

MARGIN = 8 / 7
"""Shorter side of a stored image divided by the crop's, as 256 for 224: what people do."""

RAW_BYTES = 256 * 256 * 3
"""Bytes of raw pixels up to which they are proposed: larger ones fill disk and memory."""

_WORTH = 0.85
"""A side that is larger than this part of the stored one is not worth a conversion."""

_LOSSLESS = ("png", "tiff", "bmp", "ppm", "gif")


@dataclass(frozen=True, kw_only=True)
class Change:
    """What one change of the stored images does to a sample's time."""

    name: str
    """``convert``, ``resize``, ``raw``, ``jpeg`` or ``fast``."""
    images: int
    """That it was measured on."""
    before: float
    """Seconds to decode and transform a sample as it is stored."""
    after: float
    """The same of what it would be."""
    bytes_before: float
    """Stored bytes of an image, in the mean."""
    bytes_after: float
    recipe: dict[str, Any] = field(default_factory=dict)
    """As `Recipe.describe` gives it; empty if nothing is converted."""
    other_pixels: bool = False
    """Whether the crop then shows another part of the image than before."""
    maybe_other: bool = False
    """Whether a transform may do so: it gets a smaller image, and nobody knows what it crops."""


def candidates(crop: int | None, kinds: Sequence[str], side: float) -> dict[str, Recipe]:
    """Return the recipes that may be worth it, by name.

    Args:
        crop: Shorter side of a sample, in pixels; None if it is not known.
        kinds: Encodings of the stored images, the most common first.
        side: The shorter side of a stored image, in the mean.
    """
    found: dict[str, Recipe] = {}
    if not kinds or "raw" in kinds:  # nothing is decoded
        return found
    target = None if crop is None else round(crop * MARGIN)
    size = (target, target) if target is not None and target < _WORTH * side else None
    if size is not None:
        found["resize"] = Recipe(resize=size)
    if kinds[0] in _LOSSLESS:
        found["jpeg"] = Recipe(encode="jpeg", resize=size)
    if size is not None and 3 * size[0] * size[1] <= RAW_BYTES:
        found["raw"] = Recipe(encode="raw", resize=size, resize_mode="crop", enlarge=True)
    return found


def predict(dataset: Any, crop: int | None, images: int = IMAGES, seed: int = 1) -> list[Change]:
    """Return what each change that may be worth it does, measured on some images.

    Args:
        dataset: A dataset of shardkit, or an image folder.
        crop: Shorter side of a sample, in pixels; None if it is not known.
        images: That are taken, at random.
        seed: Chooses them.

    Raises:
        ShardkitError: If the dataset cannot be read.
    """
    if dataset.decode == "bytes":
        return []
    work = staged(dataset)
    batch = Batch(rows=np.random.default_rng(seed).permutation(len(dataset))[:images])
    work.read(batch)
    stored = [identified(image) for image in batch.stored]
    kinds = [kind for kind, _ in Counter(image.field for image in stored).most_common()]
    side = statistics.fmean(min(image.width, image.height) for image in stored)
    recipes = candidates(crop, kinds, side)
    folder = isinstance(dataset, PlainFolder)
    if folder:
        recipes = {"convert": Recipe(), **recipes}
    ways = {"": _Way(dataset, work, batch)}
    for name, recipe in recipes.items():
        made = _remade(stored, recipe)
        if made is not None:
            ways[name] = _Way(dataset, work, dataclasses.replace(batch, stored=made), Decoding())
    if kinds[0] == "jpg" and not folder and dataset.jpeg != "fast":
        ways["fast"] = _Way(dataset, work, batch, Decoding(fast=True))
    with one_thread(), reading(ReadContext(seed=seed, epoch=0)):
        times = _time(list(ways.values()))
    moved = isinstance(dataset.decode, CenterCrop) and dataset.decode.resize is None
    smaller = {name for name, recipe in recipes.items() if recipe.resize is not None}
    return [
        Change(
            name=name,
            images=len(stored),
            before=times[0],
            after=seconds,
            bytes_before=ways[""].mean_bytes,
            bytes_after=way.mean_bytes,
            recipe=recipes[name].describe() if name in recipes else {},
            other_pixels=moved and name in smaller,
            maybe_other=not moved and dataset.transform is not None and name in smaller,
        )
        for (name, way), seconds in zip(ways.items(), times, strict=True)
        if name
    ]


class _Way:
    """One way in which images may be stored and decoded."""

    def __init__(
        self, dataset: Any, work: Staged, batch: Batch, how: Decoding | None = None
    ) -> None:
        """Make a way; ``how`` shardkit decodes, or None for what the dataset does now."""
        self._decode = dataset.decode
        self._work = work
        self._batch = dataclasses.replace(batch)
        self._how = how
        self.images = len(batch.stored)
        self.mean_bytes = statistics.fmean(len(image.data) for image in batch.stored)

    def run(self) -> None:
        """Decode and transform all images."""
        alone = self._work.transform is not None
        if self._how is None:
            self._work.decode(self._batch)
        else:
            decode_batch(self._batch, self._decode, self._how, alone=alone)
        if alone:
            self._work.apply(self._batch)


def _remade(stored: Sequence[EncodedImage], recipe: Recipe) -> list[EncodedImage] | None:
    """Return images as a recipe would store them; None if it cannot be done with them."""
    made = []
    with recipe.at_work():
        for number, image in enumerate(stored):
            try:
                data = {image.field: bytes(image.data), META_FIELD: dump_json({})}
                record = recipe.apply(Record(f"{number:06d}", data))
            except BadImage:
                return None
            meta = load_json(record.fields[META_FIELD])
            kind = record.image_field or ""
            made.append(
                EncodedImage(record.fields[kind], kind, image.label, meta["width"], meta["height"])
            )
    return made


def _time(ways: Sequence[_Way]) -> list[float]:
    """Return the seconds that an image takes in each of some ways, which take turns."""
    least = [float("inf")] * len(ways)
    for _ in range(PASSES):
        for number, way in enumerate(ways):
            begun = time.perf_counter()
            way.run()
            least[number] = min(least[number], time.perf_counter() - begun)
    return [seconds / way.images for seconds, way in zip(least, ways, strict=True)]
