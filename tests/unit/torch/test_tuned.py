"""Tuned files are loaded and validated, and the largest batch that fits is found."""

from __future__ import annotations

import dataclasses
import json
import multiprocessing
import os
import pickle
import signal
import sys
import threading
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers import DEADLINE, invoke, make_dataset, make_folder, make_tree, png
from refusals import refused
from torch import nn

from shardkit import ShardkitError, find_batch_size, make_loader, open_dataset
from shardkit.errors import MeasurementTimeout, UsageError
from shardkit.system.machine import usable_cpus
from shardkit.torch import batch_size
from shardkit.torch.batch_size import MARGIN, FoundBatchSize, search
from shardkit.torch.engine.options import LoaderOptions
from shardkit.torch.tuned import VERSION, Tuned, load_tuned, require_replaceable

GOOD: dict[str, Any] = {
    "shardkit_tuned": VERSION,
    "batch_size": 4,
    "settings": {"engine": "thread", "num_workers": 3, "prefetch_factor": 5},
    "processors": usable_cpus(),
    "measured": {},
}


def written(folder: Path, **changed: Any) -> Path:
    path = folder / "tuned.json"
    path.write_text(json.dumps({**GOOD, **changed}), "utf-8")
    return path


def test_saved_settings_are_loaded(tmp_path: Path) -> None:
    tuned = Tuned(
        batch_size=32,
        settings={"engine": "process", "num_workers": 4, "sharing_strategy": "file_system"},
        processors=usable_cpus(),
        ranks=4,
        measured={"images_per_second": 1000.5},
    )

    tuned.save(tmp_path / "tuned.json")

    assert load_tuned(tmp_path / "tuned.json") == tuned


def test_a_loader_uses_settings_and_batch_size(tmp_path: Path) -> None:
    dataset = open_dataset(make_dataset(make_folder(tmp_path / "a"), tmp_path / "made"))

    loader = make_loader(dataset, tuned=written(tmp_path))

    assert (loader.batch_size, loader.engine, loader.num_workers) == (4, "thread", 3)
    assert loader.options.prefetch_factor == 5
    assert make_loader(dataset, 2, tuned=written(tmp_path)).batch_size == 2


def test_options_override_and_contradictions_are_refused(tmp_path: Path) -> None:
    tuned = load_tuned(written(tmp_path))

    options = tuned.options(LoaderOptions(pin_memory=False, num_workers=3))

    assert options == LoaderOptions(
        engine="thread", num_workers=3, prefetch_factor=5, pin_memory=False
    )
    with refused(UsageError, "num_workers", "2", "3", "tuned="):
        tuned.options(LoaderOptions(num_workers=2))


