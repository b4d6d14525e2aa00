"""``shardkit attach``: read archives of other programs in place."""

from __future__ import annotations

import shlex
from functools import partial
from pathlib import Path
from typing import Any

import click

from shardkit.cli.console import emit, say
from shardkit.cli.convert import source_option
from shardkit.cli.convert_report import reporting_bad
from shardkit.cli.options import quiet_option, workers_option
from shardkit.cli.show import amount, line, progress_bar, show_notes
from shardkit.conversion.attach import CHECKS, Attached, AttachOptions, attach_source
from shardkit.errors import UsageError
from shardkit.registry import ATTACHABLE_SOURCES, ATTACHED_SOURCE, get_source
from shardkit.system.formatting import size
from shardkit.system.machine import usable_cpus
from shardkit.system.text import printable
from shardkit.verification.describe import summarize


class _Kinds(click.Group):
    """One command for each kind of file; without the name of a kind, that for tar archives."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Add the kind before other arguments."""
        if args and args[0] not in (*ATTACHABLE_SOURCES, "-h", "--help"):
            args = [ATTACHED_SOURCE, *args]
        return super().parse_args(ctx, args)

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the kinds."""
        return [*ATTACHABLE_SOURCES]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Return the command for a kind, with the options of its source."""
        if cmd_name not in ATTACHABLE_SOURCES:
            return None
        assert _attach.callback is not None
        is_tar = cmd_name == ATTACHED_SOURCE
        params = [each for each in _attach.params if is_tar or each.name != "trust"]
        params[2:2] = [source_option(each) for each in get_source(cmd_name).options]
        return click.Command(
            cmd_name,
            params=params,
            callback=partial(_attach.callback, kind=cmd_name),
            help=_HELP[cmd_name],
            short_help=_SHORT[cmd_name],
            context_settings={"allow_extra_args": True},
        )


_SHORT = {
    "webdataset": "Tar archives of samples.",
    "hdf5": "HDF5 files with a dataset of images.",
    "lmdb": "An LMDB environment of images.",
}

_HELP = {
    "webdataset": """Index the samples in ARCHIVES where they are, as a dataset in INDEX_DIR.

    ARCHIVES is a tar file, a folder of them, or quoted names with {000..999}, * or ?. Nothing is
    written next to them. Training, `verify`, `bench` and `convert` then read the archives through
    INDEX_DIR. Rerun the command to resume it, or to add archives.

    \b
    Examples:
      shardkit attach 'laion/{00000..00099}.tar' laion-index
      shardkit attach laion laion-index --label json:/class --keep caption=txt --workers 8
    """,
    "hdf5": """Index the images in HDF5 files where they are, as a dataset in INDEX_DIR.

    ARCHIVES is a file, a folder of them, or quoted names with {000..999}, * or ?. Images are
    encoded, or arrays of height x width x 3 in uint8, in a dataset without compression.

    \b
    Example:
      shardkit attach hdf5 camelyon.h5 camelyon-index --images x --labels y
    """,
    "lmdb": """Index the images in an LMDB environment where they are, as a dataset in INDEX_DIR.

    ARCHIVES is the folder of data.mdb, or the file.

    \b
    Example:
      shardkit attach lmdb train_lmdb train-index --layout ocr
    """,
}


@click.group("attach", cls=_Kinds)
def attach_command() -> None:
    """Read files of other programs in place: index them as a dataset.

    COMMAND is the kind of files. Without it, they are tar archives: `shardkit attach ARCHIVES
    INDEX_DIR` is `shardkit attach webdataset ARCHIVES INDEX_DIR`.
    """


@click.command()
@click.argument("archives")
@click.argument("index_dir", type=click.Path(path_type=Path))
@click.option(
    "--check",
    type=click.Choice(CHECKS),
    default="header",
    show_default=True,
    help="Depth of image validation.",
)
@click.option(
    "--on-error",
    type=click.Choice(["fail", "skip"]),
    default="fail",
    show_default=True,
    help="fail: list all findings and write nothing. skip: leave bad samples out and record each.",
)
@click.option(
    "--quick",
    is_flag=True,
    help="Identify archives by size and modification time instead of SHA-256.",
)
@click.option(
    "--trust",
    metavar="TOOL[=DIR]",
    help="Compare the index of energon, dali or webshart, next to the archives or in DIR, with "
    "them; differences are findings.",
)
@click.option("--force", is_flag=True, help="Replace the dataset in INDEX_DIR; index all again.")
@workers_option
@quiet_option
@click.option("--json", "as_json", is_flag=True, help="Print the summary as JSON.")
def _attach(  # noqa: PLR0913 - Click passes each option by name
    *,
    kind: str,
    archives: str,
    index_dir: Path,
    check: str,
    on_error: str,
    quick: bool,
    force: bool,
    workers: int | None,
    quiet: bool,
    as_json: bool,
    trust: str | None = None,
    **own: Any,
) -> None:
    """Attach files of one kind."""
    if extra := click.get_current_context().args:
        raise UsageError(
            f"{len(extra) + 2} paths were given instead of ARCHIVES and INDEX_DIR: quote a "
            f"pattern, as in: shardkit attach {kind} '*' {shlex.quote(extra[-1])}"
        )
    source = get_source(kind).open(archives, **own)
    options = AttachOptions(check=check, on_error=on_error, quick=quick, trust=trust, force=force)
    with reporting_bad(as_json=as_json), progress_bar("attaching", quiet=quiet) as tally:
        made = attach_source(
            source,
            index_dir,
            options,
            workers=workers or usable_cpus(),
            on_progress=tally,
        )
    if as_json:
        emit(
            {
                "path": str(index_dir),
                "seconds": round(tally.seconds, 3),
                "kept": made.kept,
                "unchanged": made.unchanged,
                "remembered": made.remembered,
                **summarize(made.manifest),
            }
        )
    elif not quiet:
        _show(archives, index_dir, made, tally.seconds)


def _show(archives: str, index_dir: Path, made: Attached, seconds: float) -> None:
    manifest = made.manifest
    what = "archive" if manifest.format == ATTACHED_SOURCE else "file"
    said = "already holds the index of" if made.unchanged else "now reads"
    say(f"{index_dir} {said} {printable(archives)}")
    line(
        "dataset",
        f"{amount(manifest.rows, 'image')} in {amount(len(manifest.shards), what)}, "
        f"{size(manifest.bytes)}",
    )
    show_notes(manifest.notes, manifest.recipe)
    if manifest.skipped:
        line("skipped", f"{amount(len(manifest.skipped), 'finding')}, listed in skipped.jsonl")
    if manifest.ignored:
        line("ignored", ", ".join(f"{why}: {n:,}" for why, n in manifest.ignored.items()))
    if made.kept and not made.unchanged:
        line("kept", f"{amount(made.kept, what)} indexed by an earlier run")
    if not made.remembered:
        line("note", "your state folder cannot be written: open the dataset with root=")
    line("time", f"{seconds:.1f} s")
    line("next", f"shardkit verify {shlex.quote(str(index_dir))}")
