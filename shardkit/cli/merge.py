"""``shardkit merge``: merge datasets into one."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from shardkit.changes.merge import merge
from shardkit.cli.options import Options, argument, command_option
from shardkit.cli.run import Run, say
from shardkit.cli.runner import command
from shardkit.system.text import amount


@dataclass(frozen=True, kw_only=True)
class MergeOptions(Options):
    """Options of `shardkit merge`."""

    force: bool = command_option(
        False, help="Replace the dataset in OUT once the new one is ready."
    )


@command(
    "merge",
    argument("datasets", nargs=-1, required=True),
    argument("out"),
    options=(MergeOptions,),
)
def merge_command(
    run: Run, options: MergeOptions, *, datasets: tuple[Path, ...], out: Path
) -> None:
    """Merge DATASETS into the new dataset OUT, without reading records.

    The shards become hard links, or copies on another disk. The datasets must have the same format,
    recipe, fields and classes, and different keys; the command reports each conflict. A dataset may
    lack the last classes of the others. Rows are in the order of DATASETS.

    \b
    Example:
      shardkit merge photos-2024 photos-2025 all-photos
    """
    manifests = merge(datasets, out, force=options.force).values()
    rows = sum(manifest.rows for manifest in manifests)
    shards = sum(len(manifest.shards) for manifest in manifests)
    run.report(
        lambda: {"rows": rows, "shards": shards},
        lambda: say(
            f"{out}: {amount(rows, 'row')} in {amount(shards, 'shard')}, merged from "
            f"{amount(len(datasets), 'dataset')} ({run.seconds:.1f} s)"
        ),
    )
