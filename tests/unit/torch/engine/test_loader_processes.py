"""What is special to loaders with processes: start methods, draws of workers, what they leave.

Their batches are laws of `test_engine_conformance.py`.
"""

from __future__ import annotations

import random
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers import DEADLINE, execute, wait_until
from loading import BATCH, CROP, ROWS, SEED, crc, same
from torch.utils.data import Dataset, Subset
from torch.utils.data._utils import pin_memory

from shardkit import Rank, make_loader, open_dataset
from shardkit.torch.engine import workers


def in_processes(num_workers: int = 2, **options: Any) -> dict[str, Any]:
    chosen = {"start_method": "fork", "timeout": 60.0, **options}
    return {"engine": "process", "num_workers": num_workers, **chosen}


def epochs_of(dataset: Any, options: dict[str, Any], epochs: int = 2) -> list[list[Any]]:
    """Return the batches of the first epochs; the loader ends with them."""
    with closing(make_loader(dataset, BATCH, shuffle=True, seed=SEED, **options)) as loader:
        return [list(loader) for _ in range(epochs)]


def three_numbers(image: Any) -> torch.Tensor:
    """A typical transform: it draws from all three global generators."""
    drawn = [random.random(), float(np.random.random()), float(torch.rand(()))]
    return torch.tensor([crc(image), *drawn], dtype=torch.float64)


def mixed(samples: Any) -> torch.Tensor:
    """A collate function that draws random numbers, like mixup."""
    return torch.cat([torch.rand(4, dtype=torch.float64), torch.tensor([float(len(samples))])])


@pytest.mark.slow
def test_a_collate_function_draws_differently_in_each_rank_worker_and_epoch(root: Path) -> None:
    dataset = open_dataset(root / "hdf5", decode=CROP)
    drawn = []
    for rank in range(2):
        this_rank = Rank(rank=rank, world_size=2)
        for persistent in (False, True)[: 2 - rank]:
            options = in_processes(
                2 - rank, collate_fn=mixed, rank=this_rank, persistent_workers=persistent
            )
            epochs = epochs_of(dataset, options)
            values = torch.cat([batch[:4] for epoch in epochs for batch in epoch])
            assert len(set(values.tolist())) == len(values), "epochs or workers drew the same"
            drawn.append(set(values.tolist()))
    assert not drawn[0] & drawn[2], "ranks drew the same"


class OwnRandom(Dataset[torch.Tensor]):
    """A user's dataset that draws random numbers itself."""

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, row: int) -> torch.Tensor:
        return three_numbers(np.array([row], np.uint8))


def test_a_dataset_that_draws_by_itself_repeats_and_draws_again_in_each_epoch() -> None:
    expected = epochs_of(OwnRandom(), {"engine": "thread", "num_workers": 0})
    one, two = ({float(v) for batch in epoch for v in batch[:, 3]} for epoch in expected)
    assert len(one) == len(two) == ROWS
    assert not one & two
    for persistent in (False, True):
        found = epochs_of(OwnRandom(), in_processes(2, persistent_workers=persistent))
        assert same(found, expected)


def interleaved(loaders: list[Any]) -> list[list[Any]]:
    """Return the batches of two epochs of each loader, taken in turn, one from each."""
    found: list[list[Any]] = [[] for _ in loaders]
    for _ in range(2):
        open_ones: list[Iterator[Any] | None] = list(map(iter, loaders))
        while any(open_ones):
            for number, one in enumerate(open_ones):
                batch = None if one is None else next(one, None)
                if batch is None:
                    open_ones[number] = None
                else:
                    found[number].append(batch)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("engines", [("thread", "thread"), ("helper", "process")])
def test_two_loaders_of_one_dataset_do_not_disturb_each_other(
    root: Path, engines: tuple[str, str]
) -> None:
    dataset = open_dataset(root / "webdataset", decode=CROP)
    parts = [Subset(dataset, range(12)), Subset(dataset, range(6, ROWS))]

    def loaders() -> list[Any]:
        return [
            make_loader(
                part,
                number + 2,
                shuffle=True,
                seed=number,
                engine=engine,  # type: ignore[arg-type]
                num_workers=number + 1,
                start_method="fork",
            )
            for number, (part, engine) in enumerate(zip(parts, engines, strict=True))
        ]

    together = loaders()
    together[1].set_epoch(7)
    dataset.set_epoch(3, 99)  # what others are told is no matter
    found = interleaved(together)
    apart = loaders()
    apart[1].set_epoch(7)
    for number, loader in enumerate(apart):
        assert same(found[number], [batch for _ in range(2) for batch in loader])
    for loader in (*together, *apart):
        loader.close()


