"""``shardkit doctor``: find out why the GPU waits, and what helps."""

from __future__ import annotations

from dataclasses import dataclass

from shardkit.cli.bar import Bar
from shardkit.cli.doctor_report import report_lines, verbose_lines
from shardkit.cli.options import (
    LocalOrUrl,
    Options,
    argument,
    command_option,
    duration_option,
)
from shardkit.cli.run import Run, say
from shardkit.cli.runner import command
from shardkit.measure.doctor.doctor import DoctorOptions, doctor
from shardkit.measure.doctor.report import DoctorReport


@dataclass(frozen=True, kw_only=True)
class CommandOptions(DoctorOptions):
    """The options of a measurement."""

    budget: float = duration_option(
        DoctorOptions,
        "budget",
        help="Approximate duration, such as 30s or 2m. A longer run can decide closer cases.",
    )


@dataclass(frozen=True, kw_only=True)
class DetailOptions(Options):
    """The details to print."""

    verbose: bool = command_option(False, help="Print all stages, and all checks of the machine.")


@command(
    "doctor",
    argument("dataset", required=False, type=LocalOrUrl()),
    options=(CommandOptions, DetailOptions),
)
def doctor_command(
    run: Run, options: CommandOptions, details: DetailOptions, *, dataset: str | None
) -> None:
    """Find out whether the GPU waits for data and why, and measure what helps.

    DATASET is a dataset or a plain folder of images; without it and --loader, doctor checks only
    the machine. It changes nothing: it converts a sample in a temporary folder. With --model, it
    also measures how much loading slows the training loop, which takes longer. Findings do not
    change the exit code: it is 1 only if doctor cannot measure.

    \b
    Examples:
      shardkit doctor
      shardkit doctor dataset --step-ms 180 --batch-size 256
      shardkit doctor photos --transform augment:train --model small
      shardkit doctor --loader train:make_train_loader --step-ms 180
    """
    hidden = run.output.quiet or None
    with Bar(bar_format="{desc} ({elapsed})", disable=hidden, leave=False) as bar:
        report = doctor(dataset, **{**vars(options), "watch": bar.set_description_str})
    run.report(report.as_dict, lambda: _show(report, verbose=details.verbose))


def _show(report: DoctorReport, *, verbose: bool) -> None:
    for text in report_lines(report) + (verbose_lines(report) if verbose else []):
        say(text)
