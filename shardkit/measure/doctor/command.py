"""The command that converts a dataset's source again, with changes to the images."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from shardkit.dataset.manifest import MANIFEST_NAME
from shardkit.dataset.opened import OpenedDataset, OpenedDirectory
from shardkit.dataset.reports import EXCLUDED
from shardkit.recipe import Recipe
from shardkit.registry import DEFAULT_ATTACHED, DEFAULT_SOURCE, format_names
from shardkit.sources.imagefolder import natural
from shardkit.system.text import shell

CLASSES = "CLASSES"
"""Stands for a file of class names in a command."""

SOURCE = "SRC"
"""Stands for the path that a dataset was converted from: its manifest states only the name."""

_COMMON = frozenset(("name", "kind", "images", "limit", "order", "seed"))
"""Entries that manifests have for every source."""


@dataclass(frozen=True, kw_only=True)
class Provenance:
    """Format, recipe and source of a dataset, or the defaults for a folder of images."""

    path: str
    """The dataset or folder; for one of several splits, that of the split."""
    folder: bool = False
    """Whether it is a folder of images."""
    has_own_files: bool = False
    """Whether only the files of the user's own dataset lead to the folder."""
    format: str
    recipe: Mapping[str, Any] = field(default_factory=dict)
    source: Mapping[str, Any]
    """Kind of the source, and the options that selected its records."""
    classes: list[str] | None = None
    counts: list[int] | None = None
    """Images of each class."""
    skipped: bool = False
    """Whether bad images were skipped."""
    excluded: int = 0
    """Number of images that lists left out."""
    splits: bool = False
    """Whether it is one of several splits."""
    parts: int = 1
    """Number of sources that it was made from; ``source`` is the first."""

    def hints(self, target: str, decode: str = "") -> list[str]:
        """Return the requirements of the command, and uses of its result, ``target``.

        It needs the folder of `SOURCE`, and perhaps a file of `CLASSES`.

        Args:
            target: The path of the result.
            decode: The image type, if it was chosen for the measurement.
        """
        if self.folder:
            how = f"decode={decode}" if decode else "..."
            then = [f"then: make_loader(open_dataset({target!r}, {how}), ...)"]
            other = (
                f"labels are the folders in {self.path}, with all its images: see docs/sources.md"
            )
            return then + [other] * self.has_own_files
        name = f": {self.source['name']}" if self.source.get("name") else ""
        if self.parts > 1:
            others = "source" if self.parts == 2 else f"{self.parts - 1} sources"
            name += f"; convert its other {others}, too, and merge the results"
        if self.excluded:
            name += f"; add the lists that left out {self.excluded:,} of its images, with --exclude"
        if not self._is_folder:
            options = {key: value for key, value in self.source.items() if key not in _COMMON}
            assignments = ", ".join(f"{key}={value}" for key, value in options.items())
            hints = [f"{SOURCE} is what {self.path} was converted from{name}"]
            if options:
                hints.append(f"add the options that were given then ({assignments})")
            return hints
        hints = [f"{SOURCE} is the folder that {self.path} was converted from{name}"]
        if self.class_order() == CLASSES:
            opened = f"shardkit.open_dataset({self.path!r})"
            code = f"import shardkit; print(*{opened}.classes, sep='\\n')"
            hints.append(f"first write the class order: python -c {shell(code)} > {CLASSES}")
        return hints

    @property
    def _is_folder(self) -> bool:
        """Whether the source is a folder of images, the only one whose options are known here."""
        return bool(self.source["kind"] == DEFAULT_SOURCE)

    def class_order(self) -> str:
        """Return the option that gives the same labels: ``plain``, ``natural`` or `CLASSES`.

        A class without images may have no folder, so it must be listed.
        """
        if self.classes is None or not self._is_folder:
            return "plain"
        if all(self.counts or ()):
            if self.classes == sorted(self.classes):
                return "plain"
            if self.classes == sorted(self.classes, key=natural):
                return "natural"
        return CLASSES


def provenance_of(path: str, directory: Path) -> Provenance:
    """Return how a dataset was made.

    Args:
        path: Its name in commands.
        directory: Its directory.
    """
    dataset = OpenedDataset(directory)
    manifest = dataset.manifest
    parent = directory.resolve().parent
    sources = [part.manifest.source for part in dataset.parts]
    splits = (parent / MANIFEST_NAME).exists()
    return Provenance(
        path=path,
        # Files in place have the name of their source instead.
        format=manifest.format if manifest.format in format_names() else DEFAULT_ATTACHED,
        recipe=dict(manifest.recipe),
        source=sources[0],
        parts=len(sources),
        classes=None if manifest.classes is None else list(manifest.classes),
        counts=None if manifest.class_counts is None else list(manifest.class_counts),
        skipped=bool(manifest.skipped),
        excluded=manifest.ignored.get(EXCLUDED, 0),
        splits=splits and "" not in OpenedDirectory(parent).splits,
    )


def command_words(change: Recipe, provenance: Provenance) -> list[str]:
    """Return the command for a conversion; labels, order and other options stay as they were.

    The manifest does not state the shard size, so it is the default.

    Args:
        change: Applied to the images as they are stored.
        provenance: How the dataset was made.
    """
    recipe = merged(change, provenance.recipe)
    folder = Path(provenance.path).resolve().parent if provenance.splits else Path(provenance.path)
    suffix = change.encode if change.encode != "keep" else "" if change.box else "shards"
    target = f"{folder if folder.name else 'dataset'}-{suffix}{change.box[0] if change.box else ''}"
    source = str(folder) if provenance.folder else SOURCE
    kind = provenance.source["kind"]
    order = provenance.class_order()
    words = ["shardkit", "convert", kind, source, target, "--to", provenance.format]
    words += recipe.words()
    options: dict[str, Any] = {
        "--class-order": order if order != "plain" else None,
        "--splits": provenance.splits and kind == DEFAULT_SOURCE,
        "--no-shuffle": provenance.source.get("order") == "folder",
        "--seed": provenance.source.get("seed"),
        "--limit": provenance.source.get("limit"),
        "--on-error": "skip" if provenance.skipped else None,
    }
    return words + _words(options)


def merged(change: Recipe, old: Mapping[str, Any]) -> Recipe:
    """Return the recipe for the source that gives what ``change`` makes of the stored images."""
    before = Recipe.restored(old)
    encode = before.encode if change.encode == "keep" else change.encode
    quality = before.quality if encode in ("keep", "jpeg", "webp") else None
    if change.box is None:
        return replace(before, encode=encode, quality=quality)
    mode = change.resize_mode
    size = change.box
    if before.box is not None and before.has_fixed_size:  # the images keep their shape
        height, width = before.box
        scale = min(change.box) / min(height, width)
        mode = before.resize_mode
        size = (round(scale * height), round(scale * width))
    enlarge = change.enlarge or before.enlarge
    return replace(
        before, encode=encode, quality=quality, resize=size, resize_mode=mode, enlarge=enlarge
    )


def _words(options: Mapping[str, Any]) -> list[str]:
    """Return the words of options: a flag if True, nothing if False or None."""
    words = []
    for name, value in options.items():
        if value is True:
            words.append(name)
        elif value not in (None, False, 0):
            words += [name, str(value)]
    return words
