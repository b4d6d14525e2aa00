"""``shardkit bench --ladder``: the table of what each improvement of loading brings."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Mapping
from typing import Any

import click

from shardkit.cli.show import amount, emit, line, looks_bar, table
from shardkit.errors import UsageError
from shardkit.measure.comparison.ladder import (
    ALONE,
    NO_ACCELERATOR,
    TRAINED,
    LadderReport,
    LadderRequest,
    Rung,
    ladder,
)
from shardkit.measure.material import choose_decode
from shardkit.measure.spec import Subject
from shardkit.measure.words import printable

_SMALL_GAIN = 1.1
"""Less than this in all is no gain worth a word."""

_WIDE = 0.2
"""A spread above this means that something else disturbed the measurement."""


_KNOWN = ("batch_size", "workers", "model", "rounds", "seconds")
"""Options of the command that are those of `LadderRequest` by name."""

_OF_A_CASE = {
    "decode": "makes its own samples",
    "transform": "makes its own samples",
    "seconds": "reads its own number of epochs",
}

_FORMS = ("ladder", "case", "decode", "transform", "as_json", "quiet")


def ladder_request(paths: tuple[str, ...], chosen: Mapping[str, Any]) -> LadderRequest:
    """Return what ``shardkit bench --ladder`` was asked for.

    Args:
        paths: What stands on the command line.
        chosen: The options that the user gave, by name.

    Raises:
        UsageError: If it is not one dataset, folder or case, or an option says nothing here.
    """
    others = [name for name in chosen if name not in (*_KNOWN, *_FORMS)]
    if others:
        option = {"loaders": "loader"}.get(others[0], others[0]).replace("_", "-")
        raise UsageError(f"--{option} has no meaning for --ladder")
    case = chosen.get("case")
    if len(paths) != (case is None):
        needed = "a case instead of a path" if case else "one dataset or image folder, or --case"
        raise UsageError(f"--ladder takes {needed}; {amount(len(paths), 'path')} given")
    options = {name: chosen[name] for name in _KNOWN if name in chosen}
    if options.get("model") == "none":
        options["model"] = None
    if case is not None:
        for name, own in _OF_A_CASE.items():
            if name in chosen:
                raise UsageError(f"--{name} has no meaning for --case, which {own}")
        return LadderRequest(subject=Subject(case=case), **options)
    transform = chosen.get("transform")
    decode = choose_decode(paths, chosen.get("decode"), transform)
    subject = Subject(path=paths[0], decode=decode, transform=transform)
    return LadderRequest(subject=subject, **options)


def show_ladder(request: LadderRequest, *, as_json: bool, quiet: bool) -> int:
    """Climb the ladder and print what was found.

    Args:
        request: What is climbed.
        as_json: Whether to print JSON instead of a table.
        quiet: Whether to show nothing but JSON.

    Returns:
        The exit code: 1 if a rung that this machine could do failed.

    Raises:
        UsageError: If the subject or the model cannot be opened.
        MeasurementFailed: If the baseline cannot be measured.
    """
    with looks_bar(quiet=quiet) as watch:
        report = ladder(request, watch)
    if as_json:
        emit(as_values(report))
    elif not quiet:
        _show(report)
    return int(any(rung.missing not in ("", NO_ACCELERATOR) for rung in report.rungs))


def as_values(report: LadderReport) -> dict[str, Any]:
    """Return a report as JSON values, with the medians and gains that the table shows."""
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
    """Return what each column of the table says, in words."""
    told = {ALONE: _in_words(report, ALONE)}
    if report.step_seconds is not None:
        most = (report.request.batch_size or 0) / report.step_seconds
        told[TRAINED] = (
            f"{_in_words(report, TRAINED)}; a step by itself takes "
            f"{1000 * report.step_seconds:,.1f} ms, {most:,.0f} images/s"
        )
    elif report.request.model is not None:
        told[TRAINED] = f"could not be measured: {printable(report.model_problem)}"
    return told


def _in_words(report: LadderReport, column: str) -> str:
    best = max(report.rungs, key=lambda rung: rung.rate(column) or 0.0)
    gain, largest = report.gain(best, column), report.largest(column)
    if gain is None or largest is None or gain < _SMALL_GAIN:
        return "nothing on this ladder makes it faster"
    most = report.gain(largest, column, before=True) or 0.0
    return f"{gain:.1f} x with {_plain(best)}; the largest step is {_plain(largest)}, {most:.1f} x"


def _plain(rung: Rung) -> str:
    return rung.name.removeprefix("+ ")


def _show(report: LadderReport) -> None:
    request, extent = report.request, report.extent
    part = f" of {extent.images:,}" if extent.rows < extent.images else ""
    model = f"; the model {request.model} on {report.device}" if request.model else ""
    click.echo(
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
        line("note", "an epoch of all images is longer: persistent workers gain less by that")
    widest = max(_spread(rung, column) for rung in report.rungs for column in (ALONE, TRAINED))
    if request.rounds == 1:
        line("note", "one round does not show what is chance: --rounds 3")
    if report.load.disturbs:
        line(
            "note",
            f"{report.load}: rows that PyTorch computes in the loop's own process suffer most",
        )
    if widest > _WIDE:
        line("note", f"rates differed by up to ±{widest:.0%} between rounds: was other work done?")


def _show_table(report: LadderReport) -> None:
    columns = [(ALONE, "loading alone")]
    if report.step_seconds is not None:
        columns.append((TRAINED, "with the model"))
    rows = [
        ["", *(cell for _, name in columns for cell in (name, "", ""))],
        ["", *(cell for _ in columns for cell in ("images/s", "x base", "x prev"))],
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
    """Return half of the distance between the least and the most, as a part of the median."""
    rates = rung.rates[column]
    return (max(rates) - min(rates)) / 2 / statistics.median(rates) if rates else 0.0
