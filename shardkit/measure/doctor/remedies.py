"""The remedies: a table of rules, each of which may propose changes to measure."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

from shardkit.measure.doctor.checks import fits_in_memory
from shardkit.measure.doctor.pipeline import Remedy
from shardkit.measure.doctor.profile import MATTERS, OWN_CODE, WAITS, Profile
from shardkit.recipe import Recipe
from shardkit.system import compiled
from shardkit.system.priority import priority_problem
from shardkit.system.text import plural, size
from shardkit.torch.engine.options import ENGINE_KINDS

_MARGIN = 8 / 7
_SMALLER = 0.85
"""Stored side divided by the crop's side, such as 256 for 224; a target above the second fraction
of the stored side is not worth a resize."""

_MOST_THREADS = 32
_MOST_PROCESSES = 16

_PLANES_BYTES = 1.5
"""Bytes for a pixel of planes with the usual chroma, 4:2:0."""

_LOSSLESS = ("png", "tiff", "bmp", "ppm", "gif")


def workers(profile: Profile) -> Iterator[Remedy]:
    """As many workers as CPUs, or more if they wait."""
    now = profile.setup.workers
    wanted = profile.cpus
    waits = profile.busy < WAITS
    if waits:
        wanted = max(4 * now, math.ceil(wanted / max(profile.busy, 0.01)))
    if waits or wanted > now:
        kind = profile.setup.kind
        most = _MOST_THREADS if kind is not None and kind.shares_gil else _MOST_PROCESSES
        wanted = min(wanted, most)
    if wanted > now or (now >= 2 * wanted and not waits):
        yield Remedy(
            name=f"{wanted} workers instead of {now}",
            options={"num_workers": wanted},
            code=f"num_workers={wanted}",
            price="they mostly wait, so there can be more workers than CPUs" if waits else "",
        )


def engine(profile: Profile) -> Iterator[Remedy]:
    """Worker processes for code that holds the GIL, threads for other code."""
    kind = profile.setup.kind
    new = "process" if profile.holds_gil else "thread"
    marked = new == "thread" and profile.setup.transform
    if kind is not None and kind.shares_gil == profile.holds_gil and profile.setup.mapped:
        yield Remedy(
            name=f"{plural(ENGINE_KINDS[new].worker)} instead of {plural(kind.worker)}",
            options={"engine": new},
            code=f'make_loader(..., engine="{new}")',
            price="to get repeatable random numbers, mark it with_rng" if marked else "",
        )


def torch_threads(profile: Profile) -> Iterator[Remedy]:
    """One PyTorch thread per operation, if each loader thread may start more."""
    several = profile.setup.engine == "thread" and profile.setup.workers > 1
    if several and profile.fraction(*OWN_CODE) >= MATTERS:
        yield Remedy(
            name="1 PyTorch thread per operation",
            torch_threads=1,
            code="torch.set_num_threads(1)",
        )


def default_collate(profile: Profile) -> Iterator[Remedy]:
    """The default collate function instead of a slow one."""
    if profile.setup.collate and profile.fraction("collate") >= MATTERS:
        yield Remedy(
            name="the default collate function",
            default_collate=True,
            code="collate_fn=shardkit.collate",
            price="if the model accepts its batches",
        )


def resident(profile: Profile) -> Iterator[Remedy]:
    """All images decoded in memory."""
    if profile.resident_bytes:
        seconds = profile.images * profile.total / max(1, profile.cpus)
        yield Remedy(
            name='resident="cpu"',
            options={"resident": "cpu", "engine": "thread", "num_workers": None},
            code='make_loader(..., resident="cpu")',
            price=f"{size(profile.resident_bytes)} of memory for each rank, and about "
            f"{max(1, round(seconds))} s to decode all images at the start",
        )


def same_images(profile: Profile) -> Iterator[Remedy]:
    """A shardkit dataset instead of the user's, if that has an image file for each row."""
    setup = profile.setup
    if profile.files and profile.decodes and (setup.transform or profile.crop):
        disk = size(profile.images * profile.stored_bytes)
        actors = (
            f"{setup.dataset} and {setup.collate} do" if setup.collate else f"{setup.dataset} does"
        )
        yield Remedy(
            name="the same images as a shardkit dataset",
            recipe=Recipe(),
            decode="" if setup.transform else f"RandomResizedCrop({profile.crop})",
            default_collate=True,
            price=f"{disk} of disk space; skips everything else that {actors}",
        )


