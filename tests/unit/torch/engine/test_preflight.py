"""Resources of a machine (CPUs, shared memory, file descriptors) and the resulting choices."""

from __future__ import annotations

import os
import resource
import sys
from collections.abc import Callable
from contextlib import closing
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from helpers import encoded, make_dataset, make_tree, picture
from torch.utils.data import ConcatDataset, Dataset, StackDataset, Subset, TensorDataset

from shardkit import (
    CenterCrop,
    IterableShardDataset,
    Resize,
    ShardDataset,
    make_loader,
    open_dataset,
    with_rng,
)
from shardkit.torch.data.memory import SHARED_MEMORY
from shardkit.torch.engine import preflight
from shardkit.torch.engine.preflight import (
    batch_bytes,
    default_workers,
    descriptor_problem,
    shared_memory_problem,
    why_processes,
)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four images of 40 x 20 and of 20 x 20 pixels: 600 each in the mean."""
    root = tmp_path_factory.mktemp("preflight")
    files: dict[str, bytes | None] = {
        f"train/a/{n}.png": encoded(picture(40 - 20 * (n % 2), 20, n), "PNG") for n in range(4)
    }
    make_tree(root / "photos", {**files, "test/a": None})
    return make_dataset(root / "photos", root / "made")


@pytest.fixture
def dataset(place: Path) -> ShardDataset:
    return open_dataset(place / "train", decode="torch")


@with_rng
def careful(image: Any, rng: np.random.Generator) -> Any:
    return image


def slow(image: Any) -> Any:
    return image


class Augment:
    def __call__(self, image: Any) -> Any:
        return image


class Machine:
    """Sets the resources that this machine seems to have."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._monkeypatch = monkeypatch
        self.asked: list[str] = []
        self.set()

    def set(self, *, free: int = 2**40, files: int = 2**20, processors: int = 4) -> None:
        def statvfs(path: str) -> Any:
            self.asked.append(path)
            return SimpleNamespace(f_blocks=2**40, f_bavail=free // 4096, f_frsize=4096)

        self._monkeypatch.setattr(os, "statvfs", statvfs)
        self._monkeypatch.setattr(resource, "getrlimit", lambda _: (files, files))
        self._monkeypatch.setattr(preflight, "usable_cpus", lambda: processors)
        self._monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine(monkeypatch)


# Processors.


def test_cpus_are_divided_among_the_ranks_of_a_machine(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine.set(processors=12)
    assert default_workers() == 12
    for ranks, expected in {"1": 12, "2": 6, "5": 2, "12": 1, "100": 1}.items():
        monkeypatch.setenv("LOCAL_WORLD_SIZE", ranks)
        assert default_workers() == expected
    for senseless in ("0", "", "-3", "four", "2.5"):
        monkeypatch.setenv("LOCAL_WORLD_SIZE", senseless)
        assert default_workers() == 12


def test_a_loader_uses_one_worker_per_cpu(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, dataset: ShardDataset
) -> None:
    machine.set(processors=6)
    assert make_loader(dataset, 2).num_workers == 6
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "3")
    assert make_loader(dataset, 2).num_workers == 2
    assert make_loader(dataset, 2, num_workers=5).num_workers == 5
    assert make_loader(dataset, 2, num_workers=0).num_workers == 0


# What holds the GIL.


def with_transforms(
    place: Path, transform: Any = None, target_transform: Any = None, decode: Any = "pil"
) -> ShardDataset:
    return open_dataset(place / "train", transform, target_transform, decode)


def test_a_plain_shardkit_dataset_needs_no_processes(place: Path) -> None:
    for decode in ("pil", "numpy", "torch", "bytes", CenterCrop(8)):
        assert why_processes(with_transforms(place, decode=decode)) is None
        assert why_processes(with_transforms(place, careful, careful, decode)) is None


def test_a_transform_requires_processes_and_is_named(place: Path) -> None:
    transforms: dict[str, Callable[..., Any]] = {
        "slow": slow,
        "<lambda>": lambda image: image,
        "Augment": Augment(),
        "partial": partial(slow),
        "asarray": np.asarray,
    }
    for name, transform in transforms.items():
        reason = why_processes(with_transforms(place, transform))
        assert reason == f"the transform {name} may hold the GIL"
        reason = why_processes(with_transforms(place, careful, transform))
        assert reason == f"the target_transform {name} may hold the GIL"


def test_without_a_gil_auto_uses_threads_and_warns_of_random_numbers(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "_is_gil_enabled", lambda: False, raising=False)
    augmented = with_transforms(place, slow)
    with pytest.warns(RuntimeWarning, match="GIL"):
        loader = make_loader(augmented, 2, num_workers=1)
    reason = "the transform slow may hold the GIL, but this Python runs without a GIL"
    assert (loader.engine, loader.reason) == ("thread", reason)

    with closing(make_loader(augmented, 2, num_workers=1, engine="process")) as loader:
        assert (loader.engine, loader.reason) == ("process", "requested")
    with closing(make_loader([0, 1], 2, num_workers=1)) as loader:
        assert loader.engine == "process"


def test_wrapped_datasets_count(place: Path, dataset: ShardDataset) -> None:
    bad = with_transforms(place, slow)
    wrapped: Any
    for wrapped in (
        Subset(bad, [0]),
        ConcatDataset([dataset, bad]),
        Subset(ConcatDataset([dataset, Subset(bad, [1])]), [0, 1]),
    ):
        assert "slow" in str(why_processes(wrapped))
    assert why_processes(ConcatDataset([dataset, Subset(dataset, [1])])) is None


def test_another_dataset_requires_processes_and_is_named(dataset: ShardDataset) -> None:
    foreign: list[Dataset[Any]] = [
        TensorDataset(torch.zeros(3)),
        StackDataset(dataset, dataset),
        Subset(TensorDataset(torch.zeros(3)), [0]),
        ConcatDataset([dataset, TensorDataset(torch.zeros(3))]),
    ]
    for each, name in zip(foreign, ["Tensor", "Stack", "Tensor", "Tensor"], strict=True):
        assert f"{name}Dataset is not a shardkit dataset" in str(why_processes(each))


# Bytes.


def test_the_size_of_a_batch_is_estimated(place: Path) -> None:
    for decode, transform, each in (
        ("torch", None, 600 * 3),
        ("pil", None, 600 * 3),
        ("torch", slow, 600 * 3 * 4),
        (CenterCrop(10), None, 300),
        (CenterCrop((10, 20)), slow, 600 * 4),
        (Resize((5, 6)), None, 90),
        (Resize(10), None, 600 * 3),
    ):
        assert batch_bytes(with_transforms(place, transform, decode=decode), 7) == 7 * each


def test_the_largest_part_determines_the_size_of_a_batch(
    place: Path, dataset: ShardDataset
) -> None:
    small = with_transforms(place, decode=CenterCrop(4))
    assert batch_bytes(ConcatDataset([small, Subset(dataset, [1])]), 2) == 2 * 1800
    assert batch_bytes(Subset(small, [1]), 2) == 2 * 48


def test_an_unknown_size_is_not_guessed(place: Path, dataset: ShardDataset) -> None:
    foreign = TensorDataset(torch.zeros(3))
    empty = open_dataset(place / "test", decode="torch")
    assert len(empty) == 0
    each: Any
    for each in (foreign, empty, ConcatDataset([dataset, foreign]), Subset(foreign, [0])):
        assert batch_bytes(each, 8) is None


def test_a_system_without_dev_shm_is_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(path: str) -> Any:
        raise FileNotFoundError(path)

    monkeypatch.setattr(os, "statvfs", missing)
    assert shared_memory_problem(2**50) is None


def test_a_lack_of_file_file_descriptors_is_reported(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine.set(files=256)
    assert descriptor_problem(256 - 64) is None
    told = str(descriptor_problem(256 - 63))
    for part in ("193 open files", "256", "ulimit -n"):
        assert part in told
    infinity = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
    monkeypatch.setattr(resource, "getrlimit", lambda _: infinity)
    assert descriptor_problem(2**40) is None


# What loaders make of it.


def choice(dataset: Any, **options: Any) -> tuple[str, str]:
    loader = make_loader(dataset, 8, **{"num_workers": 2, **options})
    assert loader.reason in repr(loader)
    return loader.engine, loader.reason


def test_auto_uses_threads_if_nothing_holds_the_gil(
    machine: Machine, place: Path, dataset: ShardDataset
) -> None:
    for each in (dataset, with_transforms(place, careful), Subset(dataset, [0, 1])):
        assert choice(each) == ("thread", "nothing in this dataset holds the GIL for long")
    machine.set(free=0, files=1)  # threads need neither
    assert choice(dataset)[0] == "thread"


def test_auto_uses_processes_if_something_may_hold_the_gil(machine: Machine, place: Path) -> None:
    assert choice(with_transforms(place, slow)) == (
        "process",
        "the transform slow may hold the GIL",
    )
    assert choice(TensorDataset(torch.zeros(9)))[0] == "process"
    bad = IterableShardDataset(with_transforms(place, slow))
    assert choice(bad) == ("process", "the transform slow may hold the GIL")


def needed(batch: int, num_workers: int = 2, prefetch: int = 4) -> int:
    """Return the bytes that a process engine needs: batches under way, and three for a worker."""
    return batch * (prefetch + 3 * num_workers)


def test_auto_uses_threads_if_shared_memory_is_too_small(machine: Machine, place: Path) -> None:
    bad = with_transforms(place, slow, decode=CenterCrop(64))
    bytes_each = 8 * 64 * 64 * 3 * 4
    machine.set(free=needed(bytes_each) // 4096 * 4096 + 4096)
    assert choice(bad)[0] == "process"
    machine.set(free=needed(bytes_each) // 4096 * 4096 - 4096)
    with pytest.warns(RuntimeWarning, match="using threads"):
        engine, reason = choice(bad)
    assert engine == "thread"
    for part in ("slow may hold the GIL, but", SHARED_MEMORY, "--shm-size"):
        assert part in reason
    assert choice(bad, prefetch_factor=1)[0] == "process"  # fewer batches fit
    with pytest.warns(RuntimeWarning, match="using threads"):
        assert choice(bad, num_workers=4)[0] == "thread"


def test_auto_uses_threads_if_file_file_descriptors_are_too_few(machine: Machine) -> None:
    foreign = TensorDataset(torch.zeros(9))
    machine.set(files=64 + 2 * 10)
    assert choice(foreign)[0] == "process"
    machine.set(files=64 + 2 * 10 - 1)
    with pytest.warns(RuntimeWarning, match="using threads"):
        engine, reason = choice(foreign)
    assert engine == "thread"
    for part in ("TensorDataset", "may hold the GIL, but", "ulimit -n"):
        assert part in reason


def test_without_workers_there_is_no_limit(machine: Machine, place: Path) -> None:
    machine.set(free=0, files=1)
    assert choice(with_transforms(place, slow), num_workers=0)[0] == "process"


def test_a_requested_engine_is_used_with_a_warning(machine: Machine, place: Path) -> None:
    bad = with_transforms(place, slow)
    assert choice(bad, engine="thread") == ("thread", "requested")
    assert choice(bad, engine="process") == ("process", "requested")
    machine.set(free=0)
    with pytest.warns(RuntimeWarning, match="--shm-size"):
        assert choice(bad, engine="process") == ("process", "requested")
    assert choice(bad, engine="thread") == ("thread", "requested")


def test_a_warning_points_to_the_caller(machine: Machine) -> None:
    machine.set(files=1)
    with pytest.warns(RuntimeWarning) as caught:
        make_loader([1], 1, engine="process", num_workers=1, start_method="fork")
    assert len(caught) == 1
    assert caught[0].filename == __file__
