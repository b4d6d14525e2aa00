"""A trial: a hundredth of the images, converted as a remedy says, and read beside what is there."""

from __future__ import annotations

import os
import statistics
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from shardkit.conversion.convert import convert_scan
from shardkit.conversion.plan import ConvertOptions
from shardkit.conversion.recipe import Recipe
from shardkit.errors import MeasurementFailed
from shardkit.measure.runner.material import open_subject
from shardkit.measure.runner.rounds import Candidate, Result, run_interleaved
from shardkit.measure.runner.spec import LoaderSpec, Subject
from shardkit.sources.imagefolder import scan_imagefolder
from shardkit.system.machine import usable_cpus
from shardkit.torch.data.datasets import ShardDataset
from shardkit.verification.verify import verify

FEWEST, MOST = 64, 1000
"""Images of a trial, which takes a hundredth of all between them."""

ROUNDS, SECONDS = 5, 0.5
"""Both ways are looked at so many times, in turn, for so long each."""

BATCHES = 8
"""An epoch of a trial has so many, at the least."""

PREFIX = "shardkit-trial-"


@dataclass(frozen=True, kw_only=True)
class Trial:
    """What a trial gave."""

    images: int
    before: float
    """Images/s as the images are stored now."""
    after: float
    """Images/s as the remedy stores them."""
    ratios: tuple[float, ...]
    """Of each round: images/s after, divided by those before."""
    batch_size: int
    """Smaller than asked for, if there are too few images for eight batches."""
    bytes_before: int
    """Of their files."""
    bytes_after: int

    @property
    def gain(self) -> float:
        """How many times as fast loading is: the median of the rounds' ratios."""
        return statistics.median(self.ratios)


def size_of_trial(images: int) -> int:
    """Return how many images a trial takes of a dataset."""
    return min(images, max(FEWEST, min(MOST, images // 100)))


def try_out(subject: Subject, loading: LoaderSpec, recipe: Recipe, storage: str) -> Trial:
    """Convert a part of the images, check the result, and measure both with the same loader.

    All of it happens in a temporary folder, which is removed in any case.

    Args:
        subject: What is read now. Of a dataset the stored images are the source.
        loading: How it is loaded.
        recipe: How the images would be stored.
        storage: Name of the format.

    Raises:
        ConversionFailed: If it cannot be converted.
        MeasurementFailed: If it cannot be read afterwards.
    """
    dataset: Any = open_subject(replace(subject, decode="bytes", transform=None))
    chosen = np.random.default_rng(0).permutation(len(dataset))[: size_of_trial(len(dataset))]
    # An epoch of one batch would measure little but the beginning of epochs.
    loading = replace(loading, batch_size=max(1, min(loading.batch_size, len(chosen) // BATCHES)))
    is_dataset = isinstance(dataset, ShardDataset)
    with _folder() as place:
        source = place / "source"
        _lay_out(dataset, sorted(chosen.tolist()), source)
        before, after = source, place / "after"
        if is_dataset:
            before = place / "before"
            _convert(source, before, Recipe(check="none"), storage)
        _convert(source, after, recipe, storage)
        measured = run_interleaved(
            [
                Candidate(name=name, subject=replace(subject, path=str(path)), loader=loading)
                for name, path in (("before", before), ("after", after))
            ],
            rounds=ROUNDS,
            seconds=SECONDS,
        )
        first, second = measured.results
        if first.opened is None or second.opened is None:
            raise MeasurementFailed(first.problem or second.problem)
        return Trial(
            images=len(chosen),
            batch_size=loading.batch_size,
            before=_rate(first),
            after=_rate(second),
            ratios=tuple(
                after / before for before, after in zip(first.rates, second.rates, strict=True)
            ),
            bytes_before=first.opened.bytes,
            bytes_after=second.opened.bytes,
        )


@contextmanager
def _folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix=PREFIX) as name:
        yield Path(name)


def _lay_out(dataset: Any, rows: list[int], source: Path) -> None:
    """Make a folder of some images: links to files, or files of what is stored."""
    files = None if isinstance(dataset, ShardDataset) else dataset.files()
    for number, row in enumerate(rows):
        if files is None:
            data, label = dataset[row]
        else:
            data, label = b"", dataset.entries[row].label
        folder = source / f"{label:06d}" if label >= 0 else source
        folder.mkdir(parents=True, exist_ok=True)
        if files is None:
            (folder / f"{number:06d}").write_bytes(data)  # a scan knows images by their content
        else:
            os.symlink(files[row].absolute(), folder / f"{number:06d}{files[row].suffix}")


def _convert(source: Path, target: Path, recipe: Recipe, storage: str) -> None:
    scan = scan_imagefolder(source, splits=False)
    convert_scan(scan, target, ConvertOptions(to=storage, recipe=recipe), workers=usable_cpus())
    found = verify(target, "full", workers=usable_cpus())
    if not found.ok:
        raise MeasurementFailed(f"the trial's dataset is damaged: {found.findings[0].reason}")


def _rate(result: Result) -> float:
    if result.problem:
        raise MeasurementFailed(f"the trial could not be measured: {result.problem}")
    return statistics.median(result.rates)
