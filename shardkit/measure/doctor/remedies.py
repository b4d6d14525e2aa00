"""What would move a bottleneck: measured gains first."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from shardkit.measure.doctor.changes import Change
from shardkit.measure.doctor.measured import Measured, effective, waits_for_disk
from shardkit.measure.doctor.surroundings import fits_in_memory
from shardkit.torch.data.datasets import DECODES

GAIN = 1.1
"""A measured gain below this is none: looks at one loader differ by as much."""

_RAW_HANDICAP = 2.0
"""Raw pixels are named before smaller images only if they gain this much more: they fill the disk,
and keep the central square alone."""


@dataclass(frozen=True, kw_only=True)
class Remedy:
    """What would move the bottleneck."""

    name: str
    what: str
    """What to do, in words."""
    gain: float | None = None
    """Rate with it divided by the rate now, as far as it was measured."""
    basis: str = ""
    """What the gain stands on."""
    change: Change | None = None
    """The conversion that it is, if it is one."""
    code: str = ""
    """A line of Python, if it is one."""


def find_remedies(measured: Measured, stage: str) -> list[Remedy]:
    """Return what would make the largest stage, and so loading, faster.

    Args:
        measured: Times and rates.
        stage: The one that takes most of a sample's time.
    """
    found = [*_engines(measured), *_conversions(measured, stage)]
    advice = list(_ADVICE.get(stage, ()))
    if stage == "read" and not waits_for_disk(measured):
        advice = ["store smaller images: they are read from memory already"]
    if stage == "transform" and measured.decode not in DECODES:
        del advice[0]  # it is done already
    found += [Remedy(name=stage, what=text) for text in advice]
    found = [each for each in found if each.gain is None or each.gain > GAIN]
    return sorted(found, key=_rank)


def _rank(remedy: Remedy) -> float:
    gain = remedy.gain or 0.0
    return -gain / _RAW_HANDICAP if remedy.name == "raw" else -gain


_ADVICE = {
    "read": (
        "put the data on a faster or a local disk, or into memory",
        "read forwards: make_loader(..., shuffle=shardkit.BlockShuffle())",
    ),
    "checksum": ("leave it out, once `shardkit verify` found the data sound: verify=False",),
    "transform": (
        "let shardkit crop and scale while it decodes: decode=RandomResizedCrop(224), and leave "
        "only the rest to the transform",
        "do on whole batches, or on the accelerator, what need not be done for each image",
    ),
    "collate": ("hand on blocks: an operation as decode=, and shardkit.collate",),
    "transport": (
        "take threads, which share memory: mark the transform with shardkit.with_rng",
        "send uint8 and normalize on the device: a quarter of the bytes of float32",
    ),
    "copy to the device": ("send uint8 and normalize there: shardkit.DevicePrefetcher",),
}


def _engines(measured: Measured) -> list[Remedy]:
    """Return the other engine, or one thread of PyTorch's, if that was measured to be faster."""
    found = []
    for engine in ("thread", "process"):
        gain = measured.gain(engine)
        if gain is not None:
            what = f"take {'threads' if engine == 'thread' else 'worker processes'}"
            if engine == "thread" and not measured.repeats:
                what += (
                    "; the transform is not marked with shardkit.with_rng, so its random numbers "
                    "do not repeat in threads"
                )
            found.append(
                Remedy(
                    name=engine,
                    what=what,
                    gain=gain,
                    basis=f"measured with {measured.workers} workers each",
                    code=f'options=LoaderOptions(engine="{engine}", '
                    f"num_workers={measured.workers})",
                )
            )
    alone = measured.gain("one torch thread")
    if alone is not None:
        found.append(
            Remedy(
                name="torch threads",
                what="keep PyTorch from starting threads beside the loader's",
                gain=alone,
                basis="measured",
                code="torch.set_num_threads(1)",
            )
        )
    return found


_CHANGES = {
    "convert": "convert the folder: shardkit decodes the same bytes sooner",
    "resize": "store smaller images (--resize {side})",
    "raw": "store pixels as they are (--resize {side}x{side} --encode raw): each image's central "
    "square, {bytes:.0f} KB",
    "jpeg": "store JPEGs (--encode jpeg)",
    "fast": "decode JPEGs less exactly: jpeg='fast'",
}


def _conversions(measured: Measured, stage: str) -> list[Remedy]:
    """Return what storing images in another way gives a sample, of all stages together."""
    seconds = effective(measured)
    total = sum(seconds.values())
    found = []
    for change in measured.changes:
        if change.name == "raw" and not fits_in_memory(
            round(measured.images * change.bytes_after), measured.memory
        ):
            continue  # then the disk would limit
        side = (change.recipe.get("resize") or [0])[0]
        words = _CHANGES[change.name].format(side=side, bytes=change.bytes_after / 1000)
        if change.other_pixels:
            words += "; the crop then shows more of an image, so the model sees something else"
        elif change.maybe_other:
            words += (
                "; if the transform crops pixels, it then shows more of an image, so the model "
                "may see something else"
            )
        after = total - _saved(measured, change, seconds)
        found.append(
            Remedy(
                name=change.name,
                what=words,
                gain=total / after,
                basis=f"measured on {change.images} images"
                + (", re-encoded in memory" if change.recipe else ""),
                change=change if change.recipe else None,
                code="" if change.recipe else "open_dataset(..., jpeg='fast')",
            )
        )
    return found


def _saved(measured: Measured, change: Change, seconds: Mapping[str, float]) -> float:
    """Return the seconds of a sample that a change saves; below 0 if it costs some.

    What is read and compared grows with the bytes; it shrinks with them only if the disk limits.
    """
    pixels = seconds.get("decode", 0.0) + seconds.get("transform", 0.0)
    saved = pixels * (1 - change.after / change.before)
    ratio = change.bytes_after / change.bytes_before
    if ratio > 1 or not fits_in_memory(measured.bytes, measured.memory):
        saved += seconds.get("read", 0.0) * (1 - ratio)
    return saved
