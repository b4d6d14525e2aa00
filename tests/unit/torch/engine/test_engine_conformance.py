"""The laws of reading in batches, for every engine: `engines.ENGINES`.

Each law has one fast row for each engine. A slow row has all orders, formats, ranks and stops.
"""

from __future__ import annotations

import gc
import itertools
import random
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from engines import (
    ANY_DATASET,
    DECODE,
    ENGINES,
    LOADERS,
    ORDERS,
    PLACES,
    WITH_PROCESSES,
    WITH_WORKERS,
    ByHand,
    Crew,
    Numbers,
    failure_of,
    flat,
    make_even,
    open_loader,
    opened,
    orders_of,
    rank_of,
    shared,
    squares,
    take,
    through_json,
)
from helpers import DEADLINE, FORMATS, in_fork, wait_until
from loading import BATCH, ROWS, SEED, close, crc, prints_of, row_order, same
from refusals import refused
from torch.utils.data import ConcatDataset, Dataset, StackDataset, Subset

from shardkit import Rank, ShardDataset, collate, make_loader, open_dataset, with_rng
from shardkit.errors import CorruptRecord, LoaderFailed, TransformFailed

BAD = 13
"""The row at which things go wrong: neither the first of its batch nor in the first batches."""

BEFORE = BAD // BATCH
"""Batches before it."""

loaders = pytest.mark.parametrize("engine", LOADERS)
any_dataset = pytest.mark.parametrize("engine", ANY_DATASET)


def in_full(engines: Iterable[str]) -> pytest.MarkDecorator:
    """Parametrize a law by engines: one fast row for each, and a slow one in full."""
    rows = []
    for engine in engines:
        rows.append(pytest.param(engine, False, id=engine))
        rows.append(pytest.param(engine, True, id=f"{engine} in full", marks=pytest.mark.slow))
    return pytest.mark.parametrize(("engine", "full"), rows)


SLOW_TO_START = ("helper", "process", "DataLoader", "StatefulDataLoader")


class Variant(NamedTuple):
    """What a row of a law reads, and in which order."""

    order: str
    to: str
    place: tuple[int, int]


