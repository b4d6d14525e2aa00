"""``shardkit doctor``: find out what limits loading, and what would help."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import click

from shardkit.cli.console import emit
from shardkit.cli.doctor_report import as_json as report_as_json
from shardkit.cli.doctor_report import show
from shardkit.cli.measure_options import (
    batch_size_option,
    decode_option,
    model_option,
    step_ms_option,
    transform_option,
)
from shardkit.cli.options import quiet_option
from shardkit.cli.show import Bar
from shardkit.measure.doctor.doctor import Watch, doctor


@click.command("doctor")
@click.argument("dataset", required=False)
@decode_option
@transform_option
@batch_size_option
@click.option(
    "--workers",
    type=click.IntRange(0),
    metavar="N",
    help="Workers that you plan to use.  [default: as make_loader]",
)
@step_ms_option
@model_option
@click.option(
    "--trial",
    is_flag=True,
    help="Try the most useful conversion on 1% of the images (64 to 1000) in a temporary folder, "
    "and measure both.",
)
@quiet_option
@click.option("--json", "as_json", is_flag=True, help="Print all findings as JSON.")
def doctor_command(  # noqa: PLR0913 - Click passes each option by name
    *,
    dataset: str | None,
    decode: str | None,
    transform: str | None,
    batch_size: int,
    workers: int | None,
    step_ms: float | None,
    model: str | None,
    trial: bool,
    quiet: bool,
    as_json: bool,
) -> None:
    """Find out what limits loading, and what would help.

    DATASET is a dataset or a plain folder of images; without it, doctor checks only the machine. It
    measures for about ten seconds and changes nothing. Findings do not change the exit code: it is
    1 only if doctor cannot measure.

    \b
    Examples:
      shardkit doctor
      shardkit doctor dataset
      shardkit doctor photos --trial
      shardkit doctor dataset --transform augment:train --step-ms 180 --batch-size 256
    """
    with _status(quiet=quiet) as watch:
        report = doctor(
            dataset,
            decode=decode,
            transform=transform,
            batch_size=batch_size,
            workers=workers,
            step_ms=step_ms,
            model=model,
            trial=trial,
            watch=watch,
        )
    if as_json:
        emit(report_as_json(report))
    elif not quiet:
        show(report)


@contextlib.contextmanager
def _status(*, quiet: bool) -> Iterator[Watch]:
    """Show progress on standard error, if it is a terminal."""
    with Bar(bar_format="{desc} ({elapsed})", disable=quiet or None, leave=False) as bar:
        yield bar.set_description_str
