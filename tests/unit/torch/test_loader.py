"""The loader: the behavior of a DataLoader, and its additional promises."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from helpers import make_dataset, make_tree, png, wait_until
from loading import prints_of, same
from torch.utils.data import (
    ChainDataset,
    ConcatDataset,
    DataLoader,
    Dataset,
    IterableDataset,
    StackDataset,
    Subset,
)

from shardkit import (
    BlockShuffle,
    IterableLMDBDataset,
    Rank,
    ShardDataset,
    UsageError,
    collate,
    make_loader,
    open_dataset,
    with_rng,
)
from shardkit.errors import LoaderFailed
from shardkit.sampling.order import Order
from shardkit.torch.data.collate import BatchView
from shardkit.torch.engine import preflight
from shardkit.torch.loader import Loader

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning"),
]

ROWS = 23
BATCH = 4
BATCHES = 6

ENGINES = [("thread", 0), ("thread", 2), ("helper", 2), ("process", 0), ("process", 2)]

engines = pytest.mark.parametrize(("engine", "num_workers"), ENGINES)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An LMDB dataset of 23 images of 12 x 8 pixels and two classes."""
    root = tmp_path_factory.mktemp("loader")
    files: dict[str, bytes | None] = {
        f"{'ab'[n % 2]}/{n:02d}.png": png(12, 8, n) for n in range(ROWS)
    }
    return make_dataset(make_tree(root / "photos", files), root / "made")


@pytest.fixture
def dataset(root: Path) -> ShardDataset:
    return open_dataset(root, decode="torch")


@pytest.fixture
def load() -> Iterator[Callable[..., Loader]]:
    """Create loaders that are closed at the end of the test."""
    made: list[Loader] = []

    def load(dataset: Any, engine: str = "thread", num_workers: int = 2, **more: Any) -> Loader:
        names = ("batch_size", "shuffle", "seed")
        given = {"batch_size": BATCH} | {name: more.pop(name) for name in names if name in more}
        options: dict[str, Any] = {
            "engine": engine,
            "num_workers": num_workers,
            "start_method": "fork",
            "timeout": 60.0,
            **more,
        }
        made.append(make_loader(dataset, **options, **given))
        return made[-1]

    yield load
    for loader in made:
        loader.close()


Load = Callable[..., Loader]


class Numbers(Dataset[int]):
    """Another dataset, with only the methods that a DataLoader needs."""

    def __init__(self, rows: int = ROWS) -> None:
        self._rows = rows

    def __len__(self) -> int:
        return self._rows

    def __getitem__(self, row: int) -> int:
        if not 0 <= row < self._rows:
            raise IndexError(row)
        return row * row


def rows_of(loader: Any) -> list[int]:
    """Return the rows of the batches of a loader with ``with_rows``."""
    return [row for batch in loader for row in batch[-1].tolist()]


def order_of(epoch: int, shuffle: bool | BlockShuffle = True, seed: int = 0) -> list[int]:
    rows = Order(size=ROWS, shuffle=shuffle, seed=seed).rows(epoch, np.arange(ROWS))
    return [int(row) for row in rows]


def assert_same_batches(found: Any, expected: Any) -> None:
    found, expected = list(found), list(expected)
    assert len(found) == len(expected)
    for number, (one, other) in enumerate(zip(found, expected, strict=True)):
        assert same(one, other), f"batch {number}"


@engines
def test_without_shuffling_it_equals_a_plain_loader(
    dataset: ShardDataset, load: Load, engine: str, num_workers: int
) -> None:
    plain = DataLoader(dataset, BATCH, collate_fn=collate)
    loader = load(dataset, engine, num_workers)
    assert len(loader) == len(plain) == BATCHES
    for _ in range(2):
        assert_same_batches(loader, plain)


@engines
@pytest.mark.parametrize("drop_last", [False, True])
def test_it_has_the_attributes_of_a_plain_loader(
    dataset: ShardDataset, load: Load, engine: str, num_workers: int, drop_last: bool
) -> None:
    plain = DataLoader(
        dataset,
        BATCH,
        drop_last=drop_last,
        collate_fn=collate,
        num_workers=num_workers,
        multiprocessing_context="fork" if num_workers else None,
    )
    loader = load(dataset, engine, num_workers, rank=Rank(drop_last=drop_last))
    for name in ("dataset", "batch_size", "num_workers", "drop_last", "collate_fn"):
        assert getattr(loader, name) == getattr(plain, name), name
    assert loader.pin_memory is torch.cuda.is_available()
    assert len(loader) == len(plain) == len(list(loader))


