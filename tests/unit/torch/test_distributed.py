"""Ranks of a real process group: each detects its subset, and all have the same number of steps."""

from __future__ import annotations

import itertools
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed
from helpers import DEADLINE
from loading import CROP, ROWS, SEED, Prints, Samples, prints, row_order
from ranks import in_ranks

from shardkit import (
    BlockShuffle,
    EpochBatchSampler,
    IterableShardDataset,
    Rank,
    make_loader,
    open_dataset,
)

BATCH = 3
BLOCKS = BlockShuffle(rows=3, buffer=9)


@pytest.fixture(autouse=True)
def _no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    """Clear the environment of a launcher; gloo then needs no host name."""
    for name in ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")


def options_of(told: dict[str, Any]) -> dict[str, Any]:
    return {
        "engine": told["engine"],
        "num_workers": told["num_workers"],
        "rank": Rank(remainder=told["remainder"]) if "remainder" in told else None,
        "with_rows": True,
        "start_method": "fork",
        "timeout": DEADLINE / 2,
    }


def train(path: Path, told: dict[str, Any]) -> dict[str, Any]:
    """Read epochs in step with the other ranks: a sum over all of them after each batch."""
    dataset = open_dataset(path, decode=CROP)
    shuffle = BLOCKS if told["shuffle"] == "blocks" else bool(told["shuffle"])
    loader = make_loader(dataset, BATCH, shuffle=shuffle, seed=SEED, **options_of(told))
    epochs, states = [], []
    with closing(loader):
        if "state" in told:
            loader.load_state_dict(told["state"])
        for _ in range(told.get("epochs", 1)):
            batches = []
            for batch in itertools.islice(loader, told.get("stop")):
                total = torch.tensor(len(batch[1]))
                torch.distributed.all_reduce(total)
                states.append(loader.state_dict())
                batches.append([prints(batch), batch[2].tolist(), int(total)])
            epochs.append(batches)
    return {"len": len(loader), "epochs": epochs, "state": loader.state_dict(), "states": states}


def in_step(answers: list[Any], epoch: int = 0) -> list[int]:
    """Return the rows of an epoch as its steps have them, of all ranks in turn."""
    ranks = [answer["epochs"][epoch] for answer in answers]
    return [row for step in zip(*ranks, strict=True) for batch in step for row in batch[1]]


@pytest.mark.parametrize(("world_size", "remainder"), [(2, "drop"), (2, "pad"), (3, "pad")])
def test_ranks_are_detected_and_have_equal_steps(
    root: Path, tmp_path: Path, world_size: int, remainder: str
) -> None:
    told = {
        "engine": "thread",
        "num_workers": 2,
        "shuffle": True,
        "remainder": remainder,
        "epochs": 2,
    }
    answers = in_ranks(world_size, tmp_path / "ranks", train, root / "lmdb", told)
    odd = ROWS % world_size
    for epoch in range(2):
        order = Samples(root / "lmdb", True).rows(epoch)
        expected = (
            order[: ROWS - odd] if remainder == "drop" else order + [-1] * (-ROWS % world_size)
        )
        assert in_step(answers, epoch) == expected
        for answer in answers:
            assert answer["len"] == len(answer["epochs"][epoch])
            assert all(
                total == len(rows) * world_size for _, rows, total in answer["epochs"][epoch]
            )
            assert answer["states"] == answers[0]["states"]


def evaluate(path: Path, told: dict[str, Any]) -> dict[str, Any]:
    """Read the rest of an epoch and the next: ranks may differ in length, so no call in each."""
    dataset = open_dataset(path, decode=CROP)
    loader = make_loader(dataset, BATCH, seed=SEED, **options_of(told))
    loader.load_state_dict({**loader.state_dict(), "consumed": told["consumed"]})
    read = [[row for batch in loader for row in batch[2].tolist()] for _ in range(2)]
    return {"read": read, "epoch": loader.epoch}


