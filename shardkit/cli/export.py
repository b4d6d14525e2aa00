"""``shardkit export``: write a dataset as ordinary files."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path

from shardkit.cli.options import Options, argument, command_option
from shardkit.cli.printing import line, progress_bar
from shardkit.cli.run import Run, say
from shardkit.cli.runner import command
from shardkit.exporting.export import LAYOUTS, Exported, LayoutName, export
from shardkit.system.text import amount, size


@dataclass(frozen=True, kw_only=True)
class ExportOptions(Options):
    """Options of `shardkit export`."""

    layout: LayoutName = command_option(
        "imagefolder",
        help="imagefolder: files of the source, by class. csv: images and metadata.csv. parquet: "
        "for Hugging Face datasets. webdataset: tar archives. yolo: images, labels and data.yaml.",
        choices=tuple(sorted(LAYOUTS)),
    )
    raw_as_png: bool = command_option(
        False, help="Export raw pixels and planes as PNG files with the same pixels."
    )


@command("export", argument("dataset"), argument("folder"), options=(ExportOptions,))
def export_command(run: Run, options: ExportOptions, *, dataset: Path, folder: Path) -> None:
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
        exported = export(
            dataset,
            folder,
            layout=options.layout,
            raw_as_png=options.raw_as_png,
            on_progress=tally,
        )
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