@engines
def test_each_iteration_reads_the_next_epoch(
    dataset: ShardDataset, load: Load, engine: str, num_workers: int
) -> None:
    loader = load(dataset, engine, num_workers, shuffle=True, with_rows=True)
    for epoch in range(3):
        assert loader.epoch == epoch
        assert rows_of(loader) == order_of(epoch)
    for _ in loader:
        assert loader.epoch == 3
        break
    assert rows_of(loader) == order_of(4)
    assert loader.epoch == 5


def test_set_epoch_reads_the_whole_epoch_each_time(load: Load) -> None:
    loader = load(Numbers(), shuffle=True, with_rows=True)
    for epoch in (7, 7, 0, 2):
        loader.set_epoch(epoch)
        assert loader.epoch == epoch
        assert rows_of(loader) == order_of(epoch)
    assert rows_of(loader) == order_of(3)
    next(iter(loader))
    loader.set_epoch(4)  # of which a batch was read
    assert rows_of(loader) == order_of(4)


@pytest.mark.parametrize("epoch", [-1, 1.0, "1", None, True])
def test_an_invalid_epoch_is_refused(load: Load, epoch: Any) -> None:
    loader = load(Numbers())
    with pytest.raises(UsageError, match=rf"epoch.*{epoch!r} is not an integer from 0 on"):
        loader.set_epoch(epoch)
    assert loader.epoch == 0


@engines
def test_a_new_iteration_ends_the_old_one(
    dataset: ShardDataset, load: Load, engine: str, num_workers: int
) -> None:
    loader = load(dataset, engine, num_workers, shuffle=True, with_rows=True)
    older = iter(loader)
    next(older)
    newer = iter(loader)
    begun = next(newer)
    with pytest.raises(LoaderFailed, match="use a loader for each"):
        next(older)
    assert list(older) == []
    assert rows_of([begun, *newer]) == order_of(1)


@engines
def test_close_ends_an_iteration_but_not_the_loader(
    dataset: ShardDataset, load: Load, engine: str, num_workers: int
) -> None:
    loader = load(dataset, engine, num_workers, shuffle=True, with_rows=True)
    loader.close()
    for epoch in range(3):
        begun = iter(loader)
        next(begun)
        loader.close()
        loader.close()
        with pytest.raises(LoaderFailed, match="the loader was closed"):
            next(begun)
        assert loader.state_dict()["epoch"] == 2 * epoch
        assert rows_of(loader) == order_of(2 * epoch + 1)


def test_iterating_leaves_the_global_generator_of_torch_only(load: Load) -> None:
    for engine, num_workers in ENGINES:
        before = torch.get_rng_state()
        list(load(Numbers(), engine, num_workers, shuffle=True))
        assert torch.equal(torch.get_rng_state(), before)


def of_tuple(samples: Sequence[int]) -> Any:
    return torch.tensor(samples), "all"


def of_list(samples: Sequence[int]) -> Any:
    return [torch.tensor(samples)]


def of_dict(samples: Sequence[int]) -> Any:
    return {"values": torch.tensor(samples)}


def of_tensor(samples: Sequence[int]) -> Any:
    return torch.tensor(samples)


class Named(NamedTuple):
    values: Any


def of_named(samples: Sequence[int]) -> Any:
    return Named(torch.tensor(samples))


ADDED: dict[Callable[[Sequence[int]], Any], Callable[[Any, Any], Any]] = {
    of_tuple: lambda batch, rows: (*batch, rows),
    of_list: lambda batch, rows: (*batch, rows),
    of_dict: lambda batch, rows: {**batch, "rows": rows},
    of_tensor: lambda batch, rows: (batch, rows),
    of_named: lambda batch, rows: (*batch, rows),
}
"""Functions that collate, and what their batches are with rows."""


@engines
@pytest.mark.parametrize("function", ADDED, ids=lambda function: function.__name__)
def test_rows_are_added_to_any_batch(
    load: Load, engine: str, num_workers: int, function: Callable[[Sequence[int]], Any]
) -> None:
    this_rank = Rank(rank=1, world_size=2, remainder="pad")
    loader = load(
        Numbers(), engine, num_workers, with_rows=True, collate_fn=function, rank=this_rank
    )
    rows = [[4, 5, 6, 7], [12, 13, 14, 15], [20, 21, 22, 0]]  # the last stands for position 23
    marked = [rows[0], rows[1], [20, 21, 22, -1]]
    expected = [
        ADDED[function](function([row * row for row in part]), torch.tensor(marks))
        for part, marks in zip(rows, marked, strict=True)
    ]
    assert_same_batches(loader, expected)


