"""Images and their masks, or other images, in sibling folders or in one, paired by name."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from shardkit.contracts import Recognition, SourceKind
from shardkit.errors import BadImage, Problem, UsageError, setting
from shardkit.options import option
from shardkit.record import NO_LABEL
from shardkit.sources.annotated import AnnotatedOptions, AnnotatedSource
from shardkit.sources.driver import Listing
from shardkit.sources.folders import below, is_split_name
from shardkit.sources.imagefolder import FOLDERS_TRIED, MASK_NAME
from shardkit.sources.kept import Kept, parse_keep
from shardkit.sources.named_files import NamedListing, Names, names_in
from shardkit.sources.recognize import Overview, has_images
from shardkit.sources.table_layout import unread_lists
from shardkit.system.text import quoted, shell

_OF_IMAGES = re.compile(r"im(age|g)s?|photos?|pictures?|jpegimages|leftimg8bit|inputs?", re.I)
_OF_MASKS = re.compile(
    r"(?!.*visuali)(.*mask.*|(.*[_-])?(labels?|labs?|annotations?|annots?|anns?|seg\w*|gt\w*|"
    r"targets?|ground[_ -]?truths?|trimaps?))",
    re.I,
)
_VOC_LISTS = "ImageSets/Segmentation"
_VOC_IMAGES = "JPEGImages"
_VOC_MASKS = ("SegmentationClass", "SegmentationObject")
"""The folders of masks of Pascal VOC: of classes, and of objects."""
_SPLIT = re.compile(r"(?<![a-z])(train|val|test)[a-z]*", re.I)
_END = re.compile(r"[_-][^_-]+\Z")
_PART = re.compile(r"(?P<image>.+?)(?P<suffix>[ _.-]+[a-z]+[ _-]?[0-9]*)", re.I)
"""The name of another image of an image, which may be a mask, such as 1_parts_2."""
_JPEG = {".jpg", "jpeg"}
"""The last four characters of the names of JPEGs."""
_TRIED = 50
"""Images whose names are compared with those of masks, to find what masks are called."""


@dataclass(frozen=True, kw_only=True)
class PairsOptions(AnnotatedOptions):
    """The options of this source."""

    images: str | None = option(
        None, help="Folder of images.", metavar="DIR", shown="images, imgs, ...", stored="folder"
    )
    masks: str | None = option(
        None,
        help="Folders of masks, such as masks or vessels=manual,fov=mask. KIND is mask or image; "
        "a mask with ? may be missing.",
        metavar="[NAME=]DIR[:KIND][?],...",
        shown="masks, labels, ...",
    )
    pattern: str | None = option(
        None,
        help="Mask name without its suffix, where {} is the image name: {}_mask. IMAGE:MASK also "
        "sets the ending of image names: {}_leftImg8bit:{}_gtFine_labelIds.",
        metavar="MASK",
        shown="inferred",
    )
    mask_suffix: str | None = option(
        None,
        help="Ending of mask names, if masks are next to their images, such as _mask or "
        "mask=_mask,second=_mask_1?. A mask with ? may be missing. Folders are classes.",
        metavar="[NAME=]SUFFIX[:KIND][?],...",
    )


class _Layout(NamedTuple):
    """Where images and masks are, in the root or in each split."""

    tops: Mapping[str, tuple[str, str]]
    """The path before and after the name of a folder, by split."""
    images: str
    masks: Sequence[str]
    """Names of folders, with {} for that of the split."""
    lists: str = ""
    """The folder with a list of the images of each split; "" if all are used."""

    def __str__(self) -> str:
        """Return the folders."""
        return " and ".join(f"{name}/" for name in (self.images, *self.masks))

    def folder(self, split: str, name: str) -> str:
        """Return the path of a folder of images or masks in a split."""
        before, after = self.tops[split]
        return f"{before}{name.replace('{}', split)}{after}"


class Pairs(AnnotatedSource):
    """Images with masks of the same or similar names, in sibling folders or next to them.

    A record has the image and a field for each folder or suffix of masks. Splits are folders with
    both, or folders of the same names in both. Next to masks, images have their folder as label.
    """

    kind = "pairs"
    options: PairsOptions
    _other_masks: Sequence[str] = ()
    """A note on folders that may be masks, too, if the user chose none."""

    def __init__(self, path: str | Path, options: PairsOptions) -> None:
        super().__init__(path, options)
        if options.pattern is not None:
            _require_pattern(options.pattern)
        if options.mask_suffix is not None:
            self._choose_beside(options)
            return
        masks = parse_keep(options.masks, "masks")
        seen = Overview(path)
        folders = [kept.source for kept in masks]
        layout = _layout_of_voc(seen, options.images, folders) or _layout_of(
            seen, options.images, folders or None
        )
        if layout is None:
            raise UsageError(
                f"{path} contains no folders of images and masks",
                remedy=f"select them with {setting('images')} and {setting('masks')}",
            )
        self._layout = layout
        self.splits = layout.tops
        if not masks:
            self._other_masks = _note_other_masks(seen, layout)
            several = len(layout.masks) > 1
            names = [_field_name(name) if several else "mask" for name in layout.masks]
            masks = [*map(Kept, names, layout.masks)]
        self.kept_files = [kept._replace(kind=kept.kind or "mask") for kept in masks]
        self.settle(images=layout.images, masks=",".join(map(str, self.kept_files)))

    def _choose_beside(self, options: PairsOptions) -> None:
        """Set splits and fields for masks next to images."""
        if options.images or options.masks or options.pattern:
            raise UsageError(
                f"{setting('mask_suffix')} is for masks next to images",
                remedy=f"leave out {setting('images')}, {setting('masks')} and "
                f"{setting('pattern')}",
            )
        items = (options.mask_suffix or "").split(",")
        named_items = [item if "=" in item else f"{_field_name(item)}={item}" for item in items]
        kept_files = parse_keep(",".join(named_items), "mask_suffix")
        self.kept_files = [kept._replace(kind=kept.kind or "mask") for kept in kept_files]
        folders = Overview(self.root).folders()
        names = folders if folders and all(map(is_split_name, folders)) else [""]
        self._layout = _Layout({name: ("", name) for name in names}, "", ())
        self.splits = self._layout.tops
        self.settle(mask_suffix=",".join(map(str, self.kept_files)))

    def _files(self, names: Names, split: str) -> tuple[dict[str, str], dict[str, dict[str, str]]]:
        """Return the images of a split, and the masks of each field, by path without suffix."""
        folder = self._layout.folder(split, self._layout.images)
        images = _by_stem(names, folder)
        if not self._beside:
            of_field = {
                kept.name: _by_stem(names, self._layout.folder(split, kept.source))
                for kept in self.kept_files
            }
            if not self._layout.lists:
                return images, of_field
            ids = names_in(Path(self.root, self._layout.lists, f"{split}.txt").resolve())
            return {stem: images.get(stem, f"{folder}/{stem}.jpg") for stem in ids}, {
                name: {stem: of[stem] for stem in ids if stem in of}
                for name, of in of_field.items()
            }
        suffixes = tuple(kept.source for kept in self.kept_files)
        masks = {stem: path for stem, path in images.items() if stem.endswith(suffixes)}
        alone = {stem: path for stem, path in images.items() if stem not in masks}
        return alone, {kept.name: masks for kept in self.kept_files}

    def _called(
        self, split: str, kept: Kept, images: Mapping[str, str], masks: Mapping[str, str]
    ) -> str:
        """Return the pattern of the names of masks."""
        if self._beside:
            return f"{{}}{kept.source}"
        patterns = [self.options.pattern] if self.options.pattern else _patterns(images, masks)
        folder = self._layout.folder(split, kept.source)
        if not patterns:
            raise UsageError(
                f"{self}: no mask in {folder} is named after an image in "
                f"{self._layout.folder(split, self._layout.images)}: describe mask names with "
                f"{setting('pattern')}"
            )
        if len(patterns) > 1:
            raise UsageError(
                f"{self}: {folder} contains several masks for each image;",
                remedy=f"choose one with {setting('pattern')}: {', '.join(map(quoted, patterns))}",
            )
        return patterns[0]

    @property
    def _beside(self) -> bool:
        """Whether masks are next to their images."""
        return self.options.mask_suffix is not None

    def _label(self, listing: Listing, stem: str) -> int:
        """Return the code of the class of an image: the folder, if masks are next to images."""
        folder = stem.partition("/")[0] if "/" in stem else None
        return listing.code(folder, is_name=True) if self._beside else NO_LABEL

    def list_images(self, listings: Mapping[str, Listing]) -> Mapping[str, str]:
        """List the images of each split, in the order of their paths."""
        names = self.names()
        alone = list[Problem]()
        listed = set[str]()
        understood = {}
        for split in self.splits:
            images, masks = self._files(names, split)
            patterns = {}
            for kept in self.kept_files:
                pattern = self._called(split, kept, images, masks[kept.name])
                patterns[kept.name] = pattern
                folder = "" if self._beside else f"{self._layout.folder(split, kept.source)}/"
                called = "" if pattern == "{}" else f"called {pattern}"
                where = ", ".join(filter(None, (folder, called)))
                understood[f"{split} {kept.name} from".lstrip()] = where
            listing = NamedListing(listings[split], names)
            for number, (stem, image) in enumerate(images.items()):
                try:
                    values = {
                        kept.name: self._partner(
                            names, kept, masks[kept.name], _applied(patterns[kept.name], stem)
                        )
                        for kept in self.kept_files
                    }
                except BadImage as error:
                    listing.blame_row(image, image, error.stated)
                    listed.add(image)
                else:
                    there = {name: value for name, value in values.items() if value}
                    if mask := next(iter(there.values()), None):
                        self.probe(image, partial(self._size_of, str(mask[0])))
                    label = self._label(listings[split], stem)
                    listing.add_file(image, image, number, there, label)
            used = {
                masks[name].get(_applied(pattern, stem))
                for name, pattern in patterns.items()
                for stem in images
            }
            alone += [
                Problem(path=path, reason="no image has this mask")
                for path in dict.fromkeys(path for of in masks.values() for path in of.values())
                if path not in used
            ]
        self.settle_fields({kept.name: kept.field("mask") for kept in self.kept_files})
        listed.update(problem.path for problem in alone)
        unused = [problem for problem in names.unused([]) if problem.path not in listed]
        next(iter(listings.values())).ignored += [*alone, *unused]
        self.notes += [] if self._layout.lists else self._lost_labels(images)
        folders = sorted({stem.partition("/")[0] for stem in images if "/" in stem})
        self.notes += self._other_masks
        if len(folders) > 1 and not self._beside:
            top = Path(self.root, self._layout.folder(next(iter(self.splits)), self._layout.images))
            self.notes.append(
                f"the folders of images, such as {folders[0]}, are not read as classes; to read "
                f"them, run shardkit convert {shell('imagefolder', top, 'DST', '--to', 'lmdb')}"
            )
        return {**understood, **{name: str(field) for name, field in self.schema.items()}}

    def _lost_labels(self, images: Iterable[str]) -> list[str]:
        """Return the command for a file that names images, by their paths without suffix."""
        seen = Overview(self.root)
        stems = [stem.rpartition("/")[2].encode("utf-8", "replace") for stem in images]
        lists = ((file, seen.ends(file), way) for file, way in unread_lists(seen))
        notes = (
            f"{file} may list labels, which are not read. To read them, run {way}"
            for file, content, way in lists
            if any(stem in content for stem in stems[:_TRIED])
        )
        return [*islice(notes, 1)]

    def _size_of(self, mask: str) -> tuple[int, int]:
        info = self.info_of(mask)
        return info.width, info.height

    def _partner(
        self, names: Names, kept: Kept, masks: Mapping[str, str], stem: str
    ) -> list[object]:
        """Return name, size and time of a mask; nothing if it is missing and may be."""
        if stem not in masks:
            if kept.optional:
                return []
            folder = "the folder" if self._beside else kept.source
            raise BadImage(f"its {kept.name} is missing: {folder} contains no {quoted(stem)}")
        return [*names.find(masks[stem])]


def _by_stem(names: Names, folder: str) -> dict[str, str]:
    """Return the images below a folder by their path in it, without suffix."""
    by_stem: dict[str, str] = {}
    for path in names.images(folder):
        stem = str(PurePosixPath(path.removeprefix(f"{folder}/")).with_suffix(""))
        if by_stem.setdefault(stem, path) != path:
            raise UsageError(
                f"{names.root}: {by_stem[stem]} and {path} differ only in their suffixes"
            )
    return by_stem


def _require_pattern(pattern: str) -> None:
    """Refuse a pattern without the place of the image's name."""
    halves = pattern.split(":")
    if len(halves) > 2 or any(half.count("{}") != 1 for half in halves):
        raise UsageError(
            f"{setting('pattern', pattern)} must be MASK or IMAGE:MASK, with {{}} in each"
        )


