"""``shardkit append``: add the images of a source to a dataset."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardkit.changes.append import Appended, AppendOptions, append
from shardkit.cli.options import Options, argument, click_options, command_option
from shardkit.cli.printing import line, progress_bar, record_noun, some
from shardkit.cli.run import Run, say
from shardkit.cli.runner import command
from shardkit.cli.url_source import Copies, copied
from shardkit.conversion.build_all import Processes
from shardkit.system.text import amount, plural


@dataclass(frozen=True, kw_only=True)
class CommandOptions(Options):
    """Options of the command alone."""

    source: Path = command_option(
        help="Source of the same kind as the source of DATASET.", flags=("--from",), metavar="SRC"
    )


@command(
    "append",
    argument("dataset"),
    *click_options(AppendOptions, Processes),
    options=(CommandOptions, Copies),
)
def append_command(
    run: Run, options: CommandOptions, copies: Copies, *, dataset: Path, **words: Any
) -> None:
    """Add the images of SRC to DATASET as new shards, with the same options.

    Existing rows keep their numbers and their shards. Labels of new classes follow the existing
    ones. If DATASET was created with --val or --test, the same rule divides the new images. Readers
    see the old dataset until the new one replaces it in one step. Rerun the same command to resume
    an interrupted run.

    \b
    Examples:
      shardkit append dataset --from more-photos
      shardkit append dataset --from photos --skip-existing
    """
    source = copied(run, options.source, copies, dataset)
    with progress_bar(run, "appending") as tally:
        appended = append(dataset, source, **words, on_progress=tally)
    run.report(
        lambda: {
            "images": appended.images,
            "rows": {name: manifest.rows for name, manifest in appended.manifests.items()},
            "left_out": appended.left_out,
        },
        lambda: _show(dataset, appended, run.seconds),
    )


def _show(dataset: Path, appended: Appended, seconds: float) -> None:
    rows = sum(manifest.rows for manifest in appended.manifests.values())
    shards = sum(len(manifest.shards) for manifest in appended.manifests.values())
    left_out = appended.left_out
    noun = record_noun(next(iter(appended.manifests.values())).fields_by_name)
    if not appended.images:
        say(
            f"{dataset}: nothing to append: all {plural(noun)} are already in the dataset "
            f"({amount(rows, 'row')})"
        )
    else:
        say(
            f"{dataset}: {amount(appended.images, noun)} appended, now {amount(rows, 'row')} in "
            f"{amount(shards, 'shard')} ({seconds:.1f} s)"
        )
    if left_out:
        line("left out", f"{amount(len(left_out), noun)}: {some(left_out, counted=False)}")
