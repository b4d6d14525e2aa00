"""Helpers of the conformance suites: a sample, shards of it, child processes."""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import os
import random
import tempfile
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from math import prod
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pytest
from PIL import Image

from shardkit.contracts import Format, ShardReader, ShardSpec
from shardkit.record import Record

_Result = TypeVar("_Result")

RAW_SHAPE = (3, 5, 3)
"""Height, width and channels of the sample's raw pixels."""

_TIMEOUT_SECONDS = 240
"""Time limit of a child process; below the 300 s of a test."""


def write_shard(
    storage: Format,
    path: Path,
    content: Sequence[Record],
    *,
    meta: Mapping[str, Any] | None = None,
    raw_shape: tuple[int, int, int] | None = None,
) -> Path:
    """Write ``content`` as a shard to ``path``; return ``path``."""
    writer = storage.write(path, ShardSpec(meta=meta or {}, raw_shape=raw_shape))
    try:
        for record in content:
            writer.write(record)
        writer.close()
    except BaseException:
        writer.abort()
        raise
    return path


def read_shard(storage: Format, path: Path) -> list[Record]:
    """Return all records of the shard at ``path``."""
    with reading(storage, path) as reader:
        return reader.read(range(len(reader)))


def sample_records() -> list[Record]:
    """Return seven different records; every second has a label and raw pixels of `RAW_SHAPE`."""
    rng = random.Random("sample")
    samples = []
    for row in range(7):
        fields = {"jpg": rng.randbytes(1 + 900 * row), "json": b'{"row":%d}' % row}
        if row % 2:
            fields["cls"] = b"%d" % row
            fields["raw"] = rng.randbytes(prod(RAW_SHAPE))
        samples.append(Record(f"class {row % 3}/name-{row}", fields))
    return samples


@contextlib.contextmanager
def new_path() -> Iterator[Path]:
    """Provide a path of a file that does not exist; hypothesis needs one per example."""
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder) / "shard"


@contextlib.contextmanager
def reading(storage: Format, path: Path) -> Iterator[ShardReader]:
    """Open a reader of the shard at ``path``; close it on exit."""
    reader = storage.read(path)
    try:
        yield reader
    finally:
        reader.close()


def write_sample(storage: Format, path: Path, meta: Mapping[str, Any] | None = None) -> Path:
    """Write the sample as a shard to ``path``; return ``path``."""
    return write_shard(storage, path, sample_records(), meta=meta, raw_shape=RAW_SHAPE)


def flipped(data: bytes, position: int) -> bytes:
    """Return ``data`` with a different byte at ``position``."""
    mask = 1 + position * 37 % 255
    return data[:position] + bytes([data[position] ^ mask]) + data[position + 1 :]


def contents(folder: Path) -> dict[str, bytes]:
    """Return the content of each file below a folder, by path."""
    files = (path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def random_image(seed: int) -> Image.Image:
    """Return a small RGB image of random pixels."""
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (6, 5, 3), np.uint8))


NEW_PROCESS = "forkserver" if "forkserver" in multiprocessing.get_all_start_methods() else "spawn"
"""The cheaper way to start a process that has nothing of this one."""


def open_files() -> int:
    """Return the number of files that this process has open."""
    return len(os.listdir("/dev/fd"))


def leaves_open(before: int) -> bool:
    """Return whether more than ``before`` files are open, even after collecting garbage."""
    return open_files() > before and gc.collect() >= 0 and open_files() > before


def call_in(method: str, function: Callable[..., _Result], *arguments: Any) -> _Result:
    """Call a function of a module in a child process; return its result, or fail if it dies.

    ``method`` is a start method of `multiprocessing`.
    """
    context = multiprocessing.get_context(method)
    receiver, sender = context.Pipe(duplex=False)
    child = context.Process(target=_send, args=(sender, function, arguments))  # type: ignore[attr-defined]
    with warnings.catch_warnings():
        # Python 3.12 warns about threads of numpy and torch, which hold none of our locks.
        warnings.simplefilter("ignore", DeprecationWarning)
        child.start()
    sender.close()
    try:
        if not receiver.poll(_TIMEOUT_SECONDS):
            pytest.fail(f"{function.__name__} hangs in a child process ({method})")
        result, error = receiver.recv()
    except EOFError:
        child.join()
        pytest.fail(f"a child process ({method}) ended with exit code {child.exitcode}")
    finally:
        child.kill()
        child.join()
        child.close()
        receiver.close()
    if error:
        pytest.fail(f"in a child process ({method}):\n{error}")
    returned: _Result = result
    return returned


def _send(sender: Connection, function: Callable[..., Any], arguments: Sequence[Any]) -> None:
    try:
        sender.send((function(*arguments), ""))
    except BaseException:
        sender.send((None, traceback.format_exc()))
    sender.close()
