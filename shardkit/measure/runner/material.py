"""From what is to be measured to objects: datasets, transforms, loaders."""

from __future__ import annotations

import ast
import os
import random
import sys
from collections.abc import Iterator, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import DataLoader, Dataset, Subset

from shardkit.dataset.manifest import MANIFEST_NAME, dataset_directories
from shardkit.errors import UsageError
from shardkit.measure.runner.cases import CASES
from shardkit.measure.runner.folder import PlainFolder
from shardkit.measure.runner.spec import PLAIN, LoaderSpec, Subject
from shardkit.system.files import require_local
from shardkit.torch import _compat
from shardkit.torch.data import ops
from shardkit.torch.data.collate import collate
from shardkit.torch.data.datasets import DECODES, ShardDataset, open_dataset
from shardkit.torch.data.ops import ImageOp
from shardkit.torch.engine.workers import end_with_parent
from shardkit.torch.loader import make_loader
from shardkit.torch.prefetch import DevicePrefetcher

DEFAULT_OPERATION = "RandomResizedCrop(224)"
"""What most training scripts begin with; images of many sizes make no batch otherwise."""

_OPERATIONS = ("CenterCrop", "RandomResizedCrop", "Resize")

_LOOKED_AT = 1000
"""Images whose sizes stand for all."""


class BatchSource(Protocol):
    """What is timed: gives the batches of one epoch at each iteration."""

    def __iter__(self) -> Iterator[Any]: ...


def is_dataset(path: str) -> bool:
    """Tell whether a dataset, or one with splits, is at ``path``; a plain folder may be there too.

    Raises:
        UsageError: If nothing is there, a file, or a dataset of a newer version.
        CorruptDataset: If the manifest is damaged.
    """
    require_local(path)
    place = Path(path)
    if not place.is_dir():
        what = "is no folder" if place.exists() else "does not exist"
        raise UsageError(f"{path} {what}: give a dataset of shardkit, or a folder of images")
    return (place / MANIFEST_NAME).exists() and bool(dataset_directories(place))


def choose_decode(paths: Sequence[str], decode: str | None, transform: str | None) -> str:
    """Return what is made of an image where nobody said: the same for all that is compared."""
    if decode is not None:
        if parse_decode(decode) == "pil" and transform is None:
            raise UsageError(
                "decode pil needs a transform that makes tensors: images of Pillow make no batch; "
                f"or give decode torch, or an operation such as {DEFAULT_OPERATION}"
            )
        return decode
    if transform is not None:
        return "pil"
    datasets = [open_split(path, "torch", None) for path in paths if is_dataset(path)]
    if len(datasets) == len(paths) and all(each.manifest.raw_shape for each in datasets):
        return "torch"
    return DEFAULT_OPERATION


