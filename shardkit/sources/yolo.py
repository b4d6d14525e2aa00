"""YOLO's folders of images and labels as a source: boxes, polygons and keypoints.

The layouts of Ultralytics and Roboflow: ``images/train`` and ``labels/train``, or ``train/images``
and ``train/labels``, or labels next to images. Coordinates are fractions of the upright picture.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

from shardkit.contracts import SourceKind
from shardkit.errors import BadImage, UsageError
from shardkit.kinds.field import Field
from shardkit.record import Record
from shardkit.sources.annotated import UPRIGHT, AnnotatedOptions, AnnotatedSource, header_of
from shardkit.sources.driver import Listing
from shardkit.sources.folders import LocalFolder, is_split_name
from shardkit.sources.inputs import refusing
from shardkit.sources.labels import classes_option, read_classes
from shardkit.sources.named_files import NamedListing, Names, is_below, names_in
from shardkit.sources.yolo_layout import NOTHING, description_in, read_description, recognize_yolo
from shardkit.system.files import as_name
from shardkit.system.text import amount, quoted, shell

_CLASS_FILES = ("classes.txt", "obj.names", "_darknet.labels")
_MOST_LABELS = 16 << 20
_OUTSIDE = 0.01
"""How far a coordinate may be outside of the picture: tools round, and Ultralytics accepts it."""


@dataclass(frozen=True, kw_only=True)
class YoloOptions(AnnotatedOptions):
    """The options of this source."""

    classes: str | None = classes_option(
        "File of class names, one per line, in label order.", stored=""
    )


class _LabelSummary(NamedTuple):
    """Images without labels, and the classes and kinds of all labels."""

    bare: list[str]
    """Images without a file of labels."""
    classes: set[int]
    kinds: set[str]


class Yolo(AnnotatedSource):
    """Images with YOLO labels.

    A record has the image and ``boxes``; ``polygons`` if rows are polygons: of each box its points
    as fractions of the upright picture; and ``keypoints`` if the description states ``kpt_shape``.

    The path is the folder, or its file ``data.yaml``.
    """

    kind = "yolo"
    options: YoloOptions

    def __init__(self, path: str | Path, options: YoloOptions) -> None:
        super().__init__(path, replace(options, annotated=options.annotated or UPRIGHT))
        if not os.path.exists(self.path):
            raise UsageError(f"{path} does not exist")
        self.description = NOTHING
        self._file = self.path if os.path.isfile(self.path) else description_in(self.root)
        if self._file not in (None, self.path):
            with refusing(self._file):
                self.names().status(self._file.name)
        self._lists: list[str] = []
        """Files that were read to find images and the names of classes."""
        if self._file is not None:
            self._lists.append(str(self._file))
            self.description = read_description(self._file)
        self._odd: list[str] = []
        """Differences from the description, for notes."""
        self.splits = self._choose()
        classes = read_classes(options.classes)
        named = classes if isinstance(classes, tuple) else None
        self.box_names = named or self.description.names or self._listed()

    def list_images(self, listings: Mapping[str, Listing]) -> Mapping[str, str]:
        """List the images of each split, in the order of their paths or of a list."""
        names = self.names()
        summary = _LabelSummary([], set(), set())
        total = 0
        for split, images in self.splits.items():
            listing = NamedListing(listings[split], names)
            for number, image in enumerate(images):
                total += 1
                label = _label_of(image)
                try:
                    values = self._labels(names, image, label, summary)
                except BadImage as error:
                    listing.blame_row(label, image, error.stated)
                else:
                    listing.add_file(label, image, number, values)
        if total == len(summary.bare) and total:
            image = summary.bare[0]
            folders = [name for name in image.split("/")[:-1] if not is_split_name(name)]
            raise UsageError(
                f"{self}: none of the {total:,} images has labels: {image} needs "
                f"{_label_of(image)}",
                remedy=f"if folders such as {folders[0]} are classes, run shardkit convert "
                f"{shell('imagefolder', self.root, 'DST', '--to', 'lmdb')}"
                if folders and "images" not in folders
                else None,
            )
        if summary.bare:
            self.notes.append(
                f"{amount(len(summary.bare), 'image')} without a label file have no boxes: "
                f"{summary.bare[0]}"
            )
        self.notes += self._odd
        next(iter(listings.values())).ignored += names.unused(self._lists)
        return self._settle(summary)

    def fit(self, values: dict[str, Any], record: Record) -> dict[str, Any]:
        """Return boxes and points in stored pixels, from fractions of the picture."""
        info = header_of(record)
        if info is None:
            return values
        size = info.upright if self.options.annotated == UPRIGHT else (info.width, info.height)
        values["boxes"] = _scaled(values["boxes"], size * 2)
        if "keypoints" in self.schema:
            values["keypoints"] = _scaled(values["keypoints"], size)
        if "polygons" in self.schema:
            values.setdefault("polygons", [[] for _ in values["boxes"]])
        return super().fit(values, record)

    def _settle(self, summary: _LabelSummary) -> Mapping[str, str]:
        """Set the fields, now that all labels are known."""
        earlier = self.known_classes("boxes")
        count = max(summary.classes, default=-1) + 1
        names = tuple(earlier or self.box_names or map(str, range(count)))
        if count > len(names):
            raise UsageError(
                f"{self}: labels contain class {count - 1}, but there are only {len(names)} class "
                "names"
            )
        schema = {"boxes": Field("boxes", classes=names)}
        if self.description.points:
            schema["keypoints"] = Field("keypoints", classes=self.description.points)
        if "polygons" in summary.kinds:
            schema["polygons"] = Field("json")
        self.settle_fields(schema)
        return {
            "images": ", ".join(
                f"{len(images):,} {split}".rstrip() for split, images in self.splits.items()
            ),
            **{name: str(field) for name, field in schema.items()},
        }

    def _labels(
        self, names: Names, image: str, label: str, summary: _LabelSummary
    ) -> dict[str, Any]:
        """Return the values of an image: fractions of the picture."""
        try:
            file = names.find(label)
        except BadImage:
            if names.has(label):
                raise
            summary.bare.append(image)
            text = ""
        else:
            if file.size > _MOST_LABELS:
                raise BadImage(f"its labels have {file.size:,} bytes")
            text = names.read(file, image=False).decode("utf-8-sig", "replace")
        values: dict[str, Any] = {"boxes": []}
        polygons = []
        points: list[list[float]] = []
        for number, line in enumerate(text.splitlines(), 1):
            if line.split():
                try:
                    row = self._row(line)
                except ValueError as error:
                    raise BadImage(f"line {number} of its labels: {error}") from error
                summary.classes.add(row.label)
                values["boxes"].append([*row.box, row.label])
                polygons.append(row.polygon)
                points += row.points
        self.count_outside(values["boxes"], (1 + 1e-6, 1 + 1e-6))
        if self.description.points:
            values["keypoints"] = points
        if any(polygons):
            summary.kinds.add("polygons")
            values["polygons"] = polygons
        return values

    def _row(self, line: str) -> _Row:
        """Return a row of labels."""
        label, *numbers = map(float, line.split())
        if not (label >= 0 and label.is_integer()):
            raise ValueError(f"{label:g} is not a class")
        if self.box_names and label >= len(self.box_names):
            raise ValueError(f"class {label:g} does not exist")
        points = len(self.description.points) * self.description.dimensions
        if points and len(numbers) == 4 + points:
            return _Row(int(label), _corners(numbers[:4]), [], self._points(numbers[4:]))
        if len(numbers) == 4 and not points:
            return _Row(int(label), _corners(numbers), [], [])
        if len(numbers) < 6 or len(numbers) % 2 or points:
            wanted = f"{4 + points}" if points else "4, or at least 3 pairs"
            raise ValueError(f"it has {len(numbers)} numbers after the class, not {wanted}")
        xs, ys = numbers[::2], numbers[1::2]
        _require_fractions(numbers)
        return _Row(
            int(label),
            [min(xs), min(ys), max(xs), max(ys)],
            [list(point) for point in zip(xs, ys, strict=True)],
            [],
        )

    def _points(self, numbers: list[float]) -> list[list[float]]:
        """Return x, y and visibility of each keypoint; points at 0, 0 without one are not there."""
        width = self.description.dimensions
        points = [numbers[start : start + width] for start in range(0, len(numbers), width)]
        _require_fractions([number for x, y, *_ in points for number in (x, y)])
        return [[x, y, seen[0] if seen else 2 * (x > 0 or y > 0)] for x, y, *seen in points]

    def _choose(self) -> dict[str, list[str]]:
        """Return the images of each split, by path below the root."""
        described = {
            split: [image for entry in entries for image in self._images_of(split, entry)]
            for split, entries in self.description.splits.items()
        }
        if any(described.values()):
            self._note_folder()
            return {split: images for split, images in described.items() if images}
        folders = _folders(self.root, "")
        for pattern, tops in (
            ("images/{}", _folders(self.root, "images")),
            ("{}/images", [name for name in folders if "images" in _folders(self.root, name)]),
            ("{}", folders),
        ):
            if splits := [name for name in tops if is_split_name(name)]:
                return {name: [*self.names().images(pattern.format(name))] for name in splits}
        return {"": [*self.names().images("images" if "images" in folders else "")]}

    def _note_folder(self) -> None:
        """Note that the description names another folder."""
        folder = self._local_path("")
        is_here = os.path.isdir(folder) and is_below(folder, os.path.realpath(self.root))
        if self.description.folder and not is_here:
            self._odd.append(
                f"path is {quoted(self.description.folder)}, but its folders were found in "
                f"{self.root}"
            )

    def _local_path(self, entry: str) -> str:
        """Return the path that an entry of the description means on this machine."""
        folder = os.path.dirname(self._file or self.path)
        return os.path.realpath(os.path.join(folder, self.description.folder, entry))

    def _images_of(self, split: str, entry: str) -> list[str]:
        """Return the images of a folder, list or file that a description names for a split.

        Descriptions were written elsewhere: what exists below the root is the longest end of a
        path.
        """
        path = os.path.join(self.description.folder, entry)
        path_names = [name for name in re.split(r"[\\/]", path) if name not in ("", ".", "..")]
        ends = ["/".join(path_names[start:]) for start in range(len(path_names))]
        if len(ends) > 1 and ends[-1] == "images":
            ends.pop()  # it may be that of another split
        inside = next((end for end in ends if os.path.exists(f"{self.root}/{as_name(end)}")), None)
        if inside is None:
            return self._without(split, entry)
        if os.path.isdir(os.path.join(self.root, as_name(inside))):
            return [*self.names().images(inside)]
        if not inside.endswith(".txt"):
            return [inside]
        folder = inside.rpartition("/")[0]
        names = self.names()
        names.find(inside)
        self._lists.append(os.path.join(self.root, as_name(inside)))
        lines = names_in(Path(self.root, as_name(inside)).resolve())
        return [_listed_image(self.root, folder, line) for line in lines]

    def _without(self, split: str, entry: str) -> list[str]:
        """Return no images for a test split that is not there."""
        target = self._local_path(entry)
        if os.path.exists(target):
            root = (
                self._local_path("") if self.description.folder else target.partition("/images")[0]
            )
            command = shell("yolo", f"{self._file}@{root}", "DST", "--to", "lmdb")
            raise UsageError(
                f"{self}: {split} is {target}, which is not inside {self.root};",
                remedy=f"if you trust the file, run shardkit convert {command}",
            )
        if split != "test":
            raise UsageError(
                f"{self}: {split} is {quoted(entry)}, which is not inside {self.root}",
                remedy=f"if there is no such split, remove the line from {self._file}",
            )
        self._odd.append(f"test is {quoted(entry)}, which does not exist")
        return []

    def _listed(self) -> tuple[str, ...] | None:
        """Return the class names in a file next to the images, if there is one."""
        for folder in ("", "labels", "train", "train/labels"):
            for file in _CLASS_FILES:
                path = os.path.join(self.root, folder, file)
                if os.path.isfile(path) and isinstance(names := read_classes(path), tuple):
                    self._lists.append(path)
                    return names
        return None


class _Row(NamedTuple):
    """A row of labels, in fractions of the picture."""

    label: int
    box: list[float]
    polygon: list[list[float]]
    points: list[list[float]]


def _scaled(values: Sequence[Sequence[float]], scale: Sequence[int]) -> list[list[float]]:
    """Return values whose first numbers are multiplied."""
    count = len(scale)
    return [
        [*(n * side for n, side in zip(value[:count], scale, strict=True)), *value[count:]]
        for value in values
    ]


def _corners(numbers: Sequence[float]) -> list[float]:
    """Return left, top, right and bottom from the center, width and height."""
    _require_fractions(numbers)
    x, y, width, height = numbers
    return [x - width / 2, y - height / 2, x + width / 2, y + height / 2]


def _require_fractions(numbers: Sequence[float]) -> None:
    wrong = [n for n in numbers if not (math.isfinite(n) and -_OUTSIDE <= n <= 1 + _OUTSIDE)]
    if wrong:
        raise ValueError(f"{wrong[0]:g} is not a fraction of the image, from 0 to 1")


def _label_of(image: str) -> str:
    """Return the file of labels of an image: in ``labels`` for ``images``, or next to it."""
    path = PurePosixPath(image).with_suffix(".txt")
    parts = [*path.parts]
    for number in range(len(parts) - 2, -1, -1):
        if parts[number] == "images":
            parts[number] = "labels"
            break
    return "/".join(parts)


def _listed_image(root: str, folder: str, line: str) -> str:
    """Return the image that a line of a list names, from its folder or by the end of its path."""
    parts = [part for part in re.split(r"[\\/]", line) if part not in ("", ".")]
    if line.startswith("./"):
        return "/".join([folder, *parts]) if folder else "/".join(parts)
    ends = ["/".join(parts[start:]) for start in range(len(parts)) if ".." not in parts[start:]]
    below = [end for end in ends if os.path.exists(os.path.join(root, as_name(end)))]
    return below[0] if below else "/".join(parts)


def _folders(root: str, inside: str) -> list[str]:
    """Return all folders, of which an `Overview` may miss some between many files."""
    path = os.path.join(root, as_name(inside))
    return LocalFolder(path).folders() if os.path.isdir(path) else []


SOURCE = SourceKind(
    name=Yolo.kind,
    title="Convert images with YOLO labels: boxes, polygons, keypoints.",
    help="""Convert the images of the folder SRC, with their labels, to a dataset in DST.

    SRC is a folder with data.yaml, or that file. Without data.yaml, splits are the folders in
    images, or the folders that contain an images folder. Labels are in labels, or next to the
    images. Boxes become left, top, right and bottom in pixels; rows with more numbers are polygons,
    or keypoints if data.yaml has kpt_shape. Images without labels have no boxes. Labels refer to
    the upright picture.

    \b
    Examples:
      shardkit convert yolo coco128 dataset --to lmdb
      shardkit convert yolo roboflow/data.yaml dataset --to lmdb --resize 640 --orient
    """,
    options=YoloOptions,
    recognize=recognize_yolo,
    source=Yolo,
)
