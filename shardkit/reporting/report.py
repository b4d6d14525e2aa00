"""Everything that a report states about datasets, as data."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from shardkit.dataset.selection import KEY_MARK, LIST_HEAD
from shardkit.errors import ShardkitError, UsageError, setting
from shardkit.record import IMAGE, NO_LABEL, STORED_KINDS
from shardkit.reporting.channels import channel_statistics
from shardkit.reporting.collection import Collection
from shardkit.reporting.embeddings import find_by_embedding
from shardkit.reporting.fields import describe_fields
from shardkit.reporting.findings import BY_EMBEDDING, KINDS, Findings, Group, find_all
from shardkit.reporting.similar import DISTANCE
from shardkit.system.pool import Report
from shardkit.system.text import amount
from shardkit.system.user_files import write_together

_BINS = 24

_WIDE = 20
"""Ratio of largest and smallest value from which the bins of a histogram grow with the value."""


class Histogram(NamedTuple):
    """The distribution of one property over all images."""

    title: str
    unit: str
    edges: list[float]
    """Borders of the bins: one more than bins. If all values are equal, there is one bin."""
    counts: list[int]
    median: float


@dataclass(frozen=True)
class DatasetReport:
    """Statistics and findings of one or more datasets."""

    images: Collection
    embedding: str | None
    """Name of the field with the embeddings that were compared."""
    findings: list[Findings]
    """One for each kind, also those that found nothing."""
    histograms: list[Histogram]
    fields: list[dict[str, Any]]
    """Distributions of all fields but images and labels."""
    mean: list[float]
    """Mean of red, green and blue over all pixels, from 0 to 1; each image has the same weight."""
    std: list[float]
    """Standard deviation of the same."""

    def __repr__(self) -> str:
        """Return the images of each kind of finding: all statistics would fill the screen."""
        rows_by_kind = {finding.kind: finding.rows for finding in self.findings if finding.rows}
        return f"DatasetReport({amount(len(self.images), 'image')}, findings: {rows_by_kind})"

    @property
    def normalize(self) -> str:
        """The line that normalizes these images; why there is none, of other than RGB images.

        `shardkit.codecs.typed.display` says which levels mean and std are of.
        """
        schemas = [member.shards.schema for member in self.images.members]
        types = {schema[IMAGE].image_type for schema in schemas}
        kinds = sorted(str(kind) for kind in types if not kind.is_rgb)
        if kinds:
            return f"mean and std apply to the pixels shown; the images are {'; '.join(kinds)}"
        mean, std = (
            ", ".join(f"{value:.4f}" for value in levels) for levels in (self.mean, self.std)
        )
        return f"Normalize(mean=({mean}), std=({std}))"

    @property
    def class_counts(self) -> dict[str, list[int]]:
        """Number of rows of each class in each dataset or split."""
        images = self.images
        shape = (len(images.members), len(images.classes))
        labeled = images.labels != NO_LABEL
        flat = images.member[labeled] * shape[1] + images.labels[labeled]
        counts = np.bincount(flat, minlength=shape[0] * shape[1]).reshape(shape)
        return dict(zip(images.classes, counts.T.tolist(), strict=True))

    def failed(self, kinds: Sequence[str]) -> list[Findings]:
        """Return the findings of some kinds that are not empty, or could not be judged.

        Raises:
            UsageError: If a kind is unknown, or it needs embeddings and there are none.
        """
        require_kinds(kinds, with_embeddings=self.embedding is not None)
        return [
            finding
            for finding in self.findings
            if finding.kind in kinds and (finding.groups or not finding.judged)
        ]

    def exclude(self, finding: Findings) -> dict[str, list[str]]:
        """Return the keys to leave out so that a finding disappears, by dataset or split."""
        images = self.images
        keys: dict[str, list[str]] = {}
        for row, member in zip(
            finding.exclude, images.member[finding.exclude].tolist(), strict=True
        ):
            keys.setdefault(images.members[member].name, []).append(images.keys[row])
        return keys

    def exclude_lists(self, finding: Findings) -> dict[str, str]:
        """Return the keys of `exclude`, one per line, for ``shardkit convert --exclude``.

        If one cannot be a line, the list has row numbers instead, and fits no other dataset.
        """
        lists: dict[str, str] = {}
        excluded = np.array(finding.exclude, np.int64)
        for number, member in enumerate(self.images.members):
            rows = (excluded[self.images.member[excluded] == number] - member.start).tolist()
            keys = [self.images.keys[member.start + row] for row in rows]
            lines = [key if _is_plain(key) else KEY_MARK + key for key in keys]
            if not all(map(_is_line, keys)):
                lines = [LIST_HEAD + member.shards.manifest.content_digest, *map(str, rows)]
            if rows:
                lists[member.name] = "".join(f"{line}\n" for line in lines)
        return lists

    def list_name(self, finding: Findings, member: str) -> str:
        """Return the file name of a list: ``KIND.txt`` or, of several, ``SPLIT-KIND.txt``."""
        prefix = f"{member.replace('/', '-')}-" if len(self.images.members) > 1 else ""
        return f"{prefix}{finding.kind}.txt"

    def save_exclude(self, folder: Path) -> list[Path]:
        """Write `exclude_lists` to files with the names of `list_name`.

        Other files with such names, from an earlier report, are removed.

        Returns:
            The files, one for each kind of finding and dataset; without any, there is no folder.

        Raises:
            ShardkitError: If one cannot be written or removed.
        """
        lists = {
            self.list_name(finding, member): text
            for finding in self.findings
            for member, text in self.exclude_lists(finding).items()
        }
        members = [member.name for member in self.images.members]
        names = {self.list_name(Findings(kind), member) for kind in KINDS for member in members}
        try:
            if lists:
                folder.mkdir(parents=True, exist_ok=True)
            contents = {folder / name: text.encode() for name, text in lists.items()}
            old = [folder / name for name in names if (folder / name).is_file()]
            write_together(contents, old)
        except OSError as error:
            raise ShardkitError(f"{error.filename} cannot be changed: {error.strerror}") from error
        return [folder / name for name in lists]

    def as_dict(self) -> dict[str, Any]:
        """Return the whole report as JSON values."""
        return {
            **self.overview(),
            "embedding": self.embedding,
            "mean": self.mean,
            "std": self.std,
            "normalize": self.normalize,
            "histograms": [entry._asdict() for entry in self.histograms],
            "fields": self.fields,
            "findings": [self._finding(entry) for entry in self.findings],
        }

    def overview(self) -> dict[str, Any]:
        """Return counts and sizes as JSON values."""
        images = self.images
        present = self.images.present
        return {
            "datasets": [
                {
                    "name": member.name,
                    "format": (manifest := member.shards.manifest).format,
                    "digest": manifest.digest,
                    "rows": manifest.rows,
                    "shards": len(manifest.shards),
                    "bytes": manifest.bytes,
                }
                for member in images.members
            ],
            "images": int(present.sum()),
            "image_bytes": int(images.index["length"][present].sum()),
            "kinds": _counted(images.index["field"][present], dict(enumerate(STORED_KINDS))),
            "modes": _counted(images.facts["mode"][images.measured]),
            "with_icc_profile": int(images.facts["icc"].sum()),
            "with_several_frames": int((images.facts["frames"] > 1).sum()),
            "classes": self.class_counts,
        }

    def _finding(self, finding: Findings) -> dict[str, Any]:
        return {
            "kind": finding.kind,
            "meaning": KINDS[finding.kind],
            "images": finding.rows,
            "judged": finding.judged,
            "complete": finding.complete,
            "note": finding.note,
            "groups": [self._group(group) for group in finding.groups],
            "exclude": self.exclude(finding),
        }

    def _group(self, group: Group) -> dict[str, Any]:
        images = self.images
        return {
            "distance": group.distance,
            "note": group.note,
            "images": [
                {
                    "dataset": member.name,
                    "row": row - member.start,
                    "key": images.keys[row],
                    "path": images.paths[row],
                    "class": images.label(row),
                }
                for row in group.rows
                for member in (images.members[images.member[row]],)
            ],
        }


def _is_line(key: str) -> bool:
    """Return whether a list of one key per line can have a key."""
    return key.isprintable() and key.strip() == key


def _is_plain(key: str) -> bool:
    """Return whether a line that is a key cannot be taken for something else."""
    return not (key.isdecimal() or key.startswith(("#", KEY_MARK)))


def require_kinds(kinds: Sequence[str], *, with_embeddings: bool) -> None:
    """Raise UsageError unless a report examines these kinds of findings."""
    for kind in kinds:
        if kind not in KINDS:
            raise UsageError(
                f"finding {kind!r} is unknown;", remedy=f"choose from {', '.join(KINDS)}"
            )
        if kind in BY_EMBEDDING and not with_embeddings:
            raise UsageError(
                f"{kind} requires embeddings;",
                remedy=f"choose the field that contains them with {setting('embedding')}",
            )


def report(
    *directories: str | Path,
    distance: int = DISTANCE,
    embedding: str | None = None,
    workers: int = 1,
    on_progress: Report | None = None,
) -> DatasetReport:
    """Examine the images of datasets: statistics and findings.

    Facts about each image are stored as ``facts.npy`` in each dataset's directory, so the next
    report reads few images. They are not part of the dataset. The report does not depend on
    ``workers``.

    Args:
        directories: Datasets, or directories of splits, which are compared with each other.
        distance: Maximum number of different bits, 0 to 16, in the 64-bit hashes of pictures that
            count as similar.
        embedding: Name of a field with embeddings, which help find wrong labels, near duplicates
            and outliers.
        workers: Number of processes.
        on_progress: Called with the progress since the last call.

    Returns:
        The report. `shardkit.reporting.page.page` renders it as HTML.

    Raises:
        UsageError: If there is no dataset, or it has no images or no such embeddings.
        CorruptDataset: If one is damaged.
    """
    if not directories:
        raise UsageError("pass at least one dataset to report on")
    if not 0 <= distance <= 16:
        raise UsageError(f"distance={distance} must be from 0 to 16 bits")
    images = Collection(directories, workers=workers, on_progress=on_progress)
    by_embedding = [] if embedding is None else find_by_embedding(images, embedding)
    mean, std = channel_statistics(images)
    return DatasetReport(
        images=images,
        embedding=embedding,
        findings=find_all(images, distance, by_embedding),
        histograms=list(_histograms(images)),
        fields=describe_fields(images),
        mean=mean,
        std=std,
    )


def _histograms(images: Collection) -> list[Histogram]:
    measured = images.measured
    facts = images.facts[measured]
    sizes = images.sizes[measured].astype(np.float64)
    quality = facts["quality"][facts["quality"] > 0]
    pixels = np.maximum(sizes.prod(1), 1)
    properties = (
        ("Width", "pixels", sizes[:, 0], _WIDE),
        ("Height", "pixels", sizes[:, 1], _WIDE),
        ("Aspect ratio", "width / height", sizes[:, 0] / np.maximum(sizes[:, 1], 1), _WIDE),
        ("Size", "bytes per pixel", images.index["length"][measured] / pixels, _WIDE),
        ("JPEG quality", "estimated, 1 to 100", quality, math.inf),
        ("Brightness", "mean luminance, 0 to 255", facts["brightness"], math.inf),
        ("Contrast", "standard deviation of luminance", facts["contrast"], math.inf),
        ("Sharpness", "0 blurred, 1 sharp", facts["sharpness"], math.inf),
    )
    return [
        _histogram(title, unit, values.astype(np.float64), wide)
        for title, unit, values, wide in properties
        if len(values)
    ]


def _histogram(title: str, unit: str, values: npt.NDArray[np.float64], wide: float) -> Histogram:
    low = float(values.min())
    high = float(values.max())
    if low == high:
        return Histogram(title, unit, [low, high], [len(values)], low)
    if low > 0 and high / low > wide:
        edges = np.geomspace(low, high, _BINS + 1)
        edges[[0, -1]] = low, high  # geomspace rounds
        unit += ", logarithmic"
    else:
        edges = np.histogram_bin_edges(values, _BINS)
    counts, _ = np.histogram(values, edges)
    return Histogram(title, unit, edges.tolist(), counts.tolist(), float(np.median(values)))


def _counted(values: npt.NDArray[Any], names: Mapping[int, str] | None = None) -> dict[str, int]:
    """Return how often each value occurs, the most frequent first."""
    distinct, counts = np.unique(values, return_counts=True)
    order = np.argsort(-counts, kind="stable")
    return {
        names[int(distinct[n])] if names else distinct[n].decode("ascii", "replace"): int(counts[n])
        for n in order.tolist()
    }
