"""Match the rows of a dataset to the images of its source."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property

from shardkit.contracts import Entry, Images, Scan
from shardkit.conversion.plan import as_stored, copying
from shardkit.dataset.index import string_files
from shardkit.dataset.manifest import MANIFEST_NAME
from shardkit.dataset.opened import OpenedDataset, OpenedDirectory
from shardkit.dataset.parts import Part, changed_fields, how_made
from shardkit.dataset.reports import EXCLUDED
from shardkit.errors import CorruptDataset, Problem, UsageError
from shardkit.recipe import Recipe
from shardkit.record import LABEL
from shardkit.registry import get_format
from shardkit.system.text import is_within
from shardkit.verification.findings import Finding

OTHER_FOLDER = "is it the right folder?"
"""The remedy where a source has none of the files."""


@dataclass(frozen=True, kw_only=True)
class SourceMatch:
    """The source of a part of a store, as far as it still exists."""

    store: OpenedDataset
    part: Part
    """The store, or the part of it that was made from the source."""
    images: Images
    """Images in row order, without bad ones that the conversion left out."""
    skipped: Images
    """Bad images that the conversion left out and that still exist."""
    left_out: int
    """Number of images in the source that do not belong in the dataset: bad, excluded or beyond the
    limit."""
    ignored: list[Problem]
    """Files that are not images, and images that were excluded, in the order in which the
    conversion reported them."""
    recipe: Recipe
    changed: frozenset[str]
    """Names of those that did not come from the source."""
    changed_software: dict[str, tuple[str, str]]
    """Versions then and now of each changed library that affects the dataset's bytes."""
    exact: bool
    """Whether no library changed that affects image bytes (rather than the shards around them)."""
    stored: list[str] | None
    """Source path of each row; None if that file of the index is damaged."""
    keys: list[str] | None
    """Key of each row; None if that file of the index is damaged. A file that is gone may have made
    the key of another one longer."""
    findings: list[Finding]
    """Problems of the source as a whole."""


@dataclass(frozen=True)
class StoredPart:
    """Rows and skipped files of a part."""

    paths: list[str] | None
    """Path of each row; None if that file of the index is damaged."""
    keys: list[str] | None
    """Key of each row; None if that file of the index is damaged."""
    skipped: frozenset[str]
    """Paths of the bad files that the conversion left out."""

    def has(self, entry: Entry) -> bool:
        """Return whether ``append --skip-existing`` leaves an image out because of this part."""
        return (
            entry.path in self.path_set or entry.key in self._key_set or entry.path in self.skipped
        )

    @cached_property
    def path_set(self) -> frozenset[str]:
        """All paths."""
        return frozenset(self.paths or ())

    @cached_property
    def _key_set(self) -> frozenset[str]:
        return frozenset(self.keys or ())


def stored_parts(dataset: OpenedDataset) -> list[StoredPart]:
    """Return what the rows of each part of a dataset are made from."""
    texts = list[list[list[str] | None]]()
    for name in ("paths", "keys"):
        of_parts: list[list[str] | None] = [None] * len(dataset.parts)
        with suppress(CorruptDataset, ValueError):
            if dataset.holds(*string_files(name)):
                rows = dataset.index.paths() if name == "paths" else dataset.index.keys()
                of_parts = [
                    rows[part.start : part.start + part.manifest.rows] for part in dataset.parts
                ]
        texts.append(of_parts)
    return [
        StoredPart(paths, keys, frozenset(bad.path for bad in part.manifest.skipped))
        for paths, keys, part in zip(*texts, dataset.parts, strict=True)
    ]


def require_files(matches: Sequence[SourceMatch], scan: Scan) -> None:
    """Refuse a source with none of the files; note splits that the dataset does not have."""
    with_paths = [match for match in matches if match.stored]
    top = matches[0].store.top
    if with_paths and all(
        {entry.path for entry in match.images.entries}.isdisjoint(match.stored or ())
        for match in with_paths
    ):  # otherwise there would be a finding for every file
        why = OTHER_FOLDER
        if scan.classes is not None and all(
            match.part.manifest.classes is None for match in matches
        ):
            why = "it had no folders then, and folders now become classes"
        is_part = any(len(match.store.parts) > 1 for match in matches)
        raise UsageError(
            f"{scan.source} contains none of the files that {'this part of ' * is_part}{top} was "
            "created from;",
            remedy=why,
        )
    names = OpenedDirectory(top).splits.keys()
    matches[0].findings.extend(
        Finding(file=split, reason="it is a split of the source but not of the dataset")
        for split in sorted(scan.splits.keys() - names)
        if len(scan.splits[split]) or scan.problems.get(split)
    )


