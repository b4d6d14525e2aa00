"""The source of a dataset, found again: which of its files each row must have come from."""

from __future__ import annotations

import errno
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from shardkit.conversion.plan import as_stored, software_of
from shardkit.errors import CorruptDataset, Problem, UsageError
from shardkit.examine import Finding
from shardkit.files import has_sha256
from shardkit.index import Index, string_files
from shardkit.manifest import MANIFEST_NAME, Manifest
from shardkit.recipe import Recipe
from shardkit.record import NO_LABEL, make_keys
from shardkit.registry import get_format
from shardkit.sources.imagefolder import (
    LEADS_NOWHERE,
    NO_FILE,
    UNREADABLE_FOLDER,
    Entry,
    ImageFolder,
    Scan,
    scan_imagefolder,
)

_NEVER_READ = {NO_FILE, LEADS_NOWHERE, *map(os.strerror, errno.errorcode)}
"""Reasons for which a scan takes a file for bad without listing it as an image."""


@dataclass(frozen=True, kw_only=True)
class Origin:
    """What one dataset was made from, as far as the source still has it."""

    images: ImageFolder
    """The images in the order of rows, without the bad ones that were left out."""
    skipped: ImageFolder
    """Those bad ones, as far as they are still there."""
    left_out: int
    """Image files that are in the source and not to be in the dataset: bad, or beyond a limit."""
    ignored: list[Problem]
    """What is no image, in the order in which the conversion reported it."""
    recipe: Recipe
    changed_software: dict[str, tuple[str, str]]
    """Library to its version then and now, of those that can change a byte."""
    exact: bool
    """Whether those are the same that can change a byte of an image, not of the file around it."""
    rows: int
    """Rows of the dataset."""
    stored: list[str] | None
    """The source path of each row, or None if that part of the index is damaged."""
    keys: list[str] | None
    """The key of each row, or None likewise. Another's may have made it longer that is gone now."""
    findings: list[Finding]
    """What is wrong with the source as a whole."""


def scan_source(root: Path, manifests: Mapping[str, Manifest]) -> Scan:
    """Return what is in the source of datasets: of one, under the name "", or of splits.

    Raises:
        UsageError: If it cannot be their source.
    """
    for manifest in manifests.values():
        if manifest.source.get("kind") != "imagefolder":
            raise UsageError(f"the dataset was not made from a folder of images, and {root} is one")
    return scan_imagefolder(root, splits="" not in manifests)


def find_origins(
    directory: Path, manifests: Mapping[str, Manifest], scan: Scan
) -> dict[str, Origin]:
    """Find the files that a dataset, or each of its splits, was made from.

    Args:
        directory: The dataset.
        manifests: Split, or "", to its manifest.
        scan: What is in the source, from `scan_source`.

    Raises:
        CorruptDataset: If a manifest does not say how its dataset was made.
        UsageError: If the source holds none of the files.
    """
    origins = {
        split: _find_origin(manifest, split, scan, directory / split)
        for split, manifest in manifests.items()
    }
    known = [origin for origin in origins.values() if origin.stored]
    if known and all(
        {entry.path for entry in origin.images.entries}.isdisjoint(origin.stored or ())
        for origin in known
    ):  # else there would be a finding for every file
        why = "is it the right folder?"
        if scan.classes is not None and all(m.classes is None for m in manifests.values()):
            why = "there were no folders in it then, and folders are taken for classes"
        raise UsageError(
            f"{scan.root} holds none of the files that {directory} was made from; {why}"
        )
    return origins


def _find_origin(manifest: Manifest, split: str, scan: Scan, place: Path) -> Origin:
    prefix = f"{split}/" if split else ""
    recipe, seed, limit = _how_made(manifest)
    findings = []
    if split not in scan.splits:
        findings.append(Finding(file=split, reason="the source has no such split"))
    source = scan.splits.get(split, ImageFolder(scan.root / split, []))
    if (manifest.classes is None) != (scan.classes is None) and len(source):
        reason = "the source has folders of classes, and this dataset no labels, or the reverse"
        findings.append(Finding(file=prefix + MANIFEST_NAME, reason=reason))
    bad = {problem.path for problem in manifest.skipped}
    findings += [
        Finding(file=prefix + problem.path, reason=f"in the source, {problem.reason}")
        for problem in scan.problems.get(split, ())
        if not _is_within(problem.path, bad)
    ]
    rows = as_stored(_as_then(source, manifest), seed=seed, limit=limit)
    images = [entry for entry in rows.entries if not _is_within(entry.path, bad)]
    storage = get_format(manifest.format)
    then, now = manifest.software, software_of(storage, recipe)
    changed = {
        name: (then.get(name, "absent"), now.get(name, "absent"))
        for name in sorted(then.keys() | now.keys())
        if then.get(name, "absent") != now.get(name, "absent")
    }
    return Origin(
        images=ImageFolder(source.root, images),
        skipped=ImageFolder(source.root, [e for e in source.entries if _is_within(e.path, bad)]),
        left_out=len(source) - len(images),
        ignored=_in_class_order(scan.ignored.get(split, ()), manifest.classes or ()),
        recipe=recipe,
        changed_software=changed,
        exact=changed.keys() <= set(storage.libraries),
        rows=manifest.rows,
        stored=_stored(place, manifest, "paths"),
        keys=_stored(place, manifest, "keys"),
        findings=findings,
    )


