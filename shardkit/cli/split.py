"""``shardkit split``: divide a dataset into train, val and test."""

from __future__ import annotations

import shlex
from pathlib import Path

import click

from shardkit.cli.console import emit, say
from shardkit.cli.show import amount, line, progress_bar
from shardkit.conversion.convert import convert
from shardkit.dataset.manifest import MANIFEST_NAME
from shardkit.dataset.source import DatasetSource
from shardkit.dataset.splitting import save_rows, split
from shardkit.errors import UsageError
from shardkit.registry import format_names
from shardkit.system.machine import usable_cpus


@click.command("split")
@click.argument("dataset", type=click.Path(path_type=Path))
@click.option("--val", type=float, default=0.0, metavar="SHARE", help="Share of val, such as 0.1.")
@click.option("--test", type=float, default=0.0, metavar="SHARE", help="Share of test.")
@click.option("--stratify", is_flag=True, help="Divide each class by itself, in exact shares.")
@click.option(
    "--group",
    metavar="folder|COLUMN",
    help="Keep rows of one source folder, or with one value in a column, on one side.",
)
@click.option(
    "--seed", type=int, default=0, show_default=True, metavar="N", help="Selects another division."
)
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    metavar="DIR",
    help="Folder for the lists or datasets.  [default: DATASET-split]",
)
@click.option(
    "--to", type=click.Choice(format_names()), help="Write datasets of this format, not lists."
)
@click.option("--force", is_flag=True, help="Replace other lists in DIR; with --to, datasets.")
@click.option("--json", "as_json", is_flag=True, help="Print the summary as JSON.")
def split_command(  # noqa: PLR0913 - Click passes each option by name
    *,
    dataset: Path,
    val: float,
    test: float,
    stratify: bool,
    group: str | None,
    seed: int,
    out: Path | None,
    to: str | None,
    force: bool,
    as_json: bool,
) -> None:
    """Divide the rows of DATASET into train, val and test.

    Writes lists of rows, for dataset.select(rows) and `shardkit convert dataset --rows`, or
    datasets with --to. Without --stratify, each row's side depends only on its source path, or
    its group, and the seed.

    \b
    Examples:
      shardkit split photos --val 0.1 --stratify
      shardkit split photos --val 0.1 --test 0.1 --group folder --out split --to webdataset
    """
    out = out or dataset.with_name(f"{dataset.resolve().name}-split")
    if (out / (MANIFEST_NAME if to is None else "train.txt")).exists():
        made = "datasets" if to is None else "lists"
        raise UsageError(f"{out} holds the {made} of another split; choose a folder with --out")
    rows = split(dataset, val=val, test=test, stratify=stratify, group=group, seed=seed)
    if to is None:
        if out.resolve().is_relative_to(dataset.resolve()):
            raise UsageError(f"{out} is inside of the dataset; choose another folder with --out")
        files = save_rows(rows, dataset, out, force=force)
    else:
        files = {side: out / side for side in rows}
        with progress_bar("splitting", quiet=as_json) as tally:
            convert(
                DatasetSource(dataset),
                out,
                to=to,
                val=val,
                test=test,
                stratify=stratify,
                group=group,
                seed=seed,
                force=force,
                workers=usable_cpus(),
                on_progress=tally,
            )
    if as_json:
        emit({side: {"rows": len(each), "path": str(files[side])} for side, each in rows.items()})
        return
    say(f"divided {dataset}")
    for side, each in rows.items():
        line(side, f"{amount(len(each), 'row')}, {files[side]}")
    if to is None:
        words = ["convert", "dataset", str(dataset), "OUT", "--rows", str(files["train"])]
        line("next", f"shardkit {shlex.join(words)} --to FORMAT, or dataset.select(rows) in Python")