def _applied(pattern: str, stem: str) -> str:
    """Return the name of the mask of an image, without suffix."""
    of_image, colon, of_mask = pattern.rpartition(":")
    folder, slash, name = stem.rpartition("/")
    if colon:
        start, end = of_image.split("{}")
        name = name.removeprefix(start).removesuffix(end)
    return f"{folder}{slash}{of_mask.replace('{}', name)}"


def _patterns(images: Mapping[str, str], masks: Mapping[str, str]) -> list[str]:
    """Return what most masks are called, where ``{}`` is the name of the image; several if equal.

    If no mask has the names of images, all these may have a common end.
    """
    tried = [*images][:_TRIED]
    ends = {match[0] if (match := _END.search(stem)) else "" for stem in tried}
    for end in ("", *ends) if len(ends) == 1 else ("",):
        counts = Counter[str]()
        for stem in tried:
            folder, slash, name = stem.removesuffix(end).rpartition("/")
            inside = folder + slash
            for mask in masks:
                if mask.startswith(inside) and name in mask[len(inside) :]:
                    counts[mask[len(inside) :].replace(name, "{}", 1)] += 1
        most = max(counts.values(), default=0)
        patterns = sorted(pattern for pattern, count in counts.items() if count == most)
        if patterns:
            patterns = ["{}"] if "{}" in patterns else patterns
            return [f"{{}}{end}:{pattern}" if end else pattern for pattern in patterns]
    return []


