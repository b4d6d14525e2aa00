"""Pascal VOC's folders of images and annotations as a source."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn
from xml.etree.ElementTree import Element, TreeBuilder
from xml.parsers import expat

from shardkit.contracts import (
    Recognition,
    SourceKind,
)
from shardkit.errors import BadImage, Problem, UsageError, setting
from shardkit.kinds.field import Field
from shardkit.options import option
from shardkit.sources.annotated import SIZE, AnnotatedOptions, AnnotatedSource
from shardkit.sources.driver import Listing
from shardkit.sources.folders import below, is_split_name
from shardkit.sources.labels import LabelValues, checked_label, classes_option, read_classes
from shardkit.sources.named_files import NamedListing, names_in
from shardkit.sources.recognize import Overview
from shardkit.system.files import as_name, as_text
from shardkit.system.text import quoted, shell

_IMAGES = ("JPEGImages", "images", "Images", "imgs")
_ANNOTATIONS = ("Annotations", "annotations", "Annotation", "xmls", "labels")
_SPLITS = "ImageSets/Main"
_MASKS = "SegmentationClass"
_MAX_XML = 16 << 20


@dataclass(frozen=True, kw_only=True)
class VocOptions(AnnotatedOptions):
    """The options of this source."""

    split: str | None = option(
        None,
        help="File of ImageSets/Main to convert.",
        metavar="NAME",
        shown="train, val and test, one dataset for each",
    )
    classes: str | None = classes_option(
        "File of class names, one per line, in label order.", stored=""
    )


class Voc(AnnotatedSource):
    """A folder with ``JPEGImages``, ``Annotations`` and perhaps ``ImageSets/Main``.

    Folders such as ``images`` and ``annotations`` will do, and so do annotations next to images,
    perhaps in folders ``train``, ``val`` and ``test``.

    A record has the image; ``boxes`` with their classes, sorted by name; and ``objects``, all that
    the file states about each object, as texts. Pixels of VOC's boxes count from 1 and include the
    last: a box from 1 to 10 becomes 0 to 10.

    Without ``split``, the splits are train, val and test, as far as these exist, or trainval; or
    all annotations.
    """

    kind = "voc"

    def __init__(self, path: str | Path, options: VocOptions) -> None:
        if not os.path.isdir(path):
            raise UsageError(f"{path} is not a folder")
        folders = _folders_of(Overview(path))
        if folders is None:
            raise UsageError(
                f"{path} has neither the folders {_IMAGES[0]} and {_ANNOTATIONS[0]} of Pascal VOC "
                "nor annotations (.xml) next to images"
            )
        self._images, self._annotations = folders
        super().__init__(path, options, os.path.join(path, self._images))
        self.settle(place=None)  # it is known
        self.splits = self._choose(options.split)
        self._box_names = read_classes(options.classes)

    def list_images(self, listings: Mapping[str, Listing]) -> Mapping[str, str]:
        """List the images of each split, in the order of its file."""
        images = self.names()
        is_shared = self._images == self._annotations
        annotations = images if is_shared else self.names(self.path / self._annotations)
        labels = LabelValues()
        by_id: dict[str, list[str]] = {}
        for path in images.images():
            by_id.setdefault(path.rpartition(".")[0], []).append(path)
        others = []
        for split, file in self.splits.items():
            listing = NamedListing(listings[split], images)
            for number, name in enumerate(self._ids(file)):
                row = below(self._annotations, f"{name}.xml")
                image = None
                try:
                    annotation = annotations.find(f"{name}.xml")
                    if annotation.size > _MAX_XML:
                        raise BadImage(f"its annotation has {annotation.size:,} bytes")
                    tree = parse(annotations.read(annotation, image=False))
                    file_name = (tree.findtext("filename") or "").strip() or f"{name}.jpg"
                    image = _image_of(by_id.get(name, ()), file_name)
                    names = (file_name, Path(file_name).stem)
                    if image != file_name and Path(name).name not in names:
                        others.append(f"{row} names {file_name}")
                    values = _values(tree, labels)
                except RecursionError:
                    listing.blame_row(row, image, "its annotation is nested too deeply")
                except BadImage as error:
                    listing.blame_row(row, image, error.stated)
                else:
                    listing.add_file(row, image, number, values)
                    self.probe(image, values.get(SIZE))
                    self.count_outside(values["boxes"], values.get(SIZE))
        folders = {self._images: images, self._annotations: annotations}
        next(iter(listings.values())).ignored += [
            Problem(path=below(folder, problem.path), reason="in no split")
            for folder, names in folders.items()
            for problem in names.unused([])
        ]
        read = {*folders, _SPLITS.partition("/")[0]}
        next(iter(listings.values())).ignored += [
            Problem(path=f"{name}/", reason="not read")
            for name in Overview(self.path).folders()
            if name not in read and not is_shared
        ]
        if os.path.isdir(os.path.join(self.path, _MASKS)):
            pairs = shell("shardkit", "convert", "pairs", self.path, "DST", "--to", "lmdb")
            self.notes.append(f"{_MASKS} contains masks; to read them, run `{pairs}`")
        if others:
            self.notes.append(
                f"{len(others):,} annotations name a different image than their ID; the image of "
                f"the ID is used: {others[0]}"
            )
        assigned = labels.assign(self.known_classes("boxes"), self._box_names)
        boxes = Field("boxes", classes=assigned.classes)
        self.settle_fields({"boxes": boxes, "objects": Field("json")}, {"boxes": assigned.labels})
        return {
            "splits": ", ".join(filter(None, self.splits)) or "none",
            "boxes": str(boxes),
            "objects": "json",
        }

    def _choose(self, split: str | None) -> dict[str, str | None]:
        """Return the file of ``ImageSets`` for each split; None means all annotations."""
        folder = os.path.join(self.path, _SPLITS)
        files = sorted(map(as_text, os.listdir(folder))) if os.path.isdir(folder) else []
        if split is not None:
            if f"{split}.txt" not in files:
                names_listed = ", ".join(name.removesuffix(".txt") for name in files[:20]) or "none"
                raise UsageError(
                    f"{setting('split', split)} is unknown; {folder} has {names_listed}"
                )
            return {"": f"{split}.txt"}
        for names in (("train", "val", "test"), ("trainval",)):
            there = [name for name in names if f"{name}.txt" in files]
            if there:
                return {name if len(names) > 1 else "": f"{name}.txt" for name in there}
        folders = filter(is_split_name, Overview(self.path / self._annotations).folders())
        return {name: f"{name}/" for name in folders} or {"": None}

    def _ids(self, file: str | None) -> list[str]:
        """Return the IDs in a file of ``ImageSets``, or those of all annotations in a folder."""
        if file is None or file.endswith("/"):
            folder = file or ""
            names = os.listdir(os.path.join(self.path, self._annotations, as_name(folder)))
            xml_names = sorted(name for name in map(as_text, names) if name.endswith(".xml"))
            return [folder + name.removesuffix(".xml") for name in xml_names]
        return names_in(Path(os.path.realpath(os.path.join(self.path, _SPLITS, as_name(file)))))


def parse(content: bytes) -> Element:
    """Return the root element of an XML file.

    It raises BadImage if it is not XML, or declares a document type, which could define entities.
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


