"""Export a dataset to ordinary files (`shardkit export`), or write nothing at all."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from shardkit.conversion.disk import as_failure
from shardkit.conversion.lock import locked
from shardkit.dataset.opened import OpenedDirectory
from shardkit.dataset.shardset import ShardSet
from shardkit.errors import UsageError, located
from shardkit.exporting.output import OutputFolder
from shardkit.exporting.records import Exporting
from shardkit.options import option, require_valid, takes
from shardkit.system.files import overlap, require_local, sync
from shardkit.system.late import load
from shardkit.system.pool import Progress, Report

LayoutName = Literal["csv", "imagefolder", "parquet", "webdataset", "yolo"]
_LAYOUTS: Mapping[LayoutName, str] = {
    "csv": "shardkit.exporting.folder:write_csv",
    "imagefolder": "shardkit.exporting.folder:write_imagefolder",
    "parquet": "shardkit.exporting.parquet:write_parquet",
    "webdataset": "shardkit.exporting.archive:write_archives",
    "yolo": "shardkit.exporting.yolo:write_yolo",
}
"""Functions that write the files of one dataset, imported at first use."""

Write = Callable[[Exporting, OutputFolder], None]


@dataclass(frozen=True, kw_only=True)
class Exported:
    """The result of an export."""

    records: int
    files: int
    bytes: int
    """Bytes of all files."""
    left_out: dict[str, int]
    """Files of the source that the dataset does not have, by reason: ``ignored``, ``skipped``."""
    unchanged: bool
    """Whether ``target`` had exactly these files already."""


@dataclass(frozen=True, kw_only=True)
class ExportOptions:
    """The options of `export`."""

    layout: LayoutName = option(
        "imagefolder",
        help="imagefolder: files of the source, by class. csv: images and metadata.csv. parquet: "
        "for Hugging Face datasets. webdataset: tar archives. yolo: images, labels and data.yaml.",
        choices=get_args(LayoutName),
    )
    raw_as_png: bool = option(
        False, help="Export raw pixels and planes as PNG files with the same pixels."
    )
    on_progress: Report | None = option(
        None, help="Called with the progress since the last call.", is_keyword_only=True
    )

    def __post_init__(self) -> None:
        require_valid(self)


@takes(ExportOptions)
def export(options: ExportOptions, directory: str | Path, target: str | Path) -> Exported:
    """Write the images of a dataset as the files of its source, or as tables or tar archives.

    Every image has the bytes that the dataset stores, and is verified with its checksum. The files
    appear in ``target`` all at once, when they are complete; repeat an interrupted call to start
    over. Repeating a finished call compares the files and changes nothing.

    Args:
        directory: The dataset, perhaps of splits.
        target: A folder that does not exist, is empty, or contains exactly these files.

    Raises:
        UsageError: If ``target`` is not empty, the layout cannot represent a field, a source path
            cannot be the name of a file below ``target``, or two of these names are the same.
        CorruptDataset: If the dataset is damaged.
        ConversionFailed: If writing fails.
    """
    directory = Path(directory)
    target = Path(target)
    write = _load_layout(options.layout)
    exportings = [
        Exporting(
            shards=ShardSet(dataset, verify=True),
            raw_as_png=options.raw_as_png,
            report=options.on_progress,
        )
        for dataset in OpenedDirectory(directory).splits.values()
    ]
    if options.on_progress:
        options.on_progress(Progress(total=sum(len(exporting.shards) for exporting in exportings)))
    with staged(directory, target) as output:
        for exporting in exportings:
            write(exporting, output)
    manifests = [exporting.shards.manifest for exporting in exportings]
    return Exported(
        records=sum(manifest.rows for manifest in manifests),
        files=output.files,
        bytes=output.bytes,
        left_out={
            "ignored": sum(sum(manifest.ignored.values()) for manifest in manifests),
            "skipped": sum(len(manifest.skipped) for manifest in manifests),
        },
        unchanged=output.is_compared,
    )


def _load_layout(name: LayoutName) -> Write:
    """Return the function that writes a layout."""
    try:
        write: Write = load(_LAYOUTS[name])
    except ImportError as error:
        package = (error.name or _LAYOUTS[name]).partition(".")[0]
        raise UsageError(
            f"the {name} layout needs {package}", remedy=f"pip install 'shardkit[{name}]'"
        ) from error
    return write


@contextlib.contextmanager
def staged(directory: Path, target: Path) -> Iterator[OutputFolder]:
    """Yield a new folder next to ``target``, and rename it to ``target`` in the end.

    A killed run leaves it behind; the next one to the same target removes it. If ``target`` is not
    empty, it must have the same files: an earlier run, perhaps killed at the end, has made them.
    """
    work = _work_folder(target)
    with located(target), locked(work, lambda: _check(directory, target)):
        try:
            for name in set(os.listdir(work)) - {"lock", "owner"}:
                shutil.rmtree(work / name)
            folder = work / "made"
            folder.mkdir()
            output = OutputFolder(folder, target if _names(target) else None)
            yield output
            if output.is_compared:
                output.require_same()
                return
            os.sync()  # one call for all files: syncing each would take longer than writing them
            _check(directory, target)
            folder.rename(target)  # replaces only an empty folder
            sync(target.absolute().parent)
        except OSError as error:
            raise as_failure(error, target) from error
        finally:
            shutil.rmtree(work, ignore_errors=True)


def _work_folder(target: Path) -> Path:
    absolute = target.absolute()
    return absolute.parent / f".shardkit-export-{absolute.name}"


def _check(directory: Path, target: Path) -> None:
    require_local(target)
    if not target.absolute().name or target.name == "..":
        raise UsageError(f"{target} cannot be an export folder;", remedy="choose a new folder")
    if overlap(target, directory):
        raise UsageError(
            f"{target} and the dataset {directory} overlap;", remedy="choose another folder"
        )
    if os.path.islink(target):
        raise UsageError(f"{target} is a symbolic link;", remedy="choose a new folder")
    _names(target)


def _names(target: Path) -> list[str]:
    try:
        return os.listdir(target)
    except FileNotFoundError:
        return []
    except NotADirectoryError:
        raise UsageError(f"{target} is a file, not a folder") from None
