"""``shardkit doctor``: find out why the GPU waits, and what helps."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import click

from shardkit.cli.console import emit, say
from shardkit.cli.doctor_report import report_lines, verbose_lines
from shardkit.cli.measure_options import (
    decode_option,
    model_option,
    step_ms_option,
    transform_option,
)
from shardkit.cli.options import duration, quiet_option
from shardkit.cli.show import Bar
from shardkit.measure.doctor.doctor import Watch, doctor


@click.command("doctor")
@click.argument("dataset", required=False)
@click.option(
    "--loader",
    metavar="MODULE:NAME",
    help="Function that returns your DataLoader or shardkit loader, instead of DATASET.",
)
@decode_option
@transform_option
@click.option(
    "--batch-size",
    type=click.IntRange(1),
    default=64,
    show_default=True,
    metavar="N",
    help="Samples per batch; with --loader its own.",
)
@click.option(
    "--workers",
    type=click.IntRange(0),
    metavar="N",
    help="Workers that you plan to use.  [default: as make_loader]",
)
@step_ms_option
@model_option
@click.option(
    "--budget",
    callback=duration,
    default="12s",
    show_default=True,
    metavar="TIME",
    help="Approximate duration, such as 30s or 2m. A longer run decides closer cases.",
)
@click.option("--verbose", is_flag=True, help="Print all stages, and all checks of the machine.")
@quiet_option
@click.option("--json", "as_json", is_flag=True, help="Print all findings as JSON.")
def doctor_command(  # noqa: PLR0913 - Click passes each option by name
    *,
    dataset: str | None,
    loader: str | None,
    decode: str | None,
    transform: str | None,
    batch_size: int,
    workers: int | None,
    step_ms: float | None,
    model: str | None,
    budget: float,
    verbose: bool,
    quiet: bool,
    as_json: bool,
) -> None:
    """Find out whether the GPU waits for data and why, and measure what helps.

    DATASET is a dataset or a plain folder of images; without it and --loader, doctor checks only
    the machine. It changes nothing: it converts a sample in a temporary folder. Findings do not
    change the exit code: it is 1 only if doctor cannot measure.

    \b
    Examples:
      shardkit doctor
      shardkit doctor dataset --step-ms 180 --batch-size 256
      shardkit doctor photos --transform augment:train --model small
      shardkit doctor --loader train:make_train_loader --step-ms 180
    """
    with _status(quiet=quiet) as watch:
        report = doctor(
            dataset,
            loader=loader,
            decode=decode,
            transform=transform,
            batch_size=batch_size,
            workers=workers,
            step_ms=step_ms,
            model=model,
            budget=budget,
            watch=watch,
        )
    if as_json:
        emit(report.as_dict())
    elif not quiet:
        for line in report_lines(report) + (verbose_lines(report) if verbose else []):
            say(line)


@contextlib.contextmanager
def _status(*, quiet: bool) -> Iterator[Watch]:
    """Show progress on standard error, if it is a terminal."""
    with Bar(bar_format="{desc} ({elapsed})", disable=quiet or None, leave=False) as bar:
        yield bar.set_description_str
