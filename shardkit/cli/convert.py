"""``shardkit convert``: one command for each kind of source."""

from __future__ import annotations

import contextlib
import shlex
from collections.abc import Iterator
from concurrent.futures import Executor
from pathlib import Path
from typing import Any

import click

from shardkit.cli.console import emit
from shardkit.cli.convert_report import (
    made_as_json,
    plan_as_json,
    reporting_bad,
    show_made,
    show_plan,
    show_planned,
)
from shardkit.cli.options import on_error_option, shard_samples_option, shard_size_option
from shardkit.cli.show import line, progress_bar
from shardkit.cli.url_source import CACHE, copied, require_root
from shardkit.contracts import Source, SourceKind, SourceOption
from shardkit.conversion.convert import convert
from shardkit.conversion.recipe import (
    CHECKS,
    DEFAULT_QUALITY,
    ENCODINGS,
    FILTERS,
    RESIZE_MODES,
    RESIZERS,
)
from shardkit.errors import UsageError
from shardkit.registry import DEFAULT_SOURCE, format_names, get_source, source_names
from shardkit.reporting.page import MARK, page
from shardkit.reporting.report import report
from shardkit.stores.urls import as_url
from shardkit.system.cluster import open_cluster
from shardkit.system.files import require_own_output, write_result
from shardkit.system.machine import usable_cpus


