"""COCO annotations of image files as a source."""

from __future__ import annotations

import json
import os
import re
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from shardkit.contracts import Recognition, Source, SourceKind
from shardkit.errors import BadImage, ConversionFailed, UsageError
from shardkit.kinds.field import Field
from shardkit.options import option
from shardkit.sources.annotated import SIZE, AnnotatedOptions, AnnotatedSource
from shardkit.sources.driver import Listing
from shardkit.sources.folders import below
from shardkit.sources.inputs import reading
from shardkit.sources.named_files import NamedListing, Names, corners
from shardkit.sources.recognize import Overview, split_in
from shardkit.sources.together import open_folder
from shardkit.sources.zip_file import open_member, zip_folder
from shardkit.system.text import amount, quoted, size

_SPACE = re.compile(r"[ \t\n\r]*")
_MOST_BYTES = 16 << 30
_TRIED = 50
"""Images whose names show where they are."""


@dataclass(frozen=True, kw_only=True)
class CocoOptions(AnnotatedOptions):
    """The options of this source."""

    root: str | None = option(
        None,
        help="Folder or zip archive of the images.",
        metavar="DIR",
        shown="the folder of SRC",
        stored="",
    )


class Coco(AnnotatedSource):
    """Images with the annotations of a COCO file.

    A record has the image and its ``image_id``; ``boxes``, if annotations have any, with the
    category of each; ``keypoints``, if categories name some; and ``annotations``, all of the
    image's entries as the file states them. Boxes, keypoints and annotations have one order.
    Categories are the classes of boxes, sorted by their IDs, which may have gaps. If annotations
    only state a category, as iNaturalist's, it is the image's label; or ``labels``, if an image has
    several.

    The path is that of the annotations, perhaps with ``@ROOT``.
    """

    kind = "coco"
    reads_zip = True
    options: CocoOptions

    def __init__(self, path: str | Path, options: CocoOptions) -> None:
        super().__init__(path, options, options.root)
        self._outer = ""
        """The folders of another machine with which names of files start."""

    def list_images(self, listings: Mapping[str, Listing]) -> Mapping[str, str]:
        """List the images, in the order of the file."""
        content = self._content()
        listing = NamedListing(listings[""], self.names())
        self._find_outer(content.images, listing.names)
        for number, image in enumerate(content.images):
            row = f"{self.path.name}:images[{number}]"
            name = self._name_of(image, listing.names)
            try:
                values, boxes = content.values_of(image)
                code = listings[""].code(content.label_of(image))
            except BadImage as error:
                listing.blame_row(row, name, error.stated)
            else:
                listing.add_file(row, name, number, values, code)
                if size := _size_of(image):
                    self.probe(name, size)
                    self.count_outside(boxes, size)
        for where, reason in content.stray:
            listings[""].blame(f"{self.path.name}:{where}", reason)
        listings[""].ignored += listing.names.unused([str(self.path)])
        self.settle_fields(content.schema)
        self.class_names = content.classes
        self.notes += content.notes
        return {
            "images": f"{len(content.images):,}, below {self.root}",
            **{name: str(field) for name, field in content.schema.items()},
            "objects": f"{content.objects:,} annotations: {', '.join(content.terms)}",
            "unused": ", ".join(content.unused) or "nothing",
        }

    def _name_of(self, image: Any, names: Names) -> Any:
        """Return the name of an image's file: stated, of its URL as in LVIS, or by its ID."""
        if not isinstance(image, dict):
            return None
        if "file_name" in image:
            name = image["file_name"]
            if isinstance(name, str) and ("\\" in name or self._outer) and not names.has(name):
                return _slashed(name).removeprefix(self._outer)
            return name
        url = image.get("coco_url") or image.get("flickr_url")
        if isinstance(url, str):
            *_, folder, file = ("", *url.split("/"))
            below = f"{folder}/{file}"
            return below if names.has(below) else file
        key = _id_of(image)
        return f"{key:012}.jpg" if isinstance(key, int) else None

    def _find_outer(self, images: Sequence[Any], below: Names) -> None:
        """Find which part of the first names is below the root; the rest is of another machine."""
        self._outer = ""
        names = (image.get("file_name") for image in images[:_TRIED] if isinstance(image, dict))
        for name in (name for name in names if isinstance(name, str)):
            plain = _slashed(name)
            tail = next((tail for tail in _tails(name) if below.has(tail)), plain)
            outer = plain.removesuffix(tail)
            splits = {split_in(Path(folder).name) for folder in (outer, self.root)} - {""}
            if below.has(name) or len(splits) > 1:  # an image of val must not come from train
                return
            if outer:
                self._outer = outer
                self.notes.append(f"file names start with {outer}, which is read as {self.root}")
                return

    def _content(self) -> _Content:
        try:
            if archive := zip_folder(self.path):
                with open_member(archive) as file:
                    return _Content(file.readall().decode("utf-8-sig"))
            with reading(str(self.path)) as view:
                if view.size > _MOST_BYTES:
                    raise ConversionFailed(
                        f"{self.path} has {size(view.size)}, over the limit of "
                        f"{size(_MOST_BYTES)} for annotations"
                    )
                return _Content(view.read(0, view.size).decode("utf-8-sig"))
        except (ValueError, RecursionError) as error:
            reason = f"is not a COCO annotation file: {error}"
            raise UsageError(f"{self.path} {reason}") from error


