"""Options of the commands that measure: what a sample is, and what is done with a batch."""

from __future__ import annotations

import click

from shardkit.measure.material import DEFAULT_OPERATION

decode_option = click.option(
    "--decode",
    metavar="HOW",
    help="What an image is: pil, numpy, torch, bytes, or an operation such as 'CenterCrop(224)'.  "
    f"[default: {DEFAULT_OPERATION}; pil with --transform; torch for raw pixels of one size]",
)

transform_option = click.option(
    "--transform",
    metavar="MODULE:NAME",
    help="Your transform, applied to each image; the module is looked for in this folder too.",
)

batch_size_option = click.option(
    "--batch-size",
    type=click.IntRange(1),
    default=64,
    show_default=True,
    metavar="N",
    help="Samples in a batch.",
)

step_ms_option = click.option(
    "--step-ms",
    type=click.FloatRange(0, min_open=True),
    metavar="T",
    help="Milliseconds that your training step takes for a batch, while the processors are free.",
)

model_option = click.option(
    "--model",
    metavar="MODULE:NAME",
    help="A model, or a function that makes one, to train with each batch; 'small' is one of ours.",
)