def test_ranks_that_share_a_machine_share_the_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight ranks do not take eight times what was measured for one."""
    settings = {"engine": "thread", "num_workers": 12, "prefetch_factor": 3}
    for ranks, now, expected in ((1, 1, 12), (1, 8, 1), (1, 3, 4), (2, 8, 3), (8, 1, 12)):
        monkeypatch.setenv("LOCAL_WORLD_SIZE", str(now))
        tuned = Tuned(batch_size=4, settings=settings, processors=1, ranks=ranks)
        options = tuned.options(LoaderOptions())
        assert (options.num_workers, options.prefetch_factor) == (expected, 3)
        with refused(UsageError, f"and {expected} in tuned="):
            tuned.options(LoaderOptions(num_workers=99))


def test_another_machine_warns(tmp_path: Path) -> None:
    dataset = open_dataset(make_dataset(make_folder(tmp_path / "a"), tmp_path / "made"))
    path = written(tmp_path, processors=usable_cpus() + 1)

    with pytest.warns(RuntimeWarning, match=f"measured with {usable_cpus() + 1} CPUs") as told:
        make_loader(dataset, tuned=path)

    assert [warning.filename for warning in told] == [__file__]


def test_settings_that_tune_does_not_write_are_refused(tmp_path: Path) -> None:
    settings: dict[str, tuple[Any, ...]] = {
        "engine": ("warp", ["thread"]),
        "num_workers": (-1, True, 1e9),
        "prefetch_factor": (0,),
        "start_method": ("__import__", None),
        "sharing_strategy": ("carrier pigeon",),
        "collate_fn": ("os:system",),
        "pin_memory": ("yes", 1, [True], "x" * 100_000),
        "rank": (None,),
    }
    wrong: dict[str, tuple[Any, ...]] = {
        "shardkit_tuned": (VERSION + 1, True),
        "batch_size": (0, True, "64"),
        "processors": (-1, 1.5),
        "ranks": (0, "8", "x" * 100_000),
        "settings": ([], *({name: v} for name, values in settings.items() for v in values)),
        "measured": (None,),
    }
    for name, values in wrong.items():
        for value in values:
            path = written(tmp_path, **{name: value})
            with refused(UsageError, path, "shardkit tune --out") as caught:
                load_tuned(path)
            assert len(str(caught.value)) < 1000


def test_hostile_files_are_refused(tmp_path: Path) -> None:
    for content in (
        b"",
        b"null",
        b"[]",
        b"{",
        b"\xff\xfe\x00",
        b"[" * 100_000,
        b'{"shardkit_tuned": 1}',
        b'{"a": ' * 50_000,
        b'{"shardkit_tuned": 1, "batch_size": ' + b"9" * 10_000 + b"}",
        b" " * ((1 << 20) + 2),
    ):
        (tmp_path / "file").write_bytes(content)
        with refused(UsageError, tmp_path / "file"):
            load_tuned(tmp_path / "file")


def test_too_many_workers_are_refused(tmp_path: Path) -> None:
    path = written(tmp_path, settings={"engine": "process", "num_workers": 20_000})

    with refused(UsageError, "num_workers", "20000", "1024"):
        load_tuned(path)


def test_a_missing_file_and_a_folder_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="`shardkit tune --out` writes it"):
        load_tuned(tmp_path / "missing.json")
    with refused(UsageError):
        load_tuned(tmp_path)


def test_a_pipe_does_not_hang(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")

    with refused(UsageError):
        load_tuned(tmp_path / "pipe")


def test_only_tuned_files_are_replaced(tmp_path: Path) -> None:
    require_replaceable(tmp_path / "new.json")
    require_replaceable(written(tmp_path, processors=usable_cpus() + 1))
    notes = tmp_path / "notes.txt"
    notes.write_text("precious")

    with refused(UsageError):
        require_replaceable(notes)
    with refused(UsageError):
        require_replaceable(tmp_path / "missing" / "tuned.json")
    with pytest.raises(UsageError):
        require_replaceable(tmp_path)


def test_a_file_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    tuned = load_tuned(written(tmp_path))

    with refused(ShardkitError):
        tuned.save(tmp_path / "missing" / "tuned.json")


def test_threads_tuned_for_another_dataset_warn(tmp_path: Path) -> None:
    tuned = dataclasses.replace(load_tuned(written(tmp_path)), settings={"engine": "thread"})

    tuned.warn_of_threads(None)
    with pytest.warns(RuntimeWarning, match="threads .* transform flip"):
        tuned.warn_of_threads("the transform flip may hold the GIL")
    dataclasses.replace(tuned, measured={"processes": "the transform"}).warn_of_threads("another")
    dataclasses.replace(tuned, settings={"engine": "process"}).warn_of_threads("another")


# The largest batch that fits is found, whatever becomes of a process that tries a larger one.

MIB = 1 << 20
SAMPLE = 64 * MIB
"""Bytes that the model below keeps for each sample between forward and backward."""


class Hungry(nn.Module):
    """Keeps `SAMPLE` bytes for each sample, and fails above a number of samples."""

    def __init__(self, fails: str = "", above: int = 1 << 30) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))
        self.fails, self.above = fails, above

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        if len(images) > self.above:
            if self.fails == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            if self.fails == "hangs":
                signal.pause()
            raise ValueError("this one is planted")
        return (images.reshape(-1, 1) * torch.ones(SAMPLE // 4) * self.weight).sin()


def make(fails: str = "", above: int = 1 << 30) -> tuple[nn.Module, torch.Tensor]:
    torch.set_num_threads(1)  # a fork must not use the threads of its parent
    return Hungry(fails, above), torch.zeros(1, dtype=torch.uint8)


@pytest.fixture
def forking(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sizes are tried in forks, which need not import torch again."""
    context = multiprocessing.get_context("fork")
    monkeypatch.setattr(multiprocessing, "get_context", lambda _: context)


def test_the_search_doubles_and_bisects() -> None:
    for limit in (*range(70), 1000, 12_345, 70_000):
        for most in (1, 2, 7, 64, 1 << 16):
            tried: list[int] = []

            def fits(size: int, limit: int = limit, tried: list[int] = tried) -> bool:
                tried.append(size)
                return size <= limit

            found, best = search(fits, most), min(limit, most)
            assert found <= best
            assert best - found <= best / 30, (limit, most, tried)
            assert len(tried) == len(set(tried)) < 25
            assert max(tried) <= min(most, max(2, 2 * limit))


