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
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers import execute
from loading import BATCH, CROP, ROWS, SEED, crc, same
from torch.utils.data import Dataset, Subset

from shardkit import Rank, make_loader, open_dataset
from shardkit.errors import LoaderFailed, TransformFailed


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
def test_a_worker_that_died_blocks_nobody(root: Path, dropped: bool) -> None:
    dataset = open_dataset(root / "lmdb", decode=CROP)
    loader = make_loader(dataset, BATCH, **in_processes(1))
    batches = iter(loader)
    next(batches)
    (worker,) = loader._engine._crew.processes  # type: ignore[attr-defined]
    worker.kill()
    worker.join()
    if dropped:
        del loader, batches
    else:
        loader.close()


class Positions(Dataset[int]):
    """A dataset that reads batches, so large that their rows fill a socket."""

    def __len__(self) -> int:
        return 200_000

    def __getitem__(self, row: int) -> int:
        return row

    def __getitems__(self, rows: Any) -> Any:
        return rows[:]


def as_text(rows: Any) -> tuple[bytes, int]:
    """Return a batch that also fills a socket, and the sum of its rows."""
    return b"x" * 1_000_000, sum(rows)


def test_both_ends_may_send_more_than_a_socket_holds() -> None:
    size = 50_000
    options = in_processes(1, collate_fn=as_text, prefetch_factor=3)
    with closing(make_loader(Positions(), size, **options)) as loader:
        found = list(loader)
    assert [len(text) for text, _ in found] == [1_000_000] * 4
    assert [total for _, total in found] == [
        sum(range(start, start + size)) for start in range(0, 200_000, size)
    ]


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


@pytest.fixture
def pinned(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Pretend that there is a CUDA device; return the threads that pin tensors."""
    threads: list[str] = []

    def pin(tensor: torch.Tensor) -> torch.Tensor:
        threads.append(threading.current_thread().name)
        return tensor.clone()

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "set_device", lambda _: None)
    monkeypatch.setattr(torch.Tensor, "pin_memory", pin)
    return threads


@pytest.mark.parametrize("engine", ["helper", "process"])
def test_a_thread_pins_batches(root: Path, engine: str, pinned: list[str]) -> None:
    dataset = open_dataset(root / "lmdb", CROP)
    expected = list(make_loader(dataset, BATCH, num_workers=0, pin_memory=False))
    options = {**in_processes(1, pin_memory=True), "engine": engine}
    with closing(make_loader(dataset, BATCH, **options)) as loader:
        assert same(list(loader), expected)
        next(iter(loader))
        loader.set_epoch(0)
        assert same(list(loader), expected)
    assert set(pinned) == {"shardkit-pin"}
    assert len(pinned) >= 2 * 2 * len(expected), "image and label of each batch"


def refuse(_: Any) -> None:
    raise OverflowError("no such image")


@pytest.mark.usefixtures("pinned")
def test_a_loader_that_pins_batches_raises_errors_and_closes_without_a_traceback(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    errors: list[Any] = []
    monkeypatch.setattr(threading, "excepthook", lambda args: errors.append(args.exc_value))
    options = in_processes(1, pin_memory=True, prefetch_factor=2)
    refusing = make_loader(open_dataset(root / "lmdb", refuse, decode="torch"), BATCH, **options)
    with closing(refusing) as loader, pytest.raises(TransformFailed, match="OverflowError"):
        list(loader)
    with closing(make_loader(open_dataset(root / "lmdb", CROP), BATCH, **options)) as loader:
        batches = iter(loader)
        next(batches)
        (worker,) = loader._engine._crew.processes  # type: ignore[attr-defined]
        worker.kill()
        with pytest.raises(LoaderFailed, match="SIGKILL"):
            list(batches)
    with closing(make_loader(open_dataset(root / "lmdb", CROP), BATCH, **options)) as loader:
        next(iter(loader))
    assert errors == []
    assert "shardkit-pin" not in {thread.name for thread in threading.enumerate()}
