"""Write index, reports and manifest of a dataset whose shards are built."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path

import numpy as np

from shardkit.conversion.assemble import file_entry, save_manifests, save_report
from shardkit.conversion.build import ShardTask, load_facts_part, load_part
from shardkit.conversion.build_all import Work, problems_of
from shardkit.conversion.plan import Plan
from shardkit.conversion.staging import StagingDirectory
from shardkit.dataset.facts import FACT
from shardkit.dataset.index import Index, IndexPart, save_index
from shardkit.dataset.manifest import FACTS_NAME, FieldEntry, Manifest, ShardEntry
from shardkit.dataset.reports import IGNORED, SKIPPED
from shardkit.errors import UsageError
from shardkit.system.files import sync
from shardkit.system.npy import NpyWriter
from shardkit.system.text import quoted


def finish(works: list[Work], plan: Plan, staging: StagingDirectory) -> None:
    """Write index, reports and manifests of all splits."""
    manifests = {work.plan.name: make_manifest(work, plan) for work in works}
    save_manifests(manifests, staging.dataset)


def make_manifest(work: Work, plan: Plan) -> Manifest:
    """Write index and reports of a split, next to its shards; return its manifest."""
    shards = [entry for task in work.tasks if (entry := work.entries[task.number]) is not None]
    skipped = problems_of(work, plan)
    ignored = plan.scan.ignored.get(work.plan.name, [])
    classes, schema = plan.scan.classes, plan.scan.schema
    rows, counts = sum(entry.rows for entry in shards), Counter[str]()

    def parts() -> Iterator[IndexPart]:
        for task, entry in zip(work.tasks, shards, strict=True):
            part = load_part(task, entry.rows)
            counts.update(part.counts(schema))
            yield part

    names = [
        *save_index(parts(), work.folder, schema),
        *save_report(SKIPPED, skipped, work.folder),
        *save_report(IGNORED, ignored, work.folder),
    ]
    _save_facts(list(zip(work.tasks, shards, strict=True)), work.folder)
    index = Index(work.folder, rows)
    _require_distinct(index.keys())
    lacking = {name for name in schema if counts[name] < rows}
    return Manifest(
        format=plan.options.to,
        rows=rows,
        content_digest=index.content_digest(schema, lacking),
        shards=tuple(shards),
        files=tuple(file_entry(name, work.folder) for name in names),
        fields=dict(sorted(work.fields.items())),
        schema=tuple(FieldEntry.of(name, field, counts[name]) for name, field in schema.items()),
        classes=classes,
        class_counts=None
        if classes is None
        else tuple(work.labels[n] for n in range(len(classes))),
        raw_shape=plan.options.recipe.raw_shape,
        recipe=work.plan.meta["recipe"],
        source=work.plan.meta["source"],
        notes=dict(sorted(work.notes.items())),
        skipped=tuple(skipped),
        ignored=dict(sorted(Counter(problem.reason for problem in ignored).items())),
        software=plan.software,
    )


def _save_facts(shards: list[tuple[ShardTask, ShardEntry]], folder: Path) -> None:
    """Write the facts of a split next to its shards, if any were measured."""
    path = folder / FACTS_NAME
    if any((task.part / FACTS_NAME).exists() for task, _ in shards):
        with closing(NpyWriter(path, FACT)) as writer:
            for task, entry in shards:
                writer.append(load_facts_part(task, entry.rows))
        sync(path)


def _require_distinct(keys: Sequence[str]) -> None:
    """Refuse records of the same key, which readers of tar files would take for one.

    It holds the hashes of some of the keys at a time, and only keys whose hashes are equal.

    Raises:
        UsageError: If there are any.
    """
    passes, alike = 1 + len(keys) // _HASHES, set[int]()
    for number in range(passes):
        hashes = (value for value in map(hash, keys) if value % passes == number)
        values = np.fromiter(hashes, np.int64)
        values.sort()
        alike.update(values[1:][values[1:] == values[:-1]].tolist())
    found = Counter(key for key in keys if hash(key) in alike) if alike else Counter[str]()
    twice = [key for key, count in found.items() if count > 1]
    if twice:
        raise UsageError(
            f"{len(twice)} keys occur more than once ({', '.join(map(quoted, twice[:3]))}); give "
            "each record a key of its own"
        )


_HASHES = 1 << 24
"""Keys whose hashes are compared at a time: 128 MiB."""
