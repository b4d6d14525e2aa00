"""Cases of the corpus: files and their expected outcomes."""

from __future__ import annotations

import io
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from helpers import Pixels
from PIL import Image

LEVELS = ("decode", "header", "none", "resize", "raw")
"""The conversions that each case goes through: the three levels of ``--check`` on a plain copy,
``--resize 8``, and ``--encode raw`` stretched to 8 x 8 pixels."""


@dataclass(frozen=True, kw_only=True)
class Stored:
    """The file is stored: unchanged, or with its pixels changed as requested."""

    kind: str
    pixels: Callable[[], Pixels] | None = None
    """The pixels of the file as it lies, found without shardkit; None if it has none that can be
    decoded, and is stored because nobody was to look."""
    notes: Mapping[str, int] = field(default_factory=dict)
    near: int = 0
    """By how much a value may differ."""


@dataclass(frozen=True, kw_only=True)
class Rejected:
    """The file is reported as bad, with a reason."""

    words: str
    """What the reason says, among other words."""
    kind: str | None = None
    """What it passes for unseen; None if its first bytes are those of no image."""
    header_passes: bool = False
    """Whether its header is good: then only those who look at the pixels reject it."""


@dataclass(frozen=True, kw_only=True)
class Problem:
    """The scan reports it as bad: it cannot be opened."""

    words: str


@dataclass(frozen=True, kw_only=True)
class Ignored:
    """The scan ignores and reports it: it has no image suffix."""

    words: str


Outcome = Stored | Rejected | Problem | Ignored


@dataclass(frozen=True, kw_only=True)
class Case:
    """Files in a separate folder and their expected outcomes."""

    name: str
    group: str
    make: Callable[[Path], None]
    """Writes the files into a folder."""
    outcomes: Mapping[str, Outcome]
    """A file's path in that folder to its outcome in a plain copy with ``--check decode``."""
    later: Callable[[Path], None] | None = None
    """What happens to the files between the scan and the conversion."""
    differing: Mapping[str, Outcome] = field(default_factory=dict)
    """Level to the outcome of all its files, where it is not what `at_level` derives."""
    folder: str = ""
    """Its folder; made of its number in the corpus where it is not given."""


def files_of(cases: Iterable[Case], folder: Path) -> Iterator[tuple[Case, Path]]:
    """Make each case in a folder of its own; yield its files."""
    for number, case in enumerate(cases):
        (folder / str(number)).mkdir()
        case.make(folder / str(number))
        for path in filter(Path.is_file, (folder / str(number)).rglob("*")):
            yield case, path


def at_level(case: Case, path: str, level: str) -> Outcome:
    """Return the expected outcome of a case's file at one of `LEVELS`."""
    outcome = case.outcomes[path]
    if level in case.differing:
        return case.differing[level]
    unseen = level == "none" or (level == "header" and getattr(outcome, "header_passes", False))
    if isinstance(outcome, Rejected) and outcome.kind and unseen:
        return Stored(kind=outcome.kind)
    return outcome


def simple(
    group: str,
    name: str,
    content: Callable[[], bytes],
    outcome: Outcome,
    *,
    file: str = "odd.jpg",
    **differing: Outcome,
) -> Case:
    """Return a case of one file with the given content."""

    def make(folder: Path) -> None:
        (folder / file).write_bytes(content())

    return Case(name=name, group=group, make=make, outcomes={file: outcome}, differing=differing)


def pillow(content: Callable[[], bytes]) -> Callable[[], Pixels]:
    """Return the RGB pixels of an opaque image in Pillow."""

    def pixels() -> Pixels:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of odd metadata, in the tests' own use of Pillow
            return np.asarray(Image.open(io.BytesIO(content())).convert("RGB"))

    return pixels


def over_white(values: Pixels) -> Pixels:
    """Return RGBA pixels composited over white, computed with NumPy."""
    color, opacity = values[..., :3].astype(np.float64), values[..., 3:].astype(np.float64) / 255
    laid: Pixels = np.rint(color * opacity + 255 * (1 - opacity)).astype(np.uint8)
    return laid


def gray(values: Pixels) -> Pixels:
    """Return a plane of values as RGB."""
    return np.repeat(values[:, :, None], 3, axis=2)
