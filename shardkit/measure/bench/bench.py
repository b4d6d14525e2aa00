"""`shardkit bench`: datasets and image folders, read by several loaders, warm and cold."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from os import PathLike, fspath
from pathlib import Path

from shardkit.errors import UsageError
from shardkit.measure.bench.report import BenchReport, Line, Source, measured
from shardkit.measure.runner.environment import environment
from shardkit.measure.runner.material import choose_decode, is_dataset
from shardkit.measure.runner.rounds import CACHES, Contender, Outcome, Watch, run_interleaved
from shardkit.measure.runner.spec import PLAIN, LoaderSpec, Subject, parse_loading
from shardkit.measure.runner.steps import StepSpec
from shardkit.system.machine import filesystem, other_load, usable_cpus

LIMIT = 2000
"""Images that are read at most: enough for some seconds, and for the mean of their sizes."""


@dataclass(frozen=True, kw_only=True)
class BenchOptions:
    """How datasets are compared.

    Raises:
        UsageError: If an option is unknown or out of range.
    """

    loaders: tuple[str, ...] = ()
    """What reads each of them, as ``thread`` or ``plain:num_workers=4``. None: PyTorch's DataLoader
    with a worker for each processor, and for datasets also shardkit's own loader."""
    caches: tuple[str, ...] = CACHES
    """``warm``: the files are in memory; ``cold``: they have to come from the disk."""
    rounds: int = 5
    seconds: float = 1.0
    """How long a warm look lasts; a cold one is an epoch, at most ten times as long."""
    limit: int = LIMIT
    """Images that are read at most, drawn at random from all."""
    batch_size: int = 64
    decode: str | None = None
    """What an image is; None is what `shardkit.measure.runner.material.choose_decode` says."""
    transform: str | None = None
    """``module:name``, applied to each image."""
    step: StepSpec = field(default_factory=StepSpec)
    """What is done with a batch."""

    def __post_init__(self) -> None:
        for name in ("rounds", "limit", "batch_size"):
            value = getattr(self, name)
            if type(value) is not int or value < 1:
                raise UsageError(f"{name}={value!r} is not an integer from 1 on")
        if not 0 < self.seconds < math.inf:
            raise UsageError(f"seconds={self.seconds!r} is not a number above 0")
        if not self.caches or set(self.caches) - set(CACHES):
            raise UsageError(f"caches={self.caches!r} are others than {', '.join(CACHES)}")
        _loadings(self.loaders, self.batch_size)


def bench(
    paths: Sequence[str | PathLike[str]],
    options: BenchOptions | None = None,
    *,
    watch: Watch | None = None,
) -> BenchReport:
    """Measure how fast datasets and plain image folders are read.

    Each line is measured once in each round, in an order that turns, in a process of its own or
    one that it shares with other loaders of the same data. A folder, if one is given, is what the
    others are compared with; else it is the first line.

    Args:
        paths: Datasets of shardkit and folders of images.
        options: How; the defaults if it is None.
        watch: Told before each look what is done, how much is done already, and how much there is.

    Raises:
        UsageError: If a path is missing, given twice or holds no images, or options do not go
            together. What fails while it is measured is told in its line instead.
        CorruptDataset: If a manifest is damaged.
    """
    options = BenchOptions() if options is None else options
    contenders = _contenders([fspath(path) for path in paths], options)
    step = options.step
    load = other_load()
    outcomes = run_interleaved(
        contenders,
        rounds=options.rounds,
        seconds=options.seconds,
        step=step,
        watch=watch or _unwatched,
    )
    subject = contenders[0].subject
    settings = {
        "decode": subject.decode,
        "transform": subject.transform,
        "batch_size": options.batch_size,
        "order": "random",
        "step_ms": step.milliseconds or None,
        "model": step.model,
        "rounds": options.rounds,
        "seconds": options.seconds,
        "limit": options.limit,
    }
    return BenchReport(
        sources=_sources(outcomes),
        lines=_lines(outcomes),
        settings=settings,
        environment=environment(),
        load=load,
    )


def _unwatched(text: str, done: int, total: int) -> None:
    """Tell nobody."""


def default_loaders(dataset: bool) -> tuple[str, ...]:
    """Return what reads a dataset, or a folder, if nobody says it.

    PyTorch's DataLoader keeps its workers: with few images their start at each epoch would weigh
    more than it does in training.
    """
    plain = f"{PLAIN}:num_workers={usable_cpus()},persistent_workers=true"
    return (plain, "auto") if dataset else (plain,)


def _loadings(texts: Sequence[str], batch_size: int) -> list[LoaderSpec]:
    found = [parse_loading(text, batch_size) for text in texts]
    for number, each in enumerate(found):
        if each in found[:number]:
            raise UsageError(f"the loader {each} is given twice")
    return found


def _contenders(paths: Sequence[str], options: BenchOptions) -> list[Contender]:
    if not paths:
        raise UsageError("there is nothing to measure: give a dataset, or a folder of images")
    kinds = {path: is_dataset(path) for path in paths}
    places = [Path(path).resolve() for path in paths]
    for number, place in enumerate(places):
        if place in places[:number]:
            raise UsageError(f"{paths[number]} is given twice")
    decode = choose_decode(paths, options.decode, options.transform)
    contenders = []
    for path in paths:
        subject = Subject(
            path=path, decode=decode, transform=options.transform, limit=options.limit
        )
        texts = options.loaders or default_loaders(kinds[path])
        for loading in _loadings(texts, options.batch_size):
            for cache in options.caches:
                name = f"{path} {loading} {cache}"
                contenders.append(
                    Contender(name=name, subject=subject, loading=loading, cache=cache)
                )
    return contenders


def _sources(outcomes: Sequence[Outcome]) -> tuple[Source, ...]:
    found: dict[str, Source] = {}
    for outcome in outcomes:
        path = outcome.contender.subject.path
        if path not in found:
            found[path] = Source(
                path=path,
                kind="dataset" if is_dataset(path) else "folder",
                split=outcome.split,
                images=outcome.images,
                total=outcome.total,
                bytes=outcome.bytes,
                mean_bytes=outcome.mean_bytes,
                filesystem=filesystem(Path(path))[0],
            )
    return tuple(found.values())


def _lines(outcomes: Sequence[Outcome]) -> tuple[Line, ...]:
    base = _baseline(outcomes)
    bases = {each.contender.cache: each for each in outcomes if _line(each) == base}
    return tuple(
        Line(
            path=outcome.contender.subject.path,
            loader=str(outcome.contender.loading),
            cache=outcome.contender.cache,
            baseline=_line(outcome) == base,
            measured=measured(outcome, bases[outcome.contender.cache]),
            problem=outcome.problem,
        )
        for outcome in outcomes
    )


def _line(outcome: Outcome) -> tuple[str, LoaderSpec]:
    return outcome.contender.subject.path, outcome.contender.loading


def _baseline(outcomes: Sequence[Outcome]) -> tuple[str, LoaderSpec]:
    """Return what others are compared with: a folder as PyTorch reads it, or the first line."""
    folders = [each for each in outcomes if not is_dataset(each.contender.subject.path)]
    plain = [each for each in folders if each.contender.loading.engine == PLAIN]
    return _line(next(iter(plain or folders or outcomes)))
