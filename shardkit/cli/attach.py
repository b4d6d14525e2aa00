"""``shardkit attach``: read archives from other programs in place."""

from __future__ import annotations

import contextlib
import os
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import click

from shardkit.attaching.attach import Attached, AttachOptions, attach
from shardkit.cli.options import LocalOrUrl, Workers, argument, click_options
from shardkit.cli.printing import ignored_counts, line, progress_bar, record_noun, show_notes
from shardkit.cli.run import Run, say
from shardkit.cli.runner import Command
from shardkit.contracts import Attaching, SourceKind
from shardkit.errors import UsageError
from shardkit.options import make
from shardkit.registry import (
    DATASET,
    DEFAULT_ATTACHED,
    get_source,
    is_source,
    open_source,
    source_names,
)
from shardkit.reporting.describe import summarize
from shardkit.sources.recognize import recognized
from shardkit.system.text import amount, printable, quoted, shell, size, suggestion


class _Kinds(click.Group):
    """One command for each kind of file; without its name, that of what is there."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Add the kind before other arguments."""
        if args and args[0] not in ("-h", "--help") and not _can_attach(args[0]):
            args = [_kind_of(args[0]), *args]
        return super().parse_args(ctx, args)

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the kinds."""
        return _attachable()

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Return the command for a kind, with the options of its source."""
        kind = get_source(cmd_name) if _can_attach(cmd_name) else None
        if kind is None or kind.attaching is None:
            return None
        return _Command(kind, kind.attaching)


def _kind_of(path: str) -> str:
    """Return the kind that recognizes a path for certain, or that of tar archives."""
    certain = [kind for kind in recognized(path) if kind.by.certain]
    if len(certain) != 1:
        return DEFAULT_ATTACHED
    (first,) = certain
    if first.kind == DATASET:
        raise UsageError(
            f"{path} is a shardkit dataset",
            remedy="use it directly, without attaching it",
            where=path,
        )
    if not _can_attach(first.kind):
        raise UsageError(
            f"{path} looks like {first}, which cannot be attached;",
            remedy=f"run `{first.command(path)}`",
            where=path,
        )
    return first.kind


def _attachable() -> list[str]:
    """Return the names of all kinds of sources that can be attached, the default first."""
    return sorted(filter(_can_attach, source_names()), key=lambda name: name != DEFAULT_ATTACHED)


def _can_attach(name: str) -> bool:
    with contextlib.suppress(UsageError):  # its package is missing
        return is_source(name) and get_source(name).attaching is not None
    return False


@click.group("attach", cls=_Kinds)
def attach_command() -> None:
    """Read files from other programs in place: index them as a dataset.

    COMMAND is the file type. Without COMMAND, shardkit detects the type of an existing file or
    folder, as `convert` does; anything else is a pattern of tar archives.
    """


class _Command(Command):
    """The command for a kind of file, with the options of its source."""

    def __init__(self, kind: SourceKind, attaching: Attaching) -> None:
        params = [
            argument("archives", type=LocalOrUrl()),
            argument("index_dir"),
            *click_options(kind.options),
            *click_options(AttachOptions),
        ]
        super().__init__(
            kind.name,
            self._run,
            params,
            (Workers,),
            help=attaching.help,
            short_help=attaching.title,
            context_settings={"allow_extra_args": True},
        )
        self._kind = kind.name

    def _run(
        self,
        run: Run,
        workers: Workers,
        *,
        archives: str,
        index_dir: Path,
        **words: Any,
    ) -> None:
        if extra := click.get_current_context().args:
            if len(extra) == 1 and archives.isidentifier() and not os.path.lexists(archives):
                kinds = _attachable()
                raise UsageError(
                    f"unknown kind of files {quoted(archives)};",
                    remedy=f"choose from {', '.join(kinds)}.{suggestion(archives, kinds)}",
                )
            raise UsageError(
                f"{len(extra) + 2} paths were given instead of ARCHIVES and INDEX_DIR",
                remedy=f"quote a pattern, as in: shardkit attach {self._kind} '*' "
                f"{shell(extra[-1])}",
            )
        options = make(AttachOptions, words)
        source = open_source(self._kind, archives, **words)
        with progress_bar(run, "attaching") as tally:
            attached = attach(
                source, index_dir, **vars(options), workers=workers.workers, on_progress=tally
            )
        run.report(
            lambda: {
                "path": str(index_dir),
                "kept": attached.kept,
                "unchanged": attached.unchanged,
                "remembered": attached.remembered,
                **_summarized(attached),
            },
            lambda: _show(archives, index_dir, attached, run.seconds),
        )


def _summarized(attached: Attached) -> dict[str, Any]:
    """Return the dataset as JSON values, or that of each split."""
    splits = {name: summarize(manifest) for name, manifest in attached.manifests.items()}
    return splits.get("", {"splits": splits})


def _show(archives: str, index_dir: Path, attached: Attached, seconds: float) -> None:
    manifests = [*attached.manifests.values()]
    first = manifests[0]
    noun = "archive" if first.format == DEFAULT_ATTACHED else "file"
    noun = "class folder" if first.is_loose else noun
    shards = amount(sum(len(manifest.shards) for manifest in manifests), noun)
    result = "already contains the index of" if attached.unchanged else "now reads"
    say(f"{index_dir} {result} {printable(archives)}")
    rows = sum(manifest.rows for manifest in manifests)
    line(
        "dataset",
        f"{amount(rows, record_noun(first.fields_by_name))}"
        + (f" in {shards}" if first.classes or not first.is_loose else "")
        + f", {size(sum(manifest.bytes for manifest in manifests))}",
    )
    if "" not in attached.manifests:
        line("splits", printable(", ".join(attached.manifests)))
    show_notes(_total(manifest.notes for manifest in manifests), first.recipe)
    if skipped := sum(len(manifest.skipped) for manifest in manifests):
        line("skipped", f"{amount(skipped, 'finding')}, listed in skipped.jsonl")
    if ignored := _total(manifest.ignored for manifest in manifests):
        line("ignored", ignored_counts(ignored))
    if attached.kept and not attached.unchanged:
        line("kept", f"{amount(attached.kept, noun)} indexed by an earlier run")
    if not attached.remembered:
        line("note", "your state folder cannot be written: open the dataset with root=")
    line("time", f"{seconds:.1f} s")
    line("next", shell("shardkit", "verify", index_dir))


def _total(counts: Iterable[Mapping[str, int]]) -> dict[str, int]:
    """Return the sums of counts by name."""
    total = Counter[str]()
    for count in counts:
        total.update(count)
    return dict(total)
