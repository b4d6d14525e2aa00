"""``shardkit bench``: how fast datasets and image folders are read, side by side."""

from __future__ import annotations

import dataclasses
import shlex
import sys
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from shardkit.cli.bench_table import show_report
from shardkit.cli.ladder import ladder_request, show_ladder
from shardkit.cli.measure_options import (
    batch_size_option,
    decode_option,
    model_option,
    step_ms_option,
    transform_option,
)
from shardkit.cli.options import quiet_option
from shardkit.cli.show import emit, looks_bar
from shardkit.errors import UsageError
from shardkit.measure.cases import CASES
from shardkit.measure.comparison.bench import LIMIT, BenchOptions, bench
from shardkit.measure.comparison.page import require_page, save_page
from shardkit.measure.comparison.plot import require_plot, save_plot
from shardkit.measure.rounds import CACHES
from shardkit.measure.steps import StepSpec


@click.command("bench")
@click.argument("dst", nargs=-1, type=click.Path())
@click.option(
    "--ladder",
    is_flag=True,
    help="Show instead what each improvement of loading brings, step by step, alone and with a "
    "small model; --model none leaves the model out. Defaults are others then: --rounds 3, "
    "--batch-size 32, and --seconds 6, the time in which PyTorch's loader without workers reads "
    "what a look reads.",
)
@click.option(
    "--case",
    type=click.Choice(sorted(CASES)),
    help="A built-in synthetic dataset for --ladder, instead of DST: the load of PyTorch's "
    "tutorial on data loading.",
)
@click.option(
    "--workers", type=click.IntRange(1), metavar="N", help="Workers of the loaders of --ladder."
)
@click.option(
    "--loader",
    "loaders",
    multiple=True,
    metavar="SPEC",
    help="A loader and its options, such as auto, thread:workers=4, process:prefetch=8 or "
    "plain:workers=4 (PyTorch's own); may be given several times.  [default: plain, and for "
    "datasets also auto]",
)
@click.option(
    "--cache",
    type=click.Choice((*CACHES, "both")),
    default="both",
    show_default=True,
    help="warm: files are in memory. cold: they have to come from the disk.",
)
@click.option(
    "--rounds",
    type=click.IntRange(1),
    default=5,
    show_default=True,
    metavar="N",
    help="How often each is measured, in turns; one more that does not count comes first.",
)
@click.option(
    "--seconds",
    type=click.FloatRange(0, min_open=True),
    default=1.0,
    show_default=True,
    metavar="T",
    help="How long a warm look lasts; a cold one is an epoch, at most ten times as long.",
)
@click.option(
    "--limit",
    type=click.IntRange(1),
    default=LIMIT,
    show_default=True,
    metavar="N",
    help="Images that are read at most of each, drawn at random.",
)
@decode_option
@transform_option
@batch_size_option
@step_ms_option
@model_option
@click.option("--json", "as_json", is_flag=True, help="Print everything as JSON.")
@click.option("--plot", type=click.Path(path_type=Path), metavar="FILE", help="Draw it: png, svg.")
@click.option(
    "--html", type=click.Path(path_type=Path), metavar="FILE", help="Write it as one page."
)
@quiet_option
@click.pass_context
def bench_command(context: click.Context, /, dst: tuple[str, ...], **given: Any) -> None:
    """Measure how fast each DST is read: datasets of shardkit, and plain folders of images.

    A folder is what the datasets are compared with: so you see what converting buys you. Loaders
    take turns, each in a process of its own, and every round compares them anew; the table has the
    median over the rounds. Exits with 1 if a line could not be measured.

    \b
    Examples:
      shardkit bench photos dataset
      shardkit bench dataset --loader auto --loader process:workers=4 --cache warm
      shardkit bench photos dataset --transform augment:train --step-ms 40 --html bench.html
      shardkit bench --ladder dataset
    """
    if given["ladder"] or given["case"]:
        chosen = {name: given[name] for name in given if _was_chosen(context, name)}
        request = ladder_request(dst, chosen)
        code = show_ladder(request, as_json=given["as_json"], quiet=given["quiet"])
        sys.exit(code)
    if given["workers"] is not None:
        raise UsageError(
            "--workers belongs to --ladder; here it is part of a loader: --loader thread:workers="
            f"{given['workers']}"
        )
    run_bench(dst, given)


def _was_chosen(context: click.Context, name: str) -> bool:
    """Tell whether the user gave an option, and not its default."""
    return context.get_parameter_source(name) is not ParameterSource.DEFAULT


def run_bench(paths: tuple[str, ...], given: dict[str, Any]) -> None:
    """Measure, tell, and end the command with its exit code."""
    step = StepSpec(milliseconds=given["step_ms"] or 0.0, model=given["model"])
    options = BenchOptions(
        caches=CACHES if given["cache"] == "both" else (given["cache"],),
        step=step,
        **{name: given[name] for name in _TAKEN},
    )
    plot, page = given["plot"], given["html"]
    require_plot(plot)
    require_page(page)
    if page is not None and page == plot:
        raise UsageError(f"--html and --plot are both to be written to {page}")
    with looks_bar(quiet=given["quiet"]) as watch:
        report = bench(paths, options, watch=watch)
    report = dataclasses.replace(report, command=shlex.join(["shardkit", *sys.argv[1:]]))
    if given["as_json"]:
        emit(report.as_dict())
    elif not given["quiet"]:
        show_report(report)
    if plot is not None:
        save_plot(report, plot)
    if page is not None:
        save_page(report, page)
    sys.exit(1 if report.failed else 0)


_TAKEN = ("loaders", "rounds", "seconds", "limit", "batch_size", "decode", "transform")
"""Options of the command that are those of `BenchOptions` by name."""
