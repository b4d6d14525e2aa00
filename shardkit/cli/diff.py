"""``shardkit diff``: compare two datasets by key and content."""

from __future__ import annotations

import sys
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from shardkit.cli.console import emit, say
from shardkit.cli.options import quiet_option
from shardkit.cli.show import amount, line, some, table
from shardkit.system.text import printable
from shardkit.verification.diff import DatasetDifference, diff

_LISTED = 20
"""Maximum changed records to show; --json prints all."""


@click.command("diff")
@click.argument("first", type=click.Path(path_type=Path))
@click.argument("second", type=click.Path(path_type=Path))
@click.option(
    "--bytes", "read_bytes", is_flag=True, help="Also read and compare the bytes of all images."
)
@quiet_option
@click.option("--json", "as_json", is_flag=True, help="Print all differences as JSON.")
def diff_command(first: Path, second: Path, read_bytes: bool, quiet: bool, as_json: bool) -> None:
    """Show which records were added, removed or changed from dataset FIRST to dataset SECOND.

    Records are matched by key, in datasets of any formats, and compared through the indexes: images
    by length, size and CRC-32, labels by class name, other fields by value. No record is read, so
    damaged shards are not found: see verify. Exits with 1 if the datasets differ.

    \b
    Examples:
      shardkit diff dataset-v1 dataset-v2
      shardkit diff dataset-v1/train dataset-v2/train --bytes --json
    """
    found = diff(first, second, read_bytes=read_bytes)
    if as_json:
        splits = {name: asdict(split) for name, split in found.splits.items()}
        emit({"equal": found.equal, "bytes_read": read_bytes, "splits": splits})
    elif not quiet:
        for name, split in found.splits.items():
            _show(first / name, second / name, split, read_bytes=read_bytes)
    sys.exit(0 if found.equal else 1)


def _show(first: Path, second: Path, found: DatasetDifference, *, read_bytes: bool) -> None:
    how = "bytes compared" if read_bytes else "indexes compared, no record read"
    if found.equal:
        order = ", in another order" if found.reordered else ""
        say(f"{first} and {second}: equal, {amount(found.rows[0], 'record')}{order} ({how})")
        return
    say(f"{first} -> {second} ({how})")
    for name, pair in found.described.items():
        line(name, f"{_described(pair[0])} -> {_described(pair[1])}")
    for name, keys in (("added", found.added), ("removed", found.removed)):
        if keys:
            line(name, f"{amount(len(keys), 'record')}: {some(keys, counted=False)}")
    if found.changed:
        counts = Counter(name for each in found.changed for name in each.fields)
        named = ", ".join(f"{name} {count:,}" for name, count in counts.items())
        line("changed", f"{amount(len(found.changed), 'record')}: {named}")
        table([(each.key, ", ".join(each.fields)) for each in found.changed], limit=_LISTED)
    if found.reordered:
        line("order", "the records that both have are in another order")


def _described(value: Any) -> str:
    if value is None:
        return "none"
    return some(value) if isinstance(value, (tuple, list)) else printable(str(value))