def match_part(
    store: OpenedDataset,
    number: int,
    scan: Scan,
    stored: Sequence[StoredPart],
    same: Collection[int],
) -> SourceMatch:
    """Find the source files of a part of a store.

    ``scan`` is its source today, and ``stored`` are the rows of all parts: earlier ones may be why
    images were left out. ``same`` are the numbers of the parts with the same source, this one too.
    """
    part = store.parts[number]
    here = stored[number]
    elsewhere = {
        path
        for other, texts in enumerate(stored)
        if other in same and other != number
        for path in texts.paths or ()
    }
    manifest = part.manifest
    split = store.split
    recipe, seed, limit = how_made(manifest)
    changed = changed_fields(manifest.source)
    if scan.records and manifest.source["kind"] != scan.source.kind:
        recipe = copying(Recipe(), scan)
        seed = None
        limit = None
        changed = frozenset()
    findings = []
    if split not in scan.splits and manifest.shards:
        findings.append(Finding(file=split, reason="the source does not have this split"))
    source = scan.splits.get(split, Images(scan.source, split, ()))
    if (
        LABEL not in changed
        and (manifest.classes is None) != (scan.classes is None)
        and len(source)
    ):
        reason = "only one of source and dataset has classes"
        findings.append(Finding(file=store.prefix + MANIFEST_NAME, reason=reason))
    bad = {problem.path for problem in manifest.skipped}
    findings += [
        Finding(file=store.prefix + problem.path, reason=f"in the source, {problem.reason}")
        for problem in scan.problems.get(split, ())
        if not is_within(problem.path, bad)
    ]
    listed = source.of(scan.source.relist(scan, split, manifest.skipped))
    if elsewhere:
        listed = _only(listed, lambda path: path not in elsewhere)
    if number:
        listed = listed.take(
            row
            for row, entry in enumerate(listed.entries)
            if entry.path in here.path_set or not any(texts.has(entry) for texts in stored[:number])
        )
    excluded = _excluded(store, listed.paths(), here.paths)
    if excluded:
        listed = _only(listed, lambda path: path not in excluded)
    if not scan.whole and here.paths is not None:
        listed = _only(listed, bad.union(here.paths).__contains__)
    rows = as_stored(listed, seed=seed, limit=limit)
    images = [entry for entry in rows.entries if not is_within(entry.path, bad)]
    storage = get_format(manifest.format)
    then = manifest.software
    now = storage.software()
    other_software = {
        name: (then.get(name, "absent"), now.get(name, "absent"))
        for name in sorted(then.keys() | now.keys())
        if then.get(name, "absent") != now.get(name, "absent")
    }
    return SourceMatch(
        store=store,
        part=part,
        images=source.of(images),
        skipped=source.of([entry for entry in source.entries if is_within(entry.path, bad)]),
        left_out=len(source) - len(elsewhere) - len(images),
        ignored=[
            *scan.ignored.get(split, ()),
            *(Problem(path=path, reason=EXCLUDED) for path in excluded),
        ],
        recipe=recipe,
        changed=changed,
        changed_software=other_software,
        exact=other_software.keys() <= set(storage.libraries),
        stored=here.paths,
        keys=here.keys,
        findings=findings,
    )


def _only(images: Images, is_wanted: Callable[[str], bool]) -> Images:
    """Return the images with some paths."""
    return images.take(row for row, path in enumerate(images.paths()) if is_wanted(path))


def _excluded(
    store: OpenedDataset, listed: Sequence[str], stored: Collection[str] | None
) -> dict[str, None]:
    """Return the paths of a source's images that its conversion excluded, in order.

    If the report that names them is damaged, these are all that are not stored, if their number is
    right.
    """
    count = store.manifest.ignored.get(EXCLUDED, 0)
    if not count:
        return {}
    there = set(stored or ())
    named = store.excluded
    if named is None:
        excluded = dict.fromkeys(path for path in listed if path not in there)
        return excluded if stored is not None and len(excluded) == count else {}
    return dict.fromkeys(path for path in listed if path in named and path not in there)


def match_rows(match: SourceMatch) -> tuple[list[Entry | None], list[Finding]]:
    """Return the source file of each row (None if the source lacks it) and all differences.

    The list is empty if the files cannot be matched to rows.
    """
    entries = match.images.entries
    prefix = match.store.prefix
    rows = match.part.manifest.rows
    if match.stored is None:
        if len(entries) == rows:
            return list(entries), []
        reason = (
            f"the index is damaged, and the source has {len(entries)} rows instead of {rows}, so "
            "files cannot be matched to rows"
        )
        return [], [Finding(file=prefix + MANIFEST_NAME, reason=reason)]
    stored = match.stored
    by_path = {entry.path: entry for entry in entries}
    if list(by_path) == stored:
        return list(by_path.values()), []
    there = set(stored)
    findings = [
        Finding(file=prefix + path, reason="it is in the source but not in the dataset")
        for path in sorted(by_path.keys() - there)
    ]
    for path, count in Counter(stored).items():
        if count > 1:
            findings.append(Finding(file=prefix + path, reason=f"it is stored {count} times"))
    expected = [path for path in by_path if path in there]
    still_present = [path for path in stored if path in by_path]
    wrong = next(
        (pair for pair in zip(still_present, expected, strict=False) if pair[0] != pair[1]), None
    )
    if wrong and len(still_present) == len(expected):
        reason = f"rows are in the wrong order: {wrong[0]} is in the place of {wrong[1]}"
        findings.append(Finding(file=prefix + MANIFEST_NAME, reason=reason))
    return [by_path.get(path) for path in stored], findings