class _Object(NamedTuple):
    """One annotation."""

    number: int
    start: int
    end: int
    """Where it is in the text."""
    values: dict[str, Any]
    """Its box, points and category; everything else stays in the text."""


class _Content:
    """The content of a file; ValueError if it is not JSON, or its categories are wrong.

    Annotations stay text, in half of the memory of their values.
    """

    def __init__(self, text: str) -> None:
        self._text = text
        self.images: list[Any] = []
        self.terms: dict[str, None] = {}
        """The names in annotations."""
        self.unused: dict[str, None] = {}
        self._of_image: dict[object, list[_Object]] = {}
        self._seen: set[object] = set()
        self.stray: list[tuple[str, str]] = []
        """Annotations of no image, and what is wrong with them."""
        categories: list[Any] = []
        self.objects = 0
        for name, value, start, end in _items(text):
            if name == "images":
                self.images.append(value)
            elif name == "categories":
                categories.append(value)
            elif name == "annotations":
                self._add(value, start, end)
            else:
                self.unused[name] = None
        used = self._categories_in_use()
        ids = {_id_of(image) for image in self.images if isinstance(image, dict)}
        for of_image in [self._of_image.pop(key) for key in self._of_image.keys() - ids]:
            for item in of_image:
                image = quoted(item.values["image_id"])
                self.stray.append((f"annotations[{item.number}]", f"no image has the id {image}"))
        self.stray.sort()
        self._labels, names, points = _read_categories(categories, used)
        self.notes = []
        if twins := len(categories) - len(names):
            self.notes.append(
                f"left out {amount(twins, 'category')} without annotations, whose name another "
                "category has"
            )
        are_integers = all(isinstance(key, int) for key in ids)
        image_id = Field("number", "int64") if are_integers else Field("json")
        are_labels = bool(names and self.terms) and not self.terms.keys() & _OF_OBJECTS
        several = are_labels and max(map(len, self._of_image.values()), default=0) > 1
        self.classes = names if are_labels and not several else None
        """Names of the images' labels, if each image has one at most."""
        fields = {
            "image_id": image_id,
            "labels": Field("labels", classes=names) if several else None,
            "boxes": Field("boxes", classes=names or None) if "bbox" in self.terms else None,
            "keypoints": Field("keypoints", classes=points)
            if "keypoints" in self.terms and points
            else None,
            "annotations": Field("json") if self.objects else None,
        }
        self.schema = {name: field for name, field in fields.items() if field}

    def _add(self, value: Any, start: int, end: int) -> None:
        number, self.objects = self.objects, self.objects + 1
        if not isinstance(value, dict) or not isinstance(value.get("image_id"), int | str):
            self.stray.append((f"annotations[{number}]", "it has no image_id"))
            return
        segments = value.get("segments_info")
        parts = segments if isinstance(segments, list) else [value]
        for part in parts:
            if not isinstance(part, dict):
                self.stray.append((f"annotations[{number}]", f"{quoted(part)} is not a segment"))
                continue
            self.terms.update(dict.fromkeys(part))
            terms = {name: part[name] for name in _STATED if name in part}
            terms["image_id"] = value["image_id"]
            item = _Object(number, start, end, terms)
            self._of_image.setdefault(value["image_id"], []).append(item)

    def _categories_in_use(self) -> set[int | str]:
        of_items = (item.values.get("category_id") for x in self._of_image.values() for item in x)
        return {category for category in of_items if isinstance(category, int | str)}

    def values_of(self, image: Any) -> tuple[str, list[list[float]]]:
        """Return the values of an image as JSON, and its boxes."""
        key = _id_of(image)
        if key is None:
            raise BadImage("its id is missing, or is neither an integer nor text")
        if key in self._seen:
            raise BadImage(f"another image has the id {quoted(key)}")
        self._seen.add(key)
        objects = self._of_image.get(key, [])
        values: dict[str, Any] = {"image_id": key, "labels": [], "boxes": [], "keypoints": []}
        for item in objects:
            try:
                if "labels" in self.schema:
                    values["labels"].append(self._label(item.values))
                if "boxes" in self.schema:
                    values["boxes"].append(self._box(item.values))
                if "keypoints" in self.schema:
                    values["keypoints"] += self._points(item.values)
            except BadImage as error:
                raise BadImage(
                    f"annotations[{item.number}]: {error.problem}", remedy=error.remedy
                ) from error
        stored = {name: value for name, value in values.items() if name in self.schema}
        if size := _size_of(image):
            stored[SIZE] = size
        head = json.dumps(stored)
        if "annotations" not in self.schema:
            return head, values["boxes"]
        spans = dict.fromkeys((item.start, item.end) for item in objects)  # one of all segments
        texts = ",".join(self._text[start:end] for start, end in spans)
        return f'{head[:-1]},"annotations":[{texts}]}}', values["boxes"]

    def label_of(self, image: Any) -> int | str | None:
        """Return the label of an image, "" if it is missing; None if images have none."""
        if self.classes is None:
            return None
        return next((self._label(item.values) for item in self._of_image.get(image["id"], [])), "")

    def _label(self, terms: Mapping[str, Any]) -> int:
        category = terms.get("category_id")
        if not isinstance(category, int | str) or category not in self._labels:
            raise BadImage(f"no category has the id {quoted(category)}")
        return self._labels[category]

    def _box(self, terms: Mapping[str, Any]) -> list[float]:
        box = corners(terms.get("bbox"), "xywh")
        return [*box, self._label(terms)] if self._labels else box

    def _points(self, terms: Mapping[str, Any]) -> list[list[Any]]:
        count = len(self.schema["keypoints"].classes or ())
        numbers = terms.get("keypoints", [0] * 3 * count)
        if not isinstance(numbers, list) or len(numbers) != 3 * count:
            raise BadImage(f"its keypoints are not {count} groups of three numbers")
        return [numbers[start : start + 3] for start in range(0, 3 * count, 3)]


