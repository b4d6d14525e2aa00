"""Divide the rows of a dataset into train, val and test without copying (`shardkit split`)."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt

from shardkit.dataset.manifest import load_manifest
from shardkit.dataset.selection import LIST_HEAD
from shardkit.dataset.source import DatasetSource
from shardkit.errors import UsageError
from shardkit.sources.divided import Divided, Division
from shardkit.system.files import require_local, write_atomically


def split(  # noqa: PLR0913 - the options of the command
    directory: str | Path,
    *,
    val: float = 0.0,
    test: float = 0.0,
    stratify: bool = False,
    group: str | None = None,
    seed: int = 0,
) -> dict[str, npt.NDArray[np.int64]]:
    """Divide the rows of the dataset in ``directory``, for ``dataset.select(rows)``.

    A row's side depends only on its source path and the seed, so images that are added later move
    no others, and shares are approximate. ``stratify`` divides the images of each class exactly;
    images that are added may then move a few.

    Args:
        directory: The dataset.
        val: Share of val, from 0 to 1.
        test: Share of test.
        stratify: Whether to divide each class by itself.
        group: ``folder``, or a label, number or text: rows of one folder of the source, or with one
            value, get one side. Shares are then those of groups, and with ``stratify`` those of
            images, as far as groups permit.
        seed: Selects another division.

    Returns:
        Rows of ``train``, ``val`` and ``test``, in order: int64 of shape (N,).

    Raises:
        UsageError: If there is no dataset, it has splits, an option is invalid, or a side is empty.
        CorruptDataset: If the manifest or index is damaged.
    """
    division = Division(val=val, test=test, stratify=stratify, group=group, seed=seed)
    scan = Divided(DatasetSource(directory), division).scan()
    return {
        side: np.array([entry.place for entry in images.entries], np.int64)
        for side, images in scan.splits.items()
    }


def save_rows(
    rows: dict[str, npt.NDArray[np.int64]], directory: Path, target: Path, *, force: bool = False
) -> dict[str, Path]:
    """Write lists of rows to text files, which ``convert dataset --rows`` and NumPy read.

    Args:
        rows: From `split`.
        directory: The dataset, whose content digest each file states.
        target: Folder for ``train.txt`` and the others.
        force: Whether to replace other lists there.

    Returns:
        The file of each side.

    Raises:
        UsageError: If the folder cannot be used, or has other lists.
    """
    require_local(target)
    head = f"{LIST_HEAD}{load_manifest(directory).content_digest}\n"
    texts = {target / f"{side}.txt": head + _lines(each) for side, each in rows.items()}
    try:
        target.mkdir(parents=True, exist_ok=True)
        for path, text in texts.items():
            if not force and path.exists() and path.read_bytes() != text.encode():
                raise UsageError(f"{path} exists already, with other rows; --force replaces it")
        for path, text in texts.items():
            write_atomically(path, text.encode())
    except OSError as error:
        raise UsageError(f"{target} cannot be written: {error.strerror}") from error
    return dict(zip(rows, texts, strict=True))


def _lines(rows: npt.NDArray[np.int64]) -> str:
    return "".join(f"{row}\n" for row in rows.tolist())
