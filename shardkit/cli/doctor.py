"""``shardkit doctor``: what limits loading, and what would help."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import click
from tqdm import tqdm

from shardkit.cli.doctor_report import as_json, show
from shardkit.cli.measure_options import (
    batch_size_option,
    decode_option,
    model_option,
    step_ms_option,
    transform_option,
)
from shardkit.cli.options import quiet_option
from shardkit.cli.show import emit
from shardkit.errors import UsageError
from shardkit.measure.diagnosis.doctor import Request, Watch, examine
from shardkit.measure.material import choose_decode
from shardkit.measure.spec import Subject
from shardkit.measure.steps import StepSpec


@click.command("doctor")
@click.argument("dst", required=False)
@decode_option
@transform_option
@batch_size_option
@click.option(
    "--workers",
    type=click.IntRange(0),
    metavar="N",
    help="Workers that you mean to take.  [default: what make_loader takes]",
)
@step_ms_option
@model_option
@click.option(
    "--trial",
    is_flag=True,
    help="Try the conversion that would help most on 1 % of the images (64 to 1000), in a "
    "temporary folder, and measure both.",
)
@click.option(
    "--rows",
    type=click.IntRange(1, 100_000),
    default=256,
    show_default=True,
    metavar="N",
    help="Samples whose stages are timed, at the most.",
)
@quiet_option
@click.option("--json", "as_json_", is_flag=True, help="Print all that was found as JSON.")
def doctor_command(dst: str | None, **given: Any) -> None:
    """Tell where the time of a sample goes, what limits loading, and what would help.

    DST is a dataset, or a plain folder of images; without it the machine alone is looked at. It
    measures, for some ten seconds, and changes nothing. It exits with 0 whatever it finds, and
    with 1 if it cannot measure.

    \b
    Examples:
      shardkit doctor
      shardkit doctor dataset
      shardkit doctor photos --trial
      shardkit doctor dataset --transform augment:train --step-ms 180 --batch-size 256
    """
    request = _request(dst, given)
    with _status(quiet=given["quiet"]) as watch:
        report = examine(request, watch)
    if given["as_json_"]:
        emit(as_json(request, report))
    elif not given["quiet"]:
        show(request, report)


_OF_DATA = ("decode", "transform", "step_ms", "model", "trial")
"""Options that say nothing without data."""


def _request(dst: str | None, given: dict[str, Any]) -> Request:
    step = StepSpec(milliseconds=given["step_ms"] or 0.0, model=given["model"])
    if dst is None:
        useless = [name for name in _OF_DATA if given[name]]
        if useless:
            option = useless[0].replace("_", "-")
            raise UsageError(f"--{option} needs DST: a dataset, or a folder of images")
        return Request(workers=given["workers"])
    decode = choose_decode([dst], given["decode"], given["transform"])
    return Request(
        subject=Subject(path=dst, decode=decode, transform=given["transform"]),
        batch_size=given["batch_size"],
        workers=given["workers"],
        step=step,
        rows=given["rows"],
        trial=given["trial"],
    )


@contextlib.contextmanager
def _status(*, quiet: bool) -> Iterator[Watch]:
    """Show on standard error what is done, unless it is no terminal."""
    with tqdm(bar_format="{desc} ({elapsed})", disable=quiet or None, leave=False) as bar:
        yield bar.set_description_str
