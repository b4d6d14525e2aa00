"""`shardkit bench`: compare the reading speed of datasets, image folders and loaders."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from os import PathLike, fspath

from shardkit.errors import UsageError, setting
from shardkit.measure.bench.report import BenchReport, Line, line_of
from shardkit.measure.bench.steps import EPOCHS, lines_of_steps, step_candidates
from shardkit.measure.runner.environment import environment
from shardkit.measure.runner.material import SubjectInfo, is_dataset
from shardkit.measure.runner.other_load import other_load
from shardkit.measure.runner.rounds import CACHES, Candidate, Result, Watch, run_interleaved
from shardkit.measure.runner.spec import PLAIN, LoaderSpec, StopCondition, Subject, parse_loader
from shardkit.measure.runner.workload import Workload
from shardkit.options import option, takes
from shardkit.system.machine import usable_cpus

COLD_MOST = 10
"""A cold measurement is one epoch, at most this many times as long as a warm one."""

LIMIT = 2000
"""Default maximum of images to read: enough for a few seconds."""


@dataclass(frozen=True, kw_only=True)
class BenchOptions(Workload):
    """The options of `bench`."""

    loaders: Sequence[str] = option(
        (),
        help="Loaders such as ``thread`` or ``plain:num_workers=4``. By default, PyTorch's "
        "DataLoader with one worker per CPU, and for datasets also ``auto``.",
    )
    steps: bool = option(
        False,
        help="Improve PyTorch's loader of one dataset or folder step by step, and show what each "
        "step gains.",
    )
    caches: Sequence[str] = option(
        CACHES, help="``warm``: files in memory; ``cold``: files on disk."
    )
    rounds: int = option(
        5,
        help="Interleaved rounds to measure, after one warm-up round.",
        metavar="N",
        minimum=1,
    )
    seconds: float = option(
        1.0,
        help="Duration of a warm measurement. A cold measurement is one epoch of at most 10x "
        "this duration. With --steps, a measurement takes 3 epochs of about this duration.",
        metavar="T",
        is_positive=True,
    )
    limit: int = option(
        LIMIT,
        help="Maximum number of images to read per DATASET, drawn at random.",
        metavar="N",
        minimum=1,
    )
    watch: Watch = option(
        lambda text, done, total: None,
        help="Called before each measurement with its name, the work done, and all work.",
        is_keyword_only=True,
    )


@takes(BenchOptions)
def bench(options: BenchOptions, paths: Sequence[str | PathLike[str]]) -> BenchReport:
    """Measure how fast datasets and plain image folders are read.

    Every candidate is measured once per round. The baseline is a plain folder if there is one,
    otherwise the first candidate. Ctrl-C ends the measurement after the last complete round.

    Args:
        paths: shardkit datasets and folders of images.

    Raises:
        UsageError: If a path is missing or contains no images, or an option is invalid. Failures
            during a measurement are reported in the candidate's line.
        CorruptDataset: If a manifest is damaged.
        KeyboardInterrupt: If you press Ctrl-C before the first round is complete.
    """
    seconds = options.seconds
    caches = options.caches
    batch_size = options.batch_size
    if not caches or set(caches) - set(CACHES):
        raise UsageError(f"{setting('caches', caches)} must be {' or '.join(CACHES)}, or both")
    names = [fspath(path) for path in paths]
    if not names:
        raise UsageError(
            "there is nothing to measure", remedy="pass a dataset or a folder of images"
        )
    subjects = options.subjects(names, options.limit)
    if options.steps:
        return _compare_steps(options, subjects)
    # PyTorch's loader keeps its workers: their start would cost too much of a short epoch.
    auto = LoaderSpec(batch_size=batch_size)
    plain = replace(auto, engine=PLAIN, num_workers=usable_cpus(), persistent_workers=True)
    usual = {path: [plain, auto] if is_dataset(path) else [plain] for path in names}
    specs = [parse_loader(text, batch_size) for text in options.loaders]
    stops = {
        "warm": StopCondition(seconds=seconds),
        "cold": StopCondition(seconds=COLD_MOST * seconds, epochs=1, whole=True),
    }
    candidates = [
        Candidate(
            subject=subject,
            loader=spec,
            stop=stops[cache],
            cache=cache,
            step=options.step,
        )
        for subject in subjects
        for spec in specs or usual[subject.path]
        for cache in caches
    ]
    return compare(
        candidates,
        lines_of,
        rounds=options.rounds,
        length=f"{seconds:g} s",
        watch=options.watch,
    )


def _compare_steps(options: BenchOptions, subjects: Sequence[Subject]) -> BenchReport:
    if len(subjects) > 1 or options.loaders or "warm" not in options.caches:
        raise UsageError(
            f"{setting('steps', True)} measures one dataset or folder from memory, with its own "
            "loaders",
            remedy=f"pass one path, no loaders, and {setting('caches', 'warm')}",
        )
    candidates = step_candidates(
        subjects[0], options.step, batch_size=options.batch_size, seconds=options.seconds
    )
    return compare(
        [*candidates.values()],
        lambda results: lines_of_steps([*candidates], results),
        rounds=options.rounds,
        length=f"{EPOCHS} epochs",
        watch=options.watch,
    )


def compare(
    candidates: Sequence[Candidate],
    make_lines: Callable[[Sequence[Result]], list[Line]],
    *,
    rounds: int,
    length: str,
    watch: Watch,
) -> BenchReport:
    """Measure candidates with the same samples, batches and step, and report their lines."""
    load = other_load()
    first = candidates[0]
    results, interrupted = run_interleaved(candidates, rounds=rounds, watch=watch)
    subjects = {result.candidate.subject.path: result.opened for result in results}
    settings = {
        "decode": first.subject.decode,
        "transform": first.subject.transform,
        "batch_size": first.loader.batch_size,
        "step_ms": first.step.milliseconds or None,
        "model": first.step.model,
        "rounds": rounds,
        "complete": max(len(result.samples) for result in results),
        "length": length,
        "limit": first.subject.limit,
    }
    return BenchReport(
        sources=tuple(opened or SubjectInfo(path=path) for path, opened in subjects.items()),
        lines=tuple(make_lines(results)),
        settings=settings,
        environment=environment(),
        load=load,
        interrupted=interrupted,
    )


def lines_of(results: Sequence[Result]) -> list[Line]:
    """Return the lines; the baseline is a folder read by PyTorch's loader, or the first line."""
    folders = [result for result in results if result.opened and result.opened.kind == "folder"]
    plain = [result for result in folders if result.candidate.loader.engine == PLAIN]
    first = (plain or folders or results)[0].candidate
    base = {
        result.candidate.cache: result
        for result in results
        if (result.candidate.subject, result.candidate.loader) == (first.subject, first.loader)
    }
    return [line_of(result, base[result.candidate.cache]) for result in results]