def variants(engine: str, full: bool) -> list[Variant]:
    """Return combinations: every order, if in full, with formats and ranks in rotation.

    Engines whose processes take long to start share the orders: each has every second one.
    """
    number, orders = ENGINES.index(engine) + 1, orders_of(engine)
    every = [
        Variant(order, FORMATS[(number + n) % 3], PLACES[(number + n) % 4])
        for n, order in enumerate(orders)
    ]
    if not full:
        return [every[number % len(every)]]
    return every[number % 2 :: 2] if engine in SLOW_TO_START else every


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dataset of 23 images of one size in six shards, in each format."""
    return make_even(tmp_path_factory.mktemp("conformance"))


@pytest.fixture(scope="module")
def by_hand(root: Path) -> ByHand:
    """The expected batches, from one format; all others must be equal."""
    by_hand = ByHand(root / "hdf5")
    for order, epoch in itertools.product(ORDERS, (0, 1, 2, 4)):
        by_hand.samples(order, epoch)
    return by_hand


def read(root: Path, engine: str, variant: Variant, **options: Any) -> closing[Any]:
    dataset = open_dataset(root / variant.to, decode=DECODE)
    options = {"seed": SEED, "rank": rank_of(variant.place), **ORDERS[variant.order], **options}
    return opened(engine, dataset, **options)


# Order, equality, epochs and ranks.


@in_full(ENGINES)
def test_batches_are_those_of_a_loop_over_the_dataset(
    root: Path, by_hand: ByHand, engine: str, full: bool
) -> None:
    for number, variant in enumerate(variants(engine, full)):
        dataset = open_dataset(root / variant.to, decode=DECODE)
        if number % 2:
            assert len(dataset[:]) == ROWS  # it was read before a fork
        order = {"seed": SEED, "rank": rank_of(variant.place), **ORDERS[variant.order]}
        with opened(engine, dataset, **order) as loader:
            for epoch in (0, 1, 4):  # each iteration is the next epoch
                if epoch == 4 or engine.startswith("iterable"):
                    loader.set_epoch(epoch)
                expected = by_hand.batches(variant.order, epoch, variant.place)
                assert len(loader) == len(expected)
                assert take(iter(loader)) == expected, (variant, epoch)
        assert len(dataset[:]) == ROWS  # and it reads on here


@pytest.mark.parametrize("engine", WITH_PROCESSES)
def test_a_fork_server_starts_the_same_workers(root: Path, by_hand: ByHand, engine: str) -> None:
    with read(root, engine, Variant("views", "hdf5", (1, 2)), start_method="forkserver") as loader:
        assert take(loader) == by_hand.batches("views", 0, (1, 2))


@loaders
def test_an_abandoned_epoch_is_followed_by_the_next(root: Path, engine: str) -> None:
    crew = Crew()
    with read(root, engine, Variant("shuffled", "lmdb", (0, 1)), with_rows=True) as loader:

        def fail() -> None:
            for _ in loader:
                raise ZeroDivisionError

        for _ in loader:
            assert loader.epoch == 0
            break
        with pytest.raises(ZeroDivisionError):
            fail()
        batches = iter(loader)
        next(batches)
        close(batches)
        order = row_order(shuffle=True, seed=SEED).rows(3, np.arange(ROWS)).tolist()
        assert [row for *_, rows in loader for row in rows.tolist()] == order
        assert loader.epoch == 4
    crew.ends()


@loaders
def test_a_new_iteration_ends_the_old_one_and_closing_both(
    root: Path, by_hand: ByHand, engine: str
) -> None:
    with read(root, engine, Variant("shuffled", "lmdb", (0, 1))) as loader:
        loader.close()  # before it starts
        older = iter(loader)
        next(older)
        newer = iter(loader)
        begun = next(newer)
        with pytest.raises(LoaderFailed):
            next(older)
        assert list(older) == []
        assert [flat(begun), *take(newer)] == by_hand.batches("shuffled", 1)
        begun = iter(loader)
        next(begun)
        loader.close()
        loader.close()
        with pytest.raises(LoaderFailed):
            next(begun)
        assert loader.state_dict()["epoch"] == 2
        loader.set_epoch(4)
        assert take(loader) == by_hand.batches("shuffled", 4)


@pytest.mark.slow
@loaders
def test_an_endless_iteration_continues_with_the_next_epoch(
    root: Path, by_hand: ByHand, engine: str
) -> None:
    expected = [batch for epoch in range(3) for batch in by_hand.batches("short", epoch)]
    length = len(by_hand.batches("short", 0))
    variant = Variant("short", "lmdb", (0, 1))
    with (
        read(root, engine, variant, endless=True) as first,
        read(root, engine, variant, endless=True) as second,
    ):
        for stop in (length, length + 2):
            first.set_epoch(0)
            batches = iter(first)
            assert take(batches, stop) == expected[:stop]
            assert first.epoch == (stop - 1) // length
            second.load_state_dict(through_json(first.state_dict()))
            close(batches)
            assert take(iter(second), len(expected) - stop) == expected[stop:]


@pytest.mark.parametrize("engine", [*WITH_WORKERS, "DataLoader"])
def test_a_slow_batch_is_delivered_in_order(engine: str) -> None:
    later = shared()

    def hook(row: int) -> None:
        if row == 0:
            wait_until(later.item, "batches of the other worker")
        if row == 3 * BATCH:
            later.fill_(1)

    with opened(engine, Numbers(hook=hook)) as loader:
        assert [batch.tolist() for batch in loader] == squares()


@any_dataset
def test_few_samples_or_none_are_one_batch_or_none(engine: str) -> None:
    with opened(engine, Numbers(0), shuffle=True, num_workers=workers_of(engine)) as loader:
        assert len(loader) == 0
        for epoch in range(3):
            assert loader.epoch == epoch
            assert list(loader) == []
        loader.load_state_dict(loader.state_dict())
        assert list(loader) == []
    with opened(engine, Numbers(3), batch_size=4) as loader:
        assert len(loader) == 1
        for _ in range(2):
            assert [batch.tolist() for batch in loader] == [[0, 1, 4]]
        assert loader.epoch == 2


def workers_of(engine: str) -> int:
    """Return 1, or 0 for an engine without workers."""
    return min(1, int(LOADERS[engine].get("num_workers", 0)))


# State.


def batches_after(loader: Any, engine: str, epoch: int) -> Iterator[Any]:
    """Return the next iteration of a loader; an iterable dataset is told its epoch."""
    if engine.startswith("iterable"):
        loader.set_epoch(epoch)
    return iter(loader)


@in_full(engine for engine in ENGINES if "DataLoader" not in engine or "Stateful" in engine)
def test_a_stopped_run_resumes_with_the_exact_next_batch(
    root: Path, by_hand: ByHand, engine: str, full: bool
) -> None:
    is_other, is_iterable = "Stateful" in engine, engine.startswith("iterable")
    for variant in variants(engine, full):
        run = [by_hand.batches(variant.order, epoch, variant.place) for epoch in range(3)]
        half = len(run[0]) // 2
        stops = range(half, len(run[0]), half)
        if full:  # torchdata after the last batch: test_torchdata
            every = 3 if engine in WITH_PROCESSES or is_other else 1
            stops = range(1, len(run[0]) + (not is_other), every)
        with read(root, engine, variant) as first, read(root, engine, variant) as second:
            for number, stop in enumerate(stops):
                at = number % 2
                if is_other:
                    first.restart()
                first.set_epoch(at)
                batches = batches_after(first, engine, at)
                assert take(batches, stop) == run[at][:stop], (variant, stop)
                state = first.state_dict()  # what is read ahead is not in it
                if not is_other:
                    state = through_json(state)
                    close(batches)
                del batches
                second.load_state_dict(state)
                rest = run[at][stop:] or ([] if is_iterable else run[at + 1])
                assert take(batches_after(second, engine, at)) == rest, (variant, stop)
                if run[at][stop:]:
                    following = batches_after(second, engine, at + 1)
                    assert take(following) == run[at + 1], (variant, stop)


AHEAD = {"thread": 4, "helper": 6, "process": 4, "DataLoader": 4}
"""Batches that are made or ready with two workers and ``prefetch_factor=2``; the helper sends two
more."""


def have_read(times: torch.Tensor, rows: int) -> bool:
    return int(times.sum()) == rows


@pytest.mark.parametrize("engine", [*ANY_DATASET, "DataLoader"])
def test_samples_are_read_ahead_up_to_a_bound_and_given_out_after_resuming(engine: str) -> None:
    times, ahead = shared(ROWS), AHEAD.get(engine, 0)

    def note(row: int) -> None:
        times[row] += 1

    dataset, options = Numbers(hook=note), {"prefetch_factor": 2} if engine in WITH_WORKERS else {}
    with opened(engine, dataset, **options) as loader:
        batches, found, state = iter(loader), [], None
        assert engine == "DataLoader" or int(times.sum()) == 0  # it starts with iter()
        for given in range(1, len(squares()) + 1):
            found.append(next(batches).tolist())
            allowed = min(ROWS, (given + ahead) * BATCH)
            assert int(times.sum()) <= allowed
            if given == 2:
                wait_until(partial(have_read, times, allowed), "batches read ahead")
                state = loader.state_dict() if engine in LOADERS else None
        assert found == squares()
        assert times.tolist() == [1] * ROWS
        if state is not None:
            assert state["consumed"] == 2 * BATCH
            loader.load_state_dict(state)
            assert [batch.tolist() for batch in loader] == squares()[2:]


# Failures.


FAULTS = (
    KeyError("gone"),
    OSError(5, "Input/output error"),
    RuntimeError("the request timed out after 3 attempts"),
    RuntimeError("DataLoader worker (pid 1) is what a user may say too"),
)


@any_dataset
def test_an_exception_of_a_sample_comes_with_its_batch_and_the_loader_recovers(engine: str) -> None:
    armed = shared()

    def fail(row: int) -> None:
        if row == BAD and armed.item():
            raise FAULTS[int(armed) - 1]

    with opened(engine, Numbers(hook=fail), num_workers=workers_of(engine)) as loader:
        for number, error in enumerate(FAULTS, 1):
            armed.fill_(number)
            found, raised = failure_of(loader)
            assert type(raised) is type(error)
            assert str(error.args[-1]) in str(raised)
            assert [batch.tolist() for batch in found] == squares()[:BEFORE]
        armed.zero_()
        assert [batch.tolist() for batch in loader] == squares()


@any_dataset
def test_an_exception_that_ends_loops_does_not_end_the_epoch(engine: str) -> None:
    def fail(row: int) -> None:
        if row == BAD:
            raise StopIteration

    options = {"num_workers": workers_of(engine)}
    with opened(engine, Numbers(hook=fail), **options) as loader:
        found, error = failure_of(loader)
    assert [batch.tolist() for batch in found] == squares()[:BEFORE]
    assert "StopIteration" in str(error)


@any_dataset
def test_an_exception_that_ends_processes_is_an_error(engine: str) -> None:
    def fail(row: int) -> None:
        if row == BAD:
            raise error

    kind = LoaderFailed if engine in WITH_PROCESSES else SystemExit
    for error in (SystemExit(5), SystemExit()):
        options = {"num_workers": workers_of(engine)}
        with opened(engine, Numbers(hook=fail), **options) as loader:
            raised = failure_of(loader)[1]
        assert type(raised) is kind
        assert raised is error or "SystemExit" in str(raised)


@pytest.mark.parametrize("engine", [*ANY_DATASET, "DataLoader", "iterable"])
def test_a_transform_that_fails_names_the_sample_and_the_cause(root: Path, engine: str) -> None:
    bad = crc(open_dataset(root / "hdf5", decode="numpy")[BAD][0])

    def fail(image: Any) -> torch.Tensor:
        if crc(image) == bad:
            raise ValueError("no such colour")
        return torch.from_numpy(image)

    def fail_too(label: int) -> int:
        raise ValueError("no such label")

    dataset = open_dataset(root / "hdf5", fail, decode="numpy")
    with opened(engine, dataset) as loader:
        found, error = failure_of(loader)
    assert type(error) is TransformFailed
    facts = ("ValueError: no such colour", dataset.keys[BAD], f"row {BAD},", dataset.paths[BAD])
    for fact in facts:
        assert fact in str(error)
    assert type(error.__cause__) is ValueError or engine == "DataLoader"  # which sends text alone
    assert len(found) == BEFORE
    dataset = open_dataset(root / "hdf5", None, fail_too, "torch")
    with opened(engine, dataset) as loader:
        error = failure_of(loader)[1]
    assert type(error) is TransformFailed
    for fact in ("ValueError: no such label", dataset.keys[0], "row 0,"):
        assert fact in str(error)


@pytest.fixture(scope="module")
def damaged(root: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dataset in which the image of row `BAD` is damaged."""
    place = shutil.copytree(root / "webdataset", tmp_path_factory.mktemp("damaged") / "made")
    image = (root / "photos" / open_dataset(place).paths[BAD]).read_bytes()
    (shard,) = (each for each in place.glob("*.tar") if image in each.read_bytes())
    content = bytearray(shard.read_bytes())
    content[content.index(image) + 50] ^= 1
    shard.write_bytes(content)
    return place


