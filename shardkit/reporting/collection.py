"""The images of several datasets as one table: labels, sizes and facts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from shardkit.dataset.located import EncodedImage
from shardkit.dataset.opened import OpenedDataset, OpenedDirectory
from shardkit.dataset.shardset import ShardSet
from shardkit.errors import UsageError
from shardkit.record import IMAGE, STORED_KINDS
from shardkit.reporting.facts import load_facts
from shardkit.reporting.image_facts import ABSENT_IMAGE, MEASURED, Facts
from shardkit.system.pool import Progress, Report
from shardkit.system.text import name_list


class Member(NamedTuple):
    """One dataset, or one split, in the table."""

    name: str
    shards: ShardSet
    start: int
    """Its first row in the table."""


class Image(NamedTuple):
    """Location of a stored image."""

    member: Member
    row: int
    """Row in its dataset."""
    key: str
    path: str
    """Path in the source."""


class Collection:
    """All rows of some datasets, one after another. Arrays have one element for each row.

    ``on_progress`` is called with the progress since the last call. UsageError if a dataset does
    not exist, has no images, or is given twice.
    """

    def __init__(
        self,
        directories: Sequence[str | Path],
        *,
        workers: int = 1,
        on_progress: Report | None = None,
    ) -> None:
        self.members: list[Member] = []
        start = 0
        for name, dataset in _datasets(directories).items():
            shards = ShardSet(dataset)
            if IMAGE not in shards.schema:
                raise UsageError(
                    f"{dataset.path} has no images to report on; its fields are "
                    f"{name_list(shards.schema)}. `shardkit info` describes them."
                )
            self.members.append(Member(name, shards, start))
            start += len(shards)
        if on_progress:
            on_progress(Progress(total=start))
        facts = [
            load_facts(member.shards, workers=workers, on_progress=on_progress)
            for member in self.members
        ]
        self.facts: Facts = np.concatenate(facts)
        names = [member.shards.manifest.classes or () for member in self.members]
        self.classes: list[str] = list(dict.fromkeys(name for classes in names for name in classes))
        """Names of all classes; equal names in several datasets are one class."""

    def __len__(self) -> int:
        return len(self.facts)

    @cached_property
    def member(self) -> npt.NDArray[np.int64]:
        """Position in `parts`."""
        counts = [len(member.shards) for member in self.members]
        return np.repeat(np.arange(len(counts)), counts)

    @cached_property
    def labels(self) -> npt.NDArray[np.int64]:
        """Position in `classes`, -1 without a label."""
        number = {name: position for position, name in enumerate(self.classes)}
        labels = []
        for member in self.members:
            numbers = [number[name] for name in member.shards.manifest.classes or ()]
            labels.append(np.array([*numbers, -1], np.int64)[member.shards.labels])
        return np.concatenate(labels)

    @cached_property
    def keys(self) -> list[str]:
        """The key of each row; for few rows, `image` needs less memory."""
        return [key for member in self.members for key in member.shards.keys]

    @cached_property
    def paths(self) -> list[str]:
        """The path in the source of each row."""
        return [path for member in self.members for path in member.shards.paths]

    @cached_property
    def index(self) -> npt.NDArray[np.void]:
        """The entries of the images in the index: `shardkit.dataset.index.ROW`."""
        return np.concatenate([member.shards.rows for member in self.members])

    @cached_property
    def sizes(self) -> npt.NDArray[np.int64]:
        """Width and height in pixels: shape (N, 2)."""
        columns = [self.index["width"], self.index["height"]]
        return np.stack(columns, axis=1).astype(np.int64)

    @cached_property
    def present(self) -> npt.NDArray[np.bool_]:
        """Whether the row has an image."""
        return np.asarray(self.facts["state"] != ABSENT_IMAGE)

    @cached_property
    def measured(self) -> npt.NDArray[np.bool_]:
        """Whether the row has an image that can be decoded."""
        return np.asarray(self.facts["state"] == MEASURED)

    def read(self, rows: npt.NDArray[np.int64]) -> Iterator[tuple[int, EncodedImage]]:
        """Yield some rows with their images, each of which is valid until the next one."""
        for number in np.unique(self.member[rows]).tolist():
            member = self.members[number]
            member_rows = rows[self.member[rows] == number]
            located = member.shards.find(member_rows - member.start)
            buffer = memoryview(bytearray(located.longest))
            for position, row in enumerate(member_rows.tolist()):
                yield row, located.read(position, buffer)

    def kind(self, row: int) -> str:
        """Return the kind of a row's image: a name in `STORED_KINDS`."""
        return STORED_KINDS[self.index["field"][row]]

    def label(self, row: int) -> str | None:
        """Return the class of a row."""
        label = int(self.labels[row])
        return None if label < 0 else self.classes[label]

    def image(self, row: int) -> Image:
        """Return where the image of a row is stored."""
        member = self.members[int(self.member[row])]
        own_row = row - member.start
        return Image(member, own_row, member.shards.keys[own_row], member.shards.paths[own_row])


def _datasets(directories: Sequence[str | Path]) -> dict[str, OpenedDataset]:
    """Return each dataset, by a name that tells them apart.

    The name has no more of the path than is needed: reports are shown to others.
    """
    datasets: dict[str, OpenedDataset] = {}
    folders_seen: set[Path] = set()
    folders = [Path(directory) for directory in directories]
    names = [folder.absolute().name for folder in folders]
    if len(set(names)) < len(names):
        names = [*map(str, folders)]
    for name, folder in zip(names, folders, strict=True):
        for split, dataset in OpenedDirectory(folder).splits.items():
            if (real := dataset.path.resolve()) in folders_seen:
                raise UsageError(
                    f"{folder / split} is listed twice;", remedy="list each dataset only once"
                )
            folders_seen.add(real)
            title = name if not split else split if len(folders) == 1 else f"{name}/{split}"
            datasets[title] = dataset
    return datasets
