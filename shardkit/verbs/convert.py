"""Convert: from a scanned image folder to a committed dataset, or to nothing at all."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from shardkit.conversion.build import (
    ShardResult,
    ShardTask,
    build_shard,
    load_part,
    load_result,
)
from shardkit.conversion.plan import ConvertOptions, Plan, SplitPlan, make_plan
from shardkit.conversion.reports import IGNORED, SKIPPED, render_report
from shardkit.conversion.space import Room, as_failure
from shardkit.conversion.workplace import Workplace, check_target, workplace
from shardkit.errors import BadImages, DiskFull, Problem, UsageError
from shardkit.files import sha256_of, sync
from shardkit.index import save_index
from shardkit.manifest import (
    FileEntry,
    Manifest,
    SplitsManifest,
    load_manifest,
    save_manifest,
)
from shardkit.pool import Report, run_tasks
from shardkit.recipe import TOO_SMALL
from shardkit.sources.imagefolder import Scan

_Name = TypeVar("_Name", str, int)


@dataclass(frozen=True, kw_only=True)
class Converted:
    """What a conversion made."""

    manifests: dict[str, Manifest]
    """The split's name, or "" where there are no splits, to the manifest of its dataset."""
    reused_shards: int = 0
    """Shards that an earlier, interrupted run had finished."""


@dataclass
class _Work:
    """One split on its way."""

    plan: SplitPlan
    folder: Path
    tasks: list[ShardTask]
    results: dict[int, ShardResult] = field(default_factory=dict)


def convert(  # noqa: PLR0913 - the nouns of the command line, each with its own meaning
    scan: Scan,
    target: str | Path,
    options: ConvertOptions,
    *,
    force: bool = False,
    workers: int = 1,
    on_progress: Report | None = None,
) -> Converted:
    """Write what ``scan`` found as a dataset in ``target``, or as one dataset for each split.

    A run that is interrupted can be repeated and keeps the shards it finished. The result does not
    depend on that, nor on ``workers``.

    Args:
        scan: The images, from `shardkit.sources.imagefolder.scan_imagefolder`.
        target: A directory that is new, empty, or (with ``force``) holds a dataset to replace,
            which stays whole until the new one is ready.
        options: What to make of the images.
        force: Whether a dataset in ``target`` may be replaced, an unfinished one discarded.
        workers: Processors to use: as processes, a shard at a time each, and as threads within
            them if there are fewer shards.
        on_progress: Called with what was done since the last call.

    Raises:
        UsageError: If ``target`` cannot be used, or holds an unfinished conversion of something
            else.
        BadImages: If images are bad and ``options.on_error`` is ``fail``. Shards without any are
            kept for the next run, which may leave the bad ones out, or find them mended.
        DiskFull: If there is not enough room.
        ConversionFailed: If writing fails.
    """
    target = Path(target)
    _keep_apart(scan, target)
    plan = make_plan(scan, options)
    with workplace(target, force=force) as place:
        try:
            reused = _carry_out(plan, place, force=force, workers=workers, report=on_progress)
        except OSError as error:
            raise as_failure(error, target) from error
    names = [split.name for split in plan.splits]
    return Converted(
        manifests={name: load_manifest(target / name) for name in names}, reused_shards=reused
    )


def _carry_out(
    plan: Plan, place: Workplace, *, force: bool, workers: int, report: Report | None
) -> int:
    """Make the dataset and put it in its place; return the number of shards found done."""
    place.begin(plan.terms(), force=force)
    kept = sum(split.shards for split in plan.splits)
    if not place.is_ready:
        works = [_prepare(split, plan, place, workers) for split in plan.splits]
        try:
            kept = _build(works, plan, place, workers, report)
        except DiskFull:
            if not any(load_result(task) for work in works for task in work.tasks):
                place.discard()  # there may be another, larger disk
            raise
        _finish(works, plan, place)
    place.publish()
    return kept


def dry_run(
    scan: Scan, target: str | Path, options: ConvertOptions, *, force: bool = False
) -> Plan:
    """Return the plan that `convert` would carry out; no image is read, the target is checked.

    Raises:
        UsageError: If ``target`` cannot be used.
    """
    _keep_apart(scan, Path(target))
    check_target(Path(target), force=force)
    return make_plan(scan, options)


def _keep_apart(scan: Scan, target: Path) -> None:
    place, root = Path(os.path.realpath(target)), Path(os.path.realpath(scan.root))
    if place == root or root in place.parents or place in root.parents:
        raise UsageError(
            f"{target} and the source {scan.root} lie inside of each other; "
            "choose a destination beside the source"
        )


def _prepare(split: SplitPlan, plan: Plan, place: Workplace, workers: int) -> _Work:
    shards = sum(each.shards for each in plan.splits)
    threads, left = divmod(workers, shards)
    folder = place.dataset / split.name
    folder.mkdir(exist_ok=True)
    tasks = [
        ShardTask(
            split=split.name,
            number=number,
            folder=folder,
            part=place.state / "parts" / split.name / f"{number:06d}",
            format=plan.options.to,
            recipe=plan.options.recipe,
            source=split.shard_source(number),
            meta=split.meta,
            software=plan.software,
            keep=plan.options.on_error == "skip",
            threads=max(1, threads + (number < left)),
        )
        for number in range(split.shards)
    ]
    return _Work(split, folder, tasks)


