"""Transforms for tune_grid.py: one that holds the GIL, and one that waits."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import torch

from shardkit import with_rng


def hold(image: Any) -> torch.Tensor:
    """Compute some 2 ms in pure Python."""
    total = 0
    for number in range(40_000):
        total += number
    return torch.full((3, 64, 64), total % 251, dtype=torch.uint8)


@with_rng  # so that it may run in threads, too
def wait(image: Any, rng: np.random.Generator) -> torch.Tensor:
    """Wait for 3 ms, as for something on a network."""
    time.sleep(0.003)
    return torch.zeros((3, 64, 64), dtype=torch.uint8)
