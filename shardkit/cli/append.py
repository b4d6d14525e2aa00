"""``shardkit append``: add the images of a source to a dataset."""

from __future__ import annotations

import time
from pathlib import Path

import click

from shardkit.cli.console import emit, say
from shardkit.cli.convert_report import reporting_bad
from shardkit.cli.options import (
    on_error_option,
    quiet_option,
    shard_samples_option,
    shard_size_option,
    workers_option,
)
from shardkit.cli.show import amount, line, progress_bar, some
from shardkit.cli.url_source import cache_option, copied
from shardkit.conversion.append import Appended, append
from shardkit.system.machine import usable_cpus


@click.command("append")
@click.argument("dataset", type=click.Path(path_type=Path))
@click.option(
    "--from",
    "source",
    type=click.Path(path_type=Path),
    metavar="SRC",
    required=True,
    help="Source of the same kind as that of DATASET.",
)
@cache_option
@click.option(
    "--skip-existing",
    is_flag=True,
    help="Leave out images whose path or key DATASET has already, such as all old ones of a folder "
    "that has grown.",
)
@on_error_option
@shard_size_option
@shard_samples_option
@workers_option
@click.option("--force", is_flag=True, help="Discard the work of another unfinished run.")
@quiet_option
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
def append_command(  # noqa: PLR0913 - Click passes each option by name
    *,
    dataset: Path,
    source: Path,
    cache: Path | None,
    skip_existing: bool,
    on_error: str,
    shard_size: str,
    shard_samples: int | None,
    workers: int | None,
    force: bool,
    quiet: bool,
    as_json: bool,
) -> None:
    """Add the images of SRC to DATASET as new shards, with the options that made DATASET.

    Existing rows keep their numbers and their shards. Labels of new classes follow the existing
    ones. If DATASET was made with --val or --test, the same rule divides the new images. Readers
    find the old dataset until the new one replaces it in one step. Rerun the same command to
    resume an interrupted run.

    \b
    Examples:
      shardkit append dataset --from more-photos
      shardkit append dataset --from photos --skip-existing
    """
    started = time.monotonic()
    source = copied(source, cache, quiet=quiet)
    with reporting_bad(as_json=as_json), progress_bar("appending", quiet=quiet) as tally:
        done = append(
            dataset,
            source,
            skip_existing=skip_existing,
            on_error=on_error,
            shard_size=shard_size,
            shard_samples=shard_samples,
            force=force,
            workers=workers or usable_cpus(),
            on_progress=tally,
        )
    seconds = time.monotonic() - started
    if as_json:
        rows = {name: manifest.rows for name, manifest in done.manifests.items()}
        report = {"seconds": round(seconds, 3), "images": done.images, "rows": rows}
        emit({**report, "left_out": done.left_out})
    elif not quiet:
        _show(dataset, done, seconds)


def _show(dataset: Path, done: Appended, seconds: float) -> None:
    rows = sum(manifest.rows for manifest in done.manifests.values())
    shards = sum(len(manifest.shards) for manifest in done.manifests.values())
    if not done.images:
        say(f"{dataset}: nothing to append: all images are in the dataset ({amount(rows, 'row')})")
    else:
        say(
            f"{dataset}: {amount(done.images, 'image')} appended, now {amount(rows, 'row')} in "
            f"{amount(shards, 'shard')} ({seconds:.1f} s)"
        )
    if done.left_out:
        line(
            "left out",
            f"{amount(len(done.left_out), 'image')}: {some(done.left_out, counted=False)}",
        )