@pytest.mark.parametrize("engine", [name for name in ENGINES if name != "resident"])
def test_a_damaged_record_comes_with_its_batch(damaged: Path, engine: str) -> None:
    """Also if several batches are read at once."""
    dataset = open_dataset(damaged, decode="torch")
    with opened(engine, dataset) as loader:
        found, error = failure_of(loader)
    assert type(error) is CorruptRecord
    shard = f"shard-{BAD // 4:06d}.tar"
    for fact in (dataset.keys[BAD], dataset.paths[BAD], f"row {BAD},", shard, "checksum"):
        assert fact in str(error)
    assert len(found) == BEFORE


@in_full(ANY_DATASET)
def test_a_damaged_record_is_left_out_of_its_batch(
    damaged: Path, by_hand: ByHand, engine: str, full: bool
) -> None:
    """All other samples are those of a dataset without damage, also after a resume."""
    for order in ("shuffled", "views", "long") if full else ("shuffled",):
        samples = by_hand.samples(order, 0)
        steps = [samples[start : start + BATCH] for start in range(0, len(samples), BATCH)]
        expected = [
            list(itertools.chain(*zip(*(shown for row, shown in step if row != BAD), strict=True)))
            for step in steps
        ]
        dataset = open_dataset(damaged, decode=DECODE)
        options = {"seed": SEED, "on_bad": "drop", **ORDERS[order]}
        with opened(engine, dataset, **options) as loader:
            batches = iter(loader)
            begun = take(batches, 2)
            state = through_json(loader.state_dict())
            assert begun + take(batches) == expected
            assert list(loader.bad) == [BAD]
            assert dataset.keys[BAD] in loader.bad[BAD]
        with opened(engine, dataset, **options) as resumed:
            resumed.load_state_dict(state)
            assert take(iter(resumed)) == expected[2:]