@engines
def test_a_collate_function_gets_the_datasets_samples(
    dataset: ShardDataset, load: Load, engine: str, num_workers: int
) -> None:
    def describe(samples: Any) -> Any:
        return type(samples) is BatchView, len(samples), [label for _, label in samples]

    found = list(load(dataset, engine, num_workers, collate_fn=describe))
    labels = dataset.targets.tolist()
    parts = [labels[start : start + BATCH] for start in range(0, ROWS, BATCH)]
    assert found == [(True, len(part), part) for part in parts]


@pytest.mark.parametrize(("engine", "num_workers"), [crew for crew in ENGINES if crew[1]])
def test_without_order_every_sample_comes_but_there_is_no_state(
    dataset: ShardDataset, load: Load, engine: str, num_workers: int
) -> None:
    loader = load(dataset, engine, num_workers, shuffle=True, with_rows=True, in_order=False)
    for epoch in range(2):
        assert sorted(rows_of(loader)) == list(range(ROWS))
        assert loader.epoch == epoch + 1
    for batch in loader:
        assert same(batch[0], dataset[batch[-1].tolist()].batch[0])
    with pytest.raises(UsageError, match="in_order=False"):
        loader.state_dict()


FOREIGN: dict[str, Callable[[ShardDataset], Any]] = {
    "own": lambda dataset: Numbers(),
    "list": lambda dataset: [(n, f"{n}") for n in range(ROWS)],
    "subset": lambda dataset: Subset(dataset, [3, 1, 1, 7, 0, 22]),
    "concat": lambda dataset: ConcatDataset([dataset, Subset(dataset, [5, 2]), dataset]),
    "stack": lambda dataset: StackDataset(one=dataset, number=Numbers()),
    "subset of concat": lambda dataset: Subset(ConcatDataset([dataset, dataset]), [40, 2, 25]),
}


@engines
@pytest.mark.parametrize("name", FOREIGN)
def test_other_datasets_are_read_as_by_a_plain_loader(
    dataset: ShardDataset, load: Load, engine: str, num_workers: int, name: str
) -> None:
    foreign = FOREIGN[name](dataset)
    plain = DataLoader(foreign, BATCH, collate_fn=collate)
    loader = load(foreign, engine, num_workers)
    assert_same_batches(map(as_list, loader), map(as_list, plain))


def as_list(batch: Any) -> Any:
    """Return a batch as `default_collate` would: shardkit's own datasets give a tuple."""
    return list(batch) if isinstance(batch, tuple) else batch


@pytest.mark.parametrize("shuffle", [False, True, BlockShuffle(rows=2, buffer=6)])
def test_the_options_of_an_iterable_dataset_are_used(
    root: Path, load: Load, shuffle: bool | BlockShuffle
) -> None:
    this_rank = Rank(rank=1, world_size=2, drop_last=True)
    iterable = IterableLMDBDataset(root, decode="torch", shuffle=shuffle, seed=3, rank=this_rank)
    loader = load(iterable, with_rows=True)
    expected = np.reshape(order_of(0, shuffle, seed=3)[:16], (2, 2, BATCH))[:, 1].ravel().tolist()
    assert rows_of(loader) == expected
    assert loader.drop_last
    assert loader.dataset is iterable.dataset


def test_the_loaders_arguments_override_the_iterable_datasets(root: Path, load: Load) -> None:
    this_rank = Rank(rank=1, world_size=2)
    iterable = IterableLMDBDataset(root, decode="torch", shuffle=True, seed=3, rank=this_rank)
    asked = Rank(rank=0, world_size=1)
    loader = load(iterable, with_rows=True, shuffle=False, seed=0, rank=asked)
    assert rows_of(loader) == list(range(ROWS))
    assert rows_of(load(iterable, with_rows=True, shuffle=True, seed=0, rank=asked)) == order_of(0)


class Foreign(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(5))


class Sized(Foreign):
    def __len__(self) -> int:
        return 5


@pytest.mark.parametrize(
    "foreign", [Foreign(), Sized(), ChainDataset([Sized(), Sized()]), iter([1, 2]), {1, 2}, None, 5]
)
def test_a_dataset_without_rows_is_refused_with_a_remedy(foreign: Any) -> None:
    with pytest.raises(UsageError) as caught:
        make_loader(foreign, 2)
    for part in ("length and rows", type(foreign).__name__, "torch.utils.data.DataLoader"):
        assert part in str(caught.value)


