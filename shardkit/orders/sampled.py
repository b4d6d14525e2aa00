"""The order of a PyTorch sampler, as a function of seed and epoch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
import torch
from torch.utils.data import (
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from shardkit.errors import UsageError, setting
from shardkit.sampling.order import Order, Positions, derive_key, digest
from shardkit.torch.data.read_context import globals_kept, seed_globals

_PYTORCH = (RandomSampler, SequentialSampler, SubsetRandomSampler, WeightedRandomSampler)
_PARAMETERS = ("replacement", "num_samples", "indices", "weights")
"""Attributes of PyTorch's samplers that determine their rows."""

_ARRAYS = {"indices", "weights"}


@dataclass(frozen=True, kw_only=True, eq=False)
class SampledOrder(Order):
    """The rows of a sampler, which draws from the global generators, seeded for each epoch.

    So all ranks and resumed runs read the same rows. Raises UsageError if the sampler divides rows
    among ranks, or has its own generator.
    """

    recurs: ClassVar[bool] = True
    sampler: Any
    """Yields the rows of an epoch; it has a length."""
    of: int
    """Number of rows of the dataset."""
    _latest: dict[int, Positions] = field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.sampler, DistributedSampler):
            raise UsageError(
                "sampler= is a DistributedSampler, but make_loader divides rows among ranks itself",
                remedy=f"use {setting('shuffle', True)} instead",
            )
        if getattr(self.sampler, "generator", None) is not None:
            raise UsageError(
                "sampler= has its own generator, which a resumed run cannot repeat",
                remedy=f"leave out the generator; {setting('seed')} determines the random numbers",
            )

    def describe(self) -> str:
        """Return a text that identifies the order in a state.

        It has the parameters of PyTorch's samplers and of a sequence of rows. Only the name of
        another class is known: its attributes may change from epoch to epoch.
        """
        sampler = self.sampler
        name = type(self.sampler).__name__
        if isinstance(sampler, (list, tuple, range, np.ndarray, torch.Tensor)):
            return f"{name}({_digest(sampler)})"
        if not isinstance(sampler, _PYTORCH):
            return name
        values = {key: getattr(sampler, key) for key in _PARAMETERS if hasattr(sampler, key)}
        if isinstance(sampler, RandomSampler):
            values["of"] = len(sampler.data_source)
        values |= {key: _digest(values[key]) for key in _ARRAYS & values.keys()}
        return f"{name}({', '.join(f'{key}={value}' for key, value in values.items())})"

    def rows(self, epoch: int, positions: Positions) -> Positions:
        """Return the rows at ``positions`` of ``epoch``."""
        if epoch not in self._latest:
            with globals_kept():
                seed_globals(derive_key("sampler", self.seed, epoch))
                rows = list(self.sampler)
            drawn = _integers(rows)
            if drawn is None:
                raise UsageError("sampler= yields values that are not integers")
            if len(drawn) != self.size:
                raise UsageError(f"sampler= yields {len(drawn)} rows, not its length, {self.size}")
            if len(wrong := drawn[(drawn < 0) | (drawn >= self.of)]):
                raise UsageError(
                    f"sampler= yields row {wrong[0]}, but the dataset has rows 0 to {self.of - 1}"
                )
            self._latest.clear()
            self._latest[epoch] = drawn
        return self._latest[epoch][positions]


def _digest(values: Any) -> str:
    """Return a text that identifies a sequence of numbers, in any type that holds them."""
    try:
        return f"digest {digest(np.asarray(values, np.float64))}"
    except (TypeError, ValueError, OverflowError):
        return "no numbers"  # `SampledOrder.rows` reports them


def _integers(values: list[Any]) -> Positions | None:
    """Return ``values`` as an array, or None if some are not integers."""
    try:
        array = np.array(values) if values else np.empty(0, np.int64)
    except ValueError:
        return None
    return array.astype(np.int64) if array.dtype.kind in "iu" and array.ndim == 1 else None
