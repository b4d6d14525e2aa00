"""``shardkit index-export``: write the tar indexes of other tools."""

from __future__ import annotations

from pathlib import Path

import click

from shardkit.cli.console import say
from shardkit.cli.show import amount
from shardkit.exporting.tar_index import TOOLS, export_index


@click.command("index-export")
@click.argument("dataset", type=click.Path(path_type=Path))
@click.argument("folder", type=click.Path(path_type=Path))
@click.option(
    "--as",
    "tool",
    type=click.Choice(sorted(TOOLS)),
    required=True,
    help="Tool that reads the indexes.",
)
@click.option(
    "--root",
    type=click.Path(path_type=Path),
    metavar="DIR",
    help="Folder of the archives.  [default: where `attach` found them]",
)
@click.option("--quiet", is_flag=True, help="Print nothing.")
def index_export_command(
    *, dataset: Path, folder: Path, tool: str, root: Path | None, quiet: bool
) -> None:
    """Write the indexes of another tool for the archives of the attached DATASET to FOLDER.

    FOLDER must be new or empty. The files have the names that the tool expects next to the
    archives, where nothing is written.

    \b
    Example:
      shardkit index-export index dali-index --as dali
    """
    count = export_index(dataset, folder, tool, root=root)
    if not quiet:
        say(f"{dataset}: index of {amount(count, 'sample')} for {tool} written to {folder}")
