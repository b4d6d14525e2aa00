"""``shardkit repair``: rebuild damaged files of a dataset from its source."""

from __future__ import annotations

import sys
import time
from dataclasses import asdict
from pathlib import Path

import click

from shardkit.cli.console import emit, say
from shardkit.cli.options import one_or_all, quiet_option, workers_option
from shardkit.cli.show import amount, line, progress_bar, some
from shardkit.cli.url_source import cache_option, copied
from shardkit.dataset.manifest import dataset_directories, load_manifest
from shardkit.system.machine import usable_cpus
from shardkit.system.text import printable
from shardkit.verification.repair import Repaired, repair

_LISTED = 50
"""Maximum unrepaired files to show; --json prints all."""


@click.command("repair")
@click.argument("dataset", type=click.Path(path_type=Path))
@click.option(
    "--from",
    "source",
    type=click.Path(path_type=Path),
    metavar="SRC",
    required=True,
    multiple=True,
    help="Source that DATASET was converted from. Repeat it for each part of a merged dataset, in "
    "order, unless all have the same source.",
)
@cache_option
@workers_option
@quiet_option
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
def repair_command(  # noqa: PLR0913 - Click passes each option by name
    *,
    dataset: Path,
    source: tuple[Path, ...],
    cache: Path | None,
    workers: int | None,
    quiet: bool,
    as_json: bool,
) -> None:
    """Rebuild damaged or missing files of DATASET from its source SRC.

    Repair rebuilds shards, index and reports as the conversion did, and installs a file only if it
    has the digest in the manifest. It leaves intact files untouched, and exits with 1 if a file
    could not be rebuilt.

    \b
    Example:
      shardkit repair dataset --from photos
    """
    started = time.monotonic()
    sources = [copied(each, cache, quiet=quiet) for each in source]
    total = sum(load_manifest(place).rows for place in dataset_directories(dataset).values())
    with progress_bar("repairing", quiet=quiet, total=total) as on_progress:
        result = repair(
            dataset,
            one_or_all(sources),
            workers=workers or usable_cpus(),
            on_progress=on_progress,
        )
    seconds = time.monotonic() - started
    if as_json:
        emit({"ok": result.ok, "seconds": round(seconds, 3), **asdict(result)})
    elif not quiet:
        _show(dataset, result, seconds)
    sys.exit(0 if result.ok else 1)


def _show(dataset: Path, result: Repaired, seconds: float) -> None:
    for finding in result.findings[:_LISTED]:
        say(f"  not repaired: {printable(finding.file)}: {printable(finding.reason)}", err=True)
    if len(result.findings) > _LISTED:
        more = len(result.findings) - _LISTED
        say(f"  not repaired: ... and {more:,} more (--json prints all)", err=True)
    if not result.files and result.ok:
        files = amount(result.intact, "file")
        say(f"{dataset}: nothing to repair: {files} as the conversion wrote them ({seconds:.1f} s)")
        return
    say(
        f"{dataset}: {amount(len(result.files), 'file')} rebuilt, {result.intact:,} intact, "
        f"{len(result.findings):,} still damaged ({seconds:.1f} s)"
    )
    if result.files:
        line("repaired", some(result.files))