def _field_name(folder: str) -> str:
    name = re.sub(r"[^a-z0-9_]+", "_", folder.rpartition("/")[2].lower()).strip("_")
    return name if name[:1].isalpha() else f"mask_{name}"


def _layout_of(
    seen: Overview, images: str | None = None, masks: Sequence[str] | None = None
) -> _Layout | None:
    """Return where images and masks are, or None."""
    splits = [name for name in seen.folders() if is_split_name(name)]
    named = None if images or masks else _named_by_split(seen)
    pattern, *of_masks = named or (images or "", *(masks or ()))
    if "{}" in pattern:
        before, after = pattern.split("{}", 1)
        words = [name[len(before) : len(name) - len(after)] for name in seen.folders()]
        tops = {
            word: ("", "")
            for word in filter(is_split_name, words)
            if seen.has(*(name.replace("{}", word) for name in (pattern, *of_masks)))
        }
        if of_masks and tops and (pattern != "{}" or len(tops) > 1):
            return _Layout(tops, pattern, of_masks)
    for top in ("", *splits):
        folders = seen.folders(top)
        image = images or next(filter(_OF_IMAGES.fullmatch, folders), None)
        if image is None:  # train and train_masks
            marks = ((b, re.finditer("[_-]", b)) for b in folders if _OF_MASKS.fullmatch(b))
            bases = {b[: mark.start()] for b, in_name in marks for mark in in_name}
            image = next(filter(bases.__contains__, folders), None) or _of_jpegs(seen, top)
        if image is None or image not in folders:
            continue
        others = [name for name in folders if name != image and has_images(seen, below(top, name))]
        of_masks = [*(masks or filter(_OF_MASKS.fullmatch, others))]
        if top:
            tops = {s: (f"{s}/", "") for s in splits if {image, *of_masks} <= {*seen.folders(s)}}
        else:
            inner = [name for name in seen.folders(image) if is_split_name(name)]
            tops = {name: ("", f"/{name}") for name in inner} or {"": ("", "")}
        layout = _Layout(tops, image, of_masks)
        if of_masks and tops:
            return layout
    return None


