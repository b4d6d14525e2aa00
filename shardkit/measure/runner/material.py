"""Datasets and transforms, created from what `measure.runner.spec` describes."""

from __future__ import annotations

import ast
import os
import pkgutil
import random
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch.utils.data import Dataset, Subset

from shardkit.dataset.manifest import MANIFEST_NAME
from shardkit.dataset.opened import OpenedDirectory
from shardkit.errors import ShardkitError, UsageError
from shardkit.measure.runner.folder import PlainFolder
from shardkit.measure.runner.spec import Subject
from shardkit.system.files import require_local
from shardkit.system.text import printable, shortened, size
from shardkit.torch.data.crops import OPERATIONS
from shardkit.torch.data.datasets import ShardDataset, open_dataset
from shardkit.torch.data.images import DECODES
from shardkit.torch.data.ops import ImageOp
from shardkit.torch.engine.preflight import why_processes

DEFAULT_OPERATION = "RandomResizedCrop(224)"
"""The first operation of most training scripts; images of several sizes make no batch without."""

_OPERATIONS: dict[str, Callable[..., ImageOp]] = {
    operation.__name__: operation for operation in OPERATIONS
}


def is_dataset(path: str) -> bool:
    """Return whether a dataset, or one with splits, is at ``path``, and not a plain folder."""
    require_local(path)
    folder = Path(path)
    if not folder.is_dir():
        problem = "is not a folder" if folder.exists() else "does not exist"
        raise UsageError(
            f"{path} {problem}", remedy="pass a shardkit dataset or a folder of images", where=path
        )
    return (folder / MANIFEST_NAME).exists() and bool(OpenedDirectory(folder).splits)


def choose_decode(paths: Sequence[str], decode: str | None, transform: str | None) -> str:
    """Return ``decode``, or the default for these paths: the same for all."""
    if decode is None and transform is not None:
        return "pil"
    if decode is None:
        raw = [
            is_dataset(path) and open_split(path, "torch", None).manifest.raw_shape
            for path in paths
        ]
        return "torch" if all(raw) else DEFAULT_OPERATION
    if parse_decode(decode) == "pil" and transform is None:
        raise UsageError(
            "decode pil requires a transform that returns tensors, because Pillow images cannot be "
            f"batched; otherwise use decode torch, or an operation such as {DEFAULT_OPERATION}"
        )
    return decode


def parse_decode(text: str) -> str | ImageOp:
    """Return a dataset's ``decode`` argument: a name, or an operation in Python syntax."""
    if text in DECODES:
        return text
    try:
        call = ast.parse(text.strip(), mode="eval").body
        if not isinstance(call, ast.Call) or ast.unparse(call.func) not in _OPERATIONS:
            raise ValueError
        values = [ast.literal_eval(value) for value in call.args]
        named = {keyword.arg or "": ast.literal_eval(keyword.value) for keyword in call.keywords}
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        choices = f"{', '.join(DECODES)}, {', '.join(f'{name}(...)' for name in _OPERATIONS)}"
        raise UsageError(f"decode {text!r} is unknown; choose from {choices}") from None
    try:
        return _OPERATIONS[ast.unparse(call.func)](*values, **named)
    except TypeError as error:
        raise UsageError(f"decode {text!r}: {error}") from None


def load_object(text: str, option: str, ready: Callable[[Any], bool]) -> Any:
    """Return the object that ``module:name`` refers to; it is called unless it is ``ready``."""
    working_directory = os.getcwd()
    if working_directory not in sys.path:  # last: nothing there replaces an installed module
        sys.path.append(working_directory)
    try:
        value: Any = pkgutil.resolve_name(text)
        if callable(value) and not ready(value):
            value = value()
    except ShardkitError:
        raise
    except Exception as error:
        raise UsageError(
            f"--{option} {text!r} cannot be imported or called without arguments "
            f"({type(error).__name__}: {error})",
            remedy="pass module:name, with a module that is installed or in this folder, such as "
            f"augment:{option}",
        ) from error
    if not ready(value):
        raise UsageError(f"--{option} {text!r} returns {type(value).__name__}, not a {option}")
    return value


def open_split(path: str, decode: str | ImageOp, transform: Any) -> ShardDataset:
    """Open a dataset; of one with splits, the largest split, which is the one for training."""
    splits = OpenedDirectory(path).splits.values()
    opened = [open_dataset(dataset.path, transform=transform, decode=decode) for dataset in splits]
    return max(opened, key=len)


def open_subject(subject: Subject) -> Dataset[Any]:
    """Open the dataset or image folder of a subject."""
    name = subject.transform
    transform = name and load_object(
        name, "transform", lambda value: callable(value) and not isinstance(value, type)
    )
    decode = parse_decode(subject.decode)
    opened: ShardDataset | PlainFolder
    if is_dataset(subject.path):
        opened = open_split(subject.path, decode, transform)
    else:
        opened = PlainFolder(Path(subject.path), decode, transform)
    if subject.limit is None or subject.limit >= len(opened):
        return opened
    # The same rows in every process, in stored order.
    rows = sorted(random.Random(0).sample(range(len(opened)), subject.limit))  # noqa: S311
    return Subset(opened, rows)


@dataclass(frozen=True, kw_only=True)
class SubjectInfo:
    """Kind and size of a subject."""

    path: str = ""
    kind: str = ""
    """``dataset`` of shardkit or ``folder`` of images; empty if unknown."""
    split: str = ""
    """Name of the split that is read, the largest; empty without splits."""
    images: int = 0
    """Images that are read; 0 if unknown."""
    total: int = 0
    """Images in the dataset."""
    bytes: int = 0
    """Bytes of all files; 0 if unknown."""
    processes: str = ""
    """Why it needs worker processes, such as a transform that may hold the GIL; else empty."""

    @property
    def title(self) -> str:
        """The path, the kind, the split and the size."""
        split = f", split {printable(self.split)}" if self.split else ""
        stored = f", {size(self.bytes)}" if self.bytes else ""
        details = f"{self.kind or 'dataset'}{split}, {self.total:,} images{stored}"
        return f"{shortened(self.path, 96 - len(details))}  {details}"


def describe(dataset: Any, path: str) -> tuple[SubjectInfo, list[Path]]:
    """Return what a dataset contains, and the files that an epoch reads, as far as known."""
    inner = dataset.dataset if isinstance(dataset, Subset) else dataset
    images = len(dataset) if hasattr(type(dataset), "__len__") else 0
    kind = ""
    folder = Path(path)
    total = images
    files = []
    stored = 0
    if isinstance(inner, ShardDataset):
        kind = "dataset"
        folder = inner.path
        total = len(inner)
        inside = (file for file in folder.rglob("*") if file.is_file())
        files = [*dict.fromkeys((*inside, *inner.shard_paths))]
        stored = sum(file.stat().st_size for file in files)
    elif isinstance(inner, PlainFolder):
        kind = "folder"
        folder = inner.root
        total = len(inner)
        rows = getattr(dataset, "indices", range(total))
        files = [Path(inner.samples[row][0]) for row in rows]
        stored = inner.bytes
    opened = SubjectInfo(
        path=path,
        kind=kind,
        split="" if folder.resolve() == Path(path).resolve() else folder.name,
        images=images,
        total=total,
        bytes=stored,
        processes=why_processes(dataset) or "",
    )
    return opened, files
