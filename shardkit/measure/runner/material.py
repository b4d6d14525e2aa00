"""Datasets, transforms and loaders, created from what `measure.runner.spec` describes."""

from __future__ import annotations

import ast
import os
import random
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset

from shardkit.dataset.manifest import MANIFEST_NAME, dataset_directories
from shardkit.errors import UsageError
from shardkit.measure.runner.folder import PlainFolder
from shardkit.measure.runner.spec import PLAIN, LoaderSpec, Subject
from shardkit.system.files import require_local
from shardkit.torch import _compat
from shardkit.torch.data import ops
from shardkit.torch.data.collate import collate
from shardkit.torch.data.datasets import DECODES, ShardDataset, open_dataset
from shardkit.torch.data.ops import ImageOp
from shardkit.torch.engine.preflight import why_processes
from shardkit.torch.engine.workers import end_with_parent
from shardkit.torch.loader import make_loader
from shardkit.torch.prefetch import DevicePrefetcher

DEFAULT_OPERATION = "RandomResizedCrop(224)"
"""The first operation of most training scripts; images of several sizes make no batch without."""

_OPERATIONS = ("CenterCrop", "RandomResizedCrop", "Resize")

_SAMPLED_SIZES = 1000
"""Images whose stored sizes represent all."""


def is_dataset(path: str) -> bool:
    """Return whether a dataset, or one with splits, is at ``path``, and not a plain folder.

    Raises:
        UsageError: If nothing is there, a file, or a dataset of a newer version.
        CorruptDataset: If the manifest is damaged.
    """
    require_local(path)
    place = Path(path)
    if not place.is_dir():
        what = "is not a folder" if place.exists() else "does not exist"
        raise UsageError(f"{path} {what}: give a dataset of shardkit, or a folder of images")
    return (place / MANIFEST_NAME).exists() and bool(dataset_directories(place))


def choose_decode(paths: Sequence[str], decode: str | None, transform: str | None) -> str:
    """Return ``decode``, or the default for these paths: the same for all.

    Raises:
        UsageError: If samples of this type make no batch.
    """
    if decode is not None:
        if parse_decode(decode) == "pil" and transform is None:
            raise UsageError(
                "decode pil requires a transform that returns tensors: Pillow images make no "
                f"batch; or use decode torch, or an operation such as {DEFAULT_OPERATION}"
            )
        return decode
    if transform is not None:
        return "pil"
    datasets = [open_split(path, "torch", None) for path in paths if is_dataset(path)]
    if len(datasets) == len(paths) and all(each.manifest.raw_shape for each in datasets):
        return "torch"
    return DEFAULT_OPERATION


def parse_decode(text: str) -> str | ImageOp:
    """Return a dataset's ``decode`` argument: a name, or an operation in Python syntax.

    Raises:
        UsageError: If it is neither.
    """
    if text in DECODES:
        return text
    known = f"{', '.join(DECODES)}, {', '.join(f'{name}(...)' for name in _OPERATIONS)}"
    try:
        call = ast.parse(text.strip(), mode="eval").body
        if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name):
            raise ValueError
        if call.func.id not in _OPERATIONS:
            raise ValueError
        values = [ast.literal_eval(each) for each in call.args]
        named = {each.arg or "": ast.literal_eval(each.value) for each in call.keywords}
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        raise UsageError(f"decode {text!r} is unknown; known are {known}") from None
    try:
        operation: ImageOp = getattr(ops, call.func.id)(*values, **named)
    except TypeError as error:
        raise UsageError(f"decode {text!r}: {error}") from None
    return operation


