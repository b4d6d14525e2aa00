"""The tasks of a plan, also as files: jobs that share only the target build them, then one commits.

The plan is stored as JSON in the staging directory: one file for the conversion and one for each
task. A task that runs twice, even at the same time, does no harm: each run writes the same bytes
and renames them into place.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from shardkit.contracts import Entry, Images, Scan, Source
from shardkit.conversion.build import Built, ShardTask, build_shard, load_result
from shardkit.conversion.entry_files import StoredEntries, dump_entries, load_entries
from shardkit.conversion.fingerprint import saved_digest
from shardkit.conversion.lock import own
from shardkit.conversion.plan import ConvertOptions, Plan, SplitPlan, software_of
from shardkit.conversion.recipe import Recipe
from shardkit.conversion.staging import STATE, StagingDirectory
from shardkit.dataset.reports import StoredReport, report_lines
from shardkit.errors import ConversionFailed, Problem, UsageError
from shardkit.record import describe_schema, dump_json, load_json, load_schema
from shardkit.registry import get_format, get_source
from shardkit.sources.divided import reopen
from shardkit.sources.samples import Samples
from shardkit.system.files import as_name, published, read_small, write_atomically
from shardkit.system.safe_paths import make_folder, parts_of, remove

_JOBS, _CLAIMS = f"{STATE}/jobs", f"{STATE}/claims"
PLAN = f"{_JOBS}/plan.json"
"""The plan but for the images of its tasks, relative to the target."""

_MOST_BYTES = 1 << 30
"""Limit of a file of the plan: a shard of ten million records."""


def shard_task(
    plan: Plan, split: SplitPlan, number: int, source: Images, staging: StagingDirectory
) -> ShardTask:
    """Return the task that builds a shard in a staging directory.

    Args:
        plan: The plan.
        split: The shard's split.
        number: Position of the shard in the split.
        source: Its images.
        staging: The staging directory.
    """
    return ShardTask(
        split=split.name,
        number=number,
        folder=staging.dataset / as_name(split.name),
        part=staging.state / "parts" / as_name(split.name) / f"{number:06d}",
        format=plan.options.to,
        recipe=plan.options.recipe,
        schema=plan.scan.schema,
        source=source,
        meta=split.meta,
        software=plan.software,
        keep=plan.options.on_error == "skip",
    )


def require_same_software(task: ShardTask) -> None:
    """Refuse to build a shard with other versions of libraries than planned.

    Raises:
        UsageError: If a version that affects the bytes differs on this machine.
    """
    found = software_of(get_format(task.format), task.recipe)
    differ = [
        f"{name} is {found.get(name, 'absent')}, and {wanted} was planned"
        for name, wanted in task.software.items()
        if found.get(name) != wanted
    ]
    if differ:
        raise UsageError(
            f"{socket.gethostname()} would write other bytes: {'; '.join(differ)}. Install the "
            "planned versions there."
        )


def save_plan(plan: Plan, source: Path, staging: StagingDirectory, *, force: bool) -> int:
    """Write a plan into a staging directory; return the number of tasks.

    Args:
        plan: The plan.
        source: The path from which jobs open the source.
        staging: The staging directory, which all jobs share.
        force: Whether to discard an unfinished conversion.

    Raises:
        UsageError: If there is one, or the path does not suffice to open the source.
    """
    kind = plan.scan.source.kind
    if kind == Samples.kind:
        raise UsageError("jobs cannot open Python samples; convert them with executor=")
    _reopen(kind, source, {each.name: each.meta["source"] for each in plan.splits})
    target = staging.target
    staging.start(plan.fingerprint(), force=force)
    for name in (_JOBS, _CLAIMS):
        make_folder(target, name)
    for name in os.listdir(target / _JOBS):
        if name.startswith("."):  # of a plan that was killed
            remove(target, f"{_JOBS}/{name}")
    number = 0
    for split in plan.splits:
        make_folder(target, str((staging.dataset / as_name(split.name)).relative_to(target)))
        for shard in range(split.shards):
            entries = dump_entries(split.shard_source(shard).entries)
            write_atomically(target / task_name(number), entries)
            number += 1
    for name, split in zip(_reports(plan), plan.splits, strict=True):
        with published(target / name) as temporary, temporary.open("xb") as file:
            file.writelines(report_lines(plan.scan.ignored.get(split.name, ())))
    saved = {
        "fingerprint": saved_digest(staging.state),
        "source": [kind, str(source.absolute())],
        "options": {**asdict(plan.options), "recipe": plan.options.recipe.describe()},
        "software": plan.software,
        "classes": plan.scan.classes,
        "schema": describe_schema(plan.scan.schema),
        "known": plan.scan.known,
        "exact_sizes": plan.scan.exact_sizes,
        "problems": _listed(plan.scan.problems),
        "ignored": [len(plan.scan.ignored.get(split.name, ())) for split in plan.splits],
        "splits": [
            {
                "name": split.name,
                "images": split.images,
                "cuts": split.cuts,
                "shard_bytes": split.shard_bytes,
                "meta": split.meta,
            }
            for split in plan.splits
        ],
    }
    write_atomically(target / PLAN, dump_json(saved))
    return number


def load_plan(target: Path, source: Path | None = None) -> Plan:
    """Return the plan that `save_plan` wrote. Its images are read while they are used.

    Args:
        target: The target.
        source: The path of the source on this machine, if it is another one.

    Raises:
        UsageError: If there is no plan, or it is damaged.
    """
    try:
        value = load_json(read_small(target / PLAN, _MOST_BYTES, root=target))
        if saved_digest(StagingDirectory(target).state) != value["fingerprint"]:
            raise UsageError(
                f"after the plan, another conversion was started in {target}. Plan again with "
                "--force."
            )
        kind, path = value["source"]
        described = {each["name"]: each["meta"]["source"] for each in value["splits"]}
        return _plan(value, target, _reopen(kind, source or Path(path), described))
    except FileNotFoundError:
        raise UsageError(
            f"{target} holds no plan. Write one with `shardkit convert ... {target} --plan-only`; "
            "if it was committed, its dataset is complete."
        ) from None
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise UsageError(
            f"the plan in {target} is damaged ({error}). Plan again with --force."
        ) from error


def _reopen(kind: str, path: Path, described: Mapping[str, Mapping[str, Any]]) -> Source:
    """Open the source of a plan, perhaps divided, from its description in the manifests."""
    return reopen(partial(get_source(kind).find, path), described)


def load_task(plan: Plan, target: Path, number: int) -> ShardTask:
    """Return a task of a plan. Its images are read while they are used.

    Args:
        plan: The plan.
        target: The target.
        number: The task.
    """
    for split in plan.splits:
        if number < split.shards:
            break
        number -= split.shards
    return shard_task(plan, split, number, split.shard_source(number), StagingDirectory(target))


def progress_of(target: Path) -> tuple[int, int] | None:
    """Return how many tasks of a plan are done, and how many there are; None without a plan."""
    try:
        value = load_json(read_small(target / PLAN, _MOST_BYTES, root=target))
        tasks = sum(len(each["shard_bytes"]) for each in value["splits"])
    except (OSError, ValueError, TypeError, KeyError):
        return None
    return StagingDirectory(target).count_finished(), tasks


def require_done(missing: Sequence[int], tasks: int, target: Path | str) -> None:
    """Refuse to commit while tasks are not done.

    Raises:
        ConversionFailed: If there are any. The message names them.
    """
    if missing:
        more = f" and {len(missing) - _NAMED:,} more" if len(missing) > _NAMED else ""
        raise ConversionFailed(
            f"{len(missing):,} of {tasks:,} tasks are not done: "
            f"{', '.join(map(str, missing[:_NAMED]))}{more}. Build them with "
            f"`shardkit work {target} --claim`, then commit again."
        )


_NAMED = 20
"""Tasks that a message names; it counts the others."""


class Jobs:
    """The tasks of a saved plan, to build in this process.

    Args:
        target: The directory that the plan was written for.
        source: The path of the source on this machine, if it is another one.
        place: Name of the target in messages.

    Raises:
        UsageError: If there is no plan, it is damaged, or the source is not there.
    """

    def __init__(self, target: Path, source: Path | None = None, place: str = "") -> None:
        self._target = target
        self._place = place or target
        self._plan = load_plan(target, source)
        for path in self._plan.scan.source.paths():
            if not path.exists():
                raise UsageError(
                    f"the source {path} is not on {socket.gethostname()}; if it has another path "
                    "there, give it with --source"
                )

    def __len__(self) -> int:
        return count_tasks(self._plan)

    def build(self, number: int) -> Built:
        """Build the shard of a task, or find it finished.

        Raises:
            UsageError: If there is no such task, or this machine would write other bytes.
            ConversionFailed: If the shard cannot be written.
        """
        task = self.task(number)
        require_same_software(task)
        return build_shard(task)

    def claimed(self, *, take_over: bool = False) -> Iterator[int]:
        """Claim tasks that are not done, one after another, until none is left.

        A claim is a file that names host and process. That of a dead process on this host, and of
        a task that failed, is void.

        Args:
            take_over: Whether to take tasks that others claimed but have not finished, too.
        """
        for number in range(len(self)):
            name = _claim_name(number)
            if not (own(self._target, name) or take_over):
                continue  # without reading the list of images
            task = self.task(number)
            if load_result(task):
                continue
            try:
                yield number
            finally:
                if not load_result(task):
                    remove(self._target, name)

    def task(self, number: int) -> ShardTask:
        """Return a task.

        Raises:
            UsageError: If there is no such task.
        """
        if not 0 <= number < len(self):
            raise UsageError(
                f"there is no task {number}; {self._place} has tasks 0 to {len(self) - 1}"
            )
        return load_task(self._plan, self._target, number)


def count_tasks(plan: Plan) -> int:
    """Return the number of tasks of a plan."""
    return sum(split.shards for split in plan.splits)


def task_name(number: int) -> str:
    """Return the path of a task's file, relative to the target."""
    return f"{_JOBS}/{number:06d}.json"


