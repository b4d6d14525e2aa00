"""``shardkit bench``: compare the reading speed of datasets and image folders."""

from __future__ import annotations

import dataclasses
import sys
from dataclasses import dataclass

import click

from shardkit.cli.options import LocalOrUrl, argument, command_option
from shardkit.cli.printing import measuring_bar, show_text
from shardkit.cli.run import Run
from shardkit.cli.runner import command
from shardkit.measure.bench.bench import BenchOptions, bench
from shardkit.measure.runner.rounds import CACHES
from shardkit.system.text import shell


@dataclass(frozen=True, kw_only=True)
class CommandOptions(BenchOptions):
    """The options of a measurement."""

    loaders: tuple[str, ...] = command_option(
        (),
        help="A loader and its options, such as auto, thread:num_workers=4, "
        "process:prefetch_factor=8 or plain:num_workers=4 (PyTorch's own). Repeatable.",
        flags=("--loader",),
        metavar="SPEC",
        shown="plain, and auto for datasets",
        is_repeated=True,
    )
    caches: tuple[str, ...] = command_option(
        "both",
        help="warm: files in memory. cold: files on disk.",
        flags=("--cache",),
        type=click.Choice((*CACHES, "both")),
        callback=lambda _, __, value: CACHES if value == "both" else (value,),
    )


@command(
    "bench",
    argument("datasets", metavar="DATASET...", nargs=-1, type=LocalOrUrl()),
    options=(CommandOptions,),
)
def bench_command(run: Run, options: CommandOptions, *, datasets: tuple[str, ...]) -> int:
    """Measure how fast each DATASET is read: datasets, and plain folders of images.

    A plain folder is the baseline, so the speedups show what converting gains. Each loader runs in
    its own process, in interleaved rounds; the table shows medians over the rounds. The exit code
    is 1 if a loader could not be measured. Ctrl-C shows the completed rounds and exits with 130.

    \b
    Examples:
      shardkit bench photos dataset
      shardkit bench dataset --loader auto --loader process:num_workers=4 --cache warm
      shardkit bench photos dataset --transform augment:train --step-ms 40 --json
      shardkit bench dataset --steps
    """
    with measuring_bar(run) as watch:
        report = bench(datasets, **{**vars(options), "watch": watch})
    report = dataclasses.replace(report, command=shell("shardkit", *sys.argv[1:]))
    run.report(report.as_dict, lambda: show_text(report.describe()))
    return 130 if report.interrupted else int(report.failed)
