"""Output of ``shardkit convert``: the plan, bad images, the result."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any

import click

from shardkit.cli.printing import (
    Tally,
    as_json,
    ignored_counts,
    line,
    problem_lines,
    record_noun,
    show_notes,
    some,
    table,
)
from shardkit.cli.run import flags_of, say
from shardkit.contracts import LOOSE, Scan
from shardkit.conversion.convert import Converted
from shardkit.conversion.plan import Plan
from shardkit.dataset.manifest import Manifest
from shardkit.errors import Problem, spelled
from shardkit.kinds.field import Schema
from shardkit.record import IMAGE, IMAGE_FIELDS, LABEL
from shardkit.registry import get_source
from shardkit.system.late import load
from shardkit.system.text import amount, printable, shell, size

_LISTED = 50
"""Maximum classes to show; --json prints all."""

_ALL_USED = ("nothing", "no column", "no feature", "no member")
"""Values of ``unused`` of sources that use everything."""

_BAD = 20
"""Maximum bad images to show; --json prints all."""

_FIRST = 3
"""Images to show of each split, so that the user can check paths and classes."""


def show_plan(src: Path | str, dst: Path | str, plan: Plan) -> None:
    """Print the plan of a conversion."""
    say(f"would convert {src} to {dst} ({plan.storage.title}); nothing was written")
    for term, text in plan.scan.understood.items():
        line(term, printable(text))
    _show_notes(plan.scan)
    for split in plan.splits:
        images = amount(len(split.source), record_noun(plan.scan.schema))
        say(
            f"  {split.name + ': ' if split.name else ''}{images}, "
            f"{amount(split.shards, 'shard')}, about {size(split.estimated_bytes)}"
        )
        counts = plan.class_counts(split)
        if counts:
            table(
                [(printable(name), f"{count:,}") for name, count in counts.items()], limit=_LISTED
            )
        for first in _first_rows(plan.scan, split.name) if plan.scan.understood else ():
            line("first", printable(", ".join(value for value in first.values() if value)))
        _show_left_out(
            plan.scan.ignored.get(split.name, []), plan.scan.problems.get(split.name, [])
        )


def _show_notes(scan: Scan) -> None:
    for text in _notes(scan):
        line("noted", printable(text))


def _notes(scan: Scan) -> list[str]:
    """Return the notes, with options as the command that runs has them."""
    spell = flags_of(click.get_current_context())
    return [spelled(text, spell) for text in scan.notes]


def plan_fields(plan: Plan) -> dict[str, Any]:
    """Return the plan of a conversion as JSON values."""
    splits = {
        split.name: {
            "images": len(split.source),
            "shards": split.shards,
            "estimated_bytes": split.estimated_bytes,
            "classes": plan.class_counts(split),
            "recipe": split.meta["recipe"],
            "understood": dict(plan.scan.understood),
            "notes": _notes(plan.scan),
            "first": _first_rows(plan.scan, split.name),
            "ignored": as_json(plan.scan.ignored.get(split.name, [])),
            "problems": as_json(plan.scan.problems.get(split.name, [])),
        }
        for split in plan.splits
    }
    return {"plan": splits}


def _first_rows(scan: Scan, split: str) -> list[dict[str, Any]]:
    """Return path and class of the first images of a split, in the source's order."""
    names = scan.classes or ()
    return [
        {"path": entry.path, "class": names[entry.label] if entry.label >= 0 else None}
        for entry in scan.splits[split].entries[:_FIRST]
    ]


def _show_left_out(ignored: Collection[Problem], problems: list[Problem]) -> None:
    if ignored:
        line("ignored", _by_reason(ignored))
        _show_loose(Counter(problem.reason for problem in ignored)[LOOSE])
    for text in problem_lines(problems, limit=_BAD):
        line("bad", text)


def _by_reason(problems: Iterable[Problem]) -> str:
    of_reason: dict[str, list[str]] = {}
    for problem in as_json(problems):
        of_reason.setdefault(problem["reason"], []).append(problem["path"])
    return "; ".join(
        f"{len(paths):,} {reason} ({some(paths, counted=False)})"
        for reason, paths in sorted(of_reason.items())
    )


def show_planned(src: Path | str, dst: Path | str, jobs: int) -> None:
    """Print what to do after a plan for jobs was written."""
    say(f"planned {src} to {dst}: {amount(jobs, 'task')}, 0 to {jobs - 1}")
    target = shell(dst)
    line("next", f"shardkit work {target} --claim, on any machines; then shardkit commit {target}")


