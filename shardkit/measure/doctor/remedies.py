"""The remedies: a table of rules, each of which may propose one change to measure."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

from shardkit.conversion.recipe import Recipe
from shardkit.measure.doctor.machine import fits_in_memory
from shardkit.measure.doctor.pipeline import Setup, Variant
from shardkit.measure.doctor.profile import Profile
from shardkit.measure.runner.gil import HOLDS

WAITS = 0.5
"""Fraction of its time on a CPU below which a stage waits."""

OWN_CODE = ("dataset", "transform", "collate")
"""Stages that may run user code, and so hold the GIL."""

_MATTERS = 0.25
"""Fraction of an image's time from which a stage is worth a remedy."""

_MARGIN = 8 / 7
"""Stored side divided by the crop's side, such as 256 for 224."""

_SMALLER = 0.85
"""A target above this fraction of the stored side is not worth a resize."""

_MOST_WORKERS = {"thread": 32, "process": 16, "main": 16}

_LOSSLESS = ("png", "tiff", "bmp", "ppm", "gif")


@dataclass(frozen=True, kw_only=True)
class Situation:
    """What the rules know."""

    setup: Setup
    profile: Profile
    cpus: int
    """CPUs that this process may use."""
    images: int
    """Images in the dataset."""
    memory: int
    """Bytes of memory that this process may use."""

    @property
    def decodes(self) -> bool:
        """Whether decoding encoded images takes a notable part of the time."""
        encoded = self.profile.kinds and "raw" not in self.profile.kinds
        return bool(encoded) and self.profile.fraction("read", "decode") >= _MATTERS

    @property
    def target(self) -> int | None:
        """Shorter side to store, in pixels; None if the stored images are small enough."""
        sides = [side for side in self.profile.shape if side > 4]  # not the channels
        if len(self.profile.shape) != 3 or len(sides) != 2:
            return None
        side = round(_MARGIN * min(sides))
        return side if side < _SMALLER * self.profile.side else None

    @property
    def holds_gil(self) -> bool:
        """Whether the longest stage is user code that holds the GIL."""
        return self.profile.longest in OWN_CODE and self.profile.held >= HOLDS


@dataclass(frozen=True, kw_only=True)
class Remedy:
    """A change that may make loading faster."""

    name: str
    what: str
    """The change in a few words."""
    variant: Variant = field(default_factory=Variant)
    """The loader with the change."""
    code: str = ""
    """Python code of the change; empty for a conversion."""
    recipe: Recipe | None = None
    """The conversion, if it is one; ``variant`` then reads a sample of its result."""
    price: str = ""
    """What it costs; empty if nothing."""


def more_workers(situation: Situation) -> Remedy | None:
    """As many workers as CPUs, or more if they wait."""
    setup, busy, wanted = situation.setup, situation.profile.busy, situation.cpus
    if busy < WAITS:
        wanted = max(4 * setup.workers, math.ceil(situation.cpus / max(busy, 0.01)))
    wanted = min(wanted, _MOST_WORKERS[setup.engine])
    return _workers("more workers", wanted, setup) if wanted > setup.workers else None


def fewer_workers(situation: Situation) -> Remedy | None:
    """As many workers as CPUs, if more compute."""
    setup, cpus = situation.setup, situation.cpus
    if setup.workers < 2 * cpus or situation.profile.busy < WAITS:
        return None
    return _workers("fewer workers", cpus, setup)


def _workers(name: str, count: int, setup: Setup) -> Remedy:
    what = f"{count} workers instead of {setup.workers}"
    return Remedy(name=name, what=what, variant=Variant(workers=count), code=f"num_workers={count}")


def processes(situation: Situation) -> Remedy | None:
    """Worker processes for code that holds the GIL."""
    if situation.setup.engine != "thread" or not situation.holds_gil:
        return None
    return Remedy(
        name="processes",
        what="worker processes instead of threads",
        variant=Variant(engine="process"),
        code='make_loader(..., options=LoaderOptions(engine="process"))',
    )


def threads(situation: Situation) -> Remedy | None:
    """Threads for code that does not hold the GIL."""
    setup = situation.setup
    if setup.engine != "process" or situation.holds_gil or not setup.mapped:
        return None
    return Remedy(
        name="threads",
        what="threads instead of worker processes",
        variant=Variant(engine="thread"),
        code='make_loader(..., options=LoaderOptions(engine="thread"))',
        price="to repeat random numbers, mark it with_rng" if setup.transform else "",
    )