@pytest.mark.parametrize("consumed", [5, 22])
def test_an_exact_rest_is_divided_and_all_ranks_end_in_the_same_epoch(
    root: Path, tmp_path: Path, consumed: int
) -> None:
    told = {"engine": "thread", "num_workers": 1, "remainder": "exact", "consumed": consumed}
    answers = in_ranks(3, tmp_path / "ranks", evaluate, root / "lmdb", told)
    assert [answer["epoch"] for answer in answers] == [2] * 3
    for epoch, first in enumerate((consumed, 0)):
        every = [row for answer in answers for row in answer["read"][epoch]]
        assert sorted(every) == list(range(first, ROWS))


def iterate(path: Path, told: dict[str, Any]) -> dict[str, Any]:
    """Read with everything that finds a rank by itself and is no loader of ours."""
    found: dict[str, list[Prints]] = {}
    opened = IterableShardDataset(path, decode=CROP, shuffle=BLOCKS, seed=SEED, batch_size=BATCH)
    opened.set_epoch(1)
    found["batches"] = [prints(batch) for batch in opened]
    samples = IterableShardDataset(path, decode=CROP, shuffle=BLOCKS, seed=SEED)
    samples.set_epoch(1)
    found["samples"] = [prints(([image], [label])) for image, label in samples]
    dataset = open_dataset(path, decode=CROP)
    sampler = EpochBatchSampler(dataset, BATCH, shuffle=BLOCKS, seed=SEED)
    sampler.set_epoch(1)
    found["sampler"] = [prints(dataset[rows].batch) for rows in sampler]
    lengths = {"batches": len(opened), "samples": len(samples), "sampler": len(sampler)}
    return {"found": found, "lengths": lengths}


def test_iterable_datasets_and_samplers_detect_their_rank(root: Path, tmp_path: Path) -> None:
    world_size = 3
    answers = in_ranks(world_size, tmp_path / "ranks", iterate, root / "webdataset", {})
    samples = Samples(root / "webdataset", BLOCKS)
    expected, known = samples.rows(1)[: ROWS - ROWS % world_size], samples.of(1)
    for name in ("batches", "samples", "sampler"):
        ranks = [answer["found"][name] for answer in answers]
        assert [answer["lengths"][name] for answer in answers] == list(map(len, ranks))
        steps = zip(*ranks, strict=True)
        read = [known[tuple(one)] for step in steps for batch in step for one in batch]
        assert read == expected


def disagree(path: Path, told: dict[str, Any]) -> dict[str, Any]:
    """Create loaders while the environment contradicts the process group."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RANK", "7")
        patch.setenv("WORLD_SIZE", "9")
        dataset = open_dataset(path, decode=CROP)
        found = make_loader(dataset, BATCH)
        given = make_loader(dataset, BATCH, rank=Rank(rank=3, world_size=5))
    return {"found": repr(found), "given": repr(given)}


def test_a_given_rank_overrides_the_group_and_the_group_the_environment(
    root: Path, tmp_path: Path
) -> None:
    answers = in_ranks(2, tmp_path / "ranks", disagree, root / "lmdb", {})
    for rank, answer in enumerate(answers):
        assert f"rank {rank} of 2" in answer["found"]
        assert "rank 3 of 5" in answer["given"]


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_a_launcher_states_the_rank_in_the_environment(
    root: Path, monkeypatch: pytest.MonkeyPatch, world_size: int
) -> None:
    dataset = open_dataset(root / "lmdb", decode=CROP)
    ranks = []
    for rank in range(world_size):
        monkeypatch.setenv("RANK", str(rank))
        monkeypatch.setenv("WORLD_SIZE", str(world_size))
        options: dict[str, Any] = {"engine": "thread", "with_rows": True}
        loader = make_loader(dataset, BATCH, shuffle=True, seed=SEED, **options)
        monkeypatch.delenv("RANK")  # what a loader found out stays
        ranks.append([batch[2].tolist() for batch in loader])
    read = [row for step in zip(*ranks, strict=True) for rows in step for row in rows]
    order = row_order(shuffle=True, seed=SEED)
    assert read == order.rows(0, np.arange(ROWS - ROWS % world_size)).tolist()
