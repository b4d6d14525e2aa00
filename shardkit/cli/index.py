"""``shardkit index``: rebuild the index from the shards."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from shardkit.cli.options import argument
from shardkit.cli.printing import progress_bar
from shardkit.cli.run import Run, say
from shardkit.cli.runner import command
from shardkit.dataset.opened import OpenedDirectory
from shardkit.system.text import amount
from shardkit.verification.reindex import reindex


@command("index", argument("dataset"))
def index_command(run: Run, *, dataset: Path) -> None:
    """Rebuild the index of DATASET from its shards.

    The command refuses damaged shards, because an index built from them would hide the damage.

    \b
    Example:
      shardkit index dataset
    """
    rows = dict[str, int]()
    for name, split in OpenedDirectory(dataset).splits.items():
        with progress_bar(run, "indexing") as tally:
            rows[name] = reindex(split.path, on_progress=tally)
        text = f"{split.path}: index of {amount(rows[name], 'row')} rebuilt"
        run.report(lambda: {"rows": rows}, partial(say, text))
