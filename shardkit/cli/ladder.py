"""``shardkit ladder``: the speedup of each improvement to data loading."""

from __future__ import annotations

import dataclasses
import statistics
import sys
from typing import Any

import click

from shardkit.cli.console import emit, say
from shardkit.cli.measure_options import decode_option, transform_option
from shardkit.cli.options import quiet_option
from shardkit.cli.show import amount, line, looks_bar, table
from shardkit.errors import UsageError
from shardkit.measure.bench.ladder import (
    ALONE,
    NO_ACCELERATOR,
    SECONDS,
    TRAINED,
    LadderReport,
    LadderRequest,
    Rung,
    ladder,
)
from shardkit.measure.runner.cases import CASES
from shardkit.measure.runner.material import choose_decode
from shardkit.measure.runner.spec import Subject
from shardkit.system.text import printable

_SMALL_GAIN = 1.1
"""Minimum speedup to report in the conclusion."""

_WIDE = 0.2
"""A larger spread means that other work disturbed the measurement."""


@click.command("ladder")
@click.argument("dataset", required=False, type=click.Path())
@click.option(
    "--case",
    type=click.Choice(sorted(CASES)),
    help="A built-in synthetic dataset, instead of DATASET: the load of PyTorch's tutorial on data "
    "loading.",
)
@decode_option
@transform_option
@click.option(
    "--batch-size",
    type=click.IntRange(1),
    metavar="N",
    help="Samples per batch.  [default: 32, or the case's own]",
)
@click.option(
    "--workers",
    type=click.IntRange(1),
    metavar="N",
    help="Workers per loader.  [default: number of CPUs, at least 2, or the case's own]",
)
@click.option(
    "--model",
    metavar="MODULE:NAME",
    default="small",
    show_default=True,
    help="Model to train on each batch, or a function that returns one; 'small' is built in, "
    "'none' measures loading alone.",
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
    metavar="T",
    help=f"Length of a measurement with PyTorch's loader without workers.  [default: {SECONDS:g}]",
)
@quiet_option
@click.option("--json", "as_json", is_flag=True, help="Print all measurements as JSON.")
def ladder_command(  # noqa: PLR0913 - Click passes each option by name
    *,
    dataset: str | None,
    case: str | None,
    decode: str | None,
    transform: str | None,
    batch_size: int | None,
    workers: int | None,
    model: str,
    rounds: int,
    seconds: float | None,
    quiet: bool,
    as_json: bool,
) -> None:
    """Measure the speedup of each improvement to data loading, one after the other.

    DATASET is a dataset or a plain folder of images. The ladder starts with PyTorch's loader
    without workers and adds one improvement per row, for loading alone and for training a model.
    Exits with 1 if a row that this machine supports could not be measured.

    \b
    Examples:
      shardkit ladder dataset
      shardkit ladder photos --transform augment:train --model none
      shardkit ladder --case tutorial
    """
    if (dataset is None) == (case is None):
        raise UsageError("ladder needs one dataset or image folder, or --case")
    request = LadderRequest(
        subject=_case(case, decode, transform, seconds)
        if case
        else _subject(dataset or "", decode, transform),
        batch_size=batch_size,
        workers=workers,
        model=None if model == "none" else model,
        rounds=rounds,
        seconds=SECONDS if seconds is None else seconds,
    )
    sys.exit(show_ladder(request, as_json=as_json, quiet=quiet))


def _subject(path: str, decode: str | None, transform: str | None) -> Subject:
    return Subject(path=path, decode=choose_decode([path], decode, transform), transform=transform)


def _case(case: str, decode: str | None, transform: str | None, seconds: float | None) -> Subject:
    given = {"--decode": decode, "--transform": transform, "--seconds": seconds}
    for option, value in given.items():
        if value is not None:
            own = "number of epochs" if option == "--seconds" else "samples"
            raise UsageError(f"{option} has no effect with --case, which has its own {own}")
    return Subject(case=case)


def show_ladder(request: LadderRequest, *, as_json: bool, quiet: bool) -> int:
    """Measure the ladder, print the result and return the exit code."""
    with looks_bar(quiet=quiet) as watch:
        report = ladder(request, watch)
    if as_json:
        emit(as_values(report))
    elif not quiet:
        _show(report)
    return int(any(rung.missing not in ("", NO_ACCELERATOR) for rung in report.rungs))


