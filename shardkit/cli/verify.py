"""``shardkit verify``: find every damaged byte."""

from __future__ import annotations

import sys
import time
from dataclasses import asdict
from pathlib import Path

import click

from shardkit.cli.show import amount, emit, printable, progress_bar, size, some
from shardkit.errors import ShardkitError
from shardkit.examine import Finding
from shardkit.manifest import dataset_directories, load_manifest
from shardkit.pool import available_workers
from shardkit.verbs.verify import LEVELS, Verification, verify

_LISTED = 50
"""Findings that are shown; --json gives all."""


@click.command("verify")
@click.argument("dst", type=click.Path(path_type=Path))
@click.option(
    "--level",
    type=click.Choice(LEVELS),
    default="full",
    show_default=True,
    help="quick: manifest, files, sizes, index. full: also every shard's and record's checksum. "
    "decode: also every image's pixels.",
)
@click.option(
    "--workers",
    type=click.IntRange(1),
    metavar="N",
    help="Processes.  [default: one for each processor]",
)
@click.option("--quiet", is_flag=True, help="Show nothing but --json; the exit code tells.")
@click.option("--json", "as_json", is_flag=True, help="Print all findings as JSON.")
def verify_command(dst: Path, level: str, workers: int | None, quiet: bool, as_json: bool) -> None:
    """Check the dataset in DST against its manifest and its index, byte for byte.

    Exits with 0 if all is as it was written, with 1 if anything is damaged: each damaged record is
    named by key, shard and source file.

    \b
    Examples:
      shardkit verify dataset
      shardkit verify dataset --level quick
      shardkit verify dataset --level decode --json
    """
    begun = time.monotonic()
    with progress_bar(_count(dst), "verifying", quiet=quiet) as on_progress:
        result = verify(dst, level, workers=workers or available_workers(), on_progress=on_progress)
    seconds = time.monotonic() - begun
    if as_json:
        emit({"ok": result.ok, "seconds": round(seconds, 3), **asdict(result)})
    elif not quiet:
        _show(dst, result, seconds)
    sys.exit(0 if result.ok else 1)


def _count(dst: Path) -> int:
    """Return the number of records to read, for the bar alone."""
    try:
        return sum(load_manifest(place).rows for place in dataset_directories(dst).values())
    except ShardkitError:
        return 0  # verify tells what is wrong


def _show(dst: Path, result: Verification, seconds: float) -> None:
    for finding in result.findings[:_LISTED]:
        click.echo(f"  damaged: {_describe(finding)}", err=True)
    if len(result.findings) > _LISTED:
        more = len(result.findings) - _LISTED
        click.echo(f"  damaged: ... and {more:,} more (--json gives all)", err=True)
    read = f", {amount(result.records, 'record')}" if result.level != "quick" else ""
    click.echo(
        f"{dst}: {'sound' if result.ok else amount(len(result.findings), 'finding')} "
        f"({result.level}: {amount(result.shards, 'shard')}{read}, {size(result.bytes)}, "
        f"{seconds:.1f} s)"
    )
    if result.extras:
        click.echo(f"  not part of the dataset: {some(result.extras)}")


def _describe(finding: Finding) -> str:
    if finding.row is None:
        return f"{finding.file}: {finding.reason}"
    if finding.key is None:
        return f"{finding.file}: row {finding.row}: {finding.reason}"
    source = printable(finding.path or "")
    return (
        f"{finding.file}: record {finding.key} (row {finding.row}, from {source}): {finding.reason}"
    )