def load_reference(text: str, option: str) -> Any:
    """Return the object that ``module:name`` refers to; the current folder is searched too.

    Raises:
        UsageError: If it does not exist, or its module cannot be imported.
    """
    module, colon, name = text.partition(":")
    if not colon or not module or not name:
        raise UsageError(f"--{option} {text!r} is not module:name, such as augment:{option}")
    here = os.getcwd()
    if here not in sys.path:  # last: nothing there replaces an installed module
        sys.path.append(here)
    try:
        found: Any = import_module(module)
    except Exception as error:
        if isinstance(error, ModuleNotFoundError) and error.name == module.split(".")[0]:
            why = f"there is no module {module!r} here ({here}) or installed"
        else:
            why = f"importing {module} failed: {type(error).__name__}: {error}"
        raise UsageError(f"--{option} {text!r}: {why}") from error
    for part in name.split("."):
        if not hasattr(found, part):
            names = [each for each, value in vars(found).items() if callable(value)]
            shown = ", ".join(each for each in names if not each.startswith("_")) or "nothing"
            raise UsageError(f"--{option} {text!r}: there is no {part!r}; callable are: {shown}")
        found = getattr(found, part)
    return found


def call_reference(text: str, option: str) -> Any:
    """Return the result of the function or class that ``module:name`` refers to.

    Raises:
        UsageError: If it does not exist, or cannot be called without arguments.
    """
    found = load_reference(text, option)
    try:
        return found()
    except TypeError as error:
        raise UsageError(
            f"--{option} {text!r} cannot be called without arguments ({error}): name a function "
            f"that returns the {option}"
        ) from error


def load_transform(text: str) -> Any:
    """Return a transform; of a class, an instance created without arguments.

    Raises:
        UsageError: If it does not exist, or is not callable.
    """
    found = load_reference(text, "transform")
    if isinstance(found, type):
        found = call_reference(text, "transform")
    if not callable(found):
        raise UsageError(f"--transform {text!r} is a {type(found).__name__}, and not callable")
    if isinstance(found, ImageOp):
        raise UsageError(f"--transform {text!r} is an operation of shardkit: use --decode")
    return found


def open_split(path: str, decode: str | ImageOp, transform: Any) -> ShardDataset:
    """Open a dataset; of one with splits, the largest split, which is the one for training."""
    places = dataset_directories(Path(path))
    opened = [open_dataset(each, transform=transform, decode=decode) for each in places.values()]
    return max(opened, key=len)


def open_subject(subject: Subject) -> Dataset[Any]:
    """Open the dataset or image folder of a subject.

    Raises:
        UsageError: If the dataset, folder, transform or way to decode does not exist.
    """
    if subject.dataset is not None:
        opened: Any = call_reference(subject.dataset, "dataset")
    else:
        transform = None if subject.transform is None else load_transform(subject.transform)
        decode = parse_decode(subject.decode)
        if is_dataset(subject.path):
            opened = open_split(subject.path, decode, transform)
        else:
            opened = PlainFolder(Path(subject.path), decode, transform)
    if subject.limit is None or subject.limit >= len(opened):
        return opened  # type: ignore[no-any-return]
    # The same rows in every process, in stored order.
    rows = sorted(random.Random(0).sample(range(len(opened)), subject.limit))  # noqa: S311
    if isinstance(opened, PlainFolder):
        opened.keep(rows)
        return opened
    return Subset(opened, rows)


@dataclass(frozen=True, kw_only=True)
class Opened:
    """What a subject contains."""

    split: str = ""
    """Name of the split that is read, the largest; empty without splits."""
    images: int = 0
    """Images that are read; 0 if unknown."""
    total: int = 0
    """Images in the dataset."""
    mean_bytes: float = 0.0
    """Mean stored bytes of an image, of an even sample; 0 if unknown."""
    bytes: int = 0
    """Bytes of all files; 0 if unknown."""
    processes: str = ""
    """Why it needs worker processes, such as a transform that may hold the GIL; else empty."""


def describe(dataset: Any, path: str) -> tuple[Opened, list[Path]]:
    """Return what a dataset contains, and the files that an epoch reads, as far as known."""
    whole = dataset.dataset if isinstance(dataset, Subset) else dataset
    images = len(dataset) if hasattr(type(dataset), "__len__") else 0
    opened = Opened(images=images, total=images, processes=why_processes(dataset) or "")
    if isinstance(whole, ShardDataset):
        files = [each for each in whole.path.rglob("*") if each.is_file()]
        place, total = whole.path, len(whole)
        stored = sum(each.stat().st_size for each in files)
        mean = float(whole.stored_bytes(_evenly(total)).mean()) if total else 0.0
    elif isinstance(whole, PlainFolder):
        files, place, total, stored = whole.files(), whole.root, whole.total, whole.bytes
        sizes = [whole.entries[row].bytes for row in _evenly(len(whole)).tolist()]
        mean = float(np.mean(sizes)) if sizes else 0.0
    else:
        return opened, []
    split = "" if place.resolve() == Path(path).resolve() else place.name
    return replace(opened, split=split, total=total, mean_bytes=mean, bytes=stored), files


