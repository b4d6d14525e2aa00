"""``shardkit index``: rebuild the index from the shards."""

from __future__ import annotations

from pathlib import Path

import click

from shardkit.cli.console import say
from shardkit.cli.show import amount, progress_bar
from shardkit.dataset.manifest import dataset_directories, load_manifest
from shardkit.verification.reindex import reindex


@click.command("index")
@click.argument("dataset", type=click.Path(path_type=Path))
@click.option("--quiet", is_flag=True, help="Print nothing.")
def index_command(dataset: Path, quiet: bool) -> None:
    """Rebuild the index of DATASET from its shards.

    Refuses damaged shards, because an index made from them would hide the damage.

    \b
    Example:
      shardkit index dataset
    """
    for place in dataset_directories(dataset).values():
        rows = load_manifest(place).rows
        with progress_bar("indexing", quiet=quiet, total=rows) as on_progress:
            reindex(place, on_progress=on_progress)
        if not quiet:
            say(f"{place}: index of {amount(rows, 'row')} rebuilt")
