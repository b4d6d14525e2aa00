"""``shardkit index``: rebuild the index from the shards."""

from __future__ import annotations

from pathlib import Path

import click

from shardkit.cli.show import amount, progress_bar
from shardkit.manifest import dataset_directories, load_manifest
from shardkit.verbs.reindex import reindex


@click.command("index")
@click.argument("dst", type=click.Path(path_type=Path))
@click.option("--quiet", is_flag=True, help="Show nothing.")
def index_command(dst: Path, quiet: bool) -> None:
    """Rebuild the index of the dataset in DST from its shards, which are the truth.

    Shards that are damaged are refused, so that the index cannot make damage look right.

    \b
    Example:
      shardkit index dataset
    """
    for place in dataset_directories(dst).values():
        rows = load_manifest(place).rows
        with progress_bar(rows, "indexing", quiet=quiet) as on_progress:
            reindex(place, on_progress=on_progress)
        if not quiet:
            click.echo(f"{place}: index of {amount(rows, 'row')} rebuilt")
