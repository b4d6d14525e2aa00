"""Options of the commands that measure: how samples are made and batches used."""

from __future__ import annotations

import click

from shardkit.measure.runner.material import DEFAULT_OPERATION

decode_option = click.option(
    "--decode",
    metavar="HOW",
    help="Image type: pil, numpy, torch, bytes, or an operation such as 'CenterCrop(224)'.  "
    f"[default: {DEFAULT_OPERATION}; pil with --transform; torch for raw pixels of one size]",
)

transform_option = click.option(
    "--transform",
    metavar="MODULE:NAME",
    help="Your transform for each image, from a module that may be in the current folder.",
)

batch_size_option = click.option(
    "--batch-size",
    type=click.IntRange(1),
    default=64,
    show_default=True,
    metavar="N",
    help="Samples per batch.",
)

step_ms_option = click.option(
    "--step-ms",
    type=click.FloatRange(0, min_open=True),
    metavar="T",
    help="Training step time per batch in ms, spent off the CPU.",
)

model_option = click.option(
    "--model",
    metavar="MODULE:NAME",
    help="Model to train on each batch, or a function that returns one; 'small' is built in.",
)