def parse_decode(text: str) -> str | ImageOp:
    """Return what a dataset takes as ``decode``: a name, or an operation as Python writes it.

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
        operation = getattr(ops, call.func.id)(*values, **named)
    except TypeError as error:
        raise UsageError(f"decode {text!r}: {error}") from None
    assert isinstance(operation, ImageOp)
    return operation


def load_reference(text: str, what: str) -> Any:
    """Return the object that ``module:name`` says; modules of the current folder are found.

    Raises:
        UsageError: If there is none, or its module cannot be imported.
    """
    module, colon, name = text.partition(":")
    if not colon or not module or not name:
        raise UsageError(f"--{what} {text!r} is not module:name, such as augment:transform")
    here = os.getcwd()
    if here not in sys.path:  # last: nothing there replaces an installed module
        sys.path.append(here)
    try:
        found: Any = import_module(module)
    except ModuleNotFoundError as error:
        if error.name != module.split(".")[0]:
            raise UsageError(f"--{what} {text!r}: importing {module}: {error}") from error
        raise UsageError(
            f"--{what} {text!r}: there is no module {module!r} here ({here}) nor installed"
        ) from error
    except Exception as error:
        raise UsageError(
            f"--{what} {text!r}: importing {module} failed: {type(error).__name__}: {error}"
        ) from error
    for part in name.split("."):
        if not hasattr(found, part):
            offered = [each for each, value in vars(found).items() if callable(value)]
            shown = ", ".join(each for each in offered if not each.startswith("_")) or "nothing"
            raise UsageError(f"--{what} {text!r}: there is no {part!r}; callable are: {shown}")
        found = getattr(found, part)
    return found


def load_transform(text: str) -> Any:
    """Return a transform; of a class, an instance made without arguments.

    Raises:
        UsageError: If there is none, or it cannot be called.
    """
    found = load_reference(text, "transform")
    if isinstance(found, type):
        try:
            found = found()
        except TypeError as error:
            raise UsageError(
                f"--transform {text!r} is a class that needs arguments ({error}); name an object "
                "that is made already"
            ) from None
    if not callable(found):
        raise UsageError(f"--transform {text!r} is a {type(found).__name__}, and not callable")
    if isinstance(found, ImageOp):
        raise UsageError(f"--transform {text!r} is an operation of shardkit: give it as --decode")
    return found


def open_split(path: str, decode: str | ImageOp, transform: Any) -> ShardDataset:
    """Open a dataset; of one with splits the largest, which is what is trained from."""
    places = dataset_directories(Path(path))
    opened = [open_dataset(each, transform=transform, decode=decode) for each in places.values()]
    return max(opened, key=len)


def open_subject(subject: Subject) -> Dataset[Any]:
    """Open what a subject names.

    Raises:
        UsageError: If there is no such dataset, folder, case, transform or way to decode.
    """
    if subject.case is not None:
        if subject.case not in CASES:
            raise UsageError(f"the case {subject.case!r} is unknown; known: {', '.join(CASES)}")
        return CASES[subject.case]()
    transform = None if subject.transform is None else load_transform(subject.transform)
    decode = parse_decode(subject.decode)
    if is_dataset(subject.path):
        opened: Any = open_split(subject.path, decode, transform)
    else:
        opened = PlainFolder(Path(subject.path), decode, transform)
    return _sampled(opened, subject.limit)


def _sampled(dataset: Any, limit: int | None) -> Dataset[Any]:
    """Return ``limit`` rows of a dataset, the same in every process; in random order, as stored."""
    if limit is None or limit >= len(dataset):
        return dataset  # type: ignore[no-any-return]
    rows = sorted(random.Random(0).sample(range(len(dataset)), limit))  # noqa: S311
    if isinstance(dataset, PlainFolder):
        dataset.keep(rows)
        return dataset
    return Subset(dataset, rows)


def whole(dataset: Any) -> Any:
    """Return the dataset that a sample was drawn from, or itself."""
    return dataset.dataset if isinstance(dataset, Subset) else dataset


def split_name(dataset: Any, path: str) -> str:
    """Return which split of what lies at ``path`` was opened; nothing if that has none."""
    dataset = whole(dataset)
    if not isinstance(dataset, ShardDataset | PlainFolder):
        return ""
    place = dataset.root if isinstance(dataset, PlainFolder) else dataset.path
    return "" if place.resolve() == Path(path).resolve() else place.name


def total(dataset: Any) -> int:
    """Return the number of images there are, of which a sample may be read."""
    return dataset.total if isinstance(dataset, PlainFolder) else len(whole(dataset))


def files_of(dataset: Any) -> list[Path]:
    """Return the files that an epoch reads, so that their pages can be dropped."""
    dataset = whole(dataset)
    if isinstance(dataset, ShardDataset):
        return [path for path in dataset.path.rglob("*") if path.is_file()]
    return dataset.files() if isinstance(dataset, PlainFolder) else []


def total_bytes(dataset: Any, files: Sequence[Path]) -> int:
    """Return the bytes of all files that there are, of which a sample may be read.

    Args:
        dataset: The dataset or image folder.
        files: What `files_of` returned for it.
    """
    if isinstance(dataset, PlainFolder):
        return dataset.bytes
    return sum(path.stat().st_size for path in files)


def mean_bytes(dataset: Any) -> float:
    """Return the stored bytes of an image in the mean; 0 if there are none.

    Of many images some are looked at, drawn evenly: those of one class stand side by side.
    """
    dataset = whole(dataset)
    if isinstance(dataset, ShardDataset):
        lengths = dataset.stored_bytes(_evenly(len(dataset)))
    elif isinstance(dataset, PlainFolder):
        rows = _evenly(len(dataset)).tolist()
        lengths = np.array([dataset.entries[row].bytes for row in rows])
    else:
        return 0.0
    return float(lengths.mean()) if len(lengths) else 0.0


def _evenly(count: int) -> npt.NDArray[np.int64]:
    """Return rows from the first to the last, at most `_LOOKED_AT` of them."""
    return np.linspace(0, count - 1, min(count, _LOOKED_AT)).astype(np.int64)


class OneByOne(Dataset[Any]):
    """A dataset that hides that it can read batches."""

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, row: int) -> Any:
        return self._dataset[row]


def first_rows(dataset: Any, rows: int | None) -> Any:
    """Return a dataset of the first rows of another; None takes all."""
    return dataset if rows is None or rows >= len(dataset) else Subset(dataset, range(rows))


def build_loader(dataset: Any, loading: LoaderSpec, seed: int = 0) -> BatchSource:
    """Return a loader that reads in random order.

    Raises:
        UsageError: If the options do not go together.
    """
    if loading.engine == PLAIN:
        loader: BatchSource = _plain_loader(dataset, loading, seed)
    else:
        options = loading.loader_options()
        loader = make_loader(dataset, loading.batch_size, shuffle=True, seed=seed, options=options)
    return loader if loading.device is None else DevicePrefetcher(loader, loading.device)


def _plain_loader(dataset: Any, loading: LoaderSpec, seed: int) -> DataLoader[Any]:
    chosen = dict(loading.options)
    workers = chosen.get("num_workers", 0)
    return DataLoader(
        dataset if chosen.get("batched") else OneByOne(dataset),
        loading.batch_size,
        shuffle=True,
        num_workers=workers,
        collate_fn=collate if chosen.get("batched") else None,
        pin_memory=chosen.get("pin_memory", False),
        prefetch_factor=chosen.get("prefetch_factor", 2) if workers else None,
        persistent_workers=chosen.get("persistent_workers", False) and workers > 0,
        generator=torch.Generator().manual_seed(seed),
        # Else a worker that hangs stays when this process is killed.
        worker_init_fn=end_with_parent,
    )


def bare_loader(loader: Any) -> Any:
    """Return the loader that makes the batches, without a prefetcher around it."""
    return loader.loader if isinstance(loader, DevicePrefetcher) else loader


def close_loader(loader: Any) -> None:
    """End the workers of a loader now."""
    loader = bare_loader(loader)
    if hasattr(loader, "close"):
        loader.close()
    elif (iterator := _compat.persistent_iterator(loader)) is not None:
        _compat.shut_down(iterator)
        _compat.forget_iterator(loader)
