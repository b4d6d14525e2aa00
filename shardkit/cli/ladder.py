"""``shardkit ladder``: the speedup of each improvement to data loading."""

from __future__ import annotations

import sys

import click

from shardkit.cli.console import emit, say
from shardkit.cli.measure_options import decode_option, transform_option
from shardkit.cli.options import quiet_option
from shardkit.cli.show import measuring_bar
from shardkit.measure.bench.ladder import SECONDS, ladder


@click.command("ladder")
@click.argument("dataset", type=click.Path())
@decode_option
@transform_option
@click.option(
    "--batch-size",
    type=click.IntRange(1),
    default=32,
    show_default=True,
    metavar="N",
    help="Samples per batch.",
)
@click.option(
    "--workers",
    type=click.IntRange(1),
    metavar="N",
    help="Workers per loader.  [default: number of CPUs, at least 2]",
)
@click.option(
    "--model",
    metavar="MODULE:NAME",
    help="Model to train on each batch, or a function that returns one; 'small' is built in.  "
    "[default: measure loading alone]",
)
@click.option(
    "--rounds",
    type=click.IntRange(1),
    default=3,
    show_default=True,
    metavar="N",
    help="Interleaved rounds to measure, after one warm-up round.",
)
@click.option(
    "--seconds",
    type=click.FloatRange(0, min_open=True),
    default=SECONDS,
    show_default=True,
    metavar="T",
    help="Length of a measurement of PyTorch's loader without workers.",
)
@quiet_option
@click.option("--json", "as_json", is_flag=True, help="Print all measurements as JSON.")
def ladder_command(  # noqa: PLR0913 - Click passes each option by name
    *,
    dataset: str,
    decode: str | None,
    transform: str | None,
    batch_size: int,
    workers: int | None,
    model: str | None,
    rounds: int,
    seconds: float,
    quiet: bool,
    as_json: bool,
) -> None:
    """Measure the speedup of each improvement to data loading, one after the other.

    DATASET is a dataset or a plain folder of images. The ladder starts with PyTorch's loader
    without workers and adds one improvement per row, for loading alone or for training a model.
    Exits with 1 if a row could not be measured.

    \b
    Examples:
      shardkit ladder dataset
      shardkit ladder photos --transform augment:train --model small
    """
    with measuring_bar(quiet=quiet) as watch:
        report = ladder(
            dataset,
            decode=decode,
            transform=transform,
            batch_size=batch_size,
            workers=workers,
            model=model,
            rounds=rounds,
            seconds=seconds,
            watch=watch,
        )
    if as_json:
        emit(report.as_dict())
    elif not quiet:
        for each in report.describe().split("\n"):
            say(each)
    sys.exit(130 if report.interrupted else int(report.failed))
