"""``shardkit tune``: find the fastest loader settings on this machine."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import click

from shardkit.cli.options import (
    Options,
    argument,
    byte_size,
    command_option,
    duration_option,
)
from shardkit.cli.printing import line, measuring_bar, show_text
from shardkit.cli.run import Run
from shardkit.cli.runner import command
from shardkit.errors import UsageError, setting
from shardkit.measure.runner.material import choose_decode, open_subject
from shardkit.measure.runner.spec import Subject
from shardkit.measure.runner.steps import make_model
from shardkit.measure.tune.tune import TuneOptions, tune
from shardkit.torch.batch_size import FoundBatchSize, find_batch_size
from shardkit.torch.tuned import require_replaceable

_AUTO = "auto"


class _BatchSize(click.ParamType):  # type: ignore[type-arg]  # generic from Click 8.4 on
    """A number of samples, or ``auto``."""

    name = "N"

    def convert(self, value: Any, param: Any, ctx: Any) -> Any:
        if value == _AUTO:
            return value
        if isinstance(value, str) and not value.lstrip("-").isdecimal():
            self.fail(f"{value!r} must be a number of samples or {_AUTO}", param, ctx)
        return click.IntRange(1).convert(value, param, ctx)


@dataclass(frozen=True, kw_only=True)
class CommandOptions(TuneOptions):
    """The options of a measurement."""

    batch_size: Any = command_option(
        64,
        help="Samples per batch. 'auto' finds the largest for which a training step of --model "
        "fits in memory.",
        metavar="N",
        type=_BatchSize(),
    )
    budget: float = duration_option(
        TuneOptions,
        "budget",
        help="Time limit, such as 90s or 2m. Opening the data and the first two measurements may "
        "take longer.",
    )


@dataclass(frozen=True, kw_only=True)
class MoreOptions(Options):
    """Memory for a batch, and the file to write."""

    memory: int | None = command_option(
        None,
        help="Memory for --batch-size auto, such as 4GiB: the device's, or main memory without a "
        "device.",
        metavar="SIZE",
        callback=byte_size,
        type=str,
        shown="the device's free memory",
    )
    out: Path | None = command_option(
        None,
        help="Write the settings to FILE, for make_loader(..., tuned=FILE).",
        metavar="FILE",
        heading="Output",
    )

    def __post_init__(self) -> None:
        if self.out is not None:
            require_replaceable(self.out)


@command("tune", argument("dataset"), options=(CommandOptions, MoreOptions))
def tune_command(run: Run, options: CommandOptions, more: MoreOptions, *, dataset: Path) -> None:
    """Find the fastest make_loader settings for DATASET on this machine.

    Tune measures threads and worker processes, their number and prefetch, in interleaved rounds
    within --budget, and compares the best with the defaults. With --step-ms or --model it selects
    the cheapest settings that load faster than your training step needs. With --model, it also runs
    the training loop with the loader to choose the priority, the engine and whether to pin memory.
    With --batch-size auto, it first finds the largest batch for which a training step of --model
    fits in memory.

    \b
    Examples:
      shardkit tune dataset
      shardkit tune dataset --transform augment:train --budget 2m --out tuned.json
      shardkit tune dataset --step-ms 120 --batch-size 128
      shardkit tune dataset --model nets:resnet --batch-size auto
    """
    values = vars(options)
    out = more.out
    batch_size = None
    if options.batch_size == _AUTO or more.memory is not None:
        batch_size = _find_batch_size(dataset, options, more.memory)
        values = {**values, "batch_size": batch_size.batch_size}
        if run.is_text:
            line("batch", batch_size.describe())
    with measuring_bar(run, unit="s") as watch:
        report = tune(dataset, **{**values, "watch": watch})
    try:
        run.report(
            lambda: report.as_dict() | ({"batch_size": asdict(batch_size)} if batch_size else {}),
            lambda: show_text(report.describe()),
        )
    finally:  # keep one if the other fails: a pager may be gone, or the disk full
        if out is not None:
            report.tuned().save(out)
    if out is not None and run.is_text:
        line("written", f"{out}; or paste make_loader(dataset, shuffle=True, tuned={str(out)!r})")


def _find_batch_size(dataset: Path, options: CommandOptions, memory: int | None) -> FoundBatchSize:
    if options.batch_size != _AUTO:
        raise UsageError(
            f"{setting('memory')} requires --batch-size auto",
            remedy="add it, or leave out --memory",
        )
    if options.model is None:
        raise UsageError(
            f"{setting('batch_size')} auto requires a model",
            remedy="add --model, such as --model nets:resnet",
        )
    trained = partial(_model_and_sample, dataset, options.decode, options.transform, options.model)
    return find_batch_size(trained, memory=memory)


def _model_and_sample(
    dataset: Path, decode: str | None, transform: str | None, model: str
) -> tuple[Any, Any]:
    """Return the model, and the image of a sample as a tensor; this runs in another process."""
    decode = choose_decode([str(dataset)], decode, transform)
    opened: Any = open_subject(Subject(path=str(dataset), decode=decode, transform=transform))
    image = opened[0][0]
    if not hasattr(image, "to"):
        raise UsageError(
            f"the images are of type {type(image).__name__}: --batch-size auto needs tensors, as "
            "with --decode 'RandomResizedCrop(224)'"
        )
    return make_model(model), image
