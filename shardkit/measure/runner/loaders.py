"""Loaders, created from what `measure.runner.spec` describes."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.data import ConcatDataset, DataLoader

from shardkit.measure.runner.spec import PLAIN, LoaderSpec
from shardkit.torch import _compat
from shardkit.torch.data.collate import collate
from shardkit.torch.engine.workers import end_with_parent
from shardkit.torch.loader import make_loader

_WORKER_OPTIONS = ("prefetch_factor", "persistent_workers")
"""Arguments that DataLoader refuses without workers."""


def build_loader(dataset: Any, spec: LoaderSpec, seed: int = 0) -> Any:
    """Return a loader that reads a dataset in random order."""
    if spec.engine != PLAIN:
        chosen = vars(spec.loader_options())
        return make_loader(dataset, spec.batch_size, shuffle=True, seed=seed, **chosen)
    options = spec.options
    batched = options.pop("batched", False)
    if not spec.workers:
        options = {name: options[name] for name in options if name not in _WORKER_OPTIONS}
    return DataLoader(
        dataset if batched else ConcatDataset([dataset]),  # which reads one row at a time
        spec.batch_size,
        shuffle=True,
        collate_fn=collate if batched else None,
        generator=torch.Generator().manual_seed(seed),
        worker_init_fn=end_with_parent,  # otherwise a worker that hangs outlives this process
        **options,
    )


def close_loader(loader: Any) -> None:
    """Stop the workers of a loader now."""
    if hasattr(loader, "close"):
        loader.close()
    elif isinstance(loader, DataLoader):
        iterator = _compat.persistent_iterator(loader)
        if iterator is not None:
            _compat.shut_down(iterator)
            _compat.forget_iterator(loader)
