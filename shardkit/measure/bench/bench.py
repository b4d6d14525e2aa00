"""`shardkit bench`: compare the reading speed of datasets, image folders and loaders."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from os import PathLike, fspath

from shardkit.errors import UsageError
from shardkit.measure.bench.report import BenchReport, Line, line_of
from shardkit.measure.runner.environment import environment
from shardkit.measure.runner.material import Opened, choose_decode, is_dataset
from shardkit.measure.runner.rounds import CACHES, Candidate, Result, Watch, run_interleaved
from shardkit.measure.runner.spec import (
    PLAIN,
    LoaderSpec,
    StepSpec,
    StopCondition,
    Subject,
    parse_loader,
)
from shardkit.system.machine import other_load, usable_cpus

COLD_MOST = 10
"""A cold measurement is one epoch, at most this many times as long as a warm one."""

LIMIT = 2000
"""Default maximum of images to read: enough for a few seconds."""


def bench(  # noqa: PLR0913 - the options of the command
    paths: Sequence[str | PathLike[str]],
    *,
    loaders: Sequence[str] = (),
    caches: Sequence[str] = CACHES,
    rounds: int = 5,
    seconds: float = 1.0,
    limit: int = LIMIT,
    batch_size: int = 64,
    decode: str | None = None,
    transform: str | None = None,
    step_ms: float | None = None,
    model: str | None = None,
    watch: Watch = lambda text, done, total: None,
) -> BenchReport:
    """Measure how fast datasets and plain image folders are read.

    Every line is measured once per round. A folder, if there is one, is the baseline; otherwise the
    first line is. Ctrl-C ends the measurement after the last complete round.

    Args:
        paths: Datasets of shardkit and folders of images.
        loaders: Loaders such as ``thread`` or ``plain:num_workers=4``. By default, PyTorch's
            DataLoader with one worker per CPU, and for datasets also ``auto``.
        caches: ``warm``: files in memory; ``cold``: files on disk.
        rounds: Interleaved rounds, after one warm-up round.
        seconds: Length of a warm measurement. A cold one is an epoch, at most 10x as long.
        limit: Maximum images to read per path, drawn at random.
        batch_size: Samples per batch.
        decode: Image type, or an operation such as ``"CenterCrop(224)"``; None selects as the
            command does.
        transform: ``module:name`` of a transform for each image.
        step_ms: Training step time per batch in ms, spent off the CPU.
        model: ``module:name`` of a model to train on each batch, or ``small``.
        watch: Called before each measurement with its name, the work done, and all work.

    Raises:
        UsageError: If a path is missing or contains no images, or an option is invalid. Failures
            during a measurement are reported in its line.
        CorruptDataset: If a manifest is damaged.
        KeyboardInterrupt: If Ctrl-C comes before a round is complete.
    """
    for name, value in (("rounds", rounds), ("limit", limit)):
        if type(value) is not int or value < 1:
            raise UsageError(f"{name}={value!r} is not a positive integer")
    if not 0 < seconds < 1e5:
        raise UsageError(f"seconds={seconds!r} is not a number of seconds above 0")
    if not caches or set(caches) - set(CACHES):
        raise UsageError(f"caches={caches!r} must be some of {', '.join(CACHES)}")
    names = [fspath(path) for path in paths]
    if not names:
        raise UsageError("there is nothing to measure: give a dataset, or a folder of images")
    # PyTorch's loader keeps its workers: their start would cost too much of a short epoch.
    auto = LoaderSpec(batch_size=batch_size)
    plain = replace(auto, engine=PLAIN, num_workers=usable_cpus(), persistent_workers=True)
    usual = {path: [plain, auto] if is_dataset(path) else [plain] for path in names}
    specs = [parse_loader(text, batch_size) for text in loaders]
    decode = choose_decode(names, decode, transform)
    step = StepSpec(milliseconds=step_ms or 0.0, model=model)
    stops = {
        "warm": StopCondition(seconds=seconds),
        "cold": StopCondition(seconds=COLD_MOST * seconds, epochs=1, whole=True),
    }
    candidates = [
        Candidate(
            subject=Subject(path=path, decode=decode, transform=transform, limit=limit),
            loader=spec,
            stop=stops[cache],
            cache=cache,
            step=step,
        )
        for path in names
        for spec in specs or usual[path]
        for cache in caches
    ]
    return compare(candidates, lines_of, rounds=rounds, length=f"{seconds:g} s", watch=watch)


def compare(
    candidates: Sequence[Candidate],
    make_lines: Callable[[Sequence[Result]], list[Line]],
    *,
    rounds: int,
    length: str,
    watch: Watch,
) -> BenchReport:
    """Measure candidates with the same samples, batches and step, and report their lines."""
    load, first = other_load(), candidates[0]
    results, interrupted = run_interleaved(candidates, rounds=rounds, watch=watch)
    subjects = {each.candidate.subject.path: each.opened for each in results}
    settings = {
        "decode": first.subject.decode,
        "transform": first.subject.transform,
        "batch_size": first.loader.batch_size,
        "step_ms": first.step.milliseconds or None,
        "model": first.step.model,
        "rounds": rounds,
        "complete": max(len(each.samples) for each in results),
        "length": length,
        "limit": first.subject.limit,
    }
    return BenchReport(
        sources=tuple(each or Opened(path=path) for path, each in subjects.items()),
        lines=tuple(make_lines(results)),
        settings=settings,
        environment=environment(),
        load=load,
        interrupted=interrupted,
    )


def lines_of(results: Sequence[Result]) -> list[Line]:
    """Return the lines; the baseline is a folder read by PyTorch's loader, or the first line."""
    folders = [each for each in results if each.opened and each.opened.kind == "folder"]
    plain = [each for each in folders if each.candidate.loader.engine == PLAIN]
    first = (plain or folders or results)[0].candidate
    base = {
        each.candidate.cache: each
        for each in results
        if (each.candidate.subject, each.candidate.loader) == (first.subject, first.loader)
    }
    return [line_of(each, base[each.candidate.cache]) for each in results]