def test_a_path_is_refused(root: Path) -> None:
    for path in (str(root), root):
        with pytest.raises(UsageError, match="dataset"):
            make_loader(path, 2)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"batch_size": 0}, "batch_size=0 .* from 1 on"),
        ({"batch_size": -1}, "batch_size=-1 .* from 1 on"),
        ({"batch_size": 2.0}, "batch_size=2.0 .* from 1 on"),
        ({"batch_size": None}, "batch_size= is required"),
        ({"batch_size": True}, "batch_size=True .* from 1 on"),
        ({"shuffle": 1}, r"shuffle=1 is neither True, False nor BlockShuffle\(...\)"),
        ({"shuffle": 0}, r"shuffle=0 is neither True, False nor BlockShuffle\(...\)"),
        ({"shuffle": "blocks"}, "shuffle='blocks' is neither"),
        ({"seed": 1.5}, "seed=1.5 is not an integer"),
        ({"seed": 0.0}, "seed=0.0 is not an integer"),
        ({"seed": "1"}, "seed='1' is not an integer"),
        ({"seed": False}, "seed=False is not an integer"),
    ],
    ids=str,
)
def test_wrong_arguments_are_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        make_loader(Numbers(), **{"batch_size": 2, **given})


@engines
def test_an_empty_dataset_has_no_batches(
    dataset: ShardDataset, load: Load, engine: str, num_workers: int
) -> None:
    for empty in (Numbers(0), Subset(dataset, [])):
        loader = load(empty, engine, num_workers, shuffle=True)
        assert len(loader) == 0
        for epoch in range(3):
            assert loader.epoch == epoch
            assert list(loader) == []
        loader.load_state_dict(loader.state_dict())
        assert list(loader) == []


@engines
def test_fewer_samples_than_a_batch_are_one_batch_or_dropped(
    load: Load, engine: str, num_workers: int
) -> None:
    few = Numbers(3)
    found = [batch.tolist() for batch in load(few, engine, num_workers)]
    assert found == [[0, 1, 4]]
    loader = load(few, engine, num_workers, rank=Rank(drop_last=True))
    assert len(loader) == 0
    assert [list(loader) for _ in range(2)] == [[], []]
    assert loader.epoch == 2


@engines
def test_pil_images_without_a_transform_are_refused_with_a_remedy(
    root: Path, load: Load, engine: str, num_workers: int
) -> None:
    with pytest.raises(TypeError) as caught:
        list(load(open_dataset(root), engine, num_workers))
    for part in ("cannot be collated", "add a transform", "decode='torch'"):
        assert part in str(caught.value)


@engines
def test_a_kept_batch_never_changes(
    dataset: ShardDataset, load: Load, engine: str, num_workers: int
) -> None:
    loader = load(dataset, engine, num_workers, shuffle=True, prefetch_factor=1)
    kept: list[Any] = []
    seen: list[Any] = []
    for _ in range(3):
        for batch in loader:
            kept.append(batch[0])
            seen += prints_of([batch])
    loader.close()
    labels = [[label for _, label in part] for part in seen]
    assert prints_of(zip(kept, labels, strict=True)) == seen
    assert len({images.data_ptr() for images in kept}) == len(kept) == 3 * BATCHES


@pytest.mark.parametrize(("engine", "num_workers"), ENGINES)
def test_a_view_of_a_batch_keeps_the_batch(
    dataset: ShardDataset, load: Load, engine: str, num_workers: int
) -> None:
    loader = load(dataset, engine, num_workers, prefetch_factor=1)
    expected = [dataset[row][0] for row in range(1, ROWS, BATCH)]
    for _ in range(2):
        kept = [batch[0][1] for batch in loader]
        again = [batch[0][1].numpy()[:] for batch in loader]
        assert all(map(torch.equal, kept, expected))
        assert all(map(torch.equal, map(torch.from_numpy, again), expected))


