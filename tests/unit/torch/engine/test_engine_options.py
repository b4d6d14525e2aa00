"""Loader options: validation, defaults, and start methods of worker processes."""

from __future__ import annotations

import itertools
import math
import multiprocessing
import sys
import threading
from collections.abc import Iterator
from contextlib import closing
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.multiprocessing
from helpers import make_dataset, make_folder, python
from loading import same
from refusals import refused

from shardkit import make_loader, open_dataset
from shardkit.errors import UsageError
from shardkit.torch.engine import processes, workers
from shardkit.torch.engine.options import ENGINES, START_METHODS, LoaderOptions
from shardkit.torch.loader import Loader

WRONG: dict[str, tuple[tuple[Any, ...], tuple[str, ...]]] = {
    "engine": (("threads", None), ENGINES),
    "start_method": (("vfork", None), START_METHODS),
    "sharing_strategy": (("pigeon",), ("file_system",)),
    "num_workers": ((-1, 1.0, True, "2"), ()),
    "prefetch_factor": ((0, -2, 2.5, True), ()),
    "timeout": ((-0.1, math.nan, math.inf, None, "60"), ()),  # 0 is how to wait for ever
    "collate_fn": ((3,), ()),
}
"""Wrong values, and the choices that the error lists."""


def test_a_wrong_option_is_refused_with_name_value_and_choices() -> None:
    for name, (values, choices) in WRONG.items():
        for value in values:
            with refused(UsageError, name, repr(value), *choices):
                LoaderOptions(**{name: value})


def test_missing_options_get_defaults() -> None:
    for given, cpus, thread, process in (
        ({}, 4, 6, 8),
        ({}, 1, 3, 2),
        ({"num_workers": 0}, 9, 2, 1),
        ({"num_workers": 3}, 9, 5, 6),
        ({"num_workers": 3, "prefetch_factor": 4}, 9, 12, 12),
        ({"num_workers": 3, "prefetch_factor": 1}, 9, 3, 3),
        ({"prefetch_factor": 3}, 4, 12, 12),
        ({"num_workers": 0, "prefetch_factor": 1}, 9, 1, 1),
    ):
        found = LoaderOptions(**given).resolved(cpus, pinned=False)  # type: ignore[arg-type]
        assert found.num_workers == given.get("num_workers", cpus)
        assert (found.thread_prefetch, found.process_prefetch) == (thread, process), given
        assert found.options == LoaderOptions(**given)  # type: ignore[arg-type]


def test_memory_is_pinned_as_requested_or_with_an_accelerator() -> None:
    for asked, accelerator in itertools.product((None, True, False), (True, False)):
        found = LoaderOptions(pin_memory=asked).resolved(2, pinned=accelerator)
        assert found.pinned is (accelerator and asked is not False)


def method_of(loader: Loader) -> str | None:
    engine = loader._engine
    assert isinstance(engine, processes.ProcessEngine)
    return engine.start_method()


def chosen(**options: Any) -> str | None:
    """Return the start method that a loader would use, without starting a process."""
    options = {"num_workers": 1, **options}
    return method_of(make_loader([1, 2], 1, engine="process", **options))


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Make this process seem to have one thread and no CUDA context."""
    monkeypatch.setattr(threading, "enumerate", lambda: [threading.current_thread()])
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    return monkeypatch


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere fork is not safe")
def test_a_single_threaded_process_forks(alone: pytest.MonkeyPatch) -> None:
    assert chosen() == "fork"


def test_a_process_that_uses_cuda_and_other_systems_do_not_fork(
    alone: pytest.MonkeyPatch,
) -> None:
    for module, name, value in (
        (torch.cuda, "is_initialized", lambda: True),
        (sys, "platform", "darwin"),
    ):
        with alone.context() as patch:
            patch.setattr(module, name, value)
            assert chosen() == "forkserver"


def test_without_a_fork_server_workers_are_spawned(alone: pytest.MonkeyPatch) -> None:
    alone.setattr(multiprocessing, "get_all_start_methods", lambda: ["spawn"])
    assert chosen() == "spawn"
    with refused(UsageError, "start_method='fork'", "choose from spawn"):
        chosen(start_method="fork")


def test_a_requested_start_method_is_used_if_there_are_workers(alone: pytest.MonkeyPatch) -> None:
    alone.setattr(threading, "enumerate", lambda: [threading.current_thread(), threading.Thread()])
    for asked in START_METHODS:
        assert chosen(start_method=asked) == ("forkserver" if asked == "auto" else asked)
        assert chosen(start_method=asked, num_workers=0) is None


def test_threads_that_prevent_a_fork_are_detected() -> None:
    release = threading.Event()
    thread = threading.Thread(target=release.wait)
    thread.start()
    try:
        assert chosen() == "forkserver"
    finally:
        release.set()
        thread.join()


@pytest.fixture
def server() -> Iterator[Any]:
    """The fork server's settings of a new interpreter; restored after the test."""
    settings: Any = forkserver._forkserver
    before = settings._preload_modules
    settings._preload_modules = ["__main__"]
    yield settings
    settings._preload_modules = before