@pytest.mark.slow
def test_the_largest_allowed_batch_may_fit(forking: None) -> None:
    found = find_batch_size(make, memory=4096 * MIB, most=1)
    assert (found.batch_size, found.limit) == (1, "")
    assert SAMPLE < found.used <= found.memory == int(4096 * MIB * (1 - MARGIN))


@pytest.mark.slow
def test_a_batch_that_fits_is_found_in_a_limit_of_main_memory() -> None:
    """A sample takes its memory several times: kept by sin, its output, and their gradients."""
    memory = 1536 * MIB
    found = find_batch_size(make, memory=memory)
    assert found.device == "cpu"
    assert found.memory == int(memory * (1 - MARGIN))
    assert found.used <= found.memory
    assert found.used + 5 * SAMPLE > found.memory  # one more sample does not fit
    assert 1 < found.batch_size < 6
    assert f"a batch of {found.batch_size + 1}: " in found.limit
    assert found.describe().startswith(f"{found.batch_size}: uses ")


@pytest.mark.slow
@pytest.mark.parametrize("fails", ["killed", "raises"])
def test_a_size_at_which_the_process_ends_does_not_fit(fails: str, forking: None) -> None:
    found = find_batch_size(partial(make, fails, 1), memory=4096 * MIB, most=2)
    assert found.batch_size == 1
    stated = {
        "killed": "a batch of 2: its process ended with exit code -9",
        "raises": "ValueError: this",
    }
    assert stated[fails] in found.limit


@pytest.mark.slow
def test_what_cannot_work_is_an_error(forking: None) -> None:
    with refused(UsageError):
        find_batch_size(partial(make, "raises", 0), memory=4096 * MIB)
    with refused(UsageError, "1"):
        find_batch_size(make, memory=10 * MIB)
    with refused(MeasurementTimeout, "2", "10"):
        find_batch_size(partial(make, "hangs", 1), memory=4096 * MIB, patience=10)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, ("CUDA",)),
        ({"memory": 0}, ("memory=0", "positive")),
        ({"memory": 64}, ("memory=64", "64MiB")),
        ({"memory": 1, "most": 0}, ("most=0",)),
    ],
)
def test_wrong_options_are_refused(options: dict[str, Any], message: tuple[str, ...]) -> None:
    with refused(UsageError, *message):
        find_batch_size(make, **options)


def test_a_script_without_a_guard_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    script = tmp_path / "train.py"
    script.write_text("find_batch_size(make)")
    monkeypatch.setitem(sys.modules, "__main__", SimpleNamespace(__file__=str(script)))
    with refused(UsageError, script):
        find_batch_size(make, memory=4096 * MIB)


def test_a_device_s_free_memory_is_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """The arithmetic of a device, which these tests lack."""
    fractions: list[float] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.optim, "AdamW", torch.optim.SGD)  # AdamW calls CUDA itself
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (600, 1000))
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", fractions.append)
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda: 530)
    monkeypatch.setattr(torch.Tensor, "to", lambda tensor, *_, **__: tensor.clone())
    monkeypatch.setattr(nn.Module, "to", lambda module, _: module)

    def small() -> tuple[nn.Module, torch.Tensor]:
        return nn.Linear(3, 2), torch.zeros(3)

    assert batch_size._Step(small, None).run(4)[:2] == (530, 540)
    assert batch_size._Step(small, 100).run(4)[:2] == (530, 90)
    assert batch_size._Step(small, 10_000).run(4)[:2] == (530, 540)
    assert fractions == [0.54, 0.09, 0.54]
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: 50)  # make() used the device
    assert batch_size._Step(small, None).run(4)[:2] == (530, 585)


class InThread:
    """A process of trials, in this one, where the device is patched."""

    exitcode = 0

    def __init__(self, target: Any, args: Any, daemon: bool) -> None:
        own = Connection(os.dup(args[0].fileno()))
        self._thread = threading.Thread(target=target, args=(own, *args[1:]), daemon=daemon)
        self.start = self._thread.start

    def kill(self) -> None:
        """Leave it to the closed connection."""

    def join(self) -> None:
        self._thread.join(DEADLINE)


