"""``shardkit export``: write a dataset as ordinary files."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

from shardkit.cli.options import argument, click_options
from shardkit.cli.printing import line, progress_bar
from shardkit.cli.run import Run, say
from shardkit.cli.runner import command
from shardkit.exporting.export import Exported, ExportOptions, export
from shardkit.system.text import amount, size


@command("export", argument("dataset"), argument("folder"), *click_options(ExportOptions))
def export_command(run: Run, *, dataset: Path, folder: Path, **words: Any) -> None:
    """Write the images of DATASET to a new FOLDER, bit for bit.

    The imagefolder layout restores the source of `convert imagefolder`, including file names,
    except for files that the dataset does not store. The other layouts also contain masks, captions
    and all other fields. FOLDER appears only once it is complete. Rerun an interrupted export to
    start over.

    \b
    Examples:
      shardkit export dataset photos-again
      shardkit export dataset hub --layout parquet
    """
    with progress_bar(run, "exporting") as tally:
        exported = export(dataset, folder, **words, on_progress=tally)
    run.report(lambda: asdict(exported), lambda: _show(dataset, folder, exported, run.seconds))


def _show(dataset: Path, folder: Path, exported: Exported, seconds: float) -> None:
    exported_to = "are already in" if exported.unchanged else "exported to"
    say(
        f"{dataset}: {amount(exported.records, 'record')} {exported_to} {folder}: "
        f"{amount(exported.files, 'file')}, {size(exported.bytes)} ({seconds:.1f} s)"
    )
    for reason, count in exported.left_out.items():
        if count:
            text = f"{amount(count, 'file')} of the source, which the dataset does not store"
            line(reason, text)
