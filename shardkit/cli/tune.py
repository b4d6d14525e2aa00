"""``shardkit tune``: the loader settings that are best on this machine."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
from tqdm import tqdm

from shardkit.cli.measure_options import (
    decode_option,
    model_option,
    step_ms_option,
    transform_option,
)
from shardkit.cli.options import quiet_option
from shardkit.cli.show import emit
from shardkit.cli.tune_report import as_json, show_report, show_written
from shardkit.measure.material import choose_decode, is_dataset
from shardkit.measure.spec import Subject
from shardkit.measure.steps import StepSpec
from shardkit.measure.tuning.trials import Tick, Watch
from shardkit.measure.tuning.tune import TuneRequest, tune
from shardkit.torch.tuned import require_replaceable

_UNITS = {"": 1.0, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0}


def duration(ctx: click.Context, param: click.Parameter, value: str) -> float:
    """Return a length of time in seconds: ``60``, ``60s``, ``2m``, ``1h``."""
    found = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?) *([a-z]*)", value.strip().lower())
    if not found or found[2] not in _UNITS:
        raise click.BadParameter(f"{value!r} is no length of time, such as 60s or 2m", ctx, param)
    return float(found[1]) * _UNITS[found[2]]


@click.command("tune")
@click.argument("dst", type=click.Path(path_type=Path))
@decode_option
@transform_option
@click.option(
    "--batch-size",
    "batch_sizes",
    type=click.IntRange(1),
    multiple=True,
    metavar="N",
    help="Samples in a batch; several are choices, one is fixed.  "
    "[default: 64, unless 32, 128 or 256 are faster; 64 with a step]",
)
@step_ms_option
@model_option
@click.option(
    "--budget",
    callback=duration,
    default="60s",
    show_default=True,
    metavar="TIME",
    help="How long to measure, such as 90s or 2m.",
)
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Write the settings to FILE, for make_loader(..., tuned=FILE).",
)
@quiet_option
@click.option("--json", "wants_json", is_flag=True, help="Print all that was measured as JSON.")
def tune_command(dst: Path, **given: Any) -> None:
    """Find the settings of make_loader that are best on this machine, with your data.

    It measures threads and worker processes, how many of them, how many batches are made ahead,
    how they travel, and how many samples a batch has: within what memory, shared memory and open
    files allow, and no longer than --budget. With --step-ms or --model it takes the cheapest
    settings that load faster than your training step needs.

    \b
    Examples:
      shardkit tune dataset
      shardkit tune dataset --transform augment:train --budget 2m --out tuned.json
      shardkit tune dataset --step-ms 120 --batch-size 128
    """
    request = TuneRequest(
        subject=_subject(dst, given["decode"], given["transform"]),
        step=StepSpec(milliseconds=given["step_ms"] or 0.0, model=given["model"]),
        budget=given["budget"],
        batch_sizes=given["batch_sizes"],
    )
    out, quiet = given["out"], given["quiet"]
    if out is not None:
        require_replaceable(out)
    with _live(request.budget, quiet=quiet) as watch:
        report = tune(request, watch)
    try:
        if given["wants_json"]:
            emit(as_json(report))
        elif not quiet:
            show_report(report)
    finally:  # each is of use without the other: a pager may be gone, or the disk be full
        if out is not None:
            report.tuned().save(out)
    if out is not None and not quiet and not given["wants_json"]:
        show_written(out)


def _subject(dst: Path, decode: str | None, transform: str | None) -> Subject:
    is_dataset(str(dst))  # raises if nothing is there
    return Subject(
        path=str(dst), decode=choose_decode([str(dst)], decode, transform), transform=transform
    )


@contextlib.contextmanager
def _live(budget: float, *, quiet: bool) -> Iterator[Watch]:
    """Show on standard error what is measured while the block runs, unless it is no terminal."""
    shape = "{desc}: {percentage:3.0f}%|{bar}| {n:.0f}/{total:.0f} s{postfix}"
    with tqdm(
        total=budget, desc="tuning", disable=quiet or None, leave=False, bar_format=shape
    ) as bar:

        def told(tick: Tick) -> None:
            if bar.disable:
                return
            bar.write(
                f"  {tick.elapsed:5.1f} s  {tick.rate:>9,.0f} images/s  {tick.candidate}  "
                f"({tick.doing})",
                file=bar.fp,
            )
            bar.set_postfix_str(f"best {tick.best_rate:,.0f}/s: {tick.best}", refresh=False)
            bar.update(min(tick.elapsed, budget) - bar.n)

        yield told
