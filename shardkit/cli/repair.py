"""``shardkit repair``: make damaged files of a dataset anew from its source."""

from __future__ import annotations

import sys
import time
from dataclasses import asdict
from pathlib import Path

import click

from shardkit.cli.options import quiet_option, workers_option
from shardkit.cli.show import amount, emit, line, progress_bar, some
from shardkit.machine import processors
from shardkit.manifest import dataset_directories, load_manifest
from shardkit.measure.words import printable
from shardkit.verbs.repair import Repaired, repair

_LISTED = 50
"""Files that could not be made anew and are shown; --json gives all."""


@click.command("repair")
@click.argument("dst", type=click.Path(path_type=Path))
@click.option(
    "--from",
    "source",
    type=click.Path(path_type=Path),
    metavar="SRC",
    required=True,
    help="The folder that the dataset was converted from.",
)
@workers_option
@quiet_option
@click.option("--json", "as_json", is_flag=True, help="Print what was done as JSON.")
def repair_command(
    dst: Path, source: Path, workers: int | None, quiet: bool, as_json: bool
) -> None:
    """Make damaged or missing files of the dataset in DST anew, from the folder SRC.

    Shards, index and reports are made as the conversion made them, and put in their places only if
    they have the digests that the manifest gives. What is sound is not touched. Exits with 1 if
    something could not be made anew.

    \b
    Example:
      shardkit repair dataset --from photos
    """
    begun = time.monotonic()
    total = sum(load_manifest(place).rows for place in dataset_directories(dst).values())
    with progress_bar(total, "repairing", quiet=quiet) as on_progress:
        result = repair(dst, source, workers=workers or processors(), on_progress=on_progress)
    seconds = time.monotonic() - begun
    if as_json:
        emit({"ok": result.ok, "seconds": round(seconds, 3), **asdict(result)})
    elif not quiet:
        _show(dst, result, seconds)
    sys.exit(0 if result.ok else 1)


def _show(dst: Path, result: Repaired, seconds: float) -> None:
    for finding in result.findings[:_LISTED]:
        click.echo(
            f"  not repaired: {printable(finding.file)}: {printable(finding.reason)}", err=True
        )
    if len(result.findings) > _LISTED:
        more = len(result.findings) - _LISTED
        click.echo(f"  not repaired: ... and {more:,} more (--json gives all)", err=True)
    if not result.files and result.ok:
        click.echo(f"{dst}: nothing to repair ({amount(result.sound, 'file')}, {seconds:.1f} s)")
        return
    click.echo(
        f"{dst}: {amount(len(result.files), 'file')} made anew, {result.sound:,} sound, "
        f"{len(result.findings):,} left damaged ({seconds:.1f} s)"
    )
    if result.files:
        line("repaired", some(result.files))