def as_values(report: LadderReport) -> dict[str, Any]:
    """Return a report as JSON values, with the medians and speedups in the table."""
    rungs = [
        {
            **dataclasses.asdict(rung),
            "loading": str(rung.loading),
            "images_per_second": {column: rung.rate(column) for column in (ALONE, TRAINED)},
            "over_baseline": {column: report.gain(rung, column) for column in (ALONE, TRAINED)},
            "over_rung_before": {
                column: report.gain(rung, column, before=True) for column in (ALONE, TRAINED)
            },
        }
        for rung in report.rungs
    ]
    return {**dataclasses.asdict(report), "rungs": rungs, "conclusion": conclusion(report)}


def conclusion(report: LadderReport) -> dict[str, str]:
    """Return the result of each column as a sentence."""
    result = {ALONE: _in_words(report, ALONE)}
    if report.step_seconds is not None:
        most = (report.request.batch_size or 0) / report.step_seconds
        result[TRAINED] = (
            f"{_in_words(report, TRAINED)}; a step alone takes "
            f"{1000 * report.step_seconds:,.1f} ms, {most:,.0f} images/s"
        )
    elif report.request.model is not None:
        result[TRAINED] = f"not measured: {printable(report.model_problem)}"
    return result


def _in_words(report: LadderReport, column: str) -> str:
    best = max(report.rungs, key=lambda rung: rung.rate(column) or 0.0)
    gain, largest = report.gain(best, column), report.largest(column)
    if gain is None or largest is None or gain < _SMALL_GAIN:
        return "no improvement makes it faster"
    most = report.gain(largest, column, before=True) or 0.0
    return f"{gain:.1f}x with {_plain(best)}; largest improvement: {_plain(largest)}, {most:.1f}x"


def _plain(rung: Rung) -> str:
    return rung.name.removeprefix("+ ")


def _show(report: LadderReport) -> None:
    request, extent = report.request, report.extent
    part = f" of {extent.images:,}" if extent.rows < extent.images else ""
    model = f"; the model {request.model} on {report.device}" if request.model else ""
    say(
        f"{printable(request.subject.name)}: {extent.rows:,}{part} images, "
        f"{amount(extent.epochs, 'epoch')}, batches of {request.batch_size}{printable(model)}"
    )
    _show_table(report)
    for column, words in conclusion(report).items():
        line({ALONE: "loading", TRAINED: "training"}[column], words)
    for rung in report.rungs:
        if rung.missing not in ("", NO_ACCELERATOR):
            line("failed", f"{_plain(rung)}: {printable(rung.missing)}")
    if part:
        line("note", "a full epoch is longer, so persistent workers gain less")
    widest = max(_spread(rung, column) for rung in report.rungs for column in (ALONE, TRAINED))
    if request.rounds == 1:
        line("note", "one round does not show chance variation: use --rounds 3")
    if report.load.disturbs:
        line(
            "note",
            f"{report.load}: rows without worker processes suffer most",
        )
    if widest > _WIDE:
        line("note", f"rates varied by up to ±{widest:.0%} between rounds: other work may have run")


def _show_table(report: LadderReport) -> None:
    columns = [(ALONE, "loading alone")]
    if report.step_seconds is not None:
        columns.append((TRAINED, "with the model"))
    rows = [
        ["", *(cell for _, name in columns for cell in (name, "", ""))],
        ["", *(cell for _ in columns for cell in ("images/s", "speedup", "x previous"))],
    ]
    for rung in report.rungs:
        remark = rung.note or (rung.engine if rung.reason else "")
        name = f"{rung.name} ({remark})" if remark else rung.name
        rows.append(
            [name, *(cell for column, _ in columns for cell in _cells(report, rung, column))]
        )
    table(rows)


def _cells(report: LadderReport, rung: Rung, column: str) -> list[str]:
    rate = rung.rate(column)
    if rate is None:
        return ["no accelerator" if rung.missing == NO_ACCELERATOR else "failed", "", ""]
    gains = [report.gain(rung, column), report.gain(rung, column, before=True)]
    shown = ["" if gain is None else f"{gain:.2f}" for gain in gains]
    spread = f" ±{_spread(rung, column):.0%}" if len(rung.rates[column]) > 1 else ""
    return [f"{rate:,.0f}{spread}", *shown]


def _spread(rung: Rung, column: str) -> float:
    """Return half the range of the rates, as a fraction of the median."""
    rates = rung.rates[column]
    return (max(rates) - min(rates)) / 2 / statistics.median(rates) if rates else 0.0
