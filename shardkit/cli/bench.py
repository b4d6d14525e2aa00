"""``shardkit bench``: compare the reading speed of datasets and image folders."""

from __future__ import annotations

import dataclasses
import shlex
import sys
from pathlib import Path

import click

from shardkit.cli.console import emit, say
from shardkit.cli.measure_options import (
    batch_size_option,
    decode_option,
    model_option,
    step_ms_option,
    transform_option,
)
from shardkit.cli.options import quiet_option
from shardkit.cli.show import measuring_bar
from shardkit.errors import UsageError
from shardkit.measure.bench.bench import LIMIT, bench
from shardkit.measure.bench.page import chart, page, require_output
from shardkit.measure.runner.rounds import CACHES
from shardkit.system.files import write_result


@click.command("bench")
@click.argument("datasets", metavar="DATASET...", nargs=-1, type=click.Path())
@click.option(
    "--loader",
    "loaders",
    multiple=True,
    metavar="SPEC",
    help="A loader and its options, such as auto, thread:num_workers=4, process:prefetch_factor=8 "
    "or plain:num_workers=4 (PyTorch's own); repeatable.  [default: plain, "
    "and auto for datasets]",
)
@click.option(
    "--cache",
    type=click.Choice((*CACHES, "both")),
    default="both",
    show_default=True,
    help="warm: files in memory. cold: files on disk.",
)
@click.option(
    "--rounds",
    type=click.IntRange(1),
    default=5,
    show_default=True,
    metavar="N",
    help="Interleaved rounds to measure, after one warm-up round.",
)
@click.option(
    "--seconds",
    type=click.FloatRange(0, min_open=True),
    default=1.0,
    show_default=True,
    metavar="T",
    help="Length of a warm measurement. A cold one is an epoch, at most 10x as long.",
)
@click.option(
    "--limit",
    type=click.IntRange(1),
    default=LIMIT,
    show_default=True,
    metavar="N",
    help="Maximum images to read per DATASET, drawn at random.",
)
@decode_option
@transform_option
@batch_size_option
@step_ms_option
@model_option
@click.option("--json", "as_json", is_flag=True, help="Print all measurements as JSON.")
@click.option(
    "--plot",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Write the chart of the page to FILE, an SVG image.",
)
@click.option(
    "--html",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Write a self-contained HTML page to FILE.",
)
@quiet_option
def bench_command(  # noqa: PLR0913 - Click passes each option by name
    *,
    datasets: tuple[str, ...],
    loaders: tuple[str, ...],
    cache: str,
    rounds: int,
    seconds: float,
    limit: int,
    decode: str | None,
    transform: str | None,
    batch_size: int,
    step_ms: float | None,
    model: str | None,
    as_json: bool,
    plot: Path | None,
    html: Path | None,
    quiet: bool,
) -> None:
    """Measure how fast each DATASET is read: datasets, and plain folders of images.

    If a folder is given, it is the baseline: the speedups show what converting gains. Each loader
    runs in a process of its own, in interleaved rounds; the table shows medians over the rounds.
    Exits with 1 if a loader could not be measured. Ctrl-C shows the rounds that are complete and
    exits with 130.

    \b
    Examples:
      shardkit bench photos dataset
      shardkit bench dataset --loader auto --loader process:num_workers=4 --cache warm
      shardkit bench photos dataset --transform augment:train --step-ms 40 --html bench.html
    """
    for path, option in ((plot, "--plot"), (html, "--html")):
        if path is not None:
            require_output(path, option)
    if html is not None and html == plot:
        raise UsageError(f"--html and --plot name the same file, {html}; choose two files")
    with measuring_bar(quiet=quiet) as watch:
        report = bench(
            datasets,
            loaders=loaders,
            caches=CACHES if cache == "both" else (cache,),
            rounds=rounds,
            seconds=seconds,
            limit=limit,
            batch_size=batch_size,
            decode=decode,
            transform=transform,
            step_ms=step_ms,
            model=model,
            watch=watch,
        )
    report = dataclasses.replace(report, command=shlex.join(["shardkit", *sys.argv[1:]]))
    if as_json:
        emit(report.as_dict())
    elif not quiet:
        for each in report.describe().split("\n"):
            say(each)
    for path, render in ((plot, chart), (html, page)):
        if path is not None:
            write_result(path, render(report).encode())
    sys.exit(130 if report.interrupted else int(report.failed))
