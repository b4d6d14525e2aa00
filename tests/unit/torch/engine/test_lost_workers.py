"""Workers that end while nobody waits for a batch: an error, never a loader that waits forever."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import threading
from multiprocessing import resource_sharer
from typing import Any

import pytest
import torch
from helpers import DEADLINE, wait_until
from loading import METHODS
from torch.utils.data import Dataset

from shardkit import make_loader
from shardkit.errors import LoaderFailed
from shardkit.torch.engine import workers

ROWS = 4


class Pids(Dataset[torch.Tensor]):
    """The process that reads each row, in a tensor too large for a pipe."""

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, row: int) -> torch.Tensor:
        return torch.full((100_000,), os.getpid())


def kill(pid: int) -> None:
    """Kill a worker, and wait for its end."""

    def is_gone() -> bool:
        return pid not in [child.pid for child in multiprocessing.active_children()]

    with contextlib.suppress(RuntimeError):  # of PyTorch, once, wherever this process is
        os.kill(pid, signal.SIGKILL)
        wait_until(is_gone, "the end of a worker")
    wait_until(is_gone, "the end of a worker")


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("timeout", [0, 3600])
@pytest.mark.parametrize("engine", ["helper", "process"])
def test_a_worker_that_dies_between_epochs_is_an_error_of_the_next_one(
    engine: str, timeout: float, method: str
) -> None:
    options: dict[str, Any] = {"engine": engine, "timeout": timeout, "start_method": method}
    with contextlib.closing(make_loader(Pids(), 1, num_workers=1, **options)) as loader:
        first, second = [*loader], [*loader]
        assert len(first) == len(second) == ROWS
        pid = int(second[0][0, 0])
        kill(pid)
        with pytest.raises(LoaderFailed, match="SIGKILL"):
            list(loader)
        assert {int(batch[0, 0]) for batch in loader} not in ({pid}, {os.getpid()})


def test_a_worker_that_dies_while_it_hands_memory_over_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its end of the connection is gone a moment before the worker is."""
    options: dict[str, Any] = {"engine": "process", "num_workers": 1, "start_method": "fork"}
    with contextlib.closing(make_loader(Pids(), 1, **options)) as loader:
        batches = iter(loader)
        dying = threading.Timer(0.1, os.kill, (int(next(batches)[0, 0]), signal.SIGKILL))

        def lose(_: object) -> int:
            dying.start()
            raise ConnectionResetError

        monkeypatch.setattr(workers, "STOP_SECONDS", DEADLINE)
        monkeypatch.setattr(resource_sharer.DupFd, "detach", lose)
        with pytest.raises(LoaderFailed, match="SIGKILL"):
            list(batches)
        dying.join()


def test_a_worker_that_is_stopped_while_it_hands_memory_over_is_late(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    options: dict[str, Any] = {"engine": "process", "num_workers": 1, "start_method": "fork"}
    with contextlib.closing(make_loader(Pids(), 1, **options)) as loader:
        batches = iter(loader)
        pid = int(next(batches)[0, 0])
        engine: Any = loader._engine
        assert engine._crew.wait(DEADLINE), "the next batch"
        os.kill(pid, signal.SIGSTOP)
        monkeypatch.setattr(engine, "_timeout", 0.1)
        monkeypatch.setattr(engine._crew, "timeout", 0.1)
        with pytest.raises(LoaderFailed, match="worker 0"):
            list(batches)
    wait_until(lambda: not multiprocessing.active_children(), "the end of the worker")


def test_a_stopped_worker_blocks_nobody_before_it_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine, a worker may be there for long after it was killed."""
    monkeypatch.setattr(workers, "STOP_SECONDS", 0.1)
    options: dict[str, Any] = {"engine": "process", "num_workers": 1, "start_method": "fork"}
    loader = make_loader(Pids(), 1, **options)
    pid = int(next(iter(loader))[0, 0])
    os.kill(pid, signal.SIGSTOP)
    monkeypatch.setattr(workers, "_kill", lambda _: None)

    try:
        loader.close()
    finally:
        os.kill(pid, signal.SIGKILL)
    wait_until(lambda: not multiprocessing.active_children(), "the end of the worker")
