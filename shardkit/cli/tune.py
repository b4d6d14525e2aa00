"""``shardkit tune``: find the fastest loader settings on this machine."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from pathlib import Path

import click

from shardkit.cli.console import emit
from shardkit.cli.measure_options import (
    decode_option,
    model_option,
    step_ms_option,
    transform_option,
)
from shardkit.cli.options import quiet_option
from shardkit.cli.show import Bar
from shardkit.cli.tune_report import as_json as report_as_json
from shardkit.cli.tune_report import show_report, show_written
from shardkit.measure.runner.material import choose_decode, is_dataset
from shardkit.measure.runner.spec import Subject
from shardkit.measure.runner.steps import StepSpec
from shardkit.measure.tune.trials import Tick, Watch
from shardkit.measure.tune.tune import TuneRequest, tune
from shardkit.torch.tuned import require_replaceable

_UNITS = {"": 1.0, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0}


def duration(ctx: click.Context, param: click.Parameter, value: str) -> float:
    """Return a time in seconds, from ``60``, ``60s``, ``2m`` or ``1h``."""
    found = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?) *([a-z]*)", value.strip().lower())
    if not found or found[2] not in _UNITS:
        raise click.BadParameter(f"{value!r} is not a time such as 60s or 2m", ctx, param)
    return float(found[1]) * _UNITS[found[2]]


@click.command("tune")
@click.argument("dataset", type=click.Path(path_type=Path))
@decode_option
@transform_option
@click.option(
    "--batch-size",
    "batch_sizes",
    type=click.IntRange(1),
    multiple=True,
    metavar="N",
    help="Samples per batch; repeat it to give several candidates.  "
    "[default: 64, unless 32, 128 or 256 is faster; 64 with a step]",
)
@step_ms_option
@model_option
@click.option(
    "--budget",
    callback=duration,
    default="60s",
    show_default=True,
    metavar="TIME",
    help="Time limit, such as 90s or 2m.",
)
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Write the settings to FILE, for make_loader(..., tuned=FILE).",
)
@quiet_option
@click.option("--json", "as_json", is_flag=True, help="Print all measurements as JSON.")
def tune_command(  # noqa: PLR0913 - Click passes each option by name
    *,
    dataset: Path,
    decode: str | None,
    transform: str | None,
    batch_sizes: tuple[int, ...],
    step_ms: float | None,
    model: str | None,
    budget: float,
    out: Path | None,
    quiet: bool,
    as_json: bool,
) -> None:
    """Find the fastest make_loader settings for DATASET on this machine.

    Tune measures threads and worker processes, their number, batches made ahead, transports and
    batch sizes, within --budget and the limits on memory, shared memory and open files. With
    --step-ms or --model it selects the cheapest settings that load faster than your training step
    needs.

    \b
    Examples:
      shardkit tune dataset
      shardkit tune dataset --transform augment:train --budget 2m --out tuned.json
      shardkit tune dataset --step-ms 120 --batch-size 128
    """
    request = TuneRequest(
        subject=_subject(dataset, decode, transform),
        step=StepSpec(milliseconds=step_ms or 0.0, model=model),
        budget=budget,
        batch_sizes=batch_sizes,
    )
    if out is not None:
        require_replaceable(out)
    with _live(request.budget, quiet=quiet) as watch:
        report = tune(request, watch)
    try:
        if as_json:
            emit(report_as_json(report))
        elif not quiet:
            show_report(report)
    finally:  # keep one if the other fails: a pager may be gone, or the disk full
        if out is not None:
            report.tuned().save(out)
    if out is not None and not quiet and not as_json:
        show_written(out)


def _subject(dataset: Path, decode: str | None, transform: str | None) -> Subject:
    is_dataset(str(dataset))  # raises if it does not exist
    return Subject(
        path=str(dataset),
        decode=choose_decode([str(dataset)], decode, transform),
        transform=transform,
    )


@contextlib.contextmanager
def _live(budget: float, *, quiet: bool) -> Iterator[Watch]:
    """Show progress on standard error while the block runs, if it is a terminal."""
    shape = "{desc}: {percentage:3.0f}%|{bar}| {n:.0f}/{total:.0f} s{postfix}"
    with Bar(
        total=budget, desc="tuning", disable=quiet or None, leave=False, bar_format=shape
    ) as bar:

        def show(tick: Tick) -> None:
            if bar.disable:
                return
            bar.note(
                f"  {tick.elapsed:5.1f} s  {tick.rate:>9,.0f} images/s  {tick.candidate}  "
                f"({tick.doing})"
            )
            bar.set_postfix_str(f"best {tick.best_rate:,.0f}/s: {tick.best}", refresh=False)
            bar.update(min(tick.elapsed, budget) - bar.n)

        yield show