def _build(
    works: list[_Work], plan: Plan, place: Workplace, workers: int, on_progress: Report | None
) -> int:
    """Make all shards; return the number of those that an earlier run had made.

    Raises:
        BadImages: If images are bad and that is not wanted.
        DiskFull: If there is not enough room.
    """
    of_split = {work.plan.name: work for work in works}
    done, tasks = _divide([task for work in works for task in work.tasks])
    place.prune({task.path for task in done})
    needs = [0] * len(done) + [of_split[t.split].plan.shard_bytes[t.number] for t in tasks]
    recipe = plan.options.recipe
    room = Room(place.folder, needs, ahead=workers, copies=plan.storage.copies)
    kept = 0
    with room.held(known=recipe.keeps_bytes or recipe.raw_shape is not None):
        try:
            for task, built in run_tasks(
                build_shard, done + tasks, workers=workers, on_progress=on_progress
            ):
                of_split[task.split].results[task.number] = built.result
                kept += built.kept
                entry = built.result.entry
                room.give(entry.bytes if entry and not built.kept else 0)
        except DiskFull as error:
            raise DiskFull(f"{error} {room.need()}") from error
    _require_good(works, plan, place)
    return kept


def _divide(tasks: list[ShardTask]) -> tuple[list[ShardTask], list[ShardTask]]:
    """Return the tasks that an earlier run seems to have done, and the others."""
    done: list[ShardTask] = []
    others: list[ShardTask] = []
    for task in tasks:
        (done if load_result(task) else others).append(task)
    return done, others


def _require_good(works: list[_Work], plan: Plan, place: Workplace) -> None:
    """Refuse to go on if images are bad, unless they are to be left out and others remain."""
    problems = [
        Problem(path="/".join(filter(None, (work.plan.name, problem.path))), reason=problem.reason)
        for work in works
        for problem in _problems(work, plan)
    ]
    made = [result.entry for work in works for result in work.results.values() if result.entry]
    skip = plan.options.on_error == "skip"
    if not problems or (skip and any(entry.rows for entry in made)):
        return
    count = f"{len(problems)} bad file{'s' if len(problems) > 1 else ''}"
    small = sum(TOO_SMALL in problem.reason for problem in problems)
    if small:
        count += f", {small} of them for being too small: {TOO_SMALL} takes them"
    if skip or not made:
        place.discard()
        remedy = "No good one is left."
        if not skip:
            remedy = "Mend them, or leave them out with --on-error skip."
        error = BadImages(f"{count}; nothing was written. {remedy}")
    else:
        place.keep_for_mending([problem.path for problem in problems])
        kept = f"{len(made)} shard{'s' if len(made) > 1 else ''} without any"
        error = BadImages(
            f"{count}; no dataset was made. Mend them, or leave them out with --on-error skip: "
            f"{kept} will be used again, unless files are taken away: each says of how many it is. "
            f"(They wait in {place.folder}; remove that to give up.)"
        )
    error.problems = tuple(problems)
    raise error


def _problems(work: _Work, plan: Plan) -> list[Problem]:
    found = [*plan.scan.problems.get(work.plan.name, ())]
    found += [problem for result in work.results.values() for problem in result.bad]
    return sorted(found, key=lambda problem: problem.path)


def _finish(works: list[_Work], plan: Plan, place: Workplace) -> None:
    """Write index, reports and manifests of all splits."""
    manifests = {work.plan.name: _manifest(work, plan) for work in works}
    for name, manifest in manifests.items():
        save_manifest(manifest, place.dataset / name)
    if "" not in manifests:
        digests = {name: manifest.digest for name, manifest in manifests.items()}
        save_manifest(SplitsManifest(splits=digests), place.dataset)


def _manifest(work: _Work, plan: Plan) -> Manifest:
    results = [work.results[number] for number in range(work.plan.shards)]
    shards = [result.entry for result in results if result.entry is not None]
    skipped = _problems(work, plan)
    ignored = plan.scan.ignored.get(work.plan.name, [])
    labels = _sum(result.labels for result in results)
    classes = plan.scan.classes
    names = [
        *save_index(
            (load_part(task, entry.rows) for task, entry in zip(work.tasks, shards, strict=True)),
            work.folder,
        ),
        *_save_report(SKIPPED, skipped, work.folder),
        *_save_report(IGNORED, ignored, work.folder),
    ]
    return Manifest(
        format=plan.options.to,
        rows=sum(entry.rows for entry in shards),
        shards=tuple(shards),
        files=tuple(_file_entry(name, work.folder) for name in names),
        fields=dict(sorted(_sum(result.fields for result in results).items())),
        classes=classes,
        class_counts=None if classes is None else tuple(labels[n] for n in range(len(classes))),
        raw_shape=plan.options.recipe.raw_shape,
        recipe=work.plan.meta["recipe"],
        source=work.plan.meta["source"],
        notes=dict(sorted(_sum(result.notes for result in results).items())),
        skipped=tuple(skipped),
        ignored=dict(sorted(Counter(problem.reason for problem in ignored).items())),
        software=plan.software,
    )


def _sum(counts: Iterable[dict[_Name, int]]) -> Counter[_Name]:
    total: Counter[_Name] = Counter()
    for part in counts:
        total.update(part)
    return total


def _save_report(name: str, problems: list[Problem], folder: Path) -> list[str]:
    """Write a report; no file where there is nothing to report."""
    if not problems:
        return []
    (folder / name).write_bytes(render_report(problems))
    return [name]


def _file_entry(name: str, folder: Path) -> FileEntry:
    path = folder / name
    sync(path)
    return FileEntry(name=name, bytes=path.stat().st_size, sha256=sha256_of(path))
