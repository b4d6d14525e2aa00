"""``shardkit export``: write a dataset as ordinary files."""

from __future__ import annotations

import time
from dataclasses import asdict
from pathlib import Path

import click

from shardkit.cli.console import emit, say
from shardkit.cli.options import quiet_option
from shardkit.cli.show import amount, line, progress_bar
from shardkit.exporting.export import LAYOUTS, Exported, export
from shardkit.system.formatting import size


@click.command("export")
@click.argument("dataset", type=click.Path(path_type=Path))
@click.argument("folder", type=click.Path(path_type=Path))
@click.option(
    "--layout",
    type=click.Choice(sorted(LAYOUTS)),
    default="imagefolder",
    show_default=True,
    help="imagefolder: files of the source, by class. csv: images and metadata.csv. parquet: for "
    "Hugging Face datasets. webdataset: tar archives.",
)
@click.option(
    "--raw-as-png", is_flag=True, help="Export raw pixels, which are not files, as PNG files."
)
@quiet_option
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
def export_command(  # noqa: PLR0913 - Click passes each option by name
    *, dataset: Path, folder: Path, layout: str, raw_as_png: bool, quiet: bool, as_json: bool
) -> None:
    """Write the images of DATASET to a new FOLDER, bit for bit.

    The layout imagefolder restores the source of `convert imagefolder`, file names included, but
    for files that the dataset does not store. The others also hold masks, captions and all other
    fields. FOLDER appears once it is complete. Rerun an interrupted export to start over.

    \b
    Examples:
      shardkit export dataset photos-again
      shardkit export dataset hub --layout parquet
    """
    started = time.monotonic()
    with progress_bar("exporting", quiet=quiet) as on_progress:
        done = export(
            dataset, folder, layout=layout, raw_as_png=raw_as_png, on_progress=on_progress
        )
    seconds = time.monotonic() - started
    if as_json:
        emit({"seconds": round(seconds, 3), **asdict(done)})
    elif not quiet:
        _show(dataset, folder, done, seconds)


def _show(dataset: Path, folder: Path, done: Exported, seconds: float) -> None:
    say(
        f"{dataset}: {amount(done.records, 'record')} exported to {folder}: "
        f"{amount(done.files, 'file')}, {size(done.bytes)} ({seconds:.1f} s)"
    )
    for reason, count in done.left_out.items():
        if count:
            text = f"{amount(count, 'file')} of the source, which the dataset does not store"
            line(reason, text)
