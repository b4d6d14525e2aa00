"""Conversions that are interrupted, and what they may leave."""

from __future__ import annotations

import contextlib
import hashlib
import os
import pkgutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from stated import MANIFEST, WORK, stated

from shardkit import convert


def converted(source: Path, target: Path, to: Any = "webdataset", **options: Any) -> Any:
    """Convert in this process alone."""
    return convert(source, target, to=to, **{"workers": 1, **options})


def made(source: Path, target: Path, to: str = "webdataset", **options: Any) -> Any:
    """Convert a source without splits; return what its manifest states."""
    converted(source, target, to, **options)
    return stated(target)


def without_work(found: dict[str, str]) -> dict[str, str]:
    """Return the files of `tree` but those of an unfinished conversion."""
    return {name: kind for name, kind in found.items() if not name.startswith(WORK)}


def is_whole(dataset: Path) -> bool:
    """Return whether a directory holds either no dataset or a complete one."""
    if not (dataset / MANIFEST).exists():
        return True
    top = stated(dataset)
    parts = [dataset / name for name in top.splits] if top.kind == "splits" else [dataset]
    return all(
        hashlib.sha256((part / entry.name).read_bytes()).hexdigest() == entry.sha256
        for part in parts
        for entry in stated(part).entries
    )


@contextlib.contextmanager
def stopped(name: str, after: int = 0) -> Iterator[None]:
    """Raise KeyboardInterrupt instead of the call of a function that follows ``after`` others."""
    function: Callable[..., Any] = pkgutil.resolve_name(name)
    calls = 0

    def call(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls > after:
            raise KeyboardInterrupt
        return function(*args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(name, call)
        yield


@contextlib.contextmanager
def stopped_at_any_step(after: int) -> Iterator[None]:
    """Raise KeyboardInterrupt at the step on the disk that follows ``after`` others."""
    steps = 0

    def counted(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal steps
            steps += 1
            if steps > after:
                raise KeyboardInterrupt
            return function(*args, **kwargs)

        return call

    with pytest.MonkeyPatch.context() as patch:
        for name in ("replace", "rename", "unlink", "rmdir", "mkdir"):
            patch.setattr(os, name, counted(getattr(os, name)))
        yield
