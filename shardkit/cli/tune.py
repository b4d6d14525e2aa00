"""``shardkit tune``: find the fastest loader settings on this machine."""

from __future__ import annotations

from pathlib import Path

import click

from shardkit.cli.console import emit, say
from shardkit.cli.measure_options import (
    decode_option,
    model_option,
    step_ms_option,
    transform_option,
)
from shardkit.cli.options import duration, quiet_option
from shardkit.cli.show import line, measuring_bar
from shardkit.measure.tune.tune import tune
from shardkit.torch.tuned import require_replaceable


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
    help="Samples per batch; repeat it to add alternatives to the first.  [default: 64]",
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

    Tune measures threads and worker processes, their number and prefetch, in interleaved rounds
    within --budget, and compares the best with the defaults. With --step-ms or --model it selects
    the cheapest settings that load faster than your training step needs.

    \b
    Examples:
      shardkit tune dataset
      shardkit tune dataset --transform augment:train --budget 2m --out tuned.json
      shardkit tune dataset --step-ms 120 --batch-size 128
    """
    if out is not None:
        require_replaceable(out)
    with measuring_bar(quiet=quiet, unit="s") as watch:
        report = tune(
            dataset,
            decode=decode,
            transform=transform,
            batch_sizes=batch_sizes or (64,),
            step_ms=step_ms,
            model=model,
            budget=budget,
            watch=watch,
        )
    try:
        if as_json:
            emit(report.as_dict())
        elif not quiet:
            for each in report.describe().split("\n"):
                say(each)
    finally:  # keep one if the other fails: a pager may be gone, or the disk full
        if out is not None:
            report.tuned().save(out)
    if out is not None and not quiet and not as_json:
        line("written", f"{out}; or paste make_loader(dataset, shuffle=True, tuned={str(out)!r})")