def show_converted(
    src: Path | str | None,
    dst: Path | str,
    converted: Converted,
    tally: Tally,
    lost: Collection[str] = (),
) -> None:
    """Print the summary of a conversion.

    ``src`` is None if jobs have converted it; ``lost`` are workers of a cluster that died.
    """
    if converted.unchanged or converted.plan is None:
        if src is None:
            say(f"{dst} contains a complete dataset and no plan; nothing to commit")
        else:
            say(f"{dst} already contains the result of this command; nothing to do")
        return
    say(f"converted {src} to {dst}" if src else f"published {dst}")
    for name, manifest in converted.manifests.items():
        # A committed plan is gone, and with it the names of ignored files.
        _show_dataset(name, manifest, converted.plan.scan.ignored.get(name) if src else None)
    _show_notes(converted.plan.scan)
    understood = converted.plan.scan.understood
    for text in (understood.get("label", ""), understood.get("labels", "")):
        if ": " in text or (text and converted.plan.scan.classes):
            line("labels", printable(text))
    unused = understood.get("unused", "nothing")
    if unused not in _ALL_USED:
        kind = next(iter(converted.manifests.values())).source["kind"]
        more = "; --keep NAME stores one" * get_source(kind).has_option("keep")
        line("unused", printable(unused) + more)
    if converted.reused_shards:
        line("resumed", f"{amount(converted.reused_shards, 'shard')} kept from an earlier run")
    if lost:
        line("lost", f"{some(sorted(lost))}; other workers built their shards")
    seconds = tally.seconds
    rates = ""
    if tally.images:
        images = amount(round(tally.images / seconds), record_noun(converted.plan.scan.schema))
        rates = f", {images}/s, {tally.bytes / 1e6 / seconds:,.1f} MB/s read"
    line("time", f"{seconds:.1f} s{rates}")
    line("next", shell("shardkit", "verify", dst))
    _show_reading(dst, next(iter(converted.manifests)), converted.plan.scan.schema)


def _show_reading(dst: Path | str, split: str, schema: Schema) -> None:
    """Say how to read what is no image and label, which a dataset returns by default."""
    if not schema or LABEL in schema:
        return
    values = {"split": split, "fields": list(schema)} if split else {"fields": list(schema)}
    options = [f"{name}={json.dumps(value, ensure_ascii=False)}" for name, value in values.items()]
    path = json.dumps(str(dst), ensure_ascii=False)
    line("read", printable(f"open_dataset({', '.join([path, *options])})"))


def _show_dataset(name: str, manifest: Manifest, ignored: Collection[Problem] | None) -> None:
    labeled = manifest.classes is not None and (
        any(manifest.class_counts or ()) or not manifest.rows
    )
    schema = manifest.fields_by_name
    others = some([name for name in schema if name not in (IMAGE, LABEL)])
    classes = f"with {others}" if others and IMAGE in schema else "without labels"
    if labeled:
        classes = f"in {amount(len(manifest.classes or ()), 'class')}"
    line(
        name or "dataset",
        f"{amount(manifest.rows, record_noun(schema))} {classes}, "
        f"{amount(len(manifest.shards), 'shard')} of {manifest.format}, {size(manifest.bytes)}",
    )
    if manifest.recipe.get("encode") == "planes":
        stored = (item for item in manifest.fields.items() if item[0] in IMAGE_FIELDS)
        line("stored", ", ".join(f"{count:,} {name}" for name, count in stored))
    counts = zip(manifest.classes or (), manifest.class_counts or (), strict=True)
    empty = [name for name, count in counts if not count]
    if labeled and empty and not manifest.source["limit"]:
        where = f" in {name}" if name else ""
        line("empty", f"classes without images{where}: {some(empty)}")
    show_notes(manifest.notes, manifest.recipe)
    if manifest.skipped:
        line("skipped", f"{amount(len(manifest.skipped), 'bad file')}, listed in skipped.jsonl")
    if manifest.ignored:
        line("ignored", _by_reason(ignored) if ignored else ignored_counts(manifest.ignored))
        _show_loose(manifest.ignored.get(LOOSE, 0))


def _show_loose(count: int) -> None:
    if count:
        line(
            "loose",
            f"{amount(count, 'image')} next to the class folders, left out: move them into a "
            "class folder, or convert them separately, without labels",
        )


_SUMMARIZE = "shardkit.reporting.describe:summarize"


def converted_fields(dst: Path | str, converted: Converted, tally: Tally) -> dict[str, Any]:
    """Return the summary of a conversion as JSON values."""
    return {
        "bytes_read": tally.bytes,
        "reused_shards": converted.reused_shards,
        "unchanged": converted.unchanged,
        "datasets": {
            name: {"path": f"{dst}/{name}".rstrip("/"), **load(_SUMMARIZE)(manifest)}
            for name, manifest in converted.manifests.items()
        },
    }
