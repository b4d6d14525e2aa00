"""``shardkit merge``: merge datasets into one."""

from __future__ import annotations

import time
from pathlib import Path

import click

from shardkit.cli.console import emit, say
from shardkit.cli.options import quiet_option
from shardkit.cli.show import amount
from shardkit.conversion.merge import merge


@click.command("merge")
@click.argument("datasets", type=click.Path(path_type=Path), nargs=-1, required=True)
@click.argument("out", type=click.Path(path_type=Path))
@click.option("--force", is_flag=True, help="Replace the dataset in OUT once the new one is ready.")
@quiet_option
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
def merge_command(
    *, datasets: tuple[Path, ...], out: Path, force: bool, quiet: bool, as_json: bool
) -> None:
    """Merge DATASETS into the new dataset OUT, without reading a record.

    The shards become hard links, or copies on another disk. Formats, recipes, fields and classes
    must be equal, and keys different; the command names what is not. A dataset may lack the last
    classes of another one. Rows follow one another in the order of DATASETS.

    \b
    Example:
      shardkit merge photos-2024 photos-2025 all-photos
    """
    started = time.monotonic()
    made = merge(datasets, out, force=force)
    seconds = time.monotonic() - started
    rows = sum(manifest.rows for manifest in made.values())
    shards = sum(len(manifest.shards) for manifest in made.values())
    if as_json:
        emit({"seconds": round(seconds, 3), "rows": rows, "shards": shards})
    elif not quiet:
        say(
            f"{out}: {amount(rows, 'row')} in {amount(shards, 'shard')}, merged from "
            f"{amount(len(datasets), 'dataset')} ({seconds:.1f} s)"
        )
