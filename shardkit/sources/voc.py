"""Pascal VOC's folders of images and annotations as a source."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn
from xml.etree.ElementTree import Element, TreeBuilder
from xml.parsers import expat

from shardkit.contracts import Scan, SourceKind, SourceOption
from shardkit.errors import BadImage, Problem, UsageError
from shardkit.record import NO_LABEL, Field
from shardkit.sources.image_files import read_file
from shardkit.sources.labels import Labels, LabelValues, checked_label, read_classes
from shardkit.sources.listing import scan_of
from shardkit.sources.named_files import NamedListing, NamedSource, Names
from shardkit.system.files import as_name, as_text, read_small
from shardkit.system.text import quoted

_IMAGES, _ANNOTATIONS, _SPLITS = "JPEGImages", "Annotations", "ImageSets/Main"
_MAX_XML = 16 << 20


class Voc(NamedSource):
    """A folder with ``JPEGImages``, ``Annotations`` and perhaps ``ImageSets/Main``.

    A record has the image; ``boxes`` with their classes, sorted by name; and ``objects``, all that
    the file states about each object, as texts. Pixels of VOC's boxes count from 1 and include the
    last: a box from 1 to 10 becomes 0 to 10.

    Args:
        pattern: The folder.
        split: The name of a file in ``ImageSets/Main``. None means train, val and test, as far as
            these exist, or trainval; or all annotations.
        classes: A text file with a class name in each line.
    """

    kind = "voc"

    def __init__(
        self,
        pattern: str | Path,
        *,
        split: str | None = None,
        classes: str | None = None,
    ) -> None:
        if not os.path.isdir(pattern):
            raise UsageError(f"{pattern} is not a folder")
        self._folder = str(pattern)
        for name in (_IMAGES, _ANNOTATIONS):
            if not os.path.isdir(os.path.join(self._folder, name)):
                raise UsageError(f"{pattern} has no folder {name}, as Pascal VOC's have")
        super().__init__(pattern, os.path.join(self._folder, _IMAGES), {})
        self._options.clear()  # the place of the images is known
        self._describe(split=split)
        self._splits = self._choose(split)
        self._class_names = read_classes(classes)

    @classmethod
    def find(cls, path: Path, described: Mapping[str, Mapping[str, Any]]) -> Voc:
        """Open the folder that a dataset was made from."""
        options = next(iter(described.values()))
        found = cls(path, split=options.get("split"))
        found._restore(options)
        return found

    def scan(self, classes: Sequence[str] | None = None) -> Scan:
        """List the images of each split, in the order of its file.

        Raises:
            UsageError: If a file of ``ImageSets`` cannot be read, or the classes lack one.
        """
        images = Names(self._root)
        annotations = Names(os.path.join(self._folder, _ANNOTATIONS))
        labels = LabelValues()
        listings = {}
        for split, names in self._splits.items():
            listings[split] = listing = NamedListing(LabelValues(), images)
            for number, name in enumerate(self._all() if names is None else self._read(names)):
                row = f"{_ANNOTATIONS}/{name}.xml"
                image = None
                try:
                    path, status = annotations.find(f"{name}.xml")
                    path = os.path.join(self._folder, _ANNOTATIONS, as_name(path))
                    if status.st_size > _MAX_XML:
                        raise BadImage(f"its annotation has {status.st_size:,} bytes")
                    content = read_file(path, status.st_size, status.st_mtime_ns, image=False)
                    tree = parse(content)
                    image = tree.findtext("filename") or f"{name}.jpg"
                    values = _values(tree, labels)
                except RecursionError:
                    listing.blame_row(row, image, "its annotation is nested too deeply")
                except BadImage as error:
                    listing.blame_row(row, image, str(error))
                else:
                    listing.add_file(row, image, NO_LABEL, number, values)
        unused = [
            *((_IMAGES, problem) for problem in images.unused([])),
            *((_ANNOTATIONS, problem) for problem in annotations.unused([])),
        ]
        next(iter(listings.values())).ignored += [
            Problem(path=f"{folder}/{problem.path}", reason="in no split")
            for folder, problem in unused
        ]
        assigned = labels.assign(self._known("boxes"), self._class_names)
        boxes = Field("boxes", classes=assigned.classes)
        self._settle({"boxes": boxes, "objects": Field("json")}, {"boxes": assigned.labels})
        understood = {
            "splits": ", ".join(filter(None, self._splits)) or "none",
            "boxes": str(boxes),
            "objects": "json",
        }
        return scan_of(self, listings, Labels(None, ()), understood, more=self._schema)

    def _choose(self, split: str | None) -> dict[str, str | None]:
        """Return the file of ``ImageSets`` for each split; None means all annotations."""
        folder = os.path.join(self._folder, _SPLITS)
        known = sorted(map(as_text, os.listdir(folder))) if os.path.isdir(folder) else []
        if split is not None:
            if f"{split}.txt" not in known:
                some = ", ".join(name.removesuffix(".txt") for name in known[:20]) or "none"
                raise UsageError(f"--split {split} is unknown; {folder} has {some}")
            return {"": f"{split}.txt"}
        for names in (("train", "val", "test"), ("trainval",)):
            found = [name for name in names if f"{name}.txt" in known]
            if found:
                return {name if len(names) > 1 else "": f"{name}.txt" for name in found}
        return {"": None}

    def _all(self) -> list[str]:
        names = sorted(map(as_text, os.listdir(os.path.join(self._folder, _ANNOTATIONS))))
        return [name.removesuffix(".xml") for name in names if name.endswith(".xml")]

    def _read(self, file: str) -> list[str]:
        path = Path(os.path.realpath(os.path.join(self._folder, _SPLITS, as_name(file))))
        try:
            lines = read_small(path).decode("utf-8-sig").splitlines()
        except (OSError, ValueError) as error:
            raise UsageError(f"{path} cannot be read: {error}") from error
        return [line.strip() for line in lines if line.strip()]


def parse(content: bytes) -> Element:
    """Return the root element of an XML file.

    Raises:
        BadImage: If it is not XML, or declares a document type, which could define entities.
    """
    builder = TreeBuilder()
    parser = expat.ParserCreate()
    parser.StartElementHandler = builder.start
    parser.EndElementHandler = builder.end
    parser.CharacterDataHandler = builder.data
    parser.StartDoctypeDeclHandler = _refuse
    try:
        parser.Parse(content, True)
    except (expat.ExpatError, ValueError, LookupError) as error:
        if isinstance(error, BadImage):
            raise
        raise BadImage(f"its annotation is not XML: {error}") from error
    return builder.close()


def _refuse(*_: object) -> NoReturn:
    raise BadImage("its annotation declares a document type")


def _values(tree: Element, labels: LabelValues) -> dict[str, Any]:
    """Return the values of an image: boxes, with the code of each label, and all of the objects."""
    objects = tree.findall("object")
    boxes = []
    for each in objects:
        name = checked_label((each.findtext("name") or "").strip(), "object/name")
        texts = [each.findtext(f"bndbox/{side}") or "" for side in ("xmin", "ymin", "xmax", "ymax")]
        try:
            left, top, right, bottom = map(float, texts)
        except ValueError as error:
            raise BadImage(f"its box of {quoted(name)} is {quoted(texts)}") from error
        boxes.append([left - 1, top - 1, right, bottom, labels.code(name)])
    return {"boxes": boxes, "objects": [_plain(each) for each in objects]}


def _plain(element: Element) -> Any:
    """Return the content of an element: its text, or its elements by tag; several as a list."""
    if not len(element):
        return (element.text or "").strip()
    found: dict[str, Any] = {}
    for tag in dict.fromkeys(each.tag for each in element):
        values = [_plain(each) for each in element.findall(tag)]
        found[tag] = values if len(values) > 1 else values[0]
    return found


SOURCE = SourceKind(
    name=Voc.kind,
    title="Convert images with annotations of Pascal VOC.",
    help="""Convert the images of the folder SRC, with their annotations, to a dataset in DST.

    SRC has JPEGImages, Annotations with a file for each image, and perhaps ImageSets/Main with
    train.txt and others, which become splits. Pixels of VOC's boxes count from 1; stored boxes are
    left, top, right and bottom from 0. All that is stated about objects is kept as JSON. Boxes
    refer to the stored pixels; --orient turns both.

    \\b
    Examples:
      shardkit convert voc VOCdevkit/VOC2012 dataset --to lmdb --dry-run
      shardkit convert voc VOCdevkit/VOC2012 dataset --to lmdb --split trainval
    """,
    options=(
        SourceOption(
            flags="--split",
            metavar="NAME",
            help="File of ImageSets/Main to convert.  [default: train, val and test, one dataset "
            "each]",
        ),
        SourceOption(
            flags="--classes", metavar="FILE", help="Class names, one per line, in their order."
        ),
    ),
    open=Voc,
    find=Voc.find,
)
