"""Stages of real loaders in this process, and variants of them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers import jpeg, make_tree
from refusals import refused
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    SequentialSampler,
    Subset,
)

import shardkit
from shardkit import Buckets, CenterCrop, LMDBDataset, RandomResizedCrop, make_loader
from shardkit.errors import UsageError
from shardkit.measure.doctor import pipeline as pipeline_module
from shardkit.measure.doctor import profiling as profile_module
from shardkit.measure.doctor.pipeline import Loading, Pipeline, Remedy
from shardkit.measure.doctor.profile import Profile
from shardkit.measure.doctor.profiling import profile
from shardkit.measure.doctor.stored import convert_images, to_convert, write_images
from shardkit.measure.doctor.trials import Trial, measure_rate
from shardkit.measure.runner import clock
from shardkit.measure.runner.session import Session
from shardkit.measure.runner.spec import StepSpec, Subject
from shardkit.recipe import Recipe

ROWS = 12


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    files: dict[str, bytes | None] = {
        f"{'ab'[n % 2]}/{n}.jpg": jpeg(64, 48, n) for n in range(ROWS)
    }
    return make_tree(tmp_path_factory.mktemp("profile") / "photos", files)


@pytest.fixture(scope="module")
def made(photos: Path) -> Path:
    shardkit.convert(photos, photos.parent / "made", to="lmdb", shard_samples=4, workers=1)
    return photos.parent / "made"


def session(loader: Any) -> Session:
    return Session(subject=Subject(loader="made:up"), dataset=loader.dataset, loader=loader)


def profiled(loader: Any, seconds: float = 0.02) -> Profile:
    return profile(session(loader), loading=Loading(), seconds=seconds, step=StepSpec())


class Sleepy(Dataset[Any]):
    """Samples that wait, with a transform that does so longer."""

    def __init__(self, sleep: Callable[[float], object] = time.sleep) -> None:
        self.sleep, self.transform = sleep, self.slow

    def slow(self, value: torch.Tensor) -> torch.Tensor:
        self.sleep(0.002)
        return value

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, row: int) -> tuple[torch.Tensor, int]:
        self.sleep(0.001)
        return self.transform(torch.zeros(3, 8, 8)), row


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(torch.zeros(100, 3, 8, 8))


def test_the_stages_of_a_shardkit_dataset(made: Path) -> None:
    dataset = LMDBDataset(made, decode="torch", transform=torch.Tensor.float)
    found = profiled(make_loader(dataset, 4, engine="thread"), 60.0)  # ends with the last row

    assert list(found.stages) == ["read", "decode", "transform", "collate"]
    assert found.fraction(*found.stages) == pytest.approx(1)
    assert (found.kind, found.side, found.crop) == ("jpg", 48, 48)
    assert sorted(found.rows) == list(range(ROWS))
    assert found.p95 >= found.p50 >= 0
    assert dataset.transform is torch.Tensor.float


@pytest.mark.parametrize(
    ("options", "needed"),
    [
        ({"decode": CenterCrop(32)}, ROWS * 3 * 32 * 32 + 8 * ROWS),
        ({"decode": "torch"}, ROWS * 3 * 48 * 64 + 8 * ROWS),
        ({"decode": RandomResizedCrop(32)}, 0),
        ({"decode": "torch", "transform": torch.Tensor.float}, 0),
    ],
)
def test_a_dataset_that_can_be_resident_has_a_size(
    options: dict[str, Any], needed: int, made: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(profile_module, "held_fraction", lambda *_: 0.0)
    loader = make_loader(LMDBDataset(made, **options), 4, engine="thread")
    assert profiled(loader).resident_bytes == needed
    monkeypatch.setattr(pipeline_module, "free_memory", lambda: 2 * ROWS * 3 * 32 * 32)
    assert profiled(loader).resident_bytes == 0


def test_a_wait_is_told_from_computing(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a time in which only sleeping takes any, and computing an eighth of it."""
    slept: list[float] = []
    monkeypatch.setattr(clock, "_clock", lambda: np.array([1, 0.125]) * sum(slept))
    monkeypatch.setattr(profile_module, "held_fraction", lambda *_: 0.25)
    found = profiled(DataLoader(Sleepy(slept.append), 4))

    assert list(found.stages) == ["dataset", "transform", "collate"]
    assert found.longest == "transform"
    assert found.stages["dataset"].seconds == pytest.approx(0.001)
    assert found.stages["transform"].seconds == pytest.approx(0.002)
    assert found.p50 == pytest.approx(0.003)
    assert found.stages["transform"].busy == pytest.approx(0.125)
    assert found.held == pytest.approx(0.25 / (2 / 3))  # of the transform's part of the time


