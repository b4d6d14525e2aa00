"""COCO annotations of image files as a source."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from shardkit.contracts import Scan, SourceKind, SourceOption
from shardkit.errors import BadImage, UsageError
from shardkit.record import NO_LABEL, Field
from shardkit.sources.inputs import reading
from shardkit.sources.labels import Labels, LabelValues
from shardkit.sources.listing import scan_of
from shardkit.sources.named_files import NamedListing, NamedSource, Names, corners, find_root
from shardkit.system.text import quoted

_SPACE = re.compile(r"[ \t\n\r]*")


class Coco(NamedSource):
    """Images with the annotations of a COCO file.

    A record has the image and its ``image_id``; ``boxes``, if annotations have any, with the
    category of each; ``keypoints``, if categories name some; and ``annotations``, all of the
    image's entries as the file states them. Boxes, keypoints and annotations have one order.
    Categories are the classes of boxes, sorted by their IDs, which may have gaps.

    Args:
        pattern: The file of annotations; perhaps with ``@ROOT``.
        root: The folder that file names are relative to; None means that of the file.
    """

    kind = "coco"

    def __init__(self, pattern: str | Path, *, root: str | Path | None = None) -> None:
        super().__init__(pattern, root, {})

    @classmethod
    def find(cls, path: Path, described: Mapping[str, Mapping[str, Any]]) -> Coco:
        """Open the annotations that a dataset was made from."""
        (options,) = described.values()
        found = cls(path, root=find_root(path, options))
        found._restore(options)
        return found

    def scan(self, classes: Sequence[str] | None = None) -> Scan:
        """List the images, in the order of the file.

        Raises:
            UsageError: If the file cannot be read, or states no images or wrong categories.
        """
        found = self._content()
        names = Names(self._root)
        listing = NamedListing(LabelValues(), names)
        for number, image in enumerate(found.images):
            row = f"{self.pattern.name}:images[{number}]"
            name = image.get("file_name") if isinstance(image, dict) else None
            try:
                values = found.values_of(image)
            except BadImage as error:
                listing.blame_row(row, name, str(error))
            else:
                listing.add_file(row, name, NO_LABEL, number, values)
        for where, reason in found.stray:
            listing.blame(f"{self.pattern.name}:{where}", reason)
        listing.ignored += names.unused([str(self.pattern)])
        self._settle(found.schema)
        understood = {
            "images": f"{len(found.images):,}, below {self._root}",
            **{name: str(field) for name, field in found.schema.items()},
            "objects": f"{found.objects:,} annotations: {', '.join(found.terms)}",
            "unused": ", ".join(found.unused) or "nothing",
        }
        del found  # its text may have hundreds of megabytes
        return scan_of(self, {"": listing}, Labels(None, ()), understood, more=self._schema)

    def _content(self) -> _Content:
        try:
            with reading(str(self.pattern)) as view:
                return _Content(view.read(0, view.size).decode("utf-8-sig"))
        except (ValueError, RecursionError) as error:
            reason = f"is not a file of COCO annotations: {error}"
            raise UsageError(f"{self.pattern} {reason}") from error


class _Object(NamedTuple):
    """One annotation."""

    number: int
    start: int
    end: int
    """Where it is in the text."""
    stated: dict[str, Any]
    """Its box, points and category; everything else stays in the text."""


class _Content:
    """The content of a file. Annotations stay text, in half of the memory of their values.

    Raises:
        ValueError: If it is not JSON, or its categories are wrong.
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
        ids = {_id_of(image) for image in self.images if isinstance(image, dict)}
        for of_image in [self._of_image.pop(key) for key in self._of_image.keys() - ids]:
            for each in of_image:
                image = quoted(each.stated["image_id"])
                self.stray.append((f"annotations[{each.number}]", f"there is no image {image}"))
        self.stray.sort()
        self._labels, names, points = _read_categories(categories)
        whole = all(isinstance(each, int) for each in ids)
        self.schema = {"image_id": Field("number", "int64") if whole else Field("json")}
        if "bbox" in self.terms:
            self.schema["boxes"] = Field("boxes", classes=names or None)
        if "keypoints" in self.terms and points:
            self.schema["keypoints"] = Field("keypoints", classes=points)
        if self.objects:
            self.schema["annotations"] = Field("json")

    def _add(self, value: Any, start: int, end: int) -> None:
        number, self.objects = self.objects, self.objects + 1
        if not isinstance(value, dict) or not isinstance(value.get("image_id"), int | str):
            self.stray.append((f"annotations[{number}]", "it states no image_id"))
            return
        self.terms.update(dict.fromkeys(value))
        stated = {name: value[name] for name in _STATED if name in value}
        each = _Object(number, start, end, stated)
        self._of_image.setdefault(value["image_id"], []).append(each)

    def values_of(self, image: Any) -> str:
        """Return the values of an image as JSON.

        Raises:
            BadImage: If one of its annotations is wrong, or its ID is.
        """
        key = _id_of(image)
        if key is None:
            raise BadImage("it has no id that is an integer or text")
        if key in self._seen:
            raise BadImage(f"another image has the id {quoted(key)}")
        self._seen.add(key)
        objects = self._of_image.get(key, [])
        values: dict[str, Any] = {"image_id": key, "boxes": [], "keypoints": []}
        for each in objects:
            try:
                if "boxes" in self.schema:
                    values["boxes"].append(self._box(each.stated))
                if "keypoints" in self.schema:
                    values["keypoints"] += self._points(each.stated)
            except BadImage as error:
                raise BadImage(f"annotations[{each.number}]: {error}") from error
        head = json.dumps({name: each for name, each in values.items() if name in self.schema})
        if "annotations" not in self.schema:
            return head
        texts = ",".join(self._text[each.start : each.end] for each in objects)
        return f'{head[:-1]},"annotations":[{texts}]}}'

    def _box(self, stated: Mapping[str, Any]) -> list[float]:
        box = corners(stated.get("bbox"), "xywh")
        if not self._labels:
            return box
        category = stated.get("category_id")
        if not isinstance(category, int | str) or category not in self._labels:
            raise BadImage(f"there is no category {quoted(category)}")
        return [*box, self._labels[category]]

    def _points(self, stated: Mapping[str, Any]) -> list[list[Any]]:
        count = len(self.schema["keypoints"].classes or ())
        numbers = stated.get("keypoints", [0] * 3 * count)
        if not isinstance(numbers, list) or len(numbers) != 3 * count:
            raise BadImage(f"it has not {count} keypoints of three numbers each")
        return [numbers[start : start + 3] for start in range(0, 3 * count, 3)]


