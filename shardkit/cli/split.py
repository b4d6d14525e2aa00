"""``shardkit split``: divide a dataset into train, val and test."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardkit.changes.splitting import SplitOptions, save_rows, split
from shardkit.cli.options import FormatChoice, Options, argument, command_option
from shardkit.cli.printing import line, progress_bar
from shardkit.cli.run import Run, say
from shardkit.cli.runner import command
from shardkit.conversion.convert import convert
from shardkit.dataset.manifest import MANIFEST_NAME
from shardkit.dataset.source import DatasetSource
from shardkit.errors import UsageError
from shardkit.sources.opening import DivisionOptions
from shardkit.system.machine import usable_cpus
from shardkit.system.text import amount, shell


@dataclass(frozen=True, kw_only=True)
class CommandOptions(Options):
    """The lists or datasets to write."""

    out: Path | None = command_option(
        None,
        help="Folder for the lists or datasets.",
        metavar="DIR",
        shown="DATASET-split",
    )
    to: str | None = command_option(
        None, help="Write datasets in this format instead of lists.", type=FormatChoice()
    )
    force: bool = command_option(
        False, help="Replace existing lists in DIR; with --to, existing datasets."
    )


@command("split", argument("dataset"), options=(DivisionOptions, SplitOptions, CommandOptions))
def split_command(
    run: Run,
    rule: DivisionOptions,
    more: SplitOptions,
    options: CommandOptions,
    *,
    dataset: Path,
) -> None:
    """Divide the rows of DATASET into train, val and test.

    The command writes lists of rows, for dataset.select(rows) and `shardkit convert dataset
    --rows`, or with --to, datasets. Without --stratify, the split of a row depends only on the seed
    and on its source path or group.

    \b
    Examples:
      shardkit split photos --val 0.1 --stratify
      shardkit split photos --val 0.1 --test 0.1 --group folder --out split --to webdataset
    """
    out = options.out
    to = options.to
    out = out or dataset.with_name(f"{dataset.resolve().name}-split")
    if to is None and out.resolve().is_relative_to(dataset.resolve()):
        raise UsageError(
            f"{out} is the dataset, or inside it;", remedy="choose another folder with --out"
        )
    if (out / (MANIFEST_NAME if to is None else "train.txt")).exists():
        content = "a dataset" if to is None else "lists of rows"
        raise UsageError(f"{out} contains {content};", remedy="choose another folder with --out")
    division = vars(rule) | vars(more)
    rows = split(dataset, **division)
    if to is None:
        paths = save_rows(rows, dataset, out, force=options.force)
    else:
        paths = {name: out / name for name in rows}
        source = DatasetSource(dataset)
        force = options.force
        workers = usable_cpus()
        with progress_bar(run, "splitting") as tally:
            convert(source, out, to=to, **division, force=force, workers=workers, on_progress=tally)
    splits = {name: {"rows": len(rows[name]), "path": str(paths[name])} for name in rows}
    run.report(lambda: {"splits": splits}, lambda: _show(dataset, splits, are_lists=to is None))


def _show(dataset: Path, splits: dict[str, dict[str, Any]], *, are_lists: bool) -> None:
    say(f"divided {dataset}")
    for name, entry in splits.items():
        line(name, f"{amount(entry['rows'], 'row')}, {entry['path']}")
    if are_lists:
        words = ["convert", "dataset", str(dataset), "OUT", "--rows", splits["train"]["path"]]
        line("next", f"{shell('shardkit', *words)} --to FORMAT, or dataset.select(rows) in Python")
