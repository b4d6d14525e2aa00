"""The load of PyTorch's tutorial on data loading, improved step by step.

    python scripts/bench/tutorial.py [--rounds 3] [--epochs 10] [--train]

512 samples of 3 x 224 x 224 noise, a wait of 5 ms per fetch, batches of 32, 4 workers. See "Data
Loading Optimization in PyTorch",
docs.pytorch.org/tutorials/intermediate/intermediate_data_loading_tutorial.html. `shardkit bench
--steps` takes the same steps with a dataset or an image folder.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from shardkit import collate, make_loader
from shardkit.measure.runner.rounds import Spread, turn
from shardkit.measure.runner.spec import StepSpec, StopCondition
from shardkit.measure.runner.steps import make_step
from shardkit.measure.runner.timing import measure
from shardkit.torch.data.collate import BatchView, Values
from shardkit.torch.data.read_context import new_block

BATCH_SIZE, WORKERS = 32, 4


class OneByOne(Dataset[Any]):
    """The tutorial's dataset; a fetch waits as for a database or a network."""

    ROWS, SIDE, CLASSES = 512, 224, 10
    FETCH_SECONDS = 0.005

    def __len__(self) -> int:
        return self.ROWS

    def __getitem__(self, row: int) -> tuple[torch.Tensor, int]:
        time.sleep(self.FETCH_SECONDS)
        return torch.randn(3, self.SIDE, self.SIDE), int(torch.randint(0, self.CLASSES, (1,)))


class Batched(OneByOne):
    """Fetches a batch at once, into one block of memory, as datasets of shardkit do."""

    def __getitems__(self, rows: Sequence[int]) -> BatchView:
        time.sleep(self.FETCH_SECONDS)
        shape = (len(rows), 3, self.SIDE, self.SIDE)
        images = new_block(shape, shared=True, dtype=torch.float32)
        torch.randn(shape, out=images)
        labels = torch.randint(0, self.CLASSES, (len(rows),)).tolist()
        return BatchView([Values(images, images), Values(labels)])


def steps() -> dict[str, Any]:
    """Return a new loader for each step; each contains the steps before it."""
    plain: dict[str, Any] = {"batch_size": BATCH_SIZE, "shuffle": True}
    workers = {**plain, "num_workers": WORKERS, "prefetch_factor": 2}
    kept = {**workers, "persistent_workers": True}
    ours: dict[str, Any] = {"num_workers": WORKERS}
    return {
        "no workers": DataLoader(OneByOne(), **plain),
        f"+ {WORKERS} workers": DataLoader(OneByOne(), **workers),
        "+ persistent workers": DataLoader(OneByOne(), **kept),
        "+ batched __getitems__": DataLoader(Batched(), **kept, collate_fn=collate),
        "+ shardkit's engine": make_loader(Batched(), BATCH_SIZE, shuffle=True, **ours),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--rounds", type=int, default=3, help="Interleaved rounds.")
    parser.add_argument("--epochs", type=int, default=10, help="Epochs of a measurement.")
    parser.add_argument("--train", action="store_true", help="Train a small model, too.")
    given = parser.parse_args()
    use = make_step(StepSpec(model="small") if given.train else StepSpec())
    stop = StopCondition(seconds=600.0, epochs=given.epochs, whole=True)
    rates: dict[str, list[float]] = {name: [] for name in steps()}
    for number in range(given.rounds):
        for name in turn(list(rates), number):
            loader = steps()[name]
            rates[name].append(measure(loader, stop, use).rate)
            if hasattr(loader, "close"):
                loader.close()
            del loader  # ends persistent workers
    first = previous = rates["no workers"]
    print("| | images/s | x base | x before |\n|---|---:|---:|---:|")
    for name, found in rates.items():
        base, before = (Spread.paired(found, each).median for each in (first, previous))
        print(f"| {name} | {Spread.of(found).median:,.0f} | {base:.2f} | {before:.2f} |")
        previous = found


if __name__ == "__main__":
    main()