class Batches(IterableDataset[Any]):
    """Batches of another library."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(torch.zeros(20, 16, 3, 8, 8))


def test_an_iterable_dataset_has_stages_and_its_batches_are_counted_in_samples() -> None:
    found = profiled(DataLoader(Stream(), 5))
    assert list(found.stages) == ["dataset", "collate"]
    assert found.rows == []
    assert not found.setup.mapped
    assert profiled(DataLoader(Batches(), batch_size=None)).setup.batch_size == 16


def test_a_stream_that_takes_all_the_time_to_start_is_still_profiled() -> None:
    assert list(profiled(DataLoader(Stream(), 5), 0.0).stages) == ["dataset", "collate"]


class Groups(Dataset[Any]):
    """Batches by lists of rows."""

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, rows: list[int]) -> torch.Tensor:
        return torch.zeros(len(rows), 3, 8, 8)


def test_a_sampler_of_batches_is_kept() -> None:
    batches = BatchSampler(SequentialSampler(range(ROWS)), 4, drop_last=False)
    loader = DataLoader(Groups(), sampler=batches, batch_size=None)
    assert profiled(loader).setup.batch_size == 4
    trial = Trial(remedy=Remedy(), seconds=0.01)
    assert measure_rate(session(loader), loading=Loading(), trial=trial) > 0


def test_a_subset_in_worker_processes_is_profiled(made: Path) -> None:
    loader = DataLoader(Subset(Sleepy(), [3, 4, 5]), 2, num_workers=2)

    found = profiled(loader, 60.0)  # ends with the last row
    assert sorted(found.rows) == [0, 1, 2]  # rows of the subset
    setup = found.setup
    assert (setup.engine, setup.workers, setup.batch_size) == ("process", 2, 2)
    assert (setup.dataset, setup.transform) == ("Sleepy", "slow")


def joined(samples: list[Any]) -> Any:
    return torch.stack([image for image, _ in samples]), None


def test_a_remedy_keeps_everything_else() -> None:
    pipeline = Pipeline(session(DataLoader(Sleepy(), 4, collate_fn=joined)), Loading())

    same: Any = pipeline.loader(Remedy(), "", [0, 1, 2])
    assert (same.collate_fn, same.batch_size, same.num_workers) == (joined, 4, 0)
    assert set(same.dataset.indices) == {0, 1, 2}
    assert same.dataset.dataset is pipeline.dataset

    changed = Remedy(options={"num_workers": 2}, default_collate=True)
    workers: Any = pipeline.loader(changed, "", [0])
    assert workers.num_workers == 2
    assert workers.collate_fn is shardkit.collate

    changed = Remedy(options={"num_workers": 2, "engine": "thread"})
    threads: Any = pipeline.loader(changed, "", [0])
    assert (threads.engine, threads.num_workers, threads.collate_fn) == ("thread", 2, joined)


def negative(label: int) -> int:
    return -label


def test_a_trial_keeps_the_options_and_rows_of_the_dataset(made: Path, tmp_path: Path) -> None:
    options: dict[str, Any] = {"fields": ("label", "image"), "as_dict": True, "decode": "torch"}
    dataset = LMDBDataset(made, target_transform=negative, **options)
    loader = make_loader(Subset(dataset.select([3, 0, 4]), [2, 0]), 2, num_workers=1)
    pipeline = Pipeline(session(loader), Loading())
    expected = {-int(label) for label in dataset.targets[[4, 3]]}

    trial: Any = pipeline.loader(Remedy(), "", [0, 1])
    batch = next(iter(trial))
    assert list(batch) == ["label", "image"]
    assert {*batch["label"].tolist()} == expected

    write_images(session(loader), rows=[0], files=(), folder=tmp_path / "source")
    convert_images(tmp_path / "source", tmp_path / "copy", Recipe())
    copy: Any = pipeline.loader(Remedy(), str(tmp_path / "copy"), [0])
    assert list(next(iter(copy))) == ["label", "image"]


def test_a_trial_keeps_what_the_batches_of_the_loader_hold(made: Path) -> None:
    dataset = LMDBDataset(made, decode="torch")
    crops = [CenterCrop(8), CenterCrop(6)]

    def trial(**options: Any) -> Any:
        loader = make_loader(dataset, 4, num_workers=1, **options)
        return Pipeline(session(loader), Loading()).loader(Remedy(), "", [0, 1])

    crops = [CenterCrop(8), CenterCrop(6)]
    first, second = next(iter(trial(views=crops, samples_per_epoch=8)))
    assert (first[0].shape, second[0].shape) == ((4, 3, 8, 8), (4, 3, 6, 6))
    assert len(trial(aug_repeats=2)) == 2 * len(trial())
    buckets = Buckets([(8, 16), (16, 8)], weights=[1.0] * len(dataset))
    images, _ = next(iter(trial(sampler=buckets)))
    assert sorted(images.shape[2:]) == [8, 16]


def test_a_loader_of_another_kind_is_refused() -> None:
    with refused(UsageError, "'made:up'"):
        Pipeline(Session(subject=Subject(loader="made:up"), loader=[1]), Loading())


def test_torch_threads_of_a_remedy_are_restored(made: Path) -> None:
    before = torch.get_num_threads()
    loader = make_loader(LMDBDataset(made, decode="torch"), 4, num_workers=1)
    trial = Trial(remedy=Remedy(torch_threads=before + 1), rows=[0, 1], seconds=0.01)

    assert measure_rate(session(loader), loading=Loading(), trial=trial) > 0
    assert torch.get_num_threads() == before


def test_a_sample_is_converted(photos: Path, made: Path, tmp_path: Path) -> None:
    dataset = LMDBDataset(made, decode="torch")
    given = session(make_loader(dataset, 4, num_workers=1))
    write_images(given, rows=[3, 4, 5], files=(), folder=tmp_path / "source")
    raw = Recipe(resize=(32, 32), resize_mode="crop", encode="raw")
    convert_images(tmp_path / "source", tmp_path / "raw", raw)

    loader = Pipeline(given, Loading()).loader(Remedy(), str(tmp_path / "raw"), [0])
    images, _ = next(iter(loader))
    assert tuple(images.shape) == (4, 3, 32, 32)
    converted = to_convert(given, files=())
    assert (converted.kind, converted.path) == ("dataset", str(made))