@pytest.mark.parametrize("engine", ["serial", "process"])
def test_batches_lack_rows_that_are_bad_but_no_batch_is_empty(
    damaged: Path, engine: str, caplog: pytest.LogCaptureFixture
) -> None:
    dataset = Subset(open_dataset(damaged, decode="torch"), [BAD, 0, BAD + 1, BAD, 1])
    options = {"batch_size": 1, "with_rows": True, "shuffle": False, "on_bad": "drop"}
    with opened(engine, dataset, **options) as loader:
        assert [rows.tolist() for *_, rows in loader] == [[0], [BAD + 1], [1]]
        assert list(loader.bad) == [BAD]
    assert sum("left out row" in record.getMessage() for record in caplog.records) == 1
    with opened(engine, dataset, **options, max_bad=0) as loader, refused(LoaderFailed, "max_bad"):
        list(loader)
    alone = {"rank": Rank(rank=0, world_size=2)}
    with opened(engine, dataset, **options, **alone) as loader, refused(LoaderFailed, f"row {BAD}"):
        list(loader)


@loaders
def test_a_collate_function_that_fails_fails_its_own_batch_once(root: Path, engine: str) -> None:
    called = shared()

    def refuse(samples: Any) -> Any:
        called.add_(1)
        if called.item() == 3:
            raise error
        return collate(samples)

    dataset = open_dataset(root / "lmdb", decode="torch")
    options = {"collate_fn": refuse, "num_workers": workers_of(engine)}
    with opened(engine, dataset, **options) as loader:
        for error in (OverflowError("third"), SystemExit("third")):
            called.zero_()
            found, raised = failure_of(loader)
            ends_worker = engine in WITH_PROCESSES and isinstance(error, SystemExit)
            assert type(raised) is (LoaderFailed if ends_worker else type(error))
            assert "third" in str(raised)
            assert (len(found), called.item()) == (2, 3)


