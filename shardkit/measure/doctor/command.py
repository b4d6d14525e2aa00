"""The command that carries out a conversion, and else makes the dataset as it was made."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from shardkit.codecs.image import WHITE
from shardkit.conversion.recipe import Recipe
from shardkit.sources.imagefolder import natural

CLASSES = "CLASSES"
"""Stands in a command for a file of classes."""


@dataclass(frozen=True, kw_only=True)
class Made:
    """How a dataset was made, as far as its manifest says."""

    path: str
    """Of the dataset; of one with splits, that of the split."""
    format: str
    recipe: Mapping[str, Any] = field(default_factory=dict)
    source: Mapping[str, Any] = field(default_factory=dict)
    classes: list[str] | None = None
    counts: list[int] | None = None
    """Images of each class."""
    skipped: bool = False
    """Whether bad images were left out."""
    splits: bool = False
    """Whether it is one of some splits."""


def command_words(change: Mapping[str, Any], source: str, target: str, made: Made) -> list[str]:
    """Return the words of the command that carries out a conversion.

    Labels, order and pixels stay as they are but for what is to change. Of shards the manifest
    knows no size, so that is the default.

    Args:
        change: The recipe that is applied to the images as they are stored.
        source: The folder of images.
        target: The dataset to be made.
        made: How the dataset was made; of a folder the format that it shall have.
    """
    words = ["shardkit", "convert", "imagefolder", source, target, "--to", made.format]
    words += _recipe_words(merged(change, made.recipe))
    order = class_order(made)
    if order != "plain":
        words += ["--class-order", order]
    if made.splits:
        words.append("--splits")
    if made.source.get("order") == "folder":
        words.append("--no-shuffle")
    if made.source.get("seed"):
        words += ["--seed", str(made.source["seed"])]
    if made.source.get("limit"):
        words += ["--limit", str(made.source["limit"])]
    if made.skipped:
        words += ["--on-error", "skip"]
    return words


def class_order(made: Made) -> str:
    """Return what gives the same labels again: ``plain``, ``natural``, or a file of classes.

    A class without images may have no folder, so that it has to be named.
    """
    if made.classes is None:
        return "plain"
    if all(made.counts or ()):
        if made.classes == sorted(made.classes):
            return "plain"
        if made.classes == sorted(made.classes, key=natural):
            return "natural"
    return CLASSES


def classes_command(made: Made) -> str:
    """Return the command that writes the file of classes; empty if none is needed."""
    if class_order(made) != CLASSES:
        return ""
    code = f"import shardkit; print(*shardkit.open_dataset({made.path!r}).classes, sep='\\n')"
    return f"{shlex.join(['python', '-c', code])} > {CLASSES}"


def merged(change: Mapping[str, Any], old: Mapping[str, Any]) -> Recipe:
    """Return what has to be done to the source to have what a change makes of stored images."""
    new, before = Recipe.restored(change), Recipe.restored(old)
    encode = before.encode if new.encode == "keep" else new.encode
    quality = None if encode in ("png", "raw") else before.quality
    if new.box is None:
        return replace(before, encode=encode, quality=quality)
    if before.box is None or not before.has_fixed_size:
        mode, size = new.resize_mode, new.box
    else:  # the images have been cut, filled up or stretched to a shape, which stays
        height, width = before.box
        scale = min(new.box) / min(height, width)
        mode, size = before.resize_mode, (round(scale * height), round(scale * width))
    return replace(
        before,
        encode=encode,
        quality=quality,
        resize=size,
        resize_mode=mode,
        enlarge=new.enlarge or before.enlarge,
    )


def _recipe_words(recipe: Recipe) -> list[str]:
    words = []
    if recipe.box is not None:
        height, width = recipe.box
        short = recipe.resize_mode == "shorter" and height == width
        words += ["--resize", str(height) if short else f"{height}x{width}"]
        if not short and recipe.resize_mode != "crop":
            words += ["--resize-mode", recipe.resize_mode]
        if recipe.filter != "bicubic":
            words += ["--filter", recipe.filter]
        if recipe.resizer != "pillow":
            words += ["--resizer", recipe.resizer]
        if recipe.dct_scaling:
            words.append("--dct-scaling")
    if recipe.encode != "keep":
        words += ["--encode", recipe.encode]
    if recipe.quality is not None:
        words += ["--quality", str(recipe.quality)]
    if recipe.resize is not None and recipe.enlarge:
        words.append("--enlarge")
    if recipe.orient:
        words.append("--orient")
    if tuple(recipe.background) != WHITE:
        words += ["--background", "#{:02x}{:02x}{:02x}".format(*recipe.background)]
    if recipe.check != "decode":
        words += ["--check", recipe.check]
    return words