_STATED = ("image_id", "category_id", "bbox", "keypoints")
_OF_OBJECTS = {"bbox", "segmentation", "keypoints", "caption", "segments_info"}
"""Names in annotations of objects or texts; without these, a category is that of the image."""


def _slashed(name: str) -> str:
    """Return the name of a file with slashes, as on this system."""
    return name.replace("\\", "/")


def _tails(name: str) -> list[str]:
    """Return a path with fewer and fewer of its first folders."""
    names = _slashed(name).split("/")
    first = max(n + 1 if folder in ("", ".", "..") else 0 for n, folder in enumerate(names))
    return ["/".join(names[n:]) for n in range(first, len(names))]


def _id_of(image: Any) -> int | str | None:
    key = image.get("id") if isinstance(image, dict) else None
    return key if isinstance(key, int | str) and not isinstance(key, bool) else None


def _size_of(image: Any) -> tuple[int, int] | None:
    """Return the width and height that an image states; None without."""
    size = (image.get("width"), image.get("height")) if isinstance(image, dict) else ()
    sides = [side for side in size if type(side) is int and side > 0]
    return (sides[0], sides[1]) if len(sides) == 2 else None


def _read_categories(
    categories: Sequence[Any], used: Collection[object]
) -> tuple[dict[object, int], list[str], list[str] | None]:
    """Return the position of each category's ID, the names, and the names of keypoints, if any.

    Of categories with one name, those that no annotation uses are left out: Roboflow writes such a
    root of all categories.
    """
    try:
        ordered = sorted(categories, key=lambda category: category["id"])
        ids = [category["id"] for category in ordered]
        names = [category["name"] for category in ordered]
        points = {tuple(category["keypoints"]) for category in ordered if category.get("keypoints")}
        if not all(isinstance(category, int | float | str) for category in (*ids, *names)):
            raise TypeError
    except (TypeError, KeyError, AttributeError) as error:
        raise ValueError("a category has a missing or invalid id or name") from error
    _require_once("ID", ids)
    by_name: dict[str, list[Any]] = {}
    for key, name in zip(ids, names, strict=True):
        by_name.setdefault(str(name), []).append(key)
    kept = {
        name: [key for key in keys if key in used] or keys[:1] for name, keys in by_name.items()
    }
    of_class = [
        (key, str(name)) for key, name in zip(ids, names, strict=True) if key in kept[str(name)]
    ]
    _require_once("name", [name for _, name in of_class])
    labels = {key: label for label, (key, _) in enumerate(of_class)}
    return labels, [n for _, n in of_class], list(map(str, *points)) if len(points) == 1 else None


