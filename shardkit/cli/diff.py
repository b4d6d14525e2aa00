"""``shardkit diff``: compare two datasets by key and content."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Any

from shardkit.cli.options import argument
from shardkit.cli.printing import line, some, table
from shardkit.cli.run import Run, say
from shardkit.cli.runner import command
from shardkit.system.text import amount, printable
from shardkit.verification.diff import DatasetDifference, Differences, diff

_LISTED = 20
"""Maximum changed records to show; --json prints all."""


@command("diff", argument("first"), argument("second"))
def diff_command(run: Run, *, first: Path, second: Path) -> int:
    """Show which records were added, removed or changed from dataset FIRST to dataset SECOND.

    Records are matched by key and compared through the indexes: images by length, size and CRC-32,
    labels by class name, other fields by value. The datasets may have different formats. No record
    is read, so damaged shards are not found: use verify for that. The exit code is 1 if the
    datasets differ.

    \b
    Examples:
      shardkit diff dataset-v1 dataset-v2
      shardkit diff dataset-v1/train dataset-v2/train --json
    """
    differences = diff(first, second)
    run.report(
        lambda: {
            "equal": differences.equal,
            "splits": {name: asdict(split) for name, split in differences.splits.items()},
        },
        lambda: _show(first, second, differences),
    )
    return 0 if differences.equal else 1


def _show(first: Path, second: Path, differences: Differences) -> None:
    for name, split in differences.splits.items():
        _show_split(first / name, second / name, split)


def _show_split(first: Path, second: Path, split: DatasetDifference) -> None:
    how = "compared indexes only, read no records"
    if split.equal:
        order = ", in a different order" if split.reordered else ""
        say(f"{first} and {second}: equal, {amount(split.rows[0], 'record')}{order} ({how})")
        return
    say(f"{first} -> {second} ({how})")
    for name, pair in split.described.items():
        line(name, f"{_described(pair[0])} -> {_described(pair[1])}")
    for name, keys in (("added", split.added), ("removed", split.removed)):
        if keys:
            line(name, f"{amount(len(keys), 'record')}: {some(keys, counted=False)}")
    if split.changed:
        counts = Counter(name for record in split.changed for name in record.fields)
        named = ", ".join(f"{name} {count:,}" for name, count in counts.items())
        line("changed", f"{amount(len(split.changed), 'record')}: {named}")
        table([(record.key, ", ".join(record.fields)) for record in split.changed], limit=_LISTED)
    if split.reordered:
        line("order", "the common records are in a different order")


def _described(value: Any) -> str:
    if value is None:
        return "none"
    return some(value) if isinstance(value, (tuple, list)) else printable(str(value))