def conversions(profile: Profile) -> Iterator[Remedy]:
    """Shards instead of files, smaller images, JPEGs for lossless images, planes, raw pixels."""
    if not profile.decodes or profile.files:
        return
    if not profile.setup.converted:
        name = "shards instead of files" + " with make_loader" * profile.setup.stock
        space = size(profile.images * profile.stored_bytes)
        yield Remedy(name=name, recipe=Recipe(), price=f"{space} of disk space")
    target = profile.crop and round(_MARGIN * profile.crop)
    side = target if 0 < target < _SMALLER * profile.side else 0
    if side:
        price = "fixed crops then show more of the image" if profile.setup.transform else ""
        recipe = Recipe(resize=side)
        yield Remedy(name=f"smaller images with shorter side {side}", recipe=recipe, price=price)
    if profile.kind in _LOSSLESS:
        name = f"JPEGs instead of {profile.kind.upper()}s" + f" with shorter side {side}" * bool(
            side
        )
        recipe = Recipe(encode="jpeg", resize=side or None)
        yield Remedy(name=name, recipe=recipe, price="lossy")
    if profile.kind == "jpg" and compiled.is_available():
        name = "planes instead of JPEGs" + f" with shorter side {side}" * bool(side)
        kept = (side / profile.side) ** 2 if side else 1.0
        times = kept * _PLANES_BYTES * profile.pixels / profile.stored_bytes
        price = f"about {times:.1f}x the space"
        yield Remedy(name=name, recipe=Recipe(encode="planes", resize=side or None), price=price)
    side = side or round(profile.side)
    if fits_in_memory(profile.images * 3 * side**2):
        yield Remedy(
            name=f"raw pixels of {side}x{side}",
            recipe=Recipe(encode="raw", resize=(side, side), resize_mode="crop", enlarge=True),
            price=f"cut to the center square, {3 * side**2 / profile.stored_bytes:.1f}x the space",
        )


def together(first: Remedy, second: Remedy) -> Remedy | None:
    """Return two remedies as one, or None if they exclude each other."""
    if (first.recipe and second.recipe) or first.options.keys() & second.options.keys():
        return None
    return Remedy(
        name=f"{first.name} and {second.name}",
        options={**first.options, **second.options},
        default_collate=first.default_collate or second.default_collate,
        torch_threads=first.torch_threads or second.torch_threads,
        recipe=first.recipe or second.recipe,
        code=", ".join(filter(None, (first.code, second.code))),
        price="; ".join(filter(None, (first.price, second.price))),
        decode=first.decode or second.decode,
    )


RULES: tuple[Callable[[Profile], Iterator[Remedy]], ...] = (
    workers,
    engine,
    torch_threads,
    default_collate,
    resident,
    same_images,
    conversions,
)


def loop_changes(profile: Profile) -> list[Remedy]:
    """Return changes that may disturb a training loop less, though loading gets no faster."""
    setup = profile.setup
    if not setup.mapped or setup.kind is None:
        return []
    low = {"priority": "low"}
    helper = {"engine": "helper"}
    yields = "the loader also yields to other programs"
    process = "one more process, and shared memory for batches"
    changes = [
        ({"engine": setup.engine, **low}, yields),
        (helper, process),
        ({**helper, **low}, f"{process}; {yields}"),
    ]
    if setup.engine != "thread":
        del changes[1:]
    if priority_problem() is not None:
        changes = [change for change in changes if "priority" not in change[0]]
    remedies = []
    for options, price in changes:
        shown = {name: value for name, value in options.items() if value != setup.engine}
        words = ", ".join(f'{name}="{value}"' for name, value in shown.items())
        name = f"make_loader({words})" if setup.stock else words.replace(", ", " with ")
        code = f"make_loader(..., {words})"
        remedies.append(Remedy(name=name, options=options, code=code, price=price))
    return remedies


def propose(profile: Profile) -> list[Remedy]:
    """Return the remedies that may help, in the order of the table."""
    return [remedy for rule in RULES for remedy in rule(profile)]
