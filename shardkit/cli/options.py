"""Options shared by several commands."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import click

from shardkit.conversion.plan import DEFAULT_SHARD_BYTES

_UNITS = {"": 1.0, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0}

workers_option = click.option(
    "--workers",
    type=click.IntRange(1),
    metavar="N",
    help="Number of processes.  [default: number of CPUs]",
)

_SIZES = {"": 1, "b": 1, "kb": 1e3, "mb": 1e6, "gb": 1e9, "kib": 2**10, "mib": 2**20, "gib": 2**30}

quiet_option = click.option(
    "--quiet", is_flag=True, help="Print only --json output. See the exit code."
)

on_error_option = click.option(
    "--on-error",
    type=click.Choice(["fail", "skip"]),
    default="fail",
    show_default=True,
    help="fail: write nothing if an image is bad. skip: leave bad images out and record each.",
)

shard_size_option = click.option(
    "--shard-size",
    default=f"{DEFAULT_SHARD_BYTES >> 20}MiB",
    show_default=True,
    metavar="SIZE",
    help="Approximate bytes of images per shard.",
)

shard_samples_option = click.option(
    "--shard-samples", type=int, metavar="N", help="Images per shard, instead of --shard-size."
)


def duration(ctx: click.Context, param: click.Parameter, value: str) -> float:
    """Return a time in seconds, from ``60``, ``60s``, ``2m`` or ``1h``."""
    found = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?) *([a-z]*)", value.strip().lower())
    if not found or found[2] not in _UNITS:
        raise click.BadParameter(f"{value!r} is not a time such as 60s or 2m", ctx, param)
    return float(found[1]) * _UNITS[found[2]]


def byte_size(ctx: click.Context, param: click.Parameter, value: str | None) -> int | None:
    """Return a number of bytes, from ``500MB`` or ``4GiB``."""
    if value is None:
        return None
    found = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?) *([a-z]*)", value.strip().lower())
    if not found or found[2] not in _SIZES:
        raise click.BadParameter(f"{value!r} is not a size such as 500MB or 4GiB", ctx, param)
    return int(float(found[1]) * _SIZES[found[2]])


def one_or_all(paths: Sequence[Path]) -> Path | list[Path] | None:
    """Return the only path that was given, all of several, or None."""
    if len(paths) > 1:
        return list(paths)
    return paths[0] if paths else None
