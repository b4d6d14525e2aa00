"""The command that converts a dataset, or a folder of images, with changes to the images."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from shardkit.dataset.manifest import MANIFEST_NAME
from shardkit.dataset.opened import OpenedDataset, OpenedDirectory
from shardkit.recipe import Recipe
from shardkit.registry import DATASET, DEFAULT_ATTACHED, format_names
from shardkit.system.text import shell

SOURCE = "SRC"
"""Stands for a folder in a command if files have none in common."""


@dataclass(frozen=True, kw_only=True)
class Convertible:
    """The source of the suggested command."""

    kind: str
    """The source in the registry: a dataset, or a folder of images."""
    path: str
    format: str
    """Format of the result."""
    has_own_files: bool = False
    """Whether only the files of the user's own dataset lead to the folder."""
    encoded_again: bool = False
    """Whether the dataset's images are not the files of its source."""

    def suggest(self, change: Recipe, decode: str = "") -> tuple[str, list[str]]:
        """Return the command, and uses of its result; ``decode`` as for `hints`."""
        words = self.words(change)
        return shell(*words), self.hints(words[4], decode)

    def words(self, change: Recipe) -> list[str]:
        """Return the command; labels, order and all fields stay as they are."""
        name = self.path if Path(self.path).name else "dataset"
        suffix = change.encode if change.encode != "keep" else "" if change.box else "shards"
        target = f"{name}-{suffix}{change.box[0] if change.box else ''}"
        start = ["shardkit", "convert", self.kind, self.path, target, "--to", self.format]
        return start + change.words()

    def hints(self, target: str, decode: str = "") -> list[str]:
        """Return uses of the result, ``target``, and what to consider.

        ``decode`` is the image type, if it was chosen for the measurement.
        """
        how = f"decode={decode}" if decode else "..."
        hints = [f"then: make_loader(open_dataset({target!r}, {how}), ...)"]
        if self.has_own_files:
            hints.append(
                f"labels are the folders in {self.path}, which contain all its images: see "
                "docs/sources.md"
            )
        if self.encoded_again:
            hints.append(
                f"the images of {self.path} were already changed: converting its source again with "
                "all options loses less"
            )
        return hints


def convertible(path: str, directory: Path) -> Convertible:
    """Return a dataset to convert; of one of several splits, the folder of all.

    ``path`` is its name in commands.
    """
    dataset = OpenedDataset(directory)
    parent = directory.resolve().parent
    splits = (parent / MANIFEST_NAME).exists() and "" not in OpenedDirectory(parent).splits
    format_ = dataset.manifest.format
    return Convertible(
        kind=DATASET,
        path=str(Path(path).resolve().parent) if splits else path,
        # Files in place have the name of their source instead.
        format=format_ if format_ in format_names() else DEFAULT_ATTACHED,
        encoded_again=not dataset.manifest.made_with.keeps_bytes,
    )