class Made:
    """Collates and counts batches."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._batches = 0

    def __call__(self, samples: Any) -> Any:
        batch = collate(samples)
        with self._lock:
            self._batches += 1
        return batch

    def are(self, number: int) -> bool:
        return self._batches == number


@pytest.mark.parametrize("num_workers", [0, 1, 2])
def test_a_reused_buffer_is_valid_until_the_next_batch(
    dataset: ShardDataset, load: Load, num_workers: int
) -> None:
    made = Made()
    alone = prints_of(load(dataset, num_workers=0))
    loader = load(
        dataset, num_workers=num_workers, prefetch_factor=1, collate_fn=made, reuse_buffers=True
    )
    kept = []
    for number, batch in enumerate(loader, 1):
        ahead = min(number + num_workers, BATCHES)
        wait_until(partial(made.are, ahead), "the batches that may be made")
        assert prints_of([batch]) == [alone[number - 1]]
        kept.append(batch[0])
    assert len({images.data_ptr() for images in kept}) <= 2 * (
        num_workers + 1
    )  # two sizes of batch
    changed = [
        not torch.equal(images, dataset[start : start + BATCH].batch[0])
        for images, start in zip(kept, range(0, ROWS, BATCH), strict=True)
    ]
    assert any(changed)  # the memory was used again, whoever still held it


def test_the_repr_describes_the_loader(load: Load) -> None:
    loader = load(Numbers(), num_workers=3, rank=Rank(rank=1, world_size=2))
    assert repr(loader) == (
        "Loader of 3 batches of 4, rank 1 of 2, 3 workers, engine thread: requested"
    )


def plain(image: Any) -> Any:
    return torch.from_numpy(image)


@with_rng
def careful(image: Any, rng: np.random.Generator) -> Any:
    return torch.from_numpy(image)


@pytest.mark.parametrize(
    ("options", "engine", "reason"),
    [
        ({"decode": "torch"}, "thread", "nothing in this dataset holds the GIL for long"),
        ({"transform": careful}, "thread", "nothing in this dataset holds the GIL for long"),
        ({"transform": plain}, "process", "the transform plain may hold the GIL"),
        ({"target_transform": float}, "process", "the target_transform float may hold the GIL"),
    ],
    ids=["no transform", "careful", "plain", "target"],
)
def test_it_chooses_an_engine_and_states_the_reason(
    root: Path, load: Load, options: dict[str, Any], engine: str, reason: str
) -> None:
    dataset = open_dataset(root, **{"decode": "numpy", **options})
    every: list[Any] = [dataset, Subset(dataset, range(4)), ConcatDataset([dataset, dataset])]
    for wrapped in every:
        loader = load(wrapped, "auto")
        assert (loader.engine, loader.reason) == (engine, reason)
        assert repr(loader).endswith(f"engine {engine}: {reason}")


def test_another_dataset_gets_processes(load: Load) -> None:
    loader = load(Numbers(), "auto")
    assert loader.engine == "process"
    assert loader.reason == "Numbers is not a dataset of shardkit and may hold the GIL"


@pytest.mark.parametrize("problem", ["shared_memory_problem", "descriptor_problem"])
def test_if_processes_may_fail_it_uses_threads_or_warns(
    root: Path, load: Load, monkeypatch: pytest.MonkeyPatch, problem: str
) -> None:
    monkeypatch.setattr(preflight, problem, lambda needed: "there is no room")
    dataset = open_dataset(root, plain, decode="numpy")
    with pytest.warns(RuntimeWarning, match="with_rng does not draw"):
        loader = load(dataset, "auto")
    reason = "the transform plain may hold the GIL, but there is no room"
    assert (loader.engine, loader.reason) == ("thread", reason)
    with pytest.warns(RuntimeWarning, match="loading may fail: there is no room") as caught:
        loader = load(dataset, "process")
    assert (loader.engine, loader.reason) == ("process", "requested")
    assert len(caught) == 1
    assert load(dataset, "process", 0).reason == "requested"  # without workers nothing can fail


def test_a_warning_points_to_the_caller(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight, "descriptor_problem", lambda needed: "there is no room")
    options: dict[str, Any] = {"engine": "process", "num_workers": 1, "start_method": "fork"}
    with pytest.warns(RuntimeWarning) as caught, closing(make_loader([1], 1, **options)):
        pass
    assert caught[0].filename == __file__


@pytest.mark.skipif(torch.cuda.is_available(), reason="memory can be pinned here")
@pytest.mark.parametrize("engine", ["thread", "helper", "process"])
def test_pinning_without_a_device_warns_and_continues(dataset: ShardDataset, engine: str) -> None:
    options: dict[str, Any] = {"pin_memory": True, "engine": engine, "num_workers": 0}
    with pytest.warns(RuntimeWarning, match="pin_memory=True has no effect") as caught:
        loader = make_loader(dataset, BATCH, **options)

    assert caught[0].filename == __file__
    assert not loader.pin_memory
    assert len(list(loader)) == len(loader)
