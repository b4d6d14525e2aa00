"""The source that a user means, for a conversion or from a manifest, in the wrappers that it needs.

An option that was given asks for a wrapper, and so does an entry in the description of a source.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from shardkit.contracts import Source, SourceOptions
from shardkit.errors import UsageError
from shardkit.kinds.field import Field, Schema
from shardkit.options import changed, option
from shardkit.registry import DEFAULT_SOURCE, get_source, is_source, open_source, source_names
from shardkit.sources.imagefolder import FolderOptions
from shardkit.system.late import load
from shardkit.system.text import quoted

SAMPLES = "samples"
"""The kind of Python samples. It is in no registry: no command can name them."""

_SAMPLES = "shardkit.sources.samples:Samples"

_TOGETHER = "shardkit.sources.together:reopen"

MEMBER = "member"
"""The entry of a description with the paths of a split's own source, below the path."""

DIVISION = "division"
"""The entry of a description with the rule by which images were divided, and the side."""


@dataclass(frozen=True, kw_only=True)
class SampleOptions(SourceOptions):
    """The options of Python samples."""

    schema: Mapping[str, Field | str] | None = option(
        None,
        help="Fields of samples by name, each a `shardkit.Field` or a kind; others are inferred "
        "from the first sample.",
        is_keyword_only=True,
        stored="",
    )
    fields: Sequence[str] | None = option(
        None,
        help="Names of the values in tuple samples; image and label for tuples of two values.",
        is_keyword_only=True,
        store=list,
    )


@dataclass(frozen=True, kw_only=True)
class DivisionOptions:
    """How to divide images into splits: see `shardkit.sources.divided.Division`."""

    HEADING: ClassVar[str] = "Division"

    val: float = option(
        0.0, help="Fraction of images for the val split, such as 0.1.", metavar="FRACTION"
    )
    test: float = option(0.0, help="Fraction of images for the test split.", metavar="FRACTION")
    stratify: bool = option(False, help="Split each class separately, with exact fractions.")
    group: str | None = option(
        None,
        help="Keep images of the same folder, or with the same value in COLUMN, in one split.",
        metavar="folder|COLUMN",
    )


@dataclass(frozen=True, kw_only=True)
class Exclusion:
    """Which images of a source a conversion leaves out."""

    HEADING: ClassVar[str] = "Division"

    exclude: str | Path | Sequence[str | Path] = option(
        (),
        help="Leave out images whose keys or paths are listed in FILE, one per line, such as the "
        "lists from `shardkit report --exclude`. For a dataset, FILE may also list row numbers. "
        "Repeatable.",
        metavar="[SPLIT=]FILE",
        is_repeated=True,
    )


_BY_OPTION: Mapping[type[Any], str] = {
    DivisionOptions: "shardkit.sources.divided:divided",
    Exclusion: "shardkit.conversion.exclude:excluded",
}
"""Functions that wrap a source if one of these options is given, which they get with the seed."""

_BY_ENTRY = {DIVISION: "shardkit.sources.divided:reopen"}
"""Functions that wrap a source whose description has an entry, given `find` and ``described``."""

OF_FIELDS = "for an added field, also pass its file, under its original name"

Described = Mapping[str, Mapping[str, Any]]
"""The description of each split of a source; see `shardkit.contracts.Source.describe`."""


def open_given(
    source: Any, folder: FolderOptions, samples: SampleOptions, wrapping: Iterable[Any], seed: int
) -> Source:
    """Return the source that the arguments of `shardkit.convert` mean.

    ``wrapping`` has the options that ask for wrappers, inside out: objects of the keys of
    `_BY_OPTION`.
    """
    opened = _unwrapped(source, folder, samples)
    for options in wrapping:
        if changed(options):
            opened = load(_BY_OPTION[type(options)])(opened, **vars(options), seed=seed)
    return opened


def _unwrapped(source: Any, folder: FolderOptions, samples: SampleOptions) -> Source:
    is_folder = isinstance(source, (str, Path))
    if not is_folder and changed(folder):
        raise UsageError("class_order and splits are only for image folders")
    if not is_folder and not isinstance(source, Source):
        opened: Source = load(_SAMPLES)(source, samples)
        return opened
    if changed(samples):
        raise UsageError("schema and fields are only for Python samples")
    return open_source(DEFAULT_SOURCE, source, **vars(folder)) if is_folder else source


def reopen(kind: str, root: Any, described: Described, schema: Schema) -> Source:
    """Open the source of a dataset; ``root`` is its path, or the samples.

    It raises `CorruptDataset` if a description in the manifest is damaged.
    """
    is_path = isinstance(root, (str, Path))
    if kind == SAMPLES:
        if is_path:
            raise UsageError(
                "the dataset was converted from Python samples",
                remedy="compare it in Python: shardkit.verify(dataset, against=samples)",
            )
        return wrapped_as(described, partial(load(_SAMPLES).restored, root, schema))
    if not is_path:
        raise UsageError(
            f"the dataset was converted from a source of kind {quoted(kind)}",
            remedy=f"pass its path; {OF_FIELDS}",
        )
    if not is_source(kind):
        raise UsageError(
            f"the dataset was converted from a source of kind {quoted(kind)}, which is not "
            "installed;",
            remedy=f"choose from {', '.join(source_names())}",
        )
    if any(MEMBER in description for description in described.values()):
        together: Source = load(_TOGETHER)(kind, Path(root), described)
        return together
    return wrapped_as(described, partial(get_source(kind).find, Path(root)))


def wrapped_as(described: Described, find: Callable[[Described], Source]) -> Source:
    """Return the source that ``find`` opens from descriptions, in the wrappers that these name."""
    for entry, target in _BY_ENTRY.items():
        if any(entry in description for description in described.values()):
            find = partial(load(target), find)
    return find(described)