@pytest.mark.parametrize("engine", WITH_WORKERS)
def test_a_timeout_is_an_error_that_names_the_sample(
    root: Path, monkeypatch: pytest.MonkeyPatch, engine: str
) -> None:
    reached, release, crew = shared(), threading.Event(), Crew()

    @with_rng
    def hang(image: Any, rng: np.random.Generator) -> Any:
        reached.fill_(1)
        release.wait()

    dataset = open_dataset(root / "lmdb", hang, decode="numpy")
    options: dict[str, Any] = {"num_workers": 1, "timeout": 0.2}
    if engine in WITH_PROCESSES:  # no time passes before the worker hangs, and then an hour
        clock = SimpleNamespace(monotonic=lambda: 3600 * reached.item())
        monkeypatch.setattr("shardkit.torch.engine.processes.time", clock)
    try:
        with opened(engine, dataset, **options) as loader:
            with pytest.raises(LoaderFailed) as caught:
                next(iter(loader))
            for fact in ("0.2 s", dataset.keys[0], "row 0,", dataset.paths[0], "timeout="):
                assert fact in str(caught.value)
    finally:
        release.set()
    crew.ends()


# Forks, and the rest of the process.


@pytest.mark.parametrize(
    ("engine", "persistent"), [(engine, True) for engine in ANY_DATASET] + [("process", False)]
)
def test_a_fork_cannot_continue_its_parents_iteration_and_leaves_it_alone(
    engine: str, persistent: bool
) -> None:
    options = {"num_workers": workers_of(engine), "persistent_workers": persistent}
    with opened(engine, Numbers(), **options) as loader:
        batches = iter(loader)
        found = [next(batches).tolist()]

        def in_child() -> bool:
            with pytest.raises(LoaderFailed, match="fork"):
                next(batches)
            again = [batch.tolist() for batch in loader]
            loader.close()
            return again == squares()

        assert in_fork(in_child) == 0
        found += [batch.tolist() for batch in batches]
        assert found == squares()
        assert [batch.tolist() for batch in loader] == squares()


