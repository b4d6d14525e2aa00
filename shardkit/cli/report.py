"""``shardkit report``: see what is in datasets, and what is wrong with it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import click

from shardkit.cli.options import LocalOrUrl, Options, Workers, argument, command_option
from shardkit.cli.printing import line, progress_bar
from shardkit.cli.run import Run, say
from shardkit.cli.runner import command
from shardkit.errors import located
from shardkit.reporting.findings import KINDS, Findings
from shardkit.reporting.page import MARK, page
from shardkit.reporting.report import DatasetReport, report, require_kinds
from shardkit.reporting.similar import DISTANCE
from shardkit.system.text import amount
from shardkit.system.user_files import require_own_output, write_result


@dataclass(frozen=True, kw_only=True)
class ReportOptions(Options):
    """Options of `shardkit report`."""

    output: Path | None = command_option(
        None,
        help="Write a self-contained HTML page with pictures to FILE.",
        flags=("-o", "--output"),
        metavar="FILE",
    )
    exclude: Path | None = command_option(
        None,
        help="Write lists of keys to leave out to DIR, one list per finding, for `convert ... "
        "--exclude`.",
        metavar="DIR",
        type=LocalOrUrl(path_type=Path, file_okay=False),
    )
    fail_on: list[str] = command_option(
        None,
        help="Exit with 1 if there are findings of these kinds, such as "
        "leak,exact-duplicate,label-conflict.",
        metavar="KINDS",
        callback=lambda _, __, value: (
            [*map(str.strip, value.split(","))] if value is not None else []
        ),
    )
    distance: int = command_option(
        DISTANCE,
        help="Maximum number of different bits in the 64-bit hashes of similar pictures.",
        metavar="N",
        type=click.IntRange(0, 16),
    )
    embedding: str | None = command_option(
        None,
        help="Find wrong labels, near duplicates and outliers with the embeddings in this field.",
        metavar="FIELD",
    )

    def __post_init__(self) -> None:
        with located("--fail-on"):
            require_kinds(self.fail_on, with_embeddings=self.embedding is not None)
        if self.output is not None:
            require_own_output(self.output, "--output", MARK)


@command(
    "report",
    argument("datasets", metavar="DATASET...", nargs=-1, required=True, type=LocalOrUrl()),
    options=(ReportOptions, Workers),
)
def report_command(
    run: Run, options: ReportOptions, workers: Workers, *, datasets: tuple[str, ...]
) -> int:
    """Find duplicates, leaks between splits, and odd or broken images of each DATASET.

    The page also shows classes, channel statistics, distributions and contact sheets. Facts about
    each image are stored in facts.npy in each DATASET. So the next report reads only a sample of
    the images, and those that it shows or compares. This file is not part of the dataset.

    \b
    Examples:
      shardkit report dataset -o report.html
      shardkit report dataset --fail-on leak,exact-duplicate,label-conflict
      shardkit report train val -o report.html --exclude lists
    """
    with progress_bar(run, "measuring") as tally:
        measured = report(
            *datasets,
            distance=options.distance,
            embedding=options.embedding,
            workers=workers.workers,
            on_progress=tally,
        )
    output = options.output
    exclude = options.exclude
    if output is not None:
        write_result(output, page(measured).encode())
    lists = measured.save_exclude(exclude) if exclude is not None else []
    failed = measured.failed(options.fail_on)
    run.report(measured.as_dict, lambda: _show(measured, run.seconds))
    if run.is_text:
        if output is not None:
            line("page", f"written to {output}")
        if lists:
            line("exclude", f"{amount(len(lists), 'list')} written to {exclude}")
    if failed and not run.output.json:
        _show_failed(failed)
    return 1 if failed else 0


def _show_failed(failed: Sequence[Findings]) -> None:
    counts = ", ".join(
        f"{kind.kind} ({amount(kind.rows, 'image')})" for kind in failed if kind.judged
    )
    if counts:
        say(f"shardkit: --fail-on: found {counts}", err=True)
    for kind in failed:
        if not kind.judged:
            say(f"shardkit: --fail-on: {kind.kind}: {kind.note}", err=True)


def _show(measured: DatasetReport, seconds: float) -> None:
    images = measured.images
    names = ", ".join(member.name for member in images.members)
    say(f"{names}: {amount(int(images.present.sum()), 'image')} ({seconds:.1f} s)")
    if images.measured.any():
        line("channels", measured.normalize)
    findings = [finding for finding in measured.findings if finding.groups]
    line("findings", amount(len(findings), "kind") if findings else "none")
    for finding in findings:
        say(f"    {finding.kind:<22}  {finding.rows:>9,}  {KINDS[finding.kind]}")
    for finding in measured.findings:
        if finding.note:
            line("note", f"{finding.kind}: {finding.note}")
    if not all(finding.complete for finding in findings):
        line("note", "there are more similar pairs than can be listed; use a lower --distance")
