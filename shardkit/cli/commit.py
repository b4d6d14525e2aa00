"""``shardkit commit``: publish the dataset that jobs built."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from shardkit.cli.convert_report import converted_fields, show_converted
from shardkit.cli.options import argument, click_options
from shardkit.cli.printing import Tally
from shardkit.cli.run import Run
from shardkit.cli.runner import command
from shardkit.cluster.work import CommitOptions, commit
from shardkit.system.urls import as_url


@command("commit", argument("dst"), *click_options(CommitOptions))
def commit_command(run: Run, *, dst: Path, **words: Any) -> None:
    """Publish the dataset in DST once `work` has built all shards. Commit reads no shards."""
    converted = commit(dst, **words)
    shown = as_url(dst) or dst
    tally = Tally(run)
    run.report(
        lambda: converted_fields(shown, converted, tally),
        lambda: show_converted(None, shown, converted, tally),
    )