def _evenly(count: int) -> npt.NDArray[np.int64]:
    """Return rows from the first to the last, at most `_SAMPLED_SIZES`."""
    return np.linspace(0, max(0, count - 1), min(count, _SAMPLED_SIZES)).astype(np.int64)


class OneByOne(Dataset[Any]):
    """A dataset that hides that it can read batches."""

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, row: int) -> Any:
        return self._dataset[row]


def build_loader(dataset: Any, spec: LoaderSpec, seed: int = 0) -> Any:
    """Return a loader that reads a dataset in random order.

    Raises:
        UsageError: If the options do not go together.
    """
    if spec.engine == PLAIN:
        options = dict(spec.options)
        batched = options.pop("batched", False)
        loader: Any = DataLoader(
            dataset if batched else OneByOne(dataset),
            spec.batch_size,
            shuffle=True,
            collate_fn=collate if batched else None,
            generator=torch.Generator().manual_seed(seed),
            **_worker_arguments(options),
        )
    else:
        chosen = spec.loader_options()
        loader = make_loader(dataset, spec.batch_size, shuffle=True, seed=seed, options=chosen)
    return loader if spec.device is None else DevicePrefetcher(loader, spec.device)


def rebuild_loader(loader: Any, spec: LoaderSpec) -> Any:
    """Return a user's loader; with options, a DataLoader of the same dataset, order and collation.

    Raises:
        UsageError: If it has no options to change, or is not a loader.
    """
    if loader is None or not hasattr(loader, "__iter__"):
        raise UsageError("--loader: the function returned nothing to iterate over")
    if not spec.options:
        return loader
    if not isinstance(loader, DataLoader):
        raise UsageError(f"options of a {type(loader).__name__} cannot be changed from outside")
    kept = ("num_workers", "prefetch_factor", "pin_memory", "persistent_workers")
    options = {name: getattr(loader, name) for name in kept} | dict(spec.options)
    if isinstance(loader.dataset, IterableDataset) or loader.batch_sampler is None:
        order: dict[str, Any] = {"batch_size": loader.batch_size, "drop_last": loader.drop_last}
        if not isinstance(loader.dataset, IterableDataset):
            order["sampler"] = loader.sampler
    else:
        order = {"batch_sampler": loader.batch_sampler}
    return DataLoader(
        loader.dataset,
        collate_fn=loader.collate_fn,
        generator=loader.generator,
        timeout=loader.timeout,
        **order,
        **_worker_arguments(options, loader.worker_init_fn),
    )


def _worker_arguments(options: dict[str, Any], worker_init: Any = None) -> dict[str, Any]:
    """Return the arguments of DataLoader for workers; some are forbidden without any."""
    workers = options.get("num_workers", 0)
    factor = options.get("prefetch_factor")
    return {
        "num_workers": workers,
        "pin_memory": options.get("pin_memory", False),
        "prefetch_factor": (factor or 2) if workers else None,
        "persistent_workers": options.get("persistent_workers", False) and workers > 0,
        # Otherwise a worker that hangs outlives this process.
        "worker_init_fn": worker_init or end_with_parent,
    }


def bare_loader(loader: Any) -> Any:
    """Return the loader that makes the batches, without a prefetcher around it."""
    return loader.loader if isinstance(loader, DevicePrefetcher) else loader


def close_loader(loader: Any) -> None:
    """Stop the workers of a loader now."""
    loader = bare_loader(loader)
    if hasattr(loader, "close"):
        loader.close()
    elif isinstance(loader, DataLoader):
        iterator = _compat.persistent_iterator(loader)
        if iterator is not None:
            _compat.shut_down(iterator)
            _compat.forget_iterator(loader)
