"""Train a small network on a converted dataset, and resume exactly after a kill at any moment.

    shardkit convert imagefolder sample_data dataset --to lmdb
    python train.py dataset run

prints "accuracy 100.0%" for its 96 training images, after about 12 s on one CPU (seeds 1 to 5: 99%
to 100%; other drawings of the same kind, with --validation: 98% to 99.5%).

Rerun the same command after a kill to resume from the last checkpoint. At the end, run/log.jsonl is
byte-identical to that of an undisturbed run (on a CPU; GPUs may sum in another order).

    torchrun --nproc-per-node 2 train.py dataset run
"""

from __future__ import annotations

import argparse
import json
import math
import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from shardkit import (
    DevicePrefetcher,
    Normalize,
    RandomResizedCrop,
    Rank,
    Resize,
    make_loader,
    open_dataset,
)


def parse() -> argparse.Namespace:
    """Return the options of the command line."""
    parser = argparse.ArgumentParser(description="Train a small network on a converted dataset.")
    parser.add_argument("dataset", help="directory of the dataset to train on")
    parser.add_argument("output", type=Path, help="directory of the checkpoint and the log")
    parser.add_argument("--validation", help="dataset to evaluate on (default: the same)")
    parser.add_argument("--resume", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--epochs", type=int, default=80)
    parser.add_argument("--batch-size", type=int, default=16, help="for each process")
    parser.add_argument("--learning-rate", type=float, default=0.005, help="maximum")
    parser.add_argument("--size", type=int, default=64, help="side of the images, in pixels")
    parser.add_argument("--save-every", type=int, default=10, help="batches between checkpoints")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def make_network(classes: int) -> nn.Sequential:
    """Return a small network; GroupNorm needs no statistics of other batches or ranks."""
    layers: list[nn.Module] = []
    for before, after in ((3, 16), (16, 32), (32, 64), (64, 64)):
        layers += [nn.Conv2d(before, after, 3, padding=1), nn.GroupNorm(8, after)]
        layers += [nn.ReLU(), nn.MaxPool2d(2)]
    return nn.Sequential(*layers, nn.AdaptiveMaxPool2d(1), nn.Flatten(), nn.Linear(64, classes))


class Run:
    """The content of a checkpoint: network, optimizer, position in the data, and length of the log.

    After the network is created, nothing here draws random numbers from PyTorch. If something does,
    such as dropout, save ``torch.get_rng_state()`` too.
    """

    def __init__(self, options: argparse.Namespace, device: torch.device) -> None:
        """Start a run, or resume the one in the output directory."""
        self.options = options
        self.checkpoint = options.output / "checkpoint.pt"
        parallel = dist.is_initialized()
        self.rank, self.world_size = (
            (dist.get_rank(), dist.get_world_size()) if parallel else (0, 1)
        )
        crop = RandomResizedCrop(options.size, scale=(0.7, 1.0), ratio=(0.9, 1.1))
        dataset = open_dataset(options.dataset, decode=crop)
        if not dataset.classes:
            raise SystemExit(f"{options.dataset} has no labels to learn")
        loader = make_loader(dataset, options.batch_size, shuffle=True, seed=options.seed)
        self.batches = DevicePrefetcher(loader, device, Normalize())
        torch.manual_seed(options.seed)
        self.network = make_network(len(dataset.classes)).to(device)
        self.optimizer = torch.optim.AdamW(self.network.parameters())
        self.batch, log_bytes = 0, 0
        if options.resume and self.checkpoint.exists():
            saved = torch.load(self.checkpoint, map_location=device, weights_only=True)
            self.network.load_state_dict(saved["network"])
            self.optimizer.load_state_dict(saved["optimizer"])
            self.batches.load_state_dict(saved["batches"])
            log_bytes = saved["log_bytes"]
            if self.batches.epoch == saved["batches"]["epoch"]:  # else that epoch was complete
                self.batch = saved["batch"]
        if self.rank == 0:
            options.output.mkdir(parents=True, exist_ok=True)
            self.log = (options.output / "log.jsonl").open("ab")
            self.log.truncate(log_bytes)  # lines after the checkpoint are written again

    def train(self) -> None:
        """Train until the last epoch is done."""
        model = self.network if self.world_size == 1 else DistributedDataParallel(self.network)
        for epoch in range(self.batches.epoch, self.options.epochs):
            self.batches.set_epoch(epoch)
            for images, labels in self.batches:
                loss = cross_entropy(model(images), labels)
                self.optimizer.zero_grad()
                loss.backward()
                self._set_learning_rate()
                self.optimizer.step()
                self._record(epoch, loss.detach())
            self.batch = 0
            self._save()

    def _set_learning_rate(self) -> None:
        """Warm up, then decay along a cosine: a function of the samples read, with no state."""
        state = self.batches.state_dict()
        done = (state["epoch"] + state["consumed"] / state["samples"]) / self.options.epochs
        factor = min(1.0, 10 * done) * (1 + math.cos(math.pi * done)) / 2
        for group in self.optimizer.param_groups:
            group["lr"] = self.options.learning_rate * factor

    def _record(self, epoch: int, loss: torch.Tensor) -> None:
        """Log the mean loss of all ranks, and save a checkpoint every few batches."""
        loss = sum_over_ranks(loss / self.world_size)
        self.batch += 1
        line = {"epoch": epoch, "batch": self.batch, "loss": loss.item()}
        if self.rank == 0:
            self.log.write(json.dumps(line).encode() + b"\n")
            self.log.flush()
        if self.batch % self.options.save_every == 0:
            self._save()

    def _save(self) -> None:
        """Write a new checkpoint, then replace the old one with it: one is always complete."""
        if self.rank != 0:
            return
        os.fsync(self.log.fileno())
        state: dict[str, Any] = {
            "network": self.network.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "batches": self.batches.state_dict(),
            "batch": self.batch,
            "log_bytes": self.log.tell(),
        }
        new = self.checkpoint.with_suffix(".new")
        with new.open("wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(new, self.checkpoint)


@torch.inference_mode()
def accuracy(network: nn.Module, options: argparse.Namespace, device: torch.device) -> float:
    """Return the fraction of images classified correctly, each counted once."""
    whole = Resize((options.size, options.size))
    dataset = open_dataset(options.validation or options.dataset, decode=whole)
    loader = make_loader(dataset, 64, rank=Rank(remainder="exact"))
    correct = torch.zeros((), dtype=torch.int64, device=device)
    for images, labels in DevicePrefetcher(loader, device, Normalize()):
        correct += (network(images).argmax(1) == labels).sum()
    return sum_over_ranks(correct).item() / len(dataset)


def sum_over_ranks(value: torch.Tensor) -> torch.Tensor:
    """Return the sum of ``value`` over all ranks."""
    if dist.is_initialized():
        dist.all_reduce(value)
    return value


def main() -> None:
    """Train and evaluate."""
    options = parse()
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    torch.set_num_threads(1)  # floating-point sums depend on how they are split
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
    if "RANK" in os.environ:  # started by torchrun
        dist.init_process_group("gloo" if device.type == "cpu" else "nccl")
    run = Run(options, device)
    run.train()
    fraction = accuracy(run.network, options, device)
    if run.rank == 0:
        print(f"accuracy {fraction:.1%}")
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
