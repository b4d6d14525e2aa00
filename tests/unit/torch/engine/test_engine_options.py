"""Loader options: validation, defaults, and start methods of worker processes."""

from __future__ import annotations

import dataclasses
import math
import multiprocessing
import re
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

from shardkit import UsageError, make_loader, open_dataset
from shardkit.torch.engine import preflight, processes, workers
from shardkit.torch.engine.options import ENGINES, START_METHODS, LoaderOptions
from shardkit.torch.loader import Loader

pytestmark = pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")


@pytest.mark.parametrize(
    ("wrong", "parts"),
    [
        ({"engine": "threads"}, ["engine='threads'", *ENGINES]),
        ({"engine": None}, ["engine=None", *ENGINES]),
        ({"start_method": "vfork"}, ["start_method='vfork'", *START_METHODS]),
        ({"start_method": None}, ["start_method=None", *START_METHODS]),
        ({"sharing_strategy": "pigeon"}, ["sharing_strategy='pigeon'", "file_system"]),
        ({"num_workers": -1}, ["num_workers=-1", "integer from 0 on"]),
        ({"num_workers": 1.0}, ["num_workers=1.0", "integer from 0 on"]),
        ({"num_workers": True}, ["num_workers=True", "integer from 0 on"]),
        ({"num_workers": "2"}, ["num_workers='2'", "integer from 0 on"]),
        ({"prefetch_factor": 0}, ["prefetch_factor=0", "integer from 1 on"]),
        ({"prefetch_factor": -2}, ["prefetch_factor=-2", "integer from 1 on"]),
        ({"prefetch_factor": 2.5}, ["prefetch_factor=2.5", "integer from 1 on"]),
        ({"prefetch_factor": True}, ["prefetch_factor=True", "integer from 1 on"]),
        ({"timeout": -0.1}, ["timeout=-0.1", "seconds, from 0 on"]),
        ({"timeout": math.nan}, ["timeout=nan", "seconds, from 0 on"]),
        ({"timeout": math.inf}, ["timeout=inf"]),  # 0 is how to wait for ever
        ({"timeout": None}, ["timeout=None", "seconds, from 0 on"]),
        ({"timeout": "60"}, ["timeout='60'", "seconds, from 0 on"]),
        ({"collate_fn": 3}, ["collate_fn=3"]),
    ],
    ids=str,
)
def test_the_error_for_a_wrong_option_lists_name_value_and_choices(
    wrong: dict[str, Any], parts: list[str]
) -> None:
    with pytest.raises(UsageError) as caught:
        LoaderOptions(**wrong)
    for part in parts:
        assert part in str(caught.value)


@pytest.mark.parametrize(
    "right",
    [
        {"engine": "thread", "num_workers": 0, "prefetch_factor": 1},
        {"num_workers": 64, "prefetch_factor": 1000},
        {"timeout": 0},
        {"timeout": 0.5},
        {"sharing_strategy": "file_system", "start_method": "spawn"},
    ],
    ids=str,
)
def test_extreme_options_are_accepted(right: dict[str, Any]) -> None:
    options = LoaderOptions(**right)
    assert {name: getattr(options, name) for name in right} == right


def test_options_are_immutable() -> None:
    options = LoaderOptions()
    for field in dataclasses.fields(options):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(options, field.name, getattr(options, field.name))


def test_options_are_keyword_only() -> None:
    with pytest.raises(TypeError):
        LoaderOptions(None)  # type: ignore[call-arg]


def test_every_option_is_documented() -> None:
    text = (Path(__file__).parents[4] / "docs" / "training.md").read_text("utf-8")
    for field in dataclasses.fields(LoaderOptions):
        assert re.search(rf"\b{field.name}\b", text), (
            f"docs/training.md does not mention {field.name}"
        )


