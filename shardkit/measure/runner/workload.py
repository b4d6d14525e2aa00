"""`Workload`: how samples are made and batches used, as the tools that measure take it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from shardkit.measure.runner.material import DEFAULT_OPERATION, choose_decode
from shardkit.measure.runner.spec import StepSpec, Subject
from shardkit.options import option, require_valid


@dataclass(frozen=True, kw_only=True)
class Workload:
    """How samples are made, and what is done with each batch."""

    decode: str | None = option(
        None,
        help="Image type: pil, numpy, torch, bytes, or an operation such as 'CenterCrop(224)'.",
        metavar="HOW",
        shown=f"{DEFAULT_OPERATION}; pil with --transform; torch for raw pixels of one size",
    )
    transform: str | None = option(
        None,
        help="Your transform for each image, from a module that may be in the current folder.",
        metavar="MODULE:NAME",
    )
    batch_size: int = option(64, help="Samples per batch.", metavar="N", minimum=1)
    step_ms: float | None = option(
        None,
        help="Duration of a training step in ms, during which the CPU is free.",
        metavar="T",
        is_positive=True,
    )
    model: str | None = option(
        None,
        help="Model to train on each batch, or a function that returns one; 'small' is built in.",
        metavar="MODULE:NAME",
    )

    def __post_init__(self) -> None:
        require_valid(self)

    @property
    def step(self) -> StepSpec:
        """The training step for each batch."""
        return StepSpec(milliseconds=self.step_ms or 0.0, model=self.model)

    def subjects(self, paths: Sequence[str], limit: int | None = None) -> list[Subject]:
        """Return what to read of each path; all are decoded in the same way."""
        decode = choose_decode(paths, self.decode, self.transform)
        return [
            Subject(path=path, decode=decode, transform=self.transform, limit=limit)
            for path in paths
        ]
