"""``shardkit convert``: one command for each kind of source."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import click

from shardkit.cli.convert_report import (
    converted_fields,
    plan_fields,
    show_converted,
    show_plan,
    show_planned,
)
from shardkit.cli.options import argument, click_options
from shardkit.cli.printing import line, progress_bar, some
from shardkit.cli.run import Run, flags_of, hinted, say
from shardkit.cli.runner import Command
from shardkit.cli.url_source import Copies, copied, require_root
from shardkit.contracts import Source, SourceKind
from shardkit.conversion.build_all import Builder
from shardkit.conversion.convert import Placement, convert, plan_conversion
from shardkit.conversion.plan import ConvertOptions
from shardkit.errors import UsageError, setting
from shardkit.options import option
from shardkit.recipe import RecipeOptions
from shardkit.registry import (
    DEFAULT_SOURCE,
    get_source,
    is_source,
    open_source,
    source_hint,
    source_names,
)
from shardkit.sources.imagefolder import ImageFolder
from shardkit.sources.opening import DivisionOptions, Exclusion
from shardkit.system.late import load
from shardkit.system.urls import as_url
from shardkit.system.user_files import require_own_output, write_result

if TYPE_CHECKING:
    from concurrent.futures import Executor

_READ_AS = "shardkit.read_as"
"""Entry of `click.Context.meta`: how a source, or each split, was recognized without a name of its
kind, and what is left out."""

_RECOGNIZE = "shardkit.sources.recognize"
_TOGETHER = "shardkit.sources.together:together"
_OF_PATH = " No file or folder has this name either: check the name."
_OF_URL = " Before a URL, state the type of source: shardkit convert webdataset URL DST."


class _Sources(click.Group):
    """One command for each source in the registry."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names of the sources."""
        return source_names()

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Return the command for a source, or None if there is no such source."""
        return _Command(get_source(cmd_name)) if is_source(cmd_name) else None

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """List the sources with their titles; one that cannot be imported, with the reason."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, _title(name)) for name in source_names()])

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Return name, command and arguments; for a path in place of a name, recognize its kind."""
        if args and not is_source(args[0]) and os.path.exists(args[0]):
            source, *arguments = args
            folders = click.Context(_Command(get_source(DEFAULT_SOURCE)))
            ctx.ensure_object(Run).spell = flags_of(folders)
            kinds = load(f"{_RECOGNIZE}:the_kinds")(source, arguments)
            unread = load(f"{_RECOGNIZE}:left_out")(source, kinds.values())
            ctx.meta[_READ_AS] = kinds, unread
            first, *others = kinds.values()
            args = [*first.arguments(source), *arguments, *first.by.options(Path(source))]
            if others:
                args = [first.kind, source, *arguments]
        try:
            return super().resolve_command(ctx, args)
        except click.UsageError as error:
            hint = source_hint(args[0]) or (_OF_URL if as_url(args[0]) else _OF_PATH)
            raise hinted(error, ctx, hint) from error


def _title(name: str) -> str:
    try:
        return get_source(name).title
    except UsageError as error:
        return str(error)


@click.group("convert", cls=_Sources)
def convert_command() -> None:
    """Create a sharded dataset. COMMAND is the source type.

    Without COMMAND, shardkit detects the type and shows it: shardkit convert photos dataset --to
    lmdb.
    """


@dataclass(frozen=True, kw_only=True)
class CommandOptions:
    """The options of the command alone."""

    HEADING: ClassVar[str] = "Running"

    cluster: str | None = option(
        None,
        help="Build the shards on a cluster, dask://HOST:PORT or ray://HOST:PORT, whose machines "
        "see SRC and DST at the same paths.",
        metavar="ADDRESS",
    )
    dry_run: bool = option(False, help="Show the plan and write nothing.")
    plan_only: bool = option(
        False,
        help="Write only the plan to DST, a folder or URL. Jobs then build the shards with `work "
        "DST`, and `commit DST` publishes the dataset.",
    )
    report: Path | None = option(
        None,
        help="Also examine the images, and write the page of `shardkit report` to FILE.",
        metavar="FILE",
        heading="Output",
    )

    def __post_init__(self) -> None:
        if self.dry_run and self.plan_only:
            raise UsageError(
                f"{setting('dry_run')} and --plan-only cannot be combined", remedy="choose one"
            )
        if self.report is not None and (self.dry_run or self.plan_only):
            raise UsageError(
                f"{setting('report')} requires a finished dataset;",
                remedy="leave out --dry-run and --plan-only",
            )


def _convert(
    run: Run, options: CommandOptions, source: Source, src: Path | str, dst: Path, **words: Any
) -> None:
    """Convert a source, or plan it; ``words`` are the options of `convert`."""
    if options.report is not None:
        _require_report(options.report, dst)
    shown = as_url(dst) or dst
    lost = set[str]()
    with (
        progress_bar(run, "listing" if options.plan_only else "converting") as tally,
        _executor(options.cluster, lost) as executor,
    ):
        words |= {"executor": executor, "on_progress": tally}
        if options.dry_run:
            plan = plan_conversion(source, dst, **words)
            run.report(lambda: plan_fields(plan), lambda: show_plan(src, shown, plan))
        elif options.plan_only:
            jobs = load("shardkit.cluster.work:plan_jobs")(source, dst, **words).jobs
            run.report(lambda: {"tasks": jobs}, lambda: show_planned(src, shown, jobs))
        else:
            converted = convert(source, dst, **words, facts=options.report is not None)
    if options.dry_run or options.plan_only:
        return
    run.report(
        lambda: converted_fields(shown, converted, tally),
        lambda: show_converted(src, shown, converted, tally, lost),
    )
    if options.report is not None:
        _write_report(run, options.report, dst, words["workers"])


_REPORTING = "shardkit.reporting"
"""The module that creates reports; only `--report` loads it."""


def _write_report(run: Run, path: Path, dst: Path, workers: int) -> None:
    with progress_bar(run, "measuring") as tally:
        measured = load(f"{_REPORTING}.report:report")(dst, workers=workers, on_progress=tally)
    write_result(path, load(f"{_REPORTING}.page:page")(measured).encode())
    if run.is_text:
        line("report", f"written to {path}")


def _require_report(path: Path, dst: Path) -> None:
    """Refuse ``--report`` where no report can be made or written."""
    if as_url(dst):
        raise UsageError(
            f"{setting('report')} requires a local dataset;",
            remedy=f"run `shardkit report` on a copy of {dst}",
        )
    require_own_output(path, "--report", load(f"{_REPORTING}.page:MARK"))


@contextlib.contextmanager
def _executor(cluster: str | None, lost: set[str]) -> Iterator[Executor | None]:
    """Connect to a cluster, if one is given; add the workers that die in the block to ``lost``."""
    if cluster is None:
        yield None
        return
    with load("shardkit.cluster.executors:open_cluster")(cluster) as opened:
        before = opened.members()
        yield opened.executor
        lost |= before - opened.members()


class _Command(Command):
    """The command for a source: the options of every conversion, and the source's own."""

    def __init__(self, kind: SourceKind) -> None:
        of_source = click_options(kind.options, *[Copies] * kind.of_files)
        params = [
            argument("src"),
            argument("dst"),
            *click_options(ConvertOptions, RecipeOptions),
            *of_source,
            *click_options(DivisionOptions, Exclusion, Builder, Placement),
        ]
        super().__init__(kind.name, self._run, params, (CommandOptions,), help=kind.help)
        self._kind = kind
        self._of_source = [str(option.name) for option in of_source]

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Read the arguments; a folder called like the kind is no source if it is the first."""
        try:
            return super().parse_args(ctx, args)
        except click.MissingParameter as error:
            name = self._kind.name
            hint = f" To convert a file or folder called {name}, write ./{name}"
            shown = click.UsageError(error.format_message())
            raise hinted(shown, ctx, hint * os.path.lexists(name)) from error

    def _run(
        self, run: Run, options: CommandOptions, *, src: Path, dst: Path, **words: Any
    ) -> None:
        """Open the source with its own options, then convert it."""
        of_source = {name: words.pop(name) for name in self._of_source}
        kinds, others = click.get_current_context().meta.get(_READ_AS, ({}, []))
        if kinds:
            evidence = ", and ".join(kind.by.evidence for kind in kinds.values())
            read_as = f"{self._kind.name}: {evidence}"
            unread = f"; next to it, not read: {some(others)}" if others else ""
            run.report(
                lambda: {"read_as": read_as, "not_read": others},
                lambda: say(f"read as {read_as}{unread}"),
            )
        if self._kind.of_files:
            if "root" in of_source:
                require_root(src, of_source["root"])
            src = copied(run, src, Copies(cache=of_source.pop("cache")))
        if len(kinds) > 1:
            source: Source = load(_TOGETHER)(src, kinds, of_source)
        else:
            source = open_source(self._kind.name, src, **of_source)
        if isinstance(source, ImageFolder):
            source.rest = [str(dst), "--to", words["to"]]
        _convert(run, options, source, as_url(src) or src, dst, **words)