def generators() -> list[bytes]:
    """Return the state of this process's global generators."""
    numbers: Any = np.random.get_state()
    place = [repr(random.getstate()).encode(), repr(numbers[2:]).encode(), numbers[1].tobytes()]
    return [*place, torch.get_rng_state().numpy().tobytes()]


def three_numbers(image: Any) -> torch.Tensor:
    """A typical transform: it draws from all three global generators."""
    drawn = [random.random(), float(np.random.random()), float(torch.rand(()))]
    return torch.tensor([crc(image), *drawn], dtype=torch.float64)


def three_numbers_of_a_label(label: int) -> torch.Tensor:
    return three_numbers(np.array([label], np.uint8))


@with_rng
def noisy(image: Any, rng: np.random.Generator) -> torch.Tensor:
    return torch.from_numpy(np.asarray(image)[:4, :4] + rng.normal(0, 4, (4, 4, 3)))


@pytest.fixture(scope="module")
def drawn(root: Path) -> list[Any]:
    """Two epochs without workers."""
    loader = make_loader(noise_of(root), BATCH, shuffle=True, seed=SEED, **LOADERS["serial"])
    epochs = [list(loader) for _ in range(2)]
    assert not same(*epochs)
    return epochs


def noise_of(root: Path) -> ShardDataset:
    return open_dataset(root / "lmdb", noisy, decode="numpy")


@pytest.mark.parametrize("engine", [*ANY_DATASET, "DataLoader"])
def test_transforms_with_a_generator_draw_the_same_and_leave_the_global_ones(
    root: Path, drawn: list[Any], engine: str
) -> None:
    before = generators()
    with opened(engine, noise_of(root), shuffle=True, seed=SEED) as loader:
        for epoch in drawn:
            for found, expected in zip(loader, epoch, strict=True):
                assert same(found, expected)
                assert engine == "DataLoader" or generators() == before  # it seeds workers so
        if engine != "DataLoader":
            next(iter(loader))
            assert generators() == before


REPEATABLE = ("serial", "process", "process without workers", "DataLoader")
"""Engines in which a transform has the global generators for itself."""


@pytest.fixture(scope="module")
def ordinary(root: Path) -> list[Any]:
    """Two epochs of `three_numbers` without workers."""
    dataset = open_dataset(root / "webdataset", three_numbers, three_numbers_of_a_label)
    loader = make_loader(dataset, BATCH, shuffle=True, seed=SEED, **LOADERS["serial"])
    epochs = [list(loader) for _ in range(2)]
    for part in range(2):
        values = torch.cat([batch[part] for epoch in epochs for batch in epoch])
        for column in values[:, 1:].T:  # no row and no epoch has the numbers of another
            assert len(set(column.tolist())) == 2 * ROWS
    return epochs


