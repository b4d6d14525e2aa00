"""``shardkit index-export``: write the tar indexes of other tools."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from shardkit.cli.console import say
from shardkit.cli.options import Options, argument, command_option
from shardkit.cli.run import Run
from shardkit.cli.runner import command
from shardkit.exporting.tar_index import TOOLS, export_index
from shardkit.system.formatting import amount


@dataclass(frozen=True, kw_only=True)
class IndexExportOptions(Options):
    """Options of `shardkit index-export`."""

    tool: str = command_option(
        help="Tool that reads the indexes.", flags=("--as",), choices=tuple(sorted(TOOLS))
    )
    root: Path | None = command_option(
        None,
        help="Folder of the archives.",
        metavar="DIR",
        shown="where `attach` found them",
    )


@command("index-export", argument("dataset"), argument("folder"), options=(IndexExportOptions,))
def index_export_command(
    run: Run, options: IndexExportOptions, *, dataset: Path, folder: Path
) -> None:
    """Write the indexes of another tool for the archives of the attached DATASET to FOLDER.

    FOLDER must be new or empty. The files have the names that the tool expects next to the
    archives, where nothing is written.

    \b
    Example:
      shardkit index-export index dali-index --as dali
    """
    tool = options.tool
    count = export_index(dataset, folder, tool, root=options.root)
    run.report(
        lambda: {"tool": tool, "samples": count, "path": str(folder)},
        lambda: say(
            f"{dataset}: index of {amount(count, 'sample')} for {tool} written to {folder}"
        ),
    )