def one_torch_thread(situation: Situation) -> Remedy | None:
    """One PyTorch thread per operation, if each loader thread starts more."""
    setup = situation.setup
    if setup.engine != "thread" or setup.workers < 2 or setup.torch_threads < 2:
        return None
    return Remedy(
        name="one torch thread",
        what=f"1 PyTorch thread per operation instead of {setup.torch_threads}",
        variant=Variant(torch_threads=1),
        code="torch.set_num_threads(1)",
    )


def default_collate(situation: Situation) -> Remedy | None:
    """The default collate function instead of a slow one."""
    if not situation.setup.collate or situation.profile.fraction("collate") < _MATTERS:
        return None
    return Remedy(
        name="default collate",
        what="the default collate function",
        variant=Variant(default_collate=True),
        code="collate_fn=shardkit.collate",
        price="if its batches suit the model",
    )


def fast_jpeg(situation: Situation) -> Remedy | None:
    """The fast inverse DCT."""
    jpegs = next(iter(situation.profile.kinds), "") == "jpg"
    if not situation.decodes or not jpegs or situation.setup.jpeg != "exact":
        return None
    return Remedy(
        name='jpeg="fast"',
        what='jpeg="fast"',
        variant=Variant(jpeg="fast"),
        code='open_dataset(..., jpeg="fast")',
        price="pixels differ slightly",
    )


def shards(situation: Situation) -> Remedy | None:
    """A shardkit dataset instead of a folder."""
    if situation.setup.jpeg or not situation.decodes:
        return None
    what = "shards instead of files" + ", with make_loader" * situation.setup.stock
    return Remedy(name="shards", what=what, recipe=Recipe())


def smaller_images(situation: Situation) -> Remedy | None:
    """Images of the size that the crop needs."""
    side, setup = situation.target, situation.setup
    if not situation.decodes or side is None:
        return None
    fixed = "CenterCrop" in setup.decode and "resize=None" in setup.decode
    return Remedy(
        name="smaller images",
        what=f"smaller images, shorter side {side}",
        recipe=Recipe(resize=(side, side)),
        price="fixed crops show more" if fixed or setup.transform else "",
    )


def jpegs(situation: Situation) -> Remedy | None:
    """JPEGs instead of lossless images."""
    profile, side = situation.profile, situation.target
    kind = profile.group.kind if profile.group else next(iter(profile.kinds), "")
    if not situation.decodes or kind not in _LOSSLESS:
        return None
    what = f"JPEGs instead of {kind.upper()}s" + (f", shorter side {side}" if side else "")
    recipe = Recipe(encode="jpeg", resize=(side, side) if side else None)
    return Remedy(name="JPEGs", what=what, recipe=recipe, price="lossy")


def raw_pixels(situation: Situation) -> Remedy | None:
    """Raw pixels, which need no decoding."""
    side = situation.target or round(situation.profile.side)
    bytes_ = 3 * side**2
    if not situation.decodes or not fits_in_memory(situation.images * bytes_, situation.memory):
        return None
    return Remedy(
        name="raw pixels",
        what=f"raw pixels, {side}x{side}",
        recipe=Recipe(encode="raw", resize=(side, side), resize_mode="crop", enlarge=True),
        price=f"center square, {bytes_ / situation.profile.stored_bytes:.1f}x the space",
    )


RULES: tuple[Callable[[Situation], Remedy | None], ...] = (
    more_workers,
    fewer_workers,
    processes,
    threads,
    one_torch_thread,
    default_collate,
    fast_jpeg,
    shards,
    smaller_images,
    jpegs,
    raw_pixels,
)

_BATCHES = "return whole batches from __getitems__, with collate_fn=shardkit.collate"

ADVICE = {
    "read": "put the data on a faster or local disk, or read with shuffle=BlockShuffle()",
    "dataset": _BATCHES,
    "transform": "crop and resize with decode=RandomResizedCrop(...), or transform on the GPU",
    "collate": _BATCHES,
    "transport": "return uint8 instead of float32, and normalize on the GPU",
}
"""Stage to a change that doctor cannot measure."""


def propose(situation: Situation) -> list[Remedy]:
    """Return the remedies that may help, in the order of the table."""
    found = (rule(situation) for rule in RULES)
    return [remedy for remedy in found if remedy is not None]