class Slow:
    """A dataset whose rows take longer than the loader's interval to check its workers."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, row: int) -> int:
        time.sleep(0.05)
        return row


def test_the_next_epoch_waits_for_abandoned_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shardkit.torch.engine.processes._POLL_SECONDS", 0.01)
    options: dict[str, Any] = {"engine": "process", "num_workers": 1, "start_method": "fork"}
    loader = make_loader(Slow(), 1, **options)
    assert next(iter(loader)).tolist() == [0]
    assert [batch.item() for batch in loader] == list(range(8))
    loader.close()


@pytest.mark.parametrize("dropped", [False, True])
def test_a_worker_that_dies_with_a_lock_blocks_nobody(root: Path, dropped: bool) -> None:
    """SIGTERM may come while a worker looks whether it is to end; the lock of that stays locked."""
    dataset = open_dataset(root / "lmdb", decode=CROP)
    loader = make_loader(dataset, BATCH, **in_processes(1))
    batches = iter(loader)
    next(batches)
    iterator = loader._engine._iterator  # type: ignore[attr-defined]
    iterator._workers[0].kill()
    iterator._workers[0].join()
    iterator._workers_done_event._cond._lock.acquire(block=False)  # as the dead worker might
    if dropped:
        del loader, batches
    else:
        loader.close()
    iterator._shutdown_workers()


@pytest.mark.parametrize(("method", "length", "inside"), [("fork", 120, 0), ("forkserver", 0, 1)])
@pytest.mark.slow
def test_workers_leave_no_folders_behind(
    tmp_path: Path, method: str, length: int, inside: int
) -> None:
    """Each would make one for its sockets, which nobody removes if it is ended by a signal."""
    script = tmp_path / "script.py"
    script.write_text(
        "import os, sys, tempfile, torch\n"
        "from shardkit import make_loader\n"
        "class Large:\n"
        "    def __len__(self): return 8\n"
        "    def __getitem__(self, row): return torch.zeros(200_000), 0\n"
        "if __name__ == '__main__':\n"
        f"    options = dict(engine='process', num_workers=2, start_method={method!r})\n"
        "    loader = make_loader(Large(), 2, **options)\n"
        "    print(len(list(loader)), len(os.listdir(sys.argv[1])))\n"
        "    assert tempfile.gettempdir() == sys.argv[1]\n"
        "    loader.close()\n"
    )
    with tempfile.TemporaryDirectory(dir="/tmp") as short:
        folder = Path(short) / ("x" * length)
        folder.mkdir(exist_ok=True)
        done = execute(sys.executable, script, folder, env={"TMPDIR": str(folder)})

        assert done.stdout.split() == ["4", str(inside)], done.stderr
        assert list(folder.iterdir()) == []


def test_closing_a_loader_that_pins_batches_prints_no_traceback(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PyTorch's thread takes batches from the workers; it must end before they do."""
    queues: list[Any] = []
    threads: list[threading.Thread] = []
    pinned: list[torch.Tensor] = []
    is_dead = threading.Event()
    loop, terminate = pin_memory._pin_memory_loop, BaseProcess.terminate

    def watched(queue: Any, *others: Any) -> None:
        queues.append(queue)
        threads.append(threading.current_thread())
        loop(queue, *others)

    def pin(tensor: torch.Tensor) -> torch.Tensor:
        pinned.append(tensor)
        if len(pinned) > 2:  # image and label of the first batch
            is_dead.wait(DEADLINE)
        return tensor.clone()

    def kill(process: BaseProcess) -> None:
        terminate(process)
        process.join()
        is_dead.set()
        threads[0].join(DEADLINE)

    for place, name, value in (
        (torch.cuda, "is_available", lambda: True),
        (torch.accelerator, "is_available", lambda: True),
        (torch.accelerator, "current_accelerator", lambda *_, **__: torch.device("cpu")),
        (torch.accelerator, "current_device_index", lambda: 0),
        (torch.accelerator, "set_device_index", lambda _: None),
        (torch.Tensor, "pin_memory", pin),
        (pin_memory, "_pin_memory_loop", watched),
        (BaseProcess, "terminate", kill),
        (workers, "_STOP_SECONDS", 0.01),  # for the thread, which waits for the worker's end here
    ):
        monkeypatch.setattr(place, name, value)
    errors: list[Any] = []
    monkeypatch.setattr(threading, "excepthook", lambda args: errors.append(args.exc_value))
    dataset = open_dataset(root / "lmdb", CROP)
    options = in_processes(1, pin_memory=True, prefetch_factor=2)
    with closing(make_loader(dataset, BATCH, **options)) as loader:
        next(iter(loader))
        wait_until(lambda: len(pinned) > 2 and not queues[0].empty(), "a batch behind the one held")
    assert errors == []
