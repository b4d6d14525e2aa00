"""Divide the rows of a dataset into train, val and test without copying (`shardkit split`)."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from shardkit.dataset.opened import OpenedDataset
from shardkit.dataset.selection import LIST_HEAD
from shardkit.dataset.source import DatasetSource
from shardkit.errors import UsageError, setting
from shardkit.options import option, takes
from shardkit.sources.divided import SIDES, Divided, Division
from shardkit.sources.opening import DivisionOptions
from shardkit.system.files import is_temporary, require_local
from shardkit.system.user_files import write_together


@dataclass(frozen=True, kw_only=True)
class SplitOptions:
    """The options of `split` other than the rule."""

    HEADING: ClassVar[str] = "Division"

    seed: int = option(0, help="Seed of the split.", metavar="N")


@takes(DivisionOptions, SplitOptions)
def split(
    rule: DivisionOptions, options: SplitOptions, directory: str | Path
) -> dict[str, npt.NDArray[np.int64]]:
    """Divide the rows of the dataset in ``directory``, for ``dataset.select(rows)``.

    The split of a row depends only on its source path and the seed. So images that are added later
    do not move others, and fractions are approximate. ``stratify`` divides the images of each class
    exactly; images that are added later may then move a few others. With ``group``, fractions apply
    to groups, or with ``stratify``, to images as far as groups permit.

    Args:
        directory: The dataset.

    Returns:
        Rows of ``train``, ``val`` and ``test``, in order: int64 of shape (N,).

    Raises:
        UsageError: If there is no dataset, it has splits, an option is invalid, or one of the three
            would be empty.
        CorruptDataset: If the manifest or index is damaged.
    """
    division = Division(**vars(rule), seed=options.seed)
    scan = Divided(DatasetSource(directory), division).scan()
    return {
        side: np.fromiter((entry.place for entry in images.entries), np.int64, len(images))
        for side, images in scan.splits.items()
    }


def save_rows(
    rows: dict[str, npt.NDArray[np.int64]], directory: Path, target: Path, *, force: bool = False
) -> dict[str, Path]:
    """Write lists of rows to text files, which ``convert dataset --rows`` and NumPy read.

    Each file, such as ``train.txt``, states the content digest of the dataset in ``directory``.
    ``force`` replaces or removes other lists in ``target``. Return the file of each side.
    """
    require_local(target)
    head = f"{LIST_HEAD}{OpenedDataset(directory).manifest.content_digest}\n"
    texts = {target / f"{side}.txt": head + _lines(numbers) for side, numbers in rows.items()}
    try:
        target.mkdir(parents=True, exist_ok=True)
        lists = {f"{side}.txt" for side in SIDES}
        names = sorted(os.listdir(target))
        if others := [name for name in names if name not in lists and not is_temporary(name)]:
            listing = ", ".join(others[:5]) + (" ..." if len(others) > 5 else "")
            raise UsageError(
                f"{target} contains other files ({listing});", remedy="choose a new folder"
            )
        former = [target / name for name in names if name in lists and target / name not in texts]
        if former and not force:
            raise UsageError(
                f"{former[0]} is a list of another split;",
                remedy=f"{setting('force', True)} removes it",
            )
        for path, text in texts.items():
            if not force and path.exists() and path.read_bytes() != text.encode():
                raise UsageError(
                    f"{path} already exists, with other rows;",
                    remedy=f"{setting('force', True)} replaces it",
                )
        write_together({path: text.encode() for path, text in texts.items()}, former)
    except OSError as error:
        raise UsageError(f"{target} cannot be written: {error.strerror}") from error
    return dict(zip(rows, texts, strict=True))


def _lines(rows: npt.NDArray[np.int64]) -> str:
    return "".join(f"{row}\n" for row in rows.tolist())
