"""``shardkit report``: see what is in datasets, and what is wrong with it."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import click

from shardkit.cli.console import emit, say
from shardkit.cli.options import quiet_option, workers_option
from shardkit.cli.show import amount, line, progress_bar
from shardkit.errors import UsageError
from shardkit.reporting.findings import DISTANCE, KINDS
from shardkit.reporting.page import MARK, page
from shardkit.reporting.report import DatasetReport, report
from shardkit.system.files import require_own_output, write_result
from shardkit.system.machine import usable_cpus


def _kinds(ctx: click.Context, param: click.Parameter, value: str | None) -> list[str]:
    kinds = [kind.strip() for kind in (value or "").split(",") if kind.strip()]
    for kind in kinds:
        if kind not in KINDS:
            raise click.BadParameter(
                f"{kind!r} is unknown; choose from {', '.join(KINDS)}", ctx, param
            )
    return kinds


@click.command("report")
@click.argument("datasets", metavar="DATASET...", nargs=-1, required=True, type=click.Path())
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Write a self-contained HTML page with pictures to FILE.",
)
@click.option(
    "--json",
    "json_file",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Write everything that the page states to FILE as JSON; - prints it.",
)
@click.option(
    "--exclude",
    type=click.Path(path_type=Path, file_okay=False),
    metavar="DIR",
    help="Write lists of keys to leave out to DIR, one for each finding, for `convert "
    "... --exclude`.",
)
@click.option(
    "--fail-on",
    metavar="KINDS",
    callback=_kinds,
    help="Exit with 1 if there are findings of these kinds, such as "
    "leak,exact-duplicate,label-conflict.",
)
@click.option(
    "--distance",
    type=click.IntRange(0, 16),
    default=DISTANCE,
    show_default=True,
    metavar="N",
    help="Maximum number of different bits in the 64-bit hashes of similar pictures.",
)
@click.option(
    "--seed",
    type=click.IntRange(0),
    default=0,
    show_default=True,
    metavar="N",
    help="Seed of the choice of pictures for the contact sheets.",
)
@workers_option
@quiet_option
def report_command(  # noqa: PLR0913 - Click passes each option by name
    *,
    datasets: tuple[str, ...],
    output: Path | None,
    json_file: Path | None,
    exclude: Path | None,
    fail_on: list[str],
    distance: int,
    seed: int,
    workers: int | None,
    quiet: bool,
) -> None:
    """Find duplicates, leaks between splits, and odd or broken images of each DATASET.

    The page also shows classes, channel statistics, distributions and contact sheets. Facts of each
    image are stored in facts.npy in each DATASET, so the next report reads few images: a sample,
    and those that it shows or compares. This file is not part of the dataset.

    \b
    Examples:
      shardkit report dataset -o report.html
      shardkit report dataset --fail-on leak,exact-duplicate,label-conflict
      shardkit report train val -o report.html --exclude lists
    """
    started = time.monotonic()
    if output is not None:
        require_own_output(output, "--output", MARK)
    if json_file is not None and str(json_file) != "-":
        require_own_output(json_file, "--json", MARK)
        if json_file == output:
            raise UsageError(f"--json and --output name the same file, {output}; choose two files")
    with progress_bar("measuring", quiet=quiet) as tally:
        made = report(
            *datasets, distance=distance, workers=workers or usable_cpus(), on_progress=tally
        )
    if output is not None:
        write_result(output, page(made, seed).encode())
    lists = made.save_exclude(exclude) if exclude is not None else []
    if json_file is not None:
        value = {"generator": MARK, **made.as_dict()}
        if str(json_file) == "-":
            emit(value)
        else:
            # Without indent: a million findings then need a fifth of the memory and time.
            write_result(json_file, json.dumps(value, allow_nan=False).encode())
    failed = made.failed(fail_on)
    if not quiet and str(json_file) != "-":
        _show(made, time.monotonic() - started)
        for name, path in (("page", output), ("json", json_file)):
            if path is not None:
                line(name, f"written to {path}")
        if lists:
            line("exclude", f"{amount(len(lists), 'list')} written to {exclude}")
    if failed and not quiet:
        counts = ", ".join(f"{each.kind} ({amount(each.rows, 'image')})" for each in failed)
        say(f"shardkit: --fail-on: found {counts}", err=True)
    sys.exit(1 if failed else 0)


def _show(made: DatasetReport, seconds: float) -> None:
    images = made.images
    names = ", ".join(part.name for part in images.parts)
    say(f"{names}: {amount(int(images.present.sum()), 'image')} ({seconds:.1f} s)")
    if images.measured.any():
        line("channels", made.normalize)
    found = [each for each in made.findings if each.groups]
    if not found:
        line("findings", "none")
        return
    line("findings", amount(len(found), "kind"))
    for each in found:
        say(f"    {each.kind:<22}  {each.rows:>9,}  {KINDS[each.kind]}")
    if not all(each.complete for each in found):
        line("note", "there are more similar pairs than can be listed; use a lower --distance")
