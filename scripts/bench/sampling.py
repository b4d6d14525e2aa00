"""What `shardkit doctor` costs while it samples stacks: the rate with samples over that without.

    python scripts/bench/sampling.py [--rounds 15] [--seconds 1.0]

A dataset whose samples take 2 ms of Python and 2 ms of waiting is read by each engine, in
interleaved rounds. The last column is the median of the ratios of the rounds, with their quartiles.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from shardkit import make_loader
from shardkit.measure.doctor.lines import SampledCollate
from shardkit.measure.runner.environment import cpu_model
from shardkit.measure.runner.loaders import close_loader
from shardkit.measure.runner.rounds import turn
from shardkit.measure.runner.spec import StopCondition
from shardkit.measure.runner.timing import measure
from shardkit.torch.data.collate import collate

TEXT = json.dumps(list(range(3_000)))


class Own(Dataset[Any]):
    """Samples of a user."""

    def __len__(self) -> int:
        return 4096

    def __getitem__(self, row: int) -> tuple[torch.Tensor, int]:
        end = time.thread_time() + 0.002
        while time.thread_time() < end:
            json.loads(TEXT)
        time.sleep(0.002)
        return torch.zeros(3, 64, 64), row


def stock(function: Any) -> Any:
    """Return PyTorch's loader."""
    return DataLoader(Own(), 16, num_workers=2, collate_fn=function)


def ours(engine: str, function: Any) -> Any:
    """Return a loader of shardkit."""
    return make_loader(Own(), 16, engine=engine, num_workers=2, collate_fn=function)


LOADERS: dict[str, Callable[[Any], Any]] = {
    "DataLoader": stock,
    **{engine: partial(ours, engine) for engine in ("thread", "helper", "process")},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--seconds", type=float, default=1.0)
    parser.add_argument("--only", choices=LOADERS, action="append")
    given = parser.parse_args()
    print(cpu_model())
    for name in given.only or LOADERS:
        make = LOADERS[name]
        rates: dict[bool, list[float]] = {False: [], True: []}
        for number in range(given.rounds):
            for is_sampled in turn([False, True], number):
                rates[is_sampled].append(rate(name, make, is_sampled, given.seconds))
        ratios = [own / base for own, base in zip(rates[True], rates[False], strict=True)]
        low, median, high = statistics.quantiles(ratios, n=4)
        base = statistics.median(rates[False])
        print(f"{name:<10}  {base:>6,.0f} samples/s  {median:.3f} ({low:.3f} to {high:.3f})")


def rate(name: str, make: Callable[[Any], Any], is_sampled: bool, seconds: float) -> float:
    """Return the samples per second of a loader."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch, "counts")
        folder.mkdir()
        function = SampledCollate(collate, str(folder), is_stock=name == "DataLoader")
        loader = make(function if is_sampled else collate)
        try:
            return measure(loader, StopCondition(seconds=seconds), lambda batch: None).rate
        finally:
            close_loader(loader)
            folder.rename(Path(scratch, "ended"))


if __name__ == "__main__":
    main()
