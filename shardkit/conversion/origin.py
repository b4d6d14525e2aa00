"""The source of a dataset, found again: which of its files each row must have come from."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from shardkit.conversion.plan import as_stored, software_of
from shardkit.errors import CorruptDataset, UsageError
from shardkit.examine import Finding
from shardkit.manifest import MANIFEST_NAME, Manifest
from shardkit.recipe import Recipe
from shardkit.record import NO_LABEL
from shardkit.registry import get_format
from shardkit.sources.imagefolder import Entry, ImageFolder, Scan, scan_imagefolder


@dataclass(frozen=True, kw_only=True)
class Origin:
    """What one dataset was made from, as far as the source still has it."""

    images: ImageFolder
    """The images in the order of rows, without the bad ones that were left out."""
    recipe: Recipe
    changed_software: dict[str, tuple[str, str]]
    """Library to its version then and now, of those that can change a byte."""
    scan: Scan
    findings: list[Finding] = field(default_factory=list)
    """What is wrong with the source as a whole."""


def find_origin(manifest: Manifest, split: str, scan: Scan) -> Origin:
    """Find the files that a dataset was made from.

    Args:
        manifest: The dataset's.
        split: Its split, or "".
        scan: What is in the source, from `scan_source`.

    Raises:
        CorruptDataset: If the manifest does not say how the dataset was made.
    """
    prefix = f"{split}/" if split else ""
    try:
        seed, limit = manifest.source["seed"], manifest.source["limit"]
        recipe = Recipe.restored(manifest.recipe)
    except (KeyError, TypeError, ValueError, UsageError) as error:
        raise CorruptDataset(f"the manifest does not say how it was made: {error!r}") from error
    findings = []
    if split not in scan.splits:
        findings.append(Finding(file=split, reason="the source has no such split"))
    source = scan.splits.get(split, ImageFolder(scan.root / split, []))
    if (manifest.classes is None) != (scan.classes is None) and len(source):
        reason = "the source has folders of classes, and this dataset no labels, or the reverse"
        findings.append(Finding(file=prefix + MANIFEST_NAME, reason=reason))
    images = as_stored(_relabelled(source, scan, manifest), seed=seed, limit=limit)
    skipped = {problem.path for problem in manifest.skipped}
    findings += [
        Finding(file=prefix + problem.path, reason=f"in the source, {problem.reason}")
        for problem in scan.problems.get(split, ())
        if problem.path not in skipped
    ]
    now = software_of(get_format(manifest.format), recipe)
    then = manifest.software
    return Origin(
        images=ImageFolder(images.root, [e for e in images.entries if e.path not in skipped]),
        recipe=recipe,
        changed_software={
            name: (then.get(name, "absent"), now.get(name, "absent"))
            for name in sorted(then.keys() | now.keys())
            if then.get(name, "absent") != now.get(name, "absent")
        },
        scan=scan,
        findings=findings,
    )


def scan_source(root: Path, manifests: Mapping[str, Manifest]) -> Scan:
    """Return what is in the source of datasets: of one, under the name "", or of splits.

    Raises:
        UsageError: If it cannot be their source.
    """
    for manifest in manifests.values():
        if manifest.source.get("kind") != "imagefolder":
            raise UsageError(f"the dataset was not made from a folder of images, as {root} is one")
    scan = scan_imagefolder(root, splits="" not in manifests)
    for split in scan.splits.keys() - manifests.keys():
        raise UsageError(f"{root} has the split {split}, and the dataset has not")
    return scan


def match_rows(
    origin: Origin, stored: Sequence[str], prefix: str
) -> tuple[list[Entry | None], list[Finding]]:
    """Return the file of each row, and what is wrong with which rows there are.

    Args:
        origin: The files that there must be.
        stored: The source path of each row.
        prefix: The split's, for findings.
    """
    entries = origin.images.entries
    paths = [entry.path for entry in entries]
    if paths == list(stored):
        return list(entries), []
    by_path = dict(zip(paths, entries, strict=True))
    findings = [
        Finding(file=prefix + path, reason="it is in the source, and not in the dataset")
        for path in sorted(by_path.keys() - set(stored))
    ]
    for path, count in Counter(stored).items():
        if count > 1:
            findings.append(Finding(file=prefix + path, reason=f"it is stored {count} times"))
    there = set(stored)
    expected = [path for path in paths if path in there]
    found = [path for path in stored if path in by_path]
    wrong = next((pair for pair in zip(found, expected, strict=False) if pair[0] != pair[1]), None)
    if wrong and len(found) == len(expected):
        reason = f"rows are in another order than it says: {wrong[0]} stands where {wrong[1]} must"
        findings.append(Finding(file=prefix + MANIFEST_NAME, reason=reason))
    return [by_path.get(path) for path in stored], findings


def _relabelled(source: ImageFolder, scan: Scan, manifest: Manifest) -> ImageFolder:
    """Return the images with the labels that the dataset gives to their classes, in its order."""
    known = {name: label for label, name in enumerate(manifest.classes or ())}
    labels = {label: known.get(name, len(known)) for label, name in enumerate(scan.classes or ())}
    if manifest.classes is None:
        labels = dict.fromkeys(labels, NO_LABEL)
    entries = [entry._replace(label=labels.get(entry.label, NO_LABEL)) for entry in source.entries]
    entries.sort(key=lambda entry: entry.label)  # stable: within a class, the folder's order stays
    return ImageFolder(source.root, entries)
