"""``shardkit tune``: find the fastest loader settings on this machine."""

from __future__ import annotations

from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import click

from shardkit.cli.console import emit, say
from shardkit.cli.measure_options import (
    decode_option,
    model_option,
    step_ms_option,
    transform_option,
)
from shardkit.cli.options import byte_size, duration, quiet_option
from shardkit.cli.show import line, measuring_bar
from shardkit.errors import UsageError
from shardkit.measure.runner.material import choose_decode, open_subject
from shardkit.measure.runner.spec import Subject
from shardkit.measure.runner.steps import make_model
from shardkit.measure.tune.tune import tune
from shardkit.torch.batch_size import find_batch_size
from shardkit.torch.tuned import require_replaceable

_AUTO = "auto"


class _BatchSize(click.ParamType[Any]):
    """A number of samples, or ``auto``."""

    name = "N"

    def convert(self, value: Any, param: Any, ctx: Any) -> Any:
        if value == _AUTO:
            return value
        if isinstance(value, str) and not value.lstrip("-").isdecimal():
            self.fail(f"{value!r} is neither a number of samples nor {_AUTO}", param, ctx)
        return click.IntRange(1).convert(value, param, ctx)


@click.command("tune")
@click.argument("dataset", type=click.Path(path_type=Path))
@decode_option
@transform_option
@click.option(
    "--batch-size",
    type=_BatchSize(),
    default=64,
    show_default=True,
    metavar="N",
    help="Samples per batch. 'auto' finds the largest for which a training step of --model fits in "
    "memory.",
)
@click.option(
    "--memory",
    callback=byte_size,
    metavar="SIZE",
    help="Memory for --batch-size auto, such as 4GiB: of the device, or main memory without one.  "
    "[default: the device's free memory]",
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
    batch_size: Any,
    memory: int | None,
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
    the cheapest settings that load faster than your training step needs. With --batch-size auto, it
    first finds the largest batch for which a training step of --model fits in memory.

    \b
    Examples:
      shardkit tune dataset
      shardkit tune dataset --transform augment:train --budget 2m --out tuned.json
      shardkit tune dataset --step-ms 120 --batch-size 128
      shardkit tune dataset --model nets:resnet --batch-size auto
    """
    if out is not None:
        require_replaceable(out)
    found = None
    if batch_size == _AUTO or memory is not None:
        if batch_size != _AUTO or model is None:
            raise UsageError(
                "--batch-size auto needs --model, and --memory belongs to it: give --batch-size "
                "auto with --model"
            )
        found = find_batch_size(
            partial(_model_and_sample, dataset, decode, transform, model), memory=memory
        )
        batch_size = found.batch_size
        if not quiet and not as_json:
            line("batch", found.describe())
    with measuring_bar(quiet=quiet, unit="s") as watch:
        report = tune(
            dataset,
            decode=decode,
            transform=transform,
            batch_size=batch_size,
            step_ms=step_ms,
            model=model,
            budget=budget,
            watch=watch,
        )
    try:
        if as_json:
            emit(report.as_dict() | ({"batch_size": asdict(found)} if found else {}))
        elif not quiet:
            for each in report.describe().split("\n"):
                say(each)
    finally:  # keep one if the other fails: a pager may be gone, or the disk full
        if out is not None:
            report.tuned().save(out)
    if out is not None and not quiet and not as_json:
        line("written", f"{out}; or paste make_loader(dataset, shuffle=True, tuned={str(out)!r})")


def _model_and_sample(
    dataset: Path, decode: str | None, transform: str | None, model: str
) -> tuple[Any, Any]:
    """Return the model, and the image of a sample as a tensor; this runs in another process."""
    decode = choose_decode([str(dataset)], decode, transform)
    opened: Any = open_subject(Subject(path=str(dataset), decode=decode, transform=transform))
    image = opened[0][0]
    if not hasattr(image, "to"):
        raise UsageError(
            f"the images are of type {type(image).__name__}: --batch-size auto needs tensors, such "
            "as --decode 'RandomResizedCrop(224)'"
        )
    return make_model(model), image
