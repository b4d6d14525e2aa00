"""``shardkit repair``: rebuild damaged files of a dataset from its source."""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass
from pathlib import Path

from shardkit.cli.options import Options, Workers, argument, command_option, one_or_all
from shardkit.cli.printing import line, more_lines, progress_bar, some
from shardkit.cli.run import Run, say
from shardkit.cli.runner import command
from shardkit.cli.url_source import Copies, copied
from shardkit.errors import UsageError
from shardkit.system.text import amount, printable
from shardkit.system.urls import as_url
from shardkit.verification.repair import Repaired, repair

_LISTED = 50
"""Maximum unrepaired files to show; --json prints all."""


@dataclass(frozen=True, kw_only=True)
class RepairOptions(Options):
    """Options of `shardkit repair`."""

    sources: tuple[Path, ...] = command_option(
        help="Source that DATASET was converted from. Repeat the option for each part of a "
        "merged dataset, in order, unless all parts have the same source.",
        flags=("--from",),
        metavar="SRC",
        is_repeated=True,
    )


@command("repair", argument("dataset"), options=(RepairOptions, Workers, Copies))
def repair_command(
    run: Run, options: RepairOptions, workers: Workers, copies: Copies, *, dataset: Path
) -> int:
    """Rebuild damaged or missing files of DATASET from its source SRC.

    Repair rebuilds shards, index and reports as the conversion did, and installs a file only if it
    has the digest in the manifest. It leaves intact files untouched, and exits with 1 if a file
    could not be rebuilt.

    \b
    Example:
      shardkit repair dataset --from photos
    """
    for source in options.sources:
        _require_source(source)
    sources = [copied(run, source, copies, dataset) for source in options.sources]
    with progress_bar(run, "repairing") as tally:
        repaired = repair(dataset, one_or_all(sources), workers=workers.workers, on_progress=tally)
    run.report(
        lambda: {"ok": repaired.ok, **asdict(repaired)},
        lambda: _show(dataset, repaired, run.seconds),
    )
    return 0 if repaired.ok else 1


def _require_source(source: Path) -> None:
    """Refuse a path that does not exist, which an intact dataset would hide."""
    if as_url(source) is not None or re.search(r"[*?{@]", str(source)):  # a pattern, or with a root
        return
    try:
        source.lstat()
    except (FileNotFoundError, NotADirectoryError):
        raise UsageError(f"the source {source} does not exist", where=source) from None


def _show(dataset: Path, repaired: Repaired, seconds: float) -> None:
    listed = repaired.findings[:_LISTED]
    findings = [f"{printable(finding.file)}: {printable(finding.reason)}" for finding in listed]
    for text in [*findings, *more_lines(repaired.findings, _LISTED)]:
        say(f"  not repaired: {text}", err=True)
    if not repaired.files and repaired.ok:
        files = amount(repaired.intact, "file")
        say(f"{dataset}: nothing to repair: {files} as the conversion wrote them ({seconds:.1f} s)")
        return
    say(
        f"{dataset}: {amount(len(repaired.files), 'file')} rebuilt, {repaired.intact:,} intact, "
        f"{len(repaired.findings):,} not rebuilt ({seconds:.1f} s)"
    )
    if repaired.files:
        line("repaired", some(repaired.files))