def _of_jpegs(seen: Overview, top: str) -> str | None:
    """Return the only folder next to one of masks, if its images are JPEGs, and the masks are not.

    Class folders such as mask and normal have images of one type.
    """
    folders = sorted(seen.folders(top), key=lambda name: bool(_OF_MASKS.fullmatch(name)))
    suffixes = [{name.lower()[-4:] for name in seen.images(below(top, of))} for of in folders]
    if len(folders) != 2 or _OF_MASKS.fullmatch(folders[0]) or not _OF_MASKS.fullmatch(folders[1]):
        return None
    is_jpeg = [suffixes[0] <= _JPEG, suffixes[1].isdisjoint(_JPEG)]
    return folders[0] if all(is_jpeg) else None


def _layout_of_voc(seen: Overview, images: str | None, masks: Sequence[str]) -> _Layout | None:
    """Return where Pascal VOC's images with masks are, whose splits are lists; or None."""
    names = [
        split for split in ("train", "val", "test") if f"{split}.txt" in seen.files(_VOC_LISTS)
    ]
    folders = masks or [name for name in _VOC_MASKS if seen.images(name)]
    if images not in (None, _VOC_IMAGES) or not (names and {*folders} & {*_VOC_MASKS}):
        return None
    return _Layout(dict.fromkeys(names, ("", "")), _VOC_IMAGES, folders, _VOC_LISTS)


