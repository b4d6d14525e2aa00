"""CIFAR-10 and CIFAR-100, binary version, as a source."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from shardkit.contracts import Entry, Scan, SourceKind, SourceOption
from shardkit.errors import BadImage, UsageError
from shardkit.record import Record
from shardkit.sources.images import pixel_record
from shardkit.sources.inputs import View, place, place_of, reading, scanning
from shardkit.sources.labels import LabelValues, read_classes
from shardkit.sources.listing import SPLIT_OPTION, ListedSource, Listing, scan_of, split_names

_SHAPE = (3, 32, 32)
"""Channels, rows and columns of an image, in the order of its bytes."""
_PIXELS = 3 * 32 * 32
_CHUNK = 1024
"""Images to read together while labels are listed."""


class _Layout(NamedTuple):
    """One version of the data set."""

    title: str
    splits: Mapping[str, tuple[str, ...]]
    """Files of each split."""
    names: Mapping[str, str]
    """File with the class names of each label."""


_CIFAR10 = _Layout(
    "CIFAR-10",
    {
        "train": tuple(f"data_batch_{number}.bin" for number in range(1, 6)),
        "test": ("test_batch.bin",),
    },
    {"label": "batches.meta.txt"},
)
_CIFAR100 = _Layout(
    "CIFAR-100",
    {"train": ("train.bin",), "test": ("test.bin",)},
    {"coarse": "coarse_label_names.txt", "fine": "fine_label_names.txt"},
)


class Cifar(ListedSource):
    """The binary version of CIFAR-10 or CIFAR-100; images become PNG files.

    Args:
        folder: The folder ``cifar-10-batches-bin`` or ``cifar-100-binary``.
        split: ``train`` or ``test``; None reads both, as splits.
        label: ``fine`` or ``coarse``, for CIFAR-100.
    """

    kind = "cifar"

    def __init__(
        self, folder: str | Path, *, split: str | None = None, label: str | None = None
    ) -> None:
        self._folder = Path(folder)
        self._layout = _layout_of(self._folder)
        names = list(self._layout.names)
        self._label = label or names[-1]
        if self._label not in names:
            raise UsageError(
                f"--label {label} is unknown: {self._layout.title} has {' and '.join(names)}"
            )
        self._splits = split_names(split, list(self._layout.splits))
        super().__init__(folder, {"split": split, "label": label})
        self._files = [name for each in self._splits.values() for name in self._layout.splits[each]]
        missing = [name for name in self._files if not (self._folder / name).is_file()]
        if missing:
            raise UsageError(
                f"{folder} lacks {', '.join(missing)}; download {self._layout.title} again, or "
                "choose one split with --split"
            )

    @classmethod
    def find(cls, path: Path, described: Mapping[str, Mapping[str, Any]]) -> Cifar:
        """Open the folder that a dataset was made from."""
        options = next(iter(described.values()))
        return cls(path, split=options.get("split"), label=options.get("label"))

    def paths(self) -> Sequence[Path]:
        """Return the folder."""
        return [self._folder]

    def read(self, split: str, entry: Entry) -> Record:
        """Return the record of an image."""
        number, offset = place_of(entry.place)
        with reading(str(self._folder / self._files[number]), entry.stamp) as view:
            data = view.read(offset, _PIXELS)
        if len(data) != _PIXELS:
            raise BadImage("the file is truncated")
        planes = np.frombuffer(data, np.uint8).reshape(_SHAPE)
        return pixel_record(entry, np.ascontiguousarray(planes.transpose(1, 2, 0)))

    def locate(self, split: str, entry: Entry) -> str:
        """Return the file and the offset of an image."""
        number, offset = place_of(entry.place)
        return f"{self._folder / self._files[number]} at byte {offset}"

    def scan(self, classes: Sequence[str] | None = None) -> Scan:
        """List the images of all files, in order.

        Raises:
            UsageError: If labels have no name.
        """
        labels = LabelValues()
        listings = {name: Listing(labels) for name in self._splits}
        for name, part in self._splits.items():
            for file in self._layout.splits[part]:
                self._list(listings[name], file)
        names_file = self._layout.names[self._label]
        names = None
        if (self._folder / names_file).is_file():
            names = read_classes(str(self._folder / names_file))
        else:
            next(iter(listings.values())).ignore(names_file, "missing, so classes are numbers")
        understood = {
            "data": f"{self._layout.title}, 32 x 32 pixels, stored as PNG",
            "files": ", ".join(self._files),
            "label": f"{self._label}, named by {names_file}" if names else self._label,
        }
        assigned = labels.assign(classes, names)
        return scan_of(self, listings, assigned, understood, exact_sizes=False)

    def _list(self, listing: Listing, file: str) -> None:
        number = self._files.index(file)
        labels = len(self._layout.names)
        size = labels + _PIXELS
        column = list(self._layout.names).index(self._label)

        def scan(view: View) -> None:
            if view.size % size:
                raise BadImage(
                    f"its {view.size} bytes are not a multiple of {size}: it is damaged, or not "
                    f"the binary version of {self._layout.title}"
                )
            for start in range(0, view.size, size * _CHUNK):
                values = view.read(start, size * _CHUNK)[column::size]
                for row, value in enumerate(values, start // size):
                    path = f"{file.removesuffix('.bin')}/{row:05d}.png"
                    spot = place(number, row * size + labels)
                    listing.add(path, listing.labels.code(value), _PIXELS, view.stamp, spot)

        if reason := scanning(str(self._folder / file), scan):
            listing.blame_rest(file, reason)


def _layout_of(folder: Path) -> _Layout:
    if not folder.is_dir():
        raise UsageError(f"the source folder {folder} does not exist")
    for layout in (_CIFAR10, _CIFAR100):
        files = [name for names in layout.splits.values() for name in names]
        if any((folder / name).is_file() for name in files):
            return layout
    python = [name for name in ("data_batch_1", "train") if (folder / name).is_file()]
    if python:
        raise UsageError(
            f"{folder} is the Python version of CIFAR, which is pickled and could run any code. "
            "Download the binary version."
        )
    raise UsageError(f"{folder} holds no data_batch_1.bin (CIFAR-10) or train.bin (CIFAR-100)")


SOURCE = SourceKind(
    name=Cifar.kind,
    title="Convert the binary version of CIFAR-10 or CIFAR-100.",
    help="""Convert CIFAR-10 or CIFAR-100 to a dataset in DST.

    SRC is the folder of the binary version: cifar-10-batches-bin or cifar-100-binary. Images become
    PNG files, which are lossless; --resize 32x32 --encode raw stores plain pixels.

    \b
    Examples:
      shardkit convert cifar cifar-10-batches-bin dataset --to lmdb
      shardkit convert cifar cifar-100-binary dataset --to hdf5 --label coarse --split train
    """,
    options=(
        SPLIT_OPTION,
        SourceOption(
            flags="--label",
            metavar="fine|coarse",
            help="Labels of CIFAR-100.  [default: fine]",
        ),
    ),
    open=Cifar,
    find=Cifar.find,
)