def _report_name(split: int) -> str:
    return f"{_JOBS}/ignored-{split:03d}.jsonl"


def _reports(plan: Plan) -> list[str]:
    """Return the lists of ignored files of all splits, relative to the target."""
    return [_report_name(number) for number in range(len(plan.splits))]


def plan_files(plan: Plan) -> list[str]:
    """Return the files with what `load_plan` reads later, relative to the target."""
    return [*map(task_name, range(count_tasks(plan))), *_reports(plan)]


def _claim_name(number: int) -> str:
    return f"{_CLAIMS}/{number:06d}"


def _listed(problems: dict[str, list[Problem]]) -> dict[str, list[list[str]]]:
    return {name: [[each.path, each.reason] for each in found] for name, found in problems.items()}


def _problems(listed: dict[str, list[list[str]]]) -> dict[str, list[Problem]]:
    return {
        name: [Problem(path=path, reason=reason) for path, reason in found]
        for name, found in listed.items()
    }


def _plan(value: Any, target: Path, source: Source) -> Plan:
    """Return the plan that `save_plan` saved as ``value``."""
    options, classes = value["options"], value["classes"]
    images, first = dict[str, Images](), 0
    for each in value["splits"]:
        if each["name"] and len(parts_of(each["name"])) > 1:
            raise ValueError("a split is not a folder name")
        images[each["name"]] = Images(source, each["name"], _entries(target, first, each["cuts"]))
        first += len(each["cuts"]) - 1
    options["recipe"] = Recipe.restored(options["recipe"])
    return Plan(
        storage=get_format(options["to"]),
        options=ConvertOptions(**options),
        scan=Scan(
            source=source,
            splits=images,
            classes=None if classes is None else tuple(classes),
            fields=load_schema(value["schema"], classes),
            known=value["known"],
            exact_sizes=value["exact_sizes"],
            problems=_problems(value["problems"]),
            ignored={
                each["name"]: StoredReport(target / _report_name(number), int(count), target)
                for number, (each, count) in enumerate(
                    zip(value["splits"], value["ignored"], strict=True)
                )
            },
        ),
        splits=tuple(
            SplitPlan(
                name=each["name"],
                source=images[each["name"]],
                images=each["images"],
                cuts=tuple(each["cuts"]),
                shard_bytes=tuple(each["shard_bytes"]),
                meta=each["meta"],
            )
            for each in value["splits"]
        ),
        software=value["software"],
    )


def _entries(target: Path, first: int, cuts: Sequence[int]) -> StoredEntries:
    """Return the images of a split, from the files of its tasks.

    Args:
        target: The target.
        first: The first task.
        cuts: First row of each task, then the number of rows.
    """
    if cuts[0] != 0 or cuts != sorted(cuts) or not all(type(cut) is int for cut in cuts):
        raise ValueError("the first rows of its shards are not in order")

    def load(shard: int) -> list[Entry]:
        path = target / task_name(first + shard)
        try:
            entries = load_entries(read_small(path, _MOST_BYTES, root=target))
            if len(entries) != cuts[shard + 1] - cuts[shard]:
                raise ValueError(f"it lists {len(entries)} images")
        except (OSError, ValueError) as error:
            raise UsageError(f"{path} is damaged ({error}). Plan again with --force.") from error
        return entries

    return StoredEntries(load, cuts)