class _Sources(click.Group):
    """One command for each source in the registry."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names of the sources."""
        return source_names()

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Return the command for a source, or None if there is no such source."""
        return _Command(get_source(cmd_name)) if cmd_name in source_names() else None

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """List the sources with their titles; one that cannot be imported, with the reason."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, _title(name)) for name in source_names()])

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Return name, command and arguments; for a folder in place of a name, suggest both."""
        if args and args[0] not in self.list_commands(ctx) and Path(args[0]).is_dir():
            rest = args if "--to" in args else [*args, *["DST"] * (len(args) < 2), "--to", "lmdb"]
            raise UsageError(
                f"{args[0]} is a folder; the source type comes first. Try: "
                f"shardkit convert {DEFAULT_SOURCE} {shlex.join(rest)}"
            )
        return super().resolve_command(ctx, args)


def _title(name: str) -> str:
    try:
        return get_source(name).title
    except UsageError as error:
        return str(error)


@click.group("convert", cls=_Sources)
def convert_group() -> None:
    """Create a dataset of shards. COMMAND is the source type."""


@click.argument("src", type=click.Path(path_type=Path))
@click.argument("dst", type=click.Path(path_type=Path))
@click.option(
    "--to", required=True, type=click.Choice(format_names()), help="Format of the shards."
)
@click.option("--resize", metavar="N|HxW", help="Scale images to N pixels, or to height x width.")
@click.option(
    "--resize-mode",
    type=click.Choice(RESIZE_MODES),
    help="Scale the shorter or longer side to N (or cover or fit into HxW), fill HxW and crop the "
    "rest, fit and pad, or stretch.  [default: shorter for N, crop for HxW]",
)
@click.option(
    "--filter",
    "filter_",
    type=click.Choice(list(FILTERS)),
    default="bicubic",
    show_default=True,
    help="Interpolation; all filters are antialiased.",
)
@click.option(
    "--resizer",
    type=click.Choice(RESIZERS),
    default="pillow",
    show_default=True,
    help="Library that scales images. torch (bicubic or bilinear) is faster for large folders, but "
    "each process needs 1 s and 200 MB to load it. A few values differ from Pillow's, by 1 or 2.",
)
@click.option(
    "--dct-scaling",
    is_flag=True,
    help="Decode JPEGs at reduced size if their sides are at least 4x the target's. 2.5x faster "
    "for 2000-pixel photographs, but not exact: PSNR compared with the default, over 200 "
    "photographs, was at least 38 dB, and 50 dB or more in the median.",
)
@click.option("--enlarge", is_flag=True, help="Allow images to become larger than they are.")
@click.option(
    "--encode",
    type=click.Choice(ENCODINGS),
    default="keep",
    show_default=True,
    help="Encoding of stored images. keep: leave bytes unchanged unless pixels must change. raw: "
    "unencoded pixels, all of one size.",
)
@click.option(
    "--quality",
    type=int,
    metavar="1-100",
    help="JPEG and WebP quality. If given, all of these images are re-encoded.  "
    f"[default: {DEFAULT_QUALITY} where an image must be encoded]",
)
@click.option(
    "--background",
    default="white",
    show_default=True,
    metavar="COLOR",
    help="Color under transparent pixels and around padded images.",
)
@click.option(
    "--orient",
    is_flag=True,
    help="Apply the EXIF orientation, even if nothing else changes.",
)
@click.option(
    "--check",
    type=click.Choice(CHECKS),
    default="decode",
    show_default=True,
    help="Depth of image validation.",
)
@click.option(
    "--tolerate-damage",
    is_flag=True,
    help="Store damaged JPEGs that Pillow can decode; readers return Pillow's pixels.",
)
@on_error_option
@click.option(
    "--val", type=float, metavar="SHARE", help="Divide off this share as a split val, such as 0.1."
)
@click.option("--test", type=float, metavar="SHARE", help="Divide off this share as a split test.")
@click.option("--stratify", is_flag=True, help="Divide each class by itself, in exact shares.")
@click.option(
    "--group",
    metavar="folder|COLUMN",
    help="Keep images of one folder, or with one value in a column, on one side.",
)
@click.option(
    "--exclude",
    multiple=True,
    metavar="[SPLIT=]FILE",
    help="Leave out the images whose keys or paths FILE lists, one per line, such as the lists of "
    "`shardkit report --exclude`; for a dataset, also row numbers. Repeatable.",
)
@shard_size_option
@shard_samples_option
@click.option(
    "--shuffle/--no-shuffle",
    default=None,
    help="Store images in random order, so that sequential reading is well mixed, or in the "
    "source's order.  [default: shuffle, unless the source is a dataset]",
)
@click.option(
    "--seed",
    type=int,
    default=0,
    show_default=True,
    metavar="N",
    help="Seed of the random order, and of --val and --test.",
)
@click.option(
    "--limit", type=int, metavar="N", help="Convert only N images of each split, for a trial."
)
@click.option(
    "--workers",
    type=click.IntRange(1),
    metavar="N",
    help="Number of processes; the result does not depend on it.  [default: number of CPUs]",
)
@click.option("--force", is_flag=True, help="Replace the dataset in DST once the new one is ready.")
@click.option(
    "--staging",
    type=click.Path(path_type=Path),
    metavar="DIR",
    help="If DST is a URL (s3://, gs://, az://): build the dataset in DIR, then upload it. "
    "Optional with --plan-only.",
)
@click.option(
    "--cluster",
    metavar="ADDRESS",
    help="Build the shards on a cluster, dask://HOST:PORT or ray://HOST:PORT, whose machines see "
    "SRC and DST at the same paths.",
)
@click.option("--dry-run", is_flag=True, help="Show the plan and write nothing.")
@click.option(
    "--plan-only",
    is_flag=True,
    help="Write only the plan into DST, a folder or URL: jobs build it with `work DST`, then "
    "`commit DST` publishes the dataset.",
)
@click.option(
    "--report",
    "report_file",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Also examine the images, and write the page of `shardkit report` to FILE.",
)
@click.option("--quiet", is_flag=True, help="Print only --json output.")
@click.option("--json", "as_json", is_flag=True, help="Print the summary as JSON.")
@click.pass_obj
def _convert(  # noqa: PLR0913 - Click passes each option by name
    source: Source,
    *,
    src: Path,
    dst: Path,
    to: str,
    resize: str | None,
    resize_mode: str | None,
    filter_: str,
    resizer: str,
    dct_scaling: bool,
    enlarge: bool,
    encode: str,
    quality: int | None,
    background: str,
    orient: bool,
    check: str,
    tolerate_damage: bool,
    on_error: str,
    val: float | None,
    test: float | None,
    stratify: bool,
    group: str | None,
    exclude: tuple[str, ...],
    shard_size: str,
    shard_samples: int | None,
    shuffle: bool | None,
    seed: int,
    limit: int | None,
    workers: int | None,
    force: bool,
    staging: Path | None,
    cluster: str | None,
    dry_run: bool,
    plan_only: bool,
    report_file: Path | None,
    quiet: bool,
    as_json: bool,
) -> None:
    lost: set[str] = set()
    _require_report(report_file, dst, dry_run=dry_run or plan_only)
    with (
        reporting_bad(as_json=as_json),
        progress_bar("listing" if plan_only else "converting", quiet=quiet) as tally,
        _executor(cluster, lost) as executor,
    ):
        made = convert(
            source,
            dst,
            to=to,
            resize=resize,
            resize_mode=resize_mode,
            filter=filter_,
            resizer=resizer,
            dct_scaling=dct_scaling,
            enlarge=enlarge,
            encode=encode,
            quality=quality,
            background=background,
            orient=orient,
            check=check,
            tolerate_damage=tolerate_damage,
            on_error=on_error,
            val=val or 0.0,
            test=test or 0.0,
            stratify=stratify,
            group=group,
            exclude=exclude,
            shard_size=shard_size,
            shard_samples=shard_samples,
            shuffle=shuffle,
            seed=seed,
            limit=limit,
            workers=workers or usable_cpus(),
            executor=executor,
            facts=report_file is not None,
            force=force,
            dry_run=dry_run,
            staging=staging,
            plan_only=plan_only,
            on_progress=tally,
        )
    shown = as_url(dst) or dst
    if dry_run:
        if as_json:
            emit(plan_as_json(made.plan))
        else:
            show_plan(src, shown, made.plan)
    elif plan_only:
        if as_json:
            emit({"tasks": made.jobs})
        elif not quiet:
            show_planned(src, shown, made)
    elif as_json:
        emit(made_as_json(shown, made, tally))
    elif not quiet:
        show_made(src, shown, made, tally, lost)
    if report_file is not None:
        _write_report(report_file, dst, workers, quiet=quiet or as_json)


def _write_report(path: Path, dst: Path, workers: int | None, *, quiet: bool) -> None:
    with progress_bar("measuring", quiet=quiet) as tally:
        found = report(dst, workers=workers or usable_cpus(), on_progress=tally)
    write_result(path, page(found).encode())
    if not quiet:
        line("report", f"written to {path}")


def _require_report(path: Path | None, dst: Path, *, dry_run: bool) -> None:
    """Refuse ``--report`` where no report can be made or written."""
    if path is None:
        return
    if dry_run:
        raise UsageError("--report needs a finished dataset; leave out --dry-run and --plan-only")
    if as_url(dst):
        raise UsageError(
            f"--report reads a local dataset; run `shardkit report` on a copy of {dst}"
        )
    require_own_output(path, "--report", MARK)


@contextlib.contextmanager
def _executor(cluster: str | None, lost: set[str]) -> Iterator[Executor | None]:
    """Connect to a cluster, if one is given; add the workers that die in the block to ``lost``."""
    if cluster is None:
        yield None
        return
    with open_cluster(cluster) as found:
        before = found.members()
        yield found.executor
        lost |= before - found.members()


_COMMON = click.command()(_convert)
"""The options of every conversion, as Click parameters."""


class _Command(click.Command):
    """The command for a source: the options of every conversion, and the source's own."""

    def __init__(self, kind: SourceKind) -> None:
        options = (*kind.options, CACHE) if kind.of_files else kind.options
        own = [source_option(option) for option in options]
        params = _COMMON.params
        place = next(n for n, each in enumerate(params) if each.name == "val")
        super().__init__(
            kind.name,
            params=[*params[:place], *own, *params[place:]],
            callback=_COMMON.callback,
            help=kind.help,
        )
        self._kind = kind
        self._own = [str(option.name) for option in own]

    def invoke(self, ctx: click.Context) -> Any:
        """Open the source with its own options, then convert it."""
        own = {name: ctx.params.pop(name) for name in self._own}
        if self._kind.of_files:
            src, quiet = ctx.params["src"], ctx.params["quiet"]
            if "root" in own:
                require_root(src, own["root"])
            ctx.params["src"] = copied(src, own.pop("cache"), quiet=quiet)
        ctx.obj = self._kind.open(ctx.params["src"], **own)
        return super().invoke(ctx)


def source_option(option: SourceOption) -> click.Option:
    """Return a source's option as one of a command."""
    return click.Option(
        [option.flags],
        default=option.default,
        show_default=option.default is not None,
        metavar=option.metavar,
        type=option.type,
        help=option.help,
    )