@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize("engine", REPEATABLE)
def test_ordinary_random_transforms_draw_the_same(
    root: Path, ordinary: list[Any], engine: str, persistent: bool
) -> None:
    for seed in (random.seed, np.random.seed, torch.manual_seed):
        seed(int(persistent))  # what the user's own seeds are is no matter
    before = generators()
    dataset = open_dataset(root / "webdataset", three_numbers, three_numbers_of_a_label)
    options = {"shuffle": True, "seed": SEED, "persistent_workers": persistent}
    with opened(engine, dataset, **options) as loader:
        assert same([list(loader) for _ in range(2)], ordinary)
    kept = 3 if engine == "DataLoader" else 4  # it draws seeds of workers from torch's
    assert generators()[:kept] == before[:kept]


# Memory.


@loaders
def test_a_kept_batch_never_changes(root: Path, by_hand: ByHand, engine: str) -> None:
    options = {} if engine == "resident" else {"prefetch_factor": 1}
    variant = Variant("shuffled", "lmdb", (0, 1))
    with read(root, engine, variant, **options) as loader:
        kept = [batch for _ in range(2) for batch in loader]
        part = [batch[0][1:].numpy() for batch in loader]  # keeps the batch that it is a view of
        loader.set_epoch(2)
        whole = [batch[0] for batch in loader]
    expected = [by_hand.batches("shuffled", epoch) for epoch in range(3)]
    assert prints_of(kept) == expected[0] + expected[1]
    assert len({images.data_ptr() for images, _ in kept}) == len(kept)
    assert all(map(np.array_equal, part, [images[1:].numpy() for images in whole]))


@pytest.mark.slow
@pytest.mark.parametrize("engine", WITH_WORKERS)
def test_a_dropped_loader_and_a_kept_error_leave_no_workers(root: Path, engine: str) -> None:
    gc.collect()  # what others left

    def fail(image: Any) -> Any:
        raise ValueError("no such colour")

    crew, kept = Crew(), list[Any]()
    loader = open_loader(engine, open_dataset(root / "lmdb", decode="torch"))
    next(iter(loader))
    del loader
    gc.collect()
    crew.ends()
    try:
        list(open_loader(engine, open_dataset(root / "lmdb", fail, decode="numpy")))
    except TransformFailed as error:
        kept += [error, kept]  # which has the loader in its traceback
    del kept
    gc.collect()
    crew.ends()


AT_EXIT = """
import shardkit

alive = []  # modules end before a script without functions
for engine in ("process", "helper", "thread"):  # processes fork before threads run
    for persistent in (False, True):
        options = dict(engine=engine, num_workers=2, persistent_workers=persistent)
        alive.append(iter(shardkit.make_loader(range(64), 4, **options)))
        loader = shardkit.make_loader(range(64), 4, **options)
        alive.append(iter(shardkit.ThroughputMonitor(loader)))
for batches in alive:
    next(batches)
"""


@pytest.mark.slow
def test_iterators_that_are_alive_at_interpreter_exit_end_in_silence() -> None:
    command = [sys.executable, "-W", "ignore", "-c", AT_EXIT]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE, check=False)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "", "")


# Datasets and collate functions of others.


class Own(Dataset[dict[str, Any]]):
    """A user's dataset that wraps one of ours: reversed rows, dict samples."""

    def __init__(self, dataset: ShardDataset) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, row: int) -> dict[str, Any]:
        image, label = self.dataset[len(self) - 1 - row]
        return {"image": image, "label": label}


class Wrapped(NamedTuple):
    make: Callable[[ShardDataset], Any]
    rows: Any = range(99)
    """What ``with_rows`` states for each row: for a ``Subset``, those of its dataset."""
    decode: Any = DECODE


WRAPPED = (
    Wrapped(lambda dataset: Subset(dataset, [20, 3, 5, 7, 11, 0]), [20, 3, 5, 7, 11, 0]),
    Wrapped(lambda dataset: Subset(Subset(dataset, range(5, 20)), [9, 0, 14]), [14, 5, 19]),
    Wrapped(lambda dataset: ConcatDataset([Subset(dataset, range(3, 9)), Subset(dataset, [1, 2])])),
    Wrapped(Own),
    Wrapped(lambda dataset: Subset(Own(dataset), [4, 19]), [4, 19]),
    Wrapped(lambda dataset: Numbers()),
    Wrapped(lambda dataset: [(n, f"{n}") for n in range(ROWS)]),
    Wrapped(lambda dataset: StackDataset(one=Numbers(), two=dataset)),
    # Repeated rows draw numbers of their own; so these draw none.
    Wrapped(lambda each: Subset(ConcatDataset([each, each]), [40, 2, 25]), [40, 2, 25], "torch"),
)