def _image_of(of_id: Sequence[str], file_name: str) -> str:
    """Return the image of an annotation: the one of its ID, as torchvision does, or as stated."""
    if not of_id or file_name in of_id:
        return file_name
    if len(of_id) > 1:
        raise BadImage(f"several images have its ID: {', '.join(of_id)}")
    return of_id[0]


def _size_of(tree: Element) -> tuple[int, int] | None:
    """Return the width and height that an annotation states; None without."""
    texts = [(tree.findtext(f"size/{side}") or "").strip() for side in ("width", "height")]
    width, height = (int(text) if text.isdecimal() else 0 for text in texts)
    return (width, height) if width and height else None


def _values(tree: Element, labels: LabelValues) -> dict[str, Any]:
    """Return the values of an image: boxes, with the code of each label, and all of the objects."""
    objects = tree.findall("object")
    boxes = []
    for element in objects:
        name = checked_label((element.findtext("name") or "").strip(), "object/name")
        texts = [
            element.findtext(f"bndbox/{side}") or "" for side in ("xmin", "ymin", "xmax", "ymax")
        ]
        try:
            left, top, right, bottom = map(float, texts)
        except ValueError as error:
            raise BadImage(f"its {quoted(name)} box is {quoted(texts)}") from error
        boxes.append([left - 1, top - 1, right, bottom, labels.code_of_name(str(name))])
    values = {"boxes": boxes, "objects": [_plain(element) for element in objects]}
    size = _size_of(tree)
    return {**values, SIZE: size} if size else values


def _plain(element: Element) -> Any:
    """Return the content of an element: its text, or its elements by tag; several as a list."""
    if not len(element):
        return (element.text or "").strip()
    by_tag: dict[str, Any] = {}
    for child in element:
        by_tag.setdefault(child.tag, []).append(_plain(child))
    return {tag: values if len(values) > 1 else values[0] for tag, values in by_tag.items()}


def _folders_of(seen: Overview, top: str = "") -> tuple[str, str] | None:
    """Return the folders of images and annotations in a folder; both are "" if it has both."""
    folders = seen.folders(top)
    if {_IMAGES[0], _ANNOTATIONS[0]} <= {*folders}:
        return _IMAGES[0], _ANNOTATIONS[0]
    for images in filter(_IMAGES.__contains__, folders):
        for of_xml in filter(_ANNOTATIONS.__contains__, folders):
            if seen.files(below(top, of_xml), ".xml"):
                return images, of_xml
    for inside in ("", *filter(is_split_name, folders)):
        folder = below(top, inside)
        stems = {name.rpartition(".")[0] for name in seen.files(folder, ".xml")}
        if stems & {name.rpartition(".")[0] for name in seen.images(folder)}:
            return "", ""
    return None


def _recognize(seen: Overview) -> Iterator[Recognition]:
    if not seen.is_folder:
        return
    tops = ["", *(f"VOCdevkit/{name}" for name in seen.folders("VOCdevkit")), *seen.folders()[:20]]
    for top in tops:
        if top and is_split_name(top):
            continue
        if folders := _folders_of(seen, top):
            words = " and ".join(f"{name}/" for name in folders if name)
            yield Recognition(words or "annotations (.xml) next to images", inside=top)


SOURCE = SourceKind(
    name=Voc.kind,
    title="Convert Pascal VOC images and annotations.",
    help="""Convert the images of the folder SRC, with their annotations, to a dataset in DST.

    SRC contains JPEGImages, Annotations with one file per image, and optionally ImageSets/Main,
    whose files, such as train.txt, become splits. Folders named images and annotations also work,
    and so do annotations next to images, in train and val folders if you like. VOC boxes count
    pixels from 1; stored boxes are left, top, right and bottom, counted from 0. All object
    annotations are kept as JSON. Boxes refer to the stored pixels, unless the declared sizes are
    those of the upright picture; --orient rotates both.

    \b
    Examples:
      shardkit convert voc VOCdevkit/VOC2012 dataset --to lmdb --dry-run
      shardkit convert voc VOCdevkit/VOC2012 dataset --to lmdb --split trainval
    """,
    options=VocOptions,
    recognize=_recognize,
    source=Voc,
)