def _how_made(manifest: Manifest) -> tuple[Recipe, int | None, int | None]:
    """Return recipe, seed and limit of a conversion."""
    try:
        seed, limit = manifest.source["seed"], manifest.source["limit"]
        for value in (seed, limit):
            if value is not None and type(value) is not int:
                raise ValueError(f"{value!r} is not an integer")
        return Recipe.restored(manifest.recipe), seed, limit
    except (KeyError, TypeError, ValueError, UsageError) as error:
        raise CorruptDataset(f"the manifest does not say how it was made: {error!r}") from error


def _as_then(source: ImageFolder, manifest: Manifest) -> ImageFolder:
    """Return the images in the folder's order, with keys and labels as the conversion gave them.

    Among them are bad ones that were left out, even if they are gone since: each took a place under
    a limit, and a key, without which another's might be shorter.
    """
    unread = {problem.path for problem in manifest.skipped if _was_never_read(problem)}
    found = {entry.path: entry for entry in source.entries if not _is_within(entry.path, unread)}
    for problem in manifest.skipped:
        if problem.path not in unread:
            found.setdefault(problem.path, Entry(problem.path, "", NO_LABEL, 0, 0))
    labels = {name: label for label, name in enumerate(manifest.classes or ())}
    entries = [
        entry._replace(
            key=key,
            label=NO_LABEL
            if manifest.classes is None
            else labels.get(entry.path.partition("/")[0], len(labels)),
        )
        for key, entry in zip(make_keys(found), found.values(), strict=True)
    ]
    entries.sort(key=lambda entry: (entry.label, _walk(entry.path)))
    return ImageFolder(source.root, entries)


def _was_never_read(problem: Problem) -> bool:
    return problem.reason in _NEVER_READ or problem.reason.startswith(UNREADABLE_FOLDER)


def _is_within(path: str, places: set[str]) -> bool:
    """Tell whether a path, or a folder above it, is among ``places``."""
    while path and places:
        if path in places:
            return True
        path = path.rpartition("/")[0]
    return False


def _walk(path: str) -> list[tuple[bool, str]]:
    """Return a sort key that has a folder's files before what is in its folders, as a scan does."""
    *folders, name = path.split("/")
    return [*((True, folder) for folder in folders), (False, name)]


def _in_class_order(ignored: Sequence[Problem], classes: Sequence[str]) -> list[Problem]:
    """Return what was ignored in the order in which the conversion met it: class after class."""
    labels = {name: label for label, name in enumerate(classes)}

    def place(problem: Problem) -> int:
        if problem.reason == "outside of any split":
            return len(labels)
        return labels.get(problem.path.partition("/")[0], -1)

    return sorted(ignored, key=place)


def _stored(place: Path, manifest: Manifest, name: str) -> list[str] | None:
    """Return a string of each row, if its files in the index have the digests of the manifest."""
    files = [entry for entry in manifest.files if entry.name in string_files(name)]
    if not files or not all(has_sha256(place / file.name, file.sha256) for file in files):
        return None
    index = Index(place, manifest.rows)
    try:
        return list(index.paths() if name == "paths" else index.keys())
    except (CorruptDataset, ValueError):
        return None


def match_rows(origin: Origin, prefix: str) -> tuple[list[Entry | None], list[Finding]]:
    """Return the file of each row, None where the source lacks it, and what is wrong with them.

    There is no row at all if nobody can know which file belongs to which.

    Args:
        origin: The files that there must be.
        prefix: The split's, for findings.
    """
    entries = origin.images.entries
    if origin.stored is None:
        if len(entries) == origin.rows:
            return list(entries), []
        reason = (
            f"the index is damaged, and the source gives {len(entries)} rows instead of "
            f"{origin.rows}: which file belongs to which row is not known"
        )
        return [], [Finding(file=prefix + MANIFEST_NAME, reason=reason)]
    stored = origin.stored
    by_path = {entry.path: entry for entry in entries}
    if list(by_path) == stored:
        return list(entries), []
    there = set(stored)
    findings = [
        Finding(file=prefix + path, reason="it is in the source, and not in the dataset")
        for path in sorted(by_path.keys() - there)
    ]
    for path, count in Counter(stored).items():
        if count > 1:
            findings.append(Finding(file=prefix + path, reason=f"it is stored {count} times"))
    expected = [path for path in by_path if path in there]
    found = [path for path in stored if path in by_path]
    wrong = next((pair for pair in zip(found, expected, strict=False) if pair[0] != pair[1]), None)
    if wrong and len(found) == len(expected):
        reason = f"rows are in another order than it says: {wrong[0]} stands where {wrong[1]} must"
        findings.append(Finding(file=prefix + MANIFEST_NAME, reason=reason))
    return [by_path.get(path) for path in stored], findings
