"""A plan as files: one JSON file for the conversion and one for each task.

They are in the staging directory, where jobs find them; `shardkit.cluster.jobs` shares and builds
them. The files may be anybody's, so nothing that they name is opened unasked.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from operator import sub
from pathlib import Path
from typing import Any

from shardkit.cluster.ledger import (
    FOLDER_CLAIMS,
)
from shardkit.contracts import Entry, Images, Scan, Source, SourceOptions, StoredEntries
from shardkit.conversion.build import ShardTask
from shardkit.conversion.engine import shard_task
from shardkit.conversion.entry_files import dump_entries, load_entries
from shardkit.conversion.fingerprint import saved_digest
from shardkit.conversion.plan import ConvertOptions, Plan, SplitPlan, shard_meta
from shardkit.conversion.staging import STATE, StagingDirectory
from shardkit.dataset.manifest import MANIFEST_NAME
from shardkit.dataset.reports import StoredReport, report_lines
from shardkit.errors import Problem, UsageError
from shardkit.kinds.field import describe_schema, load_schema
from shardkit.recipe import Recipe
from shardkit.record import Record, dump_json, load_json
from shardkit.registry import get_format, get_source
from shardkit.sources.driver import ListedSource, Listing
from shardkit.sources.opening import SAMPLES, wrapped_as
from shardkit.system.files import published, read_small, write_atomically
from shardkit.system.safe_paths import UNFIT, is_file, make_folder, remove, split_path
from shardkit.system.text import fault, shell
from shardkit.system.urls import as_url

_JOBS = f"{STATE}/jobs"


PLAN = f"{_JOBS}/plan.json"
"""The plan but for the images of its tasks, relative to the target."""


_MOST_BYTES = 1 << 30
"""Limit of a file of the plan: a shard of ten million records."""


_LEAST_BYTES = 16
"""Bytes of an image in such a file, at least."""


def save_plan(plan: Plan, source: Path, staging: StagingDirectory, *, force: bool) -> int:
    """Write a plan into a staging directory; return the number of tasks.

    Jobs open the source from the path ``source``. ``force`` discards an unfinished conversion.
    UsageError if there is one, or the images are Python samples.
    """
    kind = plan.scan.source.kind
    if kind == SAMPLES:
        raise UsageError("jobs cannot open Python samples;", remedy="convert them with executor=")
    target = staging.target
    staging.start(plan.fingerprint(), force=force)
    for name in (_JOBS, FOLDER_CLAIMS):
        make_folder(target, name)
    for name in os.listdir(target / _JOBS):
        if name.startswith("."):  # of a plan that was killed
            remove(target, f"{_JOBS}/{name}")
    number = 0
    for split in plan.splits:
        make_folder(target, str(staging.folder_of(split.name).relative_to(target)))
        for shard in range(split.shards):
            entries = dump_entries(split.shard_source(shard).entries)
            write_atomically(target / task_name(number), entries)
            number += 1
    for name, split in zip(_reports(plan), plan.splits, strict=True):
        with published(target / name) as temporary, temporary.open("xb") as file:
            file.writelines(report_lines(plan.scan.ignored.get(split.name, ())))
    saved = {
        "fingerprint": saved_digest(staging.state),
        "source": [kind, as_url(source) or str(source.absolute())],
        "options": _describe_options(plan.options),
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
                "source": split.meta["source"],
            }
            for split in plan.splits
        ],
    }
    write_atomically(target / PLAN, dump_json(saved))
    return number


def is_planned(target: Path) -> bool:
    """Return whether there is a plan for jobs in the target."""
    return is_file(target, PLAN)


def load_plan(target: Path) -> Plan:
    """Return the plan that `save_plan` wrote. Its list of images is read while it is used.

    The plan may be anybody's, so nothing that it names is opened: `open_source` does that.
    UsageError if there is no plan, or it is damaged.
    """
    try:
        value = load_json(read_small(target / PLAN, _MOST_BYTES, root=target))
        if saved_digest(StagingDirectory(target).state) != value["fingerprint"]:
            raise UsageError(
                f"another conversion was started in {target} after the plan was written",
                remedy="Plan again with --force.",
            )
        return _plan(value, target)
    except FileNotFoundError:
        if os.path.lexists(target / MANIFEST_NAME):
            raise UsageError(
                f"{target} contains no plan: its dataset is complete, so no task is left"
            ) from None
        raise UsageError(
            f"{target} contains no plan",
            remedy=f"Write one with `shardkit convert ... {shell(target)} --plan-only`",
        ) from None
    except (*UNFIT, ValueError, TypeError, KeyError, AttributeError) as error:
        raise UsageError(
            f"the plan in {target} is damaged ({fault(error)})", remedy="Plan again with --force."
        ) from error


class PlannedSource(ListedSource):
    """The source that a plan names, not opened."""

    def __init__(self, kind: str, path: str) -> None:
        if not (os.path.isabs(path) or as_url(path)) or type(kind) is not str:
            # Sources also take MODULE:FUNCTION@PATH, which only a user may give.
            raise ValueError("its source is not an absolute path")
        super().__init__(path, SourceOptions())
        self.kind = kind

    def paths(self) -> Sequence[Path]:
        """Return nothing: which files belong to it is not known before it is opened."""
        return ()

    def list_images(self, listings: Mapping[str, Listing]) -> Mapping[str, str]:
        """Raise an error, since it is not open."""
        raise NotImplementedError

    def read(self, split: str, entry: Entry) -> Record:
        """Raise an error, since it is not open."""
        raise NotImplementedError

    def locate(self, split: str, entry: Entry) -> str:
        """Return the path of the source and that of an image in it."""
        return f"{self} at {entry.path}"


def open_source(plan: Plan, source: Path | None = None) -> Plan:
    """Return a plan with its source opened, to build shards.

    ``source`` is the path that a user gave for the source; None means that of the plan. UsageError
    if it is not there, or what the plan states about it is damaged.
    """
    named = plan.scan.source
    described = {split.name: split.meta["source"] for split in plan.splits}
    opened = _reopen(named.kind, source or Path(str(named)), described)
    for path in opened.paths():
        if not path.exists():
            raise UsageError(
                f"the source {path} is not on {socket.gethostname()};",
                remedy="if its path differs on that machine, pass that path",
            )
    images = {name: replace(entries, source=opened) for name, entries in plan.scan.splits.items()}
    return replace(
        plan,
        scan=replace(plan.scan, source=opened, splits=images),
        splits=tuple(replace(split, source=images[split.name]) for split in plan.splits),
    )


def _reopen(kind: str, path: Path, described: Mapping[str, Mapping[str, Any]]) -> Source:
    """Open the source of a plan, perhaps divided, from its description in the manifests."""
    try:
        return wrapped_as(described, partial(get_source(kind).find, path))
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise UsageError(
            f"the plan's description of its source {path} is damaged ({fault(error)})",
            remedy="Plan again with --force.",
        ) from error


def load_task(plan: Plan, target: Path, number: int) -> ShardTask:
    """Return a task of a plan. Its images are read while they are used."""
    for split in plan.splits:
        if number < split.shards:
            break
        number -= split.shards
    return shard_task(plan, split, number, StagingDirectory(target))


def tasks_of(plan: Plan, folder: Path) -> list[ShardTask]:
    """Return the tasks of a plan in a folder, which reads no image."""
    return [load_task(plan, folder, number) for number in range(count_tasks(plan))]


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


def later_files(plan: Plan) -> list[str]:
    """Return the files with what `load_plan` reads later, relative to the target."""
    return [*map(task_name, range(count_tasks(plan))), *_reports(plan)]


def _listed(problems: dict[str, list[Problem]]) -> dict[str, list[list[str]]]:
    return {
        name: [[problem.path, problem.message] for problem in listed]
        for name, listed in problems.items()
    }


def _problems(listed: dict[str, list[list[str]]]) -> dict[str, list[Problem]]:
    return {
        name: [Problem(path=path, reason=reason) for path, reason in pairs]
        for name, pairs in listed.items()
    }


def _plan(value: Any, target: Path) -> Plan:
    """Return the plan that `save_plan` saved as ``value``."""
    source = PlannedSource(*value["source"])
    classes = value["classes"]
    images = dict[str, Images]()
    first = 0
    for split in value["splits"]:
        texts = (split["name"], split["source"]["name"], *value["software"].values())
        if not all(type(text) is str for text in texts):
            raise TypeError("a name is not text")
        if split["name"] and len(split_path(split["name"])) > 1:
            raise ValueError("a split is not a folder name")
        images[split["name"]] = Images(
            source, split["name"], _entries(target, first, split["cuts"])
        )
        first += len(split["cuts"]) - 1
    options = _restored_options(value["options"])
    scan = Scan(
        source=source,
        splits=images,
        classes=None if classes is None else tuple(classes),
        fields=load_schema(value["schema"], classes),
        known=value["known"],
        exact_sizes=value["exact_sizes"],
        problems=_problems(value["problems"]),
        ignored={
            split["name"]: StoredReport(target / _report_name(number), int(count), target)
            for number, (split, count) in enumerate(
                zip(value["splits"], value["ignored"], strict=True)
            )
        },
    )
    return Plan(
        storage=get_format(options.to),
        options=options,
        scan=scan,
        splits=tuple(
            SplitPlan(
                name=split["name"],
                source=images[split["name"]],
                images=split["images"],
                cuts=tuple(split["cuts"]),
                shard_bytes=tuple(split["shard_bytes"]),
                meta=shard_meta(
                    to=options.to,
                    schema=scan.schema,
                    recipe=options.recipe,
                    source=split["source"],
                ),
            )
            for split in value["splits"]
        ),
        software=value["software"],
    )


def _describe_options(options: ConvertOptions) -> dict[str, Any]:
    """Return the options as JSON values, with the names that they have had in all plans."""
    values = {**asdict(options), "recipe": options.recipe.describe()}
    del values["shard_size"]
    return {**values, "shard_bytes": options.shard_bytes}


def _restored_options(described: dict[str, Any]) -> ConvertOptions:
    """Return the options that `_describe_options` described."""
    values = {**described, "recipe": Recipe.restored(described["recipe"])}
    return ConvertOptions(shard_size=f"{values.pop('shard_bytes')}B", **values)


def _entries(target: Path, first: int, cuts: Sequence[int]) -> StoredEntries:
    """Return the images of a split, from the files of its tasks."""
    if type(cuts) is not list or not all(type(cut) is int for cut in cuts):
        raise TypeError("the first rows of its shards are not numbers")
    if cuts[:1] != [0] or cuts != sorted(cuts):
        raise ValueError("the first rows of its shards are not in order")
    if max(map(sub, cuts[1:], cuts), default=0) > _MOST_BYTES // _LEAST_BYTES:
        raise ValueError("a shard has more images than the file of a task can list")

    def load(shard: int) -> list[Entry]:
        path = target / task_name(first + shard)
        try:
            entries = load_entries(read_small(path, _MOST_BYTES, root=target))
            if len(entries) != cuts[shard + 1] - cuts[shard]:
                raise ValueError(f"it lists {len(entries)} images")
        except (*UNFIT, ValueError) as error:
            raise UsageError(
                f"{path} is damaged ({fault(error)})", remedy="Plan again with --force."
            ) from error
        return entries

    return StoredEntries(load, cuts)