def _named_by_split(seen: Overview) -> tuple[str, str] | None:
    """Return the folders of images and masks whose names contain that of the split, as {}."""
    folders = seen.folders()
    of_masks = [name for name in folders if _OF_MASKS.fullmatch(name)]
    for mask in of_masks:
        for split in (match[0] for match in _SPLIT.finditer(mask)):
            for image in (name for name in folders if split in name and name not in of_masks):
                if _patterns(_stems_in(seen, image), _stems_in(seen, mask)):
                    return image.replace(split, "{}", 1), mask.replace(split, "{}", 1)
    return None


def _recognize(seen: Overview) -> Iterator[Recognition]:
    in_siblings = [*_in_siblings(seen)] if seen.is_folder else []
    yield from in_siblings or (_next_to_images(seen) if seen.is_folder else ())


def _next_to_images(seen: Overview) -> Iterator[Recognition]:
    """Yield why masks are next to their images, with the option that says what they are called."""
    splits = [*filter(is_split_name, seen.folders())]
    folders = [
        below(top, name)
        for top in ("", *splits)
        for name in ("", *seen.folders(top)[:FOLDERS_TRIED])
    ]
    counts = Counter[str]()
    parts = Counter[str]()
    images = 0
    shown = ""
    for folder in folders:
        stems = {name.rpartition(".")[0]: name for name in seen.images(folder)}
        masks = [match for match in map(MASK_NAME.fullmatch, stems) if match]
        masks = [match for match in masks if match["image"] in stems]
        counts.update(match["suffix"] for match in masks)
        masked = {match["image"] for match in masks}
        others = stems.keys() - masked - {match[0] for match in masks}
        named = [match for match in map(_PART.fullmatch, others) if match]
        parts.update(match["suffix"] for match in named if match["image"] in masked)
        images += len(stems) - len(masks)
        if masks and not shown:
            shown = below(folder, stems[masks[0][0]])
    for more in ([Counter[str](), parts] if parts else [parts]) if counts else ():
        all_ = counts + more
        left = images - more.total()
        suffixes = [suffix + "?" * (count < left) for suffix, count in sorted(all_.items())]
        evidence = f"masks such as {shown} next to their images"
        evidence += f", also with {', '.join(sorted(more))}" * bool(more)
        yield Recognition(evidence, words=("--mask-suffix", ",".join(suffixes)))