_STATED = ("image_id", "category_id", "bbox", "keypoints")


def _id_of(image: Any) -> int | str | None:
    key = image.get("id") if isinstance(image, dict) else None
    return key if isinstance(key, int | str) and not isinstance(key, bool) else None


def _read_categories(
    categories: Sequence[Any],
) -> tuple[dict[object, int], list[str], list[str] | None]:
    """Return the position of each category's ID, the names, and the names of keypoints, if any."""
    try:
        ordered = sorted(categories, key=lambda each: each["id"])
        ids, names = [each["id"] for each in ordered], [each["name"] for each in ordered]
        points = {tuple(each["keypoints"]) for each in ordered if each.get("keypoints")}
    except (TypeError, KeyError, AttributeError) as error:
        raise ValueError("a category has no id or name, or a wrong one") from error
    for what, values in (("ID", ids), ("name", names)):
        twice = [value for value, count in Counter(values).items() if count > 1]
        if twice:
            raise ValueError(f"two categories have the {what} {quoted(twice[0])}")
    labels = {key: label for label, key in enumerate(ids)}
    return labels, list(map(str, names)), list(map(str, *points)) if len(points) == 1 else None


def _items(text: str) -> Iterator[tuple[str, Any, int, int]]:
    """Yield the values of a JSON object one by one, those of lists too, with their name and place.

    Raises:
        ValueError: If it is not a JSON object.
    """
    decode = json.JSONDecoder().raw_decode
    place = _after(text, 0, "{")
    while True:
        name, place = decode(text, place)
        if not isinstance(name, str):
            raise ValueError(f"{quoted(name)} is not a name")
        place = _after(text, place, ":")
        if not text.startswith("[", place):
            value, end = decode(text, place)
            yield name, value, place, end
            place = _skip(text, end)
        else:
            place = _after(text, place, "[")
            more = not text.startswith("]", place)
            place = place if more else _after(text, place, "]")
            while more:
                value, end = decode(text, place)
                yield name, value, place, end
                place = _skip(text, end)
                more = text.startswith(",", place)
                place = _after(text, place, "," if more else "]")
        if text.startswith("}", place):
            break
        place = _after(text, place, ",")
    if place + 1 != len(text.rstrip()):
        raise ValueError(f"there is more after its end, at character {place + 1}")


def _after(text: str, place: int, sign: str) -> int:
    """Return the place after a sign and the spaces around it."""
    place = _skip(text, place)
    if not text.startswith(sign, place):
        raise ValueError(f"expected {sign} at character {place}")
    return _skip(text, place + len(sign))


def _skip(text: str, place: int) -> int:
    """Return the place after spaces."""
    spaces = _SPACE.match(text, place)
    return spaces.end() if spaces else place


SOURCE = SourceKind(
    name=Coco.kind,
    title="Convert images with COCO annotations.",
    help="""Convert the images of the COCO file SRC, with their annotations, to a dataset in DST.

    Boxes become left, top, right and bottom, with the position of their category, sorted by ID.
    Keypoints are kept, and all entries of an image as JSON, with its segmentation or captions.
    File names are relative to --root and must stay below it. Boxes refer to the stored pixels,
    as in COCO; --orient turns both. For verify and repair, give a root folder elsewhere as
    SRC@ROOT.

    \b
    Examples:
      shardkit convert coco annotations/instances_val2017.json dataset --to lmdb --root val2017
      shardkit verify dataset --against annotations/instances_val2017.json@val2017
    """,
    options=(
        SourceOption(
            flags="--root", metavar="DIR", help="Folder of the images.  [default: that of SRC]"
        ),
    ),
    open=Coco,
    find=Coco.find,
)