@pytest.mark.parametrize(
    ("given", "num_workers", "thread", "process"),
    [
        ({}, 4, 6, 8),
        ({}, 1, 3, 2),
        ({"num_workers": 0}, 0, 2, 1),
        ({"num_workers": 3}, 3, 5, 6),
        ({"num_workers": 3, "prefetch_factor": 4}, 3, 12, 12),
        ({"num_workers": 3, "prefetch_factor": 1}, 3, 3, 3),
        ({"prefetch_factor": 3}, 4, 12, 12),
        ({"num_workers": 0, "prefetch_factor": 1}, 0, 1, 1),
    ],
    ids=str,
)
def test_missing_options_get_defaults(
    given: dict[str, Any], num_workers: int, thread: int, process: int
) -> None:
    found = LoaderOptions(**given).resolved(given.get("num_workers", num_workers), pinned=False)
    assert found.num_workers == num_workers
    assert (found.thread_prefetch, found.process_prefetch) == (thread, process)
    assert found.options == LoaderOptions(**given)


@pytest.mark.parametrize("asked", [None, True, False])
@pytest.mark.parametrize("accelerator", [True, False])
def test_memory_is_pinned_as_requested_or_with_an_accelerator(
    asked: bool | None, accelerator: bool
) -> None:
    found = LoaderOptions(pin_memory=asked).resolved(2, pinned=accelerator)
    assert found.pinned is (accelerator and asked is not False)


def test_the_default_is_the_cpus_divided_among_local_ranks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(preflight, "usable_cpus", lambda: 7)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "3")
    assert make_loader([1], 1, engine="thread").num_workers == 2


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


def test_a_process_with_threads_does_not_fork(alone: pytest.MonkeyPatch) -> None:
    alone.setattr(threading, "enumerate", lambda: [threading.current_thread(), threading.Thread()])
    assert chosen() == "forkserver"


def test_a_process_that_uses_cuda_does_not_fork(alone: pytest.MonkeyPatch) -> None:
    alone.setattr(torch.cuda, "is_initialized", lambda: True)
    assert chosen() == "forkserver"


def test_other_systems_do_not_fork(alone: pytest.MonkeyPatch) -> None:
    alone.setattr(sys, "platform", "darwin")
    assert chosen() == "forkserver"


def test_without_a_fork_server_workers_are_spawned(alone: pytest.MonkeyPatch) -> None:
    alone.setattr(multiprocessing, "get_all_start_methods", lambda: ["spawn"])
    assert chosen() == "spawn"
    with pytest.raises(UsageError, match=r"start_method='fork' is unknown here; known: spawn"):
        chosen(start_method="fork")


@pytest.mark.parametrize("asked", ["fork", "forkserver", "spawn"])
def test_a_requested_start_method_is_used(alone: pytest.MonkeyPatch, asked: str) -> None:
    alone.setattr(threading, "enumerate", lambda: [threading.current_thread(), threading.Thread()])
    assert chosen(start_method=asked) == asked


@pytest.mark.parametrize("asked", START_METHODS)
def test_without_workers_no_process_starts(asked: str) -> None:
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
    workers.preload()
    assert server._preload_modules == ["__main__", "torch", "shardkit.torch.loader"]
    workers.preload()
    assert server._preload_modules == ["__main__", "torch", "shardkit.torch.loader"]


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
@pytest.mark.parametrize("strategy", ["file_system", "file_descriptor"])
def test_a_sharing_strategy_applies_in_both_processes(tmp_path: Path, strategy: str) -> None:
    place = make_dataset(make_folder(tmp_path / "photos", each=8), tmp_path / "made")
    for dataset, collate in ((open_dataset(place, decode="bytes"), list), (range(16), large)):
        here = make_loader(dataset, 4, num_workers=0, collate_fn=collate)
        expected = list(here)
        loader = make_loader(
            dataset,
            4,
            engine="process",
            num_workers=2,
            start_method="fork",
            sharing_strategy=strategy,
            collate_fn=collate,
        )
        with closing(loader):
            assert all(map(same, loader, expected))
            assert all(map(same, loader, expected))
    current = torch.multiprocessing.get_sharing_strategy()  # type: ignore[no-untyped-call]
    assert current == strategy


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