def test_the_fork_server_loads_torch_once(server: Any) -> None:
    for _ in range(2):
        workers.preload()
        ours = ["shardkit.torch.loader", "shardkit.torch.engine.processes"]
        assert server._preload_modules == ["__main__", "torch", *ours]


def test_the_users_fork_server_preload_is_kept(server: Any) -> None:
    multiprocessing.set_forkserver_preload(["json"])
    workers.preload()
    assert server._preload_modules == ["json"]


@pytest.fixture
def _same_strategy_after() -> Iterator[None]:
    """Leave PyTorch's sharing strategy, which belongs to the process, as it was."""
    before = torch.multiprocessing.get_sharing_strategy()  # type: ignore[no-untyped-call]
    yield
    torch.multiprocessing.set_sharing_strategy(before)  # type: ignore[no-untyped-call]


def large(samples: Any) -> Any:
    """Return tensors too large for the pipe, of which one is a view: all ways in which they go."""
    count = len(samples)
    values = torch.arange(count * 200_000, dtype=torch.int64).view(count, -1)
    return {"values": values, "half": values[:, ::2], "rows": torch.tensor(list(samples))}


@pytest.mark.usefixtures("_same_strategy_after")
def test_a_sharing_strategy_applies_in_both_processes(tmp_path: Path) -> None:
    """The other one is the default, with which all other tests of processes run."""
    strategy: Any = "file_system"
    place = make_dataset(make_folder(tmp_path / "photos", each=4), tmp_path / "made")
    for dataset, collate in ((open_dataset(place, decode="bytes"), list), (range(8), large)):
        here = make_loader(dataset, 4, num_workers=0, collate_fn=collate)
        expected = list(here)
        loader = make_loader(
            dataset,
            4,
            engine="process",
            num_workers=1,
            start_method="fork",
            sharing_strategy=strategy,
            collate_fn=collate,
        )
        with closing(loader):
            assert all(map(same, loader, expected))
    current = torch.multiprocessing.get_sharing_strategy()  # type: ignore[no-untyped-call]
    assert current == strategy


@pytest.mark.slow
def test_file_system_sharing_leaves_nothing_behind(tmp_path: Path) -> None:
    code = (
        "import os, torch\n"
        "from shardkit import make_loader\n"
        "def large(rows): return torch.full((len(rows), 200_000), rows[0])\n"
        "before = set(os.listdir('/dev/shm'))\n"
        "loader = make_loader(range(40), 4, engine='process', num_workers=2,\n"
        "    start_method='fork', sharing_strategy='file_system', collate_fn=large)\n"
        "print([int(batch[0, 0]) for batch in loader] == list(range(0, 40, 4)))\n"
        "loader.close()\n"
        "del loader\n"
        "mine = f'torch_{os.getpid()}_'\n"
        "print([n for n in set(os.listdir('/dev/shm')) - before if n.startswith(mine)])\n"
    )
    done = python(code)
    assert (done.returncode, done.stdout, done.stderr) == (0, "True\n[]\n", "")