@in_full(ANY_DATASET)
def test_any_dataset_is_read_with_the_epochs_random_numbers(
    root: Path, engine: str, full: bool
) -> None:
    first = 3 * (ANY_DATASET.index(engine) % 3)
    for wrapped in WRAPPED if full else WRAPPED[first : first + 3]:
        alone = open_dataset(root / "lmdb", decode=wrapped.decode)
        dataset = wrapped.make(open_dataset(root / "lmdb", decode=wrapped.decode))
        each = wrapped.make(alone)
        options = {"num_workers": workers_of(engine), "with_rows": True}
        with opened(engine, dataset, shuffle=True, seed=SEED, **options) as loader:
            for epoch in range(2):
                alone.set_epoch(epoch, SEED)
                order = row_order(size=len(dataset), shuffle=True, seed=SEED)
                rows = order.rows(epoch, np.arange(order.size)).tolist()
                parts = [rows[start : start + BATCH] for start in range(0, len(rows), BATCH)]
                for batch, part in zip(loader, parts, strict=True):
                    expected = collate([each[row] for row in part])
                    stated = torch.tensor([wrapped.rows[row] for row in part])
                    assert same(batch, with_rows_of(expected, stated))


def with_rows_of(batch: Any, rows: torch.Tensor) -> Any:
    if isinstance(batch, dict):
        return {**batch, "rows": rows}
    return (*batch, rows) if isinstance(batch, (list, tuple)) else (batch, rows)


class Named(NamedTuple):
    values: Any


COLLATE: tuple[Callable[[Any], Any], ...] = (
    lambda samples: (torch.tensor(samples), "all"),
    lambda samples: [torch.tensor(samples)],
    lambda samples: {"values": torch.tensor(samples)},
    lambda samples: Named(torch.tensor(samples)),
    torch.tensor,
)


@any_dataset
def test_rows_are_added_to_any_batch(engine: str) -> None:
    this_rank = Rank(rank=1, world_size=2, remainder="pad")
    rows = [[4, 5, 6, 7], [12, 13, 14, 15], [20, 21, 22, 0]]  # the last stands for position 23
    marked = [rows[0], rows[1], [20, 21, 22, -1]]
    chosen = COLLATE if not workers_of(engine) else COLLATE[ANY_DATASET.index(engine) :][:2]
    for function in chosen:
        options = {"collate_fn": function, "num_workers": workers_of(engine), "with_rows": True}
        with opened(engine, Numbers(), batch_size=4, rank=this_rank, **options) as loader:
            for batch, part, marks in zip(loader, rows, marked, strict=True):
                expected = function([row * row for row in part])
                assert same(batch, with_rows_of(expected, torch.tensor(marks)))


@any_dataset
def test_a_collate_function_gets_the_datasets_samples(root: Path, engine: str) -> None:
    def describe(samples: Any) -> Any:
        return type(samples) is kind, len(samples), [label for _, label in samples]

    dataset = open_dataset(root / "lmdb", decode="torch")
    kind = type(dataset[:])
    options = {"collate_fn": describe, "num_workers": workers_of(engine)}
    with opened(engine, dataset, **options) as loader:
        found = list(loader)
        assert loader.collate_fn is describe
    labels = dataset.targets.tolist()
    parts = [labels[start : start + BATCH] for start in range(0, ROWS, BATCH)]
    assert found == [(True, len(part), part) for part in parts]


@any_dataset
def test_pil_images_without_a_transform_are_refused_with_a_remedy(root: Path, engine: str) -> None:
    with opened(engine, open_dataset(root / "lmdb")) as loader:
        error = failure_of(loader)[1]
    assert type(error) is TypeError
    for fact in ("add a transform", "decode='torch'"):
        assert fact in str(error)