@pytest.mark.parametrize("largest", [1, 5, 1000])
def test_a_device_that_is_out_of_memory_sets_the_limit(
    monkeypatch: pytest.MonkeyPatch, largest: int
) -> None:
    started: list[InThread] = []

    def process(**given: Any) -> InThread:
        started.append(InThread(**given))
        return started[-1]

    clone = torch.Tensor.clone

    def copy(batch: torch.Tensor, **options: Any) -> torch.Tensor:
        if len(batch) > largest:
            raise torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 7 GiB")
        return clone(batch, **options)

    context = SimpleNamespace(Pipe=multiprocessing.Pipe, Process=process)
    monkeypatch.setattr(multiprocessing, "get_context", lambda _: context)
    monkeypatch.setattr(batch_size, "end_with_parent", lambda _: None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.optim, "AdamW", torch.optim.SGD)  # AdamW calls CUDA itself
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (900, 1000))
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", lambda _: None)
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda: 800)
    monkeypatch.setattr(torch.Tensor, "to", lambda tensor, *_, **__: tensor)
    monkeypatch.setattr(torch.Tensor, "clone", copy)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    devices: list[int] = []
    monkeypatch.setattr(torch.cuda, "set_device", devices.append)
    monkeypatch.setattr(nn.Module, "to", lambda module, _: module)

    found = find_batch_size(lambda: (nn.Linear(3, 2), torch.zeros(3)))

    assert 0.96 * largest <= found.batch_size <= largest
    assert (found.device, found.memory, found.used) == ("cuda", 810, 800)
    assert "OutOfMemoryError: CUDA out of memory. Tried to allocate 7 GiB" in found.limit
    assert len(started) > 1, "a step that failed may leave memory in use"
    assert devices == [3] * len(started), "the current device is that of this process"


def test_indices_stay_integers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_size, "_limit_growth", lambda _: None)  # of this process

    def words() -> tuple[nn.Module, torch.Tensor]:
        return nn.Embedding(9, 2), torch.tensor([3, 8])

    assert batch_size._Step(words, 4096 * MIB).run(3)[2] == "cpu"


def test_a_model_of_several_views_takes_a_list(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_size, "_limit_growth", lambda _: None)  # of this process
    shapes: list[tuple[int, ...]] = []

    class Crops(nn.Module):
        def forward(self, views: list[torch.Tensor]) -> torch.Tensor:
            shapes[:] = [tuple(view.shape) for view in views]
            return torch.ones(1, requires_grad=True)

    def crops() -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
        return Crops(), (torch.zeros(3, 8, 8, dtype=torch.uint8), torch.zeros(3, 4, 4))

    assert batch_size._Step(crops, 4096 * MIB).run(5)[2] == "cpu"
    assert shapes == [(5, 3, 8, 8), (5, 3, 4, 4)]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    files: dict[str, bytes | None] = {f"a/{n}.png": png(40, 40, n) for n in range(12)}
    return make_dataset(make_tree(tmp_path / "photos", files), tmp_path / "data")


AUTO = ("--batch-size", "auto")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (AUTO, "add --model"),
        (("--memory", "4GiB"), "add it, or leave out --memory"),
        ((*AUTO, "--memory", "much"), "--memory='much' must be a size"),
        ((*AUTO, "--memory", "4"), "--memory='4' means bytes"),
        (("--batch-size", "0"), "x>=1"),
        (("--batch-size", "many"), "'many' must be a number of samples or auto"),
    ],
)
def test_wrong_options_of_the_command_are_refused(
    path: Path, options: tuple[str, ...], message: str
) -> None:
    result = invoke("tune", path, *options)
    assert result.exit_code
    assert message in " ".join(f"{result.output} {result.exception}".split())


@pytest.mark.slow
def test_the_command_tunes_with_the_size_that_it_found(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def find(make: Any, *, memory: int) -> FoundBatchSize:
        model, sample = pickle.loads(pickle.dumps(make))()  # as another process gets it
        assert model(sample[None].float()).shape[0] == 1
        return FoundBatchSize(batch_size=3, device="cpu", memory=memory, used=1, limit="none")

    monkeypatch.setattr("shardkit.cli.tune.find_batch_size", find)
    given = (*AUTO, "--model", "small", "--memory", "600MiB", "--budget", "1s", "--json")
    result = invoke("tune", path, *given, "--decode", "Resize((64, 64))")
    assert result.exit_code == 0, result.output
    found = json.loads(result.output)["batch_size"]
    assert (found["batch_size"], found["memory"]) == (3, 600 * MIB)
    assert '"batch_size": 3,' in result.output  # of a setting
    result = invoke("tune", path, *AUTO, "--memory", "1GiB", "--model", "small", "--decode", "pil")
    assert str(result.exception).startswith("decode pil requires a transform")
