"""``shardkit commit``: publish the dataset that jobs built."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from shardkit.cli.convert_report import converted_fields, show_converted
from shardkit.cli.options import Options, argument, command_option
from shardkit.cli.printing import Tally
from shardkit.cli.run import Run
from shardkit.cli.runner import command
from shardkit.cluster.work import commit
from shardkit.system.urls import as_url


@dataclass(frozen=True, kw_only=True)
class CommitOptions(Options):
    """Options of `shardkit commit`."""

    force: bool = command_option(False, help="Replace the dataset in DST, if it is local.")
    staging: Path | None = command_option(
        None,
        help="If DST is a URL: folder for index and manifest.",
        metavar="DIR",
        shown="temporary folder",
    )


@command("commit", argument("dst"), options=(CommitOptions,))
def commit_command(run: Run, options: CommitOptions, *, dst: Path) -> None:
    """Publish the dataset in DST once `work` has built all shards. Commit reads no shards."""
    converted = commit(dst, force=options.force, staging=options.staging)
    shown = as_url(dst) or dst
    tally = Tally(run)
    run.report(
        lambda: converted_fields(shown, converted, tally),
        lambda: show_converted(None, shown, converted, tally),
    )