def _require_once(property_name: str, values: Sequence[object]) -> None:
    twice = [value for value, count in Counter(values).items() if count > 1]
    if twice:
        raise ValueError(f"two categories have the {property_name} {quoted(twice[0])}")


def _items(text: str) -> Iterator[tuple[str, Any, int, int]]:
    """Yield name, value, start and end of all values of a JSON object, one by one for lists."""
    decode = json.JSONDecoder().raw_decode
    at = _after(text, 0, "{")
    while True:
        name, at = decode(text, at)
        if not isinstance(name, str):
            raise ValueError(f"{quoted(name)} is not a name")
        at = _after(text, at, ":")
        if not text.startswith("[", at):
            value, end = decode(text, at)
            yield name, value, at, end
            at = _skip(text, end)
        else:
            at = _after(text, at, "[")
            more = not text.startswith("]", at)
            at = at if more else _after(text, at, "]")
            while more:
                value, end = decode(text, at)
                yield name, value, at, end
                at = _skip(text, end)
                more = text.startswith(",", at)
                at = _after(text, at, "," if more else "]")
        if text.startswith("}", at):
            break
        at = _after(text, at, ",")
    if at + 1 != len(text.rstrip()):
        raise ValueError(f"it continues after its end, at character {at + 1}")


def _after(text: str, at: int, sign: str) -> int:
    """Return the position after a sign and the spaces around it."""
    at = _skip(text, at)
    if not text.startswith(sign, at):
        raise ValueError(f"expected {sign} at character {at}")
    return _skip(text, at + len(sign))


def _skip(text: str, at: int) -> int:
    """Return the position after spaces."""
    spaces = _SPACE.match(text, at)
    return spaces.end() if spaces else at


def _open(path: str | Path, options: CocoOptions) -> Source:
    """Open an annotation file, or all of a folder as splits."""
    if os.path.isdir(path):
        return open_folder(Coco.kind, path, vars(options))
    return Coco(path, options)


def _recognize(seen: Overview) -> Iterator[Recognition]:
    if not seen.is_folder:
        if seen.path.suffix.lower() == ".json" and _is_coco(seen.ends()):
            yield Recognition("an annotation file")
        return
    folders = ["", *seen.folders()[:100]]
    for folder in folders:
        for file in seen.files(folder, ".json")[:20]:
            path = below(folder, file)
            ends = seen.ends(path)
            if _is_coco(ends) and (name := _FILE_NAME.search(ends)):
                image = name[1].decode("utf-8", "replace").replace("\\\\", "/")
                roots = [folder, *folders, *(f"images/{inner}" for inner in seen.folders("images"))]
                existing = (
                    [root for root in roots if seen.has(below(root, tail))]
                    for tail in _tails(image)
                )
                fitting = next(filter(None, existing), [])
                split = [root for root in fitting if split_in(root) == split_in(path) != ""]
                if folder in fitting or not fitting:
                    fitting = [folder]
                for root in dict.fromkeys(split or fitting):
                    words = ("--root", f"{{}}/{root}") if root != folder else ()
                    yield Recognition(path, inside=path, words=words)


_FILE_NAME = re.compile(rb'"(?:file_name|coco_url)"\s*:\s*"((?:[^"\\]|\\\\)+)"')


def _is_coco(ends: bytes) -> bool:
    names = (b'"images"', b'"annotations"', b'"categories"', b'"licenses"')
    return _FILE_NAME.search(ends) is not None and sum(name in ends for name in names) >= 2


SOURCE = SourceKind(
    name=Coco.kind,
    title="Convert images with COCO annotations.",
    help="""Convert the images of the COCO file SRC, with their annotations, to a dataset in DST.
    If SRC is a folder, the file of each split is read.

    Boxes become left, top, right and bottom, plus the position of their category, sorted by ID.
    Keypoints are kept, and so are all annotations of an image, as JSON, including segmentations and
    captions. File names are relative to --root and must stay below it. Boxes refer to the stored
    pixels, as in COCO; --orient rotates both. For verify and repair, write SRC@ROOT if the root
    folder is elsewhere.

    \b
    Examples:
      shardkit convert coco annotations/instances_val2017.json dataset --to lmdb --root val2017
      shardkit verify dataset --against annotations/instances_val2017.json@val2017
    """,
    options=CocoOptions,
    reads_zip=True,
    recognize=_recognize,
    source=_open,
)