def _in_siblings(seen: Overview) -> Iterator[Recognition]:
    """Yield why images and masks are in sibling folders."""
    layout = _layout_of(seen)
    if layout is None:
        return
    split = next(iter(layout.tops))
    stems = [_stems_in(seen, layout.folder(split, name)) for name in (layout.images, *layout.masks)]
    patterns = [_patterns(stems[0], masks) for masks in stems[1:]]
    if stems[0] and all(patterns):
        evidence = f"{layout}, with images such as {next(iter(stems[0].values()))} in both"
        if max(map(len, patterns)) == 1:
            yield Recognition(evidence)
        for pattern in patterns[0] if len(patterns) == 1 < len(patterns[0]) else ():
            yield Recognition(f"{evidence}, masks {pattern}", words=("--pattern", pattern))


def _note_other_masks(seen: Overview, layout: _Layout) -> list[str]:
    """Return a note on other folders with as many images as that of masks, if there are some."""
    top, after = next(iter(layout.tops.values()))
    count = len(seen.images(f"{top}{layout.masks[0]}"))
    names = [] if after or not count else seen.folders(top.rstrip("/"))
    read = (layout.images, *layout.masks)
    others = [name for name in names if name not in read and len(seen.images(top + name)) == count]
    choice = ",".join(f"{_field_name(name)}={name}" for name in (*layout.masks, *others))
    return [
        f"{', '.join(others)} may contain masks, which are not read; to read all, pass "
        f"{setting('masks', choice)}"
    ][: len(others)]


def _stems_in(seen: Overview, folder: str) -> dict[str, str]:
    """Return the images in a folder, or in the first one below it, by name without suffix."""
    images = seen.images(folder) or [
        image for inner in seen.folders(folder)[:1] for image in seen.images(f"{folder}/{inner}")
    ]
    return {name.rpartition(".")[0]: name for name in images}


SOURCE = SourceKind(
    name=Pairs.kind,
    title="Convert images with masks in a sibling folder.",
    help="""Convert the images of the folder SRC, with their masks, to a dataset in DST.

    SRC contains a folder of images and one or more folders of masks. They may be inside folders
    named train, val and test, or contain such folders. Each mask has the name of its image,
    optionally with a common prefix or suffix, as in 1_mask. Images without a mask count as bad, and
    masks without an image are listed. For Pascal VOC, ImageSets/Segmentation lists the images of
    each split. Masks may also be next to their images (--mask-suffix); folders are then classes.

    \b
    Examples:
      shardkit convert pairs carvana dataset --to lmdb --images train --masks train_masks
      shardkit convert pairs DRIVE dataset --to lmdb --masks vessels=1st_manual,fov=mask
      shardkit convert pairs BUSI dataset --to lmdb --mask-suffix _mask,_mask_1?
    """,
    options=PairsOptions,
    recognize=_recognize,
    source=Pairs,
)
