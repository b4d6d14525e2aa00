"""Loaders with processes: the same batches with any start method, dataset and transform."""

from __future__ import annotations

import itertools
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers import DEADLINE, FORMATS, python
from loading import (
    BATCH,
    CROP,
    METHODS,
    ROWS,
    SEED,
    crc,
    epoch_by_hand,
    make_datasets,
    prints_of,
    same,
)
from pairwise import pairwise
from torch.utils.data import ConcatDataset, DataLoader, Dataset, Subset

from shardkit import (
    IterableShardDataset,
    Rank,
    ShardDataset,
    collate,
    make_loader,
    open_dataset,
    with_rng,
)
from shardkit.sampling.order import Order
from shardkit.torch.engine import processes
from shardkit.torch.loader import Loader

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning"),
]

Image = Any


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dataset of 23 images in six shards, in each format."""
    return make_datasets(tmp_path_factory.mktemp("loaders"))


def in_processes(num_workers: int = 2, **options: Any) -> dict[str, Any]:
    chosen = {"start_method": "fork", "timeout": 60.0, **options}
    return {"engine": "process", "num_workers": num_workers, **chosen}


def epochs_of(dataset: Any, options: dict[str, Any], epochs: int = 2) -> list[list[Any]]:
    """Return the batches of the first epochs; the loader ends with them."""
    with closing(make_loader(dataset, BATCH, shuffle=True, seed=SEED, **options)) as loader:
        return [list(loader) for _ in range(epochs)]


def by_hand(path: Path, epoch: int) -> list[Any]:
    order = Order(size=ROWS, shuffle=True, seed=SEED)
    return epoch_by_hand(open_dataset(path, decode=CROP), order, epoch, BATCH, (0, 1))


@pytest.mark.parametrize(
    ("read_before", "persistent", "method", "to"),
    pairwise([False, True], [False, True], ["fork", "forkserver"], FORMATS),
)
def test_workers_give_the_same_epoch_with_any_start_method(
    root: Path, to: str, method: str, persistent: bool, read_before: bool
) -> None:
    dataset = open_dataset(root / to, decode=CROP)
    if read_before:
        assert len(dataset[:]) == ROWS
    options = in_processes(start_method=method, persistent_workers=persistent)
    with closing(make_loader(dataset, BATCH, shuffle=True, seed=SEED, **options)) as loader:
        assert prints_of(loader) == by_hand(root / to, 0)
        assert prints_of(loader) == by_hand(root / to, 1)
        loader.set_epoch(5)  # reaches workers that copied the dataset before
        assert prints_of(loader) == by_hand(root / to, 5)
    assert len(dataset[:]) == ROWS  # and it reads on here


@pytest.mark.parametrize("read_before", [False, True])
@pytest.mark.slow
def test_spawned_workers_give_the_same_epoch(root: Path, read_before: bool) -> None:
    every: ConcatDataset[Any] = ConcatDataset(
        [open_dataset(root / to, decode=CROP) for to in FORMATS]
    )
    if read_before:
        assert [len(every[number]) for number in range(0, 3 * ROWS, ROWS)] == [2] * 3
    expected = epochs_of(every, {"engine": "thread", "num_workers": 0})
    assert same(epochs_of(every, in_processes(1, start_method="spawn")), expected)


@pytest.mark.parametrize("method", METHODS)
def test_an_epoch_reaches_persistent_workers_of_a_plain_loader(root: Path, method: str) -> None:
    dataset = open_dataset(root / "lmdb", decode=CROP)
    alone = open_dataset(root / "lmdb", decode=CROP)
    loader = DataLoader(
        dataset,
        BATCH,
        num_workers=2,
        collate_fn=collate,
        persistent_workers=True,
        multiprocessing_context=method,
    )
    found = []
    for epoch in (0, 1, 4):
        dataset.set_epoch(epoch, SEED)
        found.append(prints_of(loader))
        expected = epoch_by_hand(alone, Order(size=ROWS, seed=SEED), epoch, BATCH, (0, 1))
        assert found[-1] == expected
    assert found[0] != found[1] != found[2]


@pytest.mark.parametrize("method", METHODS)
def test_an_epoch_reaches_persistent_workers_of_an_iterable_dataset(
    root: Path, method: str
) -> None:
    opened = IterableShardDataset(
        root / "hdf5", decode=CROP, shuffle=True, seed=SEED, batch_size=BATCH
    )
    loader = DataLoader(
        opened,
        batch_size=None,
        num_workers=2,
        persistent_workers=True,
        multiprocessing_context=method,
    )
    alone = open_dataset(root / "hdf5", decode=CROP)
    for epoch in (0, 1, 4):
        opened.set_epoch(epoch)
        expected = epoch_by_hand(alone, opened.order, epoch, BATCH, (0, 1))
        assert prints_of(loader) == expected


def three_numbers(image: Image) -> torch.Tensor:
    """A typical transform: it draws from all three global generators."""
    drawn = [random.random(), float(np.random.random()), float(torch.rand(()))]
    return torch.tensor([crc(image), *drawn], dtype=torch.float64)


def three_numbers_of_a_label(label: int) -> torch.Tensor:
    return three_numbers(np.array([label], np.uint8))


@with_rng
def noisy(image: Image, rng: np.random.Generator) -> torch.Tensor:
    return torch.from_numpy(np.asarray(image)[:4, :4] + rng.normal(0, 4, (4, 4, 3)))


def states() -> list[bytes]:
    """Return the state of the main process's global generators."""
    numbers: Any = np.random.get_state()
    place = [repr(random.getstate()).encode(), repr(numbers[2:]).encode(), numbers[1].tobytes()]
    return [*place, torch.get_rng_state().numpy().tobytes()]


CREWS = (
    {"engine": "thread", "num_workers": 0},
    in_processes(0),
    in_processes(1),
    in_processes(2),
    in_processes(2, start_method="forkserver", persistent_workers=False),
)


def test_ordinary_random_transforms_repeat_for_any_workers(root: Path) -> None:
    dataset = open_dataset(root / "webdataset", three_numbers)
    runs = []
    for number, options in enumerate(CREWS):
        for seed in (random.seed, np.random.seed, torch.manual_seed):
            seed(number)  # what the user's own seeds are is no matter
        runs.append(epochs_of(dataset, options))
    assert all(same(run, runs[0]) for run in runs)
    drawn = torch.cat([values for epoch in runs[0] for values, _ in epoch])
    assert len(drawn) == 2 * ROWS
    for column in drawn[:, 1:].T:  # no row and no epoch has the numbers of another
        assert len(set(column.tolist())) == 2 * ROWS


def test_seed_and_epoch_determine_random_draws(root: Path) -> None:
    dataset = open_dataset(root / "lmdb", three_numbers)

    def drawn(seed: int, epoch: int) -> torch.Tensor:
        loader = make_loader(dataset, ROWS, seed=seed, num_workers=0)
        loader.set_epoch(epoch)
        ((values, _),) = loader
        return torch.as_tensor(values)

    assert torch.equal(drawn(1, 3), drawn(1, 3))
    for seed, epoch in ((1, 2), (2, 3), (3, 1)):
        assert not (drawn(seed, epoch)[:, 1:] == drawn(1, 3)[:, 1:]).any()


@pytest.mark.parametrize("options", [*CREWS, {"engine": "thread", "num_workers": 2}])
def test_an_epoch_leaves_the_global_generators_of_this_process_only(
    root: Path, options: dict[str, Any]
) -> None:
    transform = noisy if options == {"engine": "thread", "num_workers": 2} else three_numbers
    dataset = open_dataset(root / "lmdb", transform, decode="numpy")
    before = states()
    with closing(make_loader(dataset, BATCH, shuffle=True, **options)) as loader:
        for _ in loader:
            assert states() == before
        next(iter(loader))
    assert states() == before


def test_random_target_transforms_repeat_for_any_workers(root: Path) -> None:
    dataset = open_dataset(root / "hdf5", None, three_numbers_of_a_label, decode=CROP)
    runs = [epochs_of(dataset, options) for options in CREWS]
    assert all(same(run, runs[0]) for run in runs)


def mixed(samples: Any) -> torch.Tensor:
    """A collate function that draws random numbers, like mixup."""
    return torch.cat([torch.rand(4, dtype=torch.float64), torch.tensor([float(len(samples))])])


@pytest.mark.parametrize("num_workers", [1, 2])
def test_a_collate_function_draws_differently_in_each_rank_worker_and_epoch(
    root: Path, num_workers: int
) -> None:
    dataset = open_dataset(root / "hdf5", decode=CROP)
    drawn = []
    for rank in range(2):
        this_rank = Rank(rank=rank, world_size=2)
        for persistent in (False, True):
            options = in_processes(
                num_workers, collate_fn=mixed, rank=this_rank, persistent_workers=persistent
            )
            epochs = epochs_of(dataset, options)
            values = torch.cat([batch[:4] for epoch in epochs for batch in epoch])
            assert len(set(values.tolist())) == len(values), "epochs or workers drew the same"
            drawn.append(set(values.tolist()))
    assert not drawn[0] & drawn[2], "ranks drew the same"
    assert not drawn[1] & drawn[3], "ranks drew the same"


@pytest.mark.parametrize("method", METHODS)
def test_transforms_that_take_a_generator_are_equal_in_threads_and_processes(
    root: Path, method: str
) -> None:
    dataset = open_dataset(root / "lmdb", noisy, decode="numpy")
    runs = [
        epochs_of(dataset, options)
        for options in (
            {"engine": "thread", "num_workers": 0},
            {"engine": "thread", "num_workers": 3},
            in_processes(0),
            in_processes(2, start_method=method),
            in_processes(2, start_method=method, engine="helper"),
        )
    ]
    assert all(same(run, runs[0]) for run in runs)
    assert not same(runs[0][0], runs[0][1])


class Own(Dataset[dict[str, Any]]):
    """A user's dataset that wraps one of ours: reversed rows, dict samples."""

    def __init__(self, dataset: ShardDataset) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, row: int) -> dict[str, Any]:
        image, label = self.dataset[len(self) - 1 - row]
        return {"image": image, "label": label}


class OwnRandom(Dataset[torch.Tensor]):
    """A user's dataset that draws random numbers itself."""

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, row: int) -> torch.Tensor:
        return three_numbers(np.array([row], np.uint8))


WRAPPED: dict[str, Callable[[ShardDataset], Any]] = {
    "subset": lambda dataset: Subset(dataset, [20, 3, 5, 7, 11, 0]),
    "subset of a subset": lambda dataset: Subset(Subset(dataset, range(5, 20)), [9, 0, 14]),
    "concat": lambda dataset: ConcatDataset(
        [Subset(dataset, range(3, 9)), Subset(dataset, [1, 2])]
    ),
    "own": Own,
    "own in a subset": lambda dataset: Subset(Own(dataset), [4, 19]),
}

SUBSETS = {
    "subset": [20, 3, 5, 7, 11, 0],
    "subset of a subset": [14, 5, 19],
    "own in a subset": [4, 19],
}
"""Rows of the innermost dataset, which ``with_rows`` states for a ``Subset``."""


@pytest.mark.parametrize(
    ("num_workers", "engine", "wrap"), pairwise([0, 2], ["thread", "helper", "process"], WRAPPED)
)
def test_wrapped_datasets_give_their_samples_with_the_epochs_random_numbers(
    root: Path, wrap: str, engine: str, num_workers: int
) -> None:
    dataset = WRAPPED[wrap](open_dataset(root / "lmdb", decode=CROP))
    alone = open_dataset(root / "lmdb", decode=CROP)
    expected_of = WRAPPED[wrap](alone)
    options: dict[str, Any] = {
        "engine": engine,
        "num_workers": num_workers,
        "with_rows": True,
        "start_method": "fork",
    }
    with closing(make_loader(dataset, 2, shuffle=True, seed=SEED, **options)) as loader:
        for epoch in range(2):
            alone.set_epoch(epoch, SEED)
            order = Order(size=len(dataset), shuffle=True, seed=SEED)
            rows = order.rows(epoch, np.arange(order.size))
            parts = [rows[start : start + 2].tolist() for start in range(0, order.size, 2)]
            for batch, part in zip(loader, parts, strict=True):
                samples = collate([expected_of[row] for row in part])
                stated = torch.tensor([SUBSETS.get(wrap, range(99))[row] for row in part])
                if isinstance(samples, dict):
                    assert same(batch, {**samples, "rows": stated})
                else:
                    assert same(tuple(batch), (*samples, stated))


def test_a_dataset_that_draws_by_itself_repeats_for_any_workers() -> None:
    runs = [epochs_of(OwnRandom(), options) for options in CREWS]
    assert all(same(run, runs[0]) for run in runs)


@pytest.mark.parametrize("persistent", [False, True])
def test_a_dataset_that_draws_by_itself_draws_again_in_each_epoch(persistent: bool) -> None:
    first, second = epochs_of(OwnRandom(), in_processes(2, persistent_workers=persistent))
    one, two = ({float(v) for batch in epoch for v in batch[:, 3]} for epoch in (first, second))
    assert len(one) == len(two) == ROWS
    assert not one & two


def interleaved(loaders: list[Loader]) -> list[list[Any]]:
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


@pytest.mark.parametrize(
    "engines", [("thread",) * 2, ("process",) * 2, ("thread", "process"), ("helper", "process")]
)
def test_two_loaders_of_one_dataset_do_not_disturb_each_other(
    root: Path, engines: tuple[str, str]
) -> None:
    dataset = open_dataset(root / "webdataset", decode=CROP)
    parts = [Subset(dataset, range(12)), Subset(dataset, range(6, ROWS))]

    def loaders() -> list[Loader]:
        return [
            make_loader(
                part,
                number + 2,
                shuffle=True,
                seed=number,
                engine=engine,
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


NEW_PROCESS = """
import json, sys
sys.path[:0] = sys.argv[4:]
from loading import BATCH, CROP, SEED, prints_of
from shardkit import make_loader, open_dataset
if __name__ == "__main__":
    options = dict(engine=sys.argv[3], num_workers=2)
    dataset = open_dataset(sys.argv[1], decode=CROP)
    loader = make_loader(dataset, BATCH, shuffle=True, seed=SEED, **options)
    loader.load_state_dict(json.loads(sys.argv[2]))
    print(json.dumps([prints_of(loader), prints_of(loader)]))
    loader.close()
"""


@pytest.mark.parametrize("engine", ["thread", "helper", "process"])
@pytest.mark.slow
def test_a_run_resumes_in_a_new_process(root: Path, engine: str) -> None:
    dataset = open_dataset(root / "lmdb", decode=CROP)
    with closing(make_loader(dataset, BATCH, shuffle=True, seed=SEED)) as loader:
        assert len(list(itertools.islice(loader, 7))) == 7
        state = json.dumps(loader.state_dict())
    done = python(
        NEW_PROCESS, root / "lmdb", state, engine, (Path(__file__).parents[3] / "support")
    )
    assert done.returncode == 0, done.stderr
    found = [[[tuple(one) for one in batch] for batch in part] for part in json.loads(done.stdout)]
    assert found == [by_hand(root / "lmdb", 0)[7:], by_hand(root / "lmdb", 1)]


class Slow:
    """A dataset whose rows take longer than the loader's interval to check its workers."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, row: int) -> int:
        time.sleep(0.2)
        return row


def test_the_next_epoch_waits_for_abandoned_requests(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(processes, "_POLL_SECONDS", 0.05)
    options: dict[str, Any] = {"engine": "process", "num_workers": 1, "start_method": "fork"}
    loader = make_loader(Slow(), 1, **options)
    assert next(iter(loader)).tolist() == [0]
    assert [batch.item() for batch in loader] == list(range(8))
    loader.close()


@pytest.mark.timeout(120)
@pytest.mark.parametrize("dropped", [False, True])
@pytest.mark.slow
def test_a_worker_that_dies_with_a_lock_blocks_nobody(root: Path, dropped: bool) -> None:
    """SIGTERM may come while a worker looks whether it is to end; the lock of that stays locked."""
    dataset = open_dataset(root / "lmdb", decode=CROP)
    loader = make_loader(dataset, BATCH, engine="process", num_workers=1)
    batches = iter(loader)
    next(batches)
    iterator = loader._engine._iterator  # type: ignore[union-attr]
    iterator._workers[0].kill()
    iterator._workers[0].join()
    iterator._workers_done_event._cond._lock.acquire(block=False)  # as the dead worker might
    if dropped:
        del loader, batches
    else:
        loader.close()
    iterator._shutdown_workers()


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(("length", "inside"), [(0, 1), (120, 0)])
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
        done = subprocess.run(
            [sys.executable, str(script), str(folder)],
            env={**os.environ, "TMPDIR": str(folder)},
            capture_output=True,
            text=True,
            timeout=DEADLINE,
            check=False,
        )

        assert done.stdout.split() == ["4", str(inside)], done.stderr
        assert list(folder.iterdir()) == []


FORKED = """
import os, sys
from shardkit import make_loader
from shardkit.errors import LoaderFailed

class Rows:
    def __len__(self):
        return 16

    def __getitem__(self, row):
        return row

options = dict(
    engine=sys.argv[1], num_workers=2, persistent_workers=sys.argv[2] == "persistent"
)
loader = make_loader(Rows(), 2, **options)
batches = iter(loader)
rows = next(batches).tolist()
child = os.fork()
if child == 0:
    try:
        next(batches)
    except LoaderFailed as error:
        told = str(error)
    del batches
    again = [row for batch in loader for row in batch.tolist()]
    print("fork" in told and "again" in told, again == list(range(16)), flush=True)
    loader.close()
    os._exit(0)
_, status = os.waitpid(child, 0)
rows += [row for batch in batches for row in batch.tolist()]
print(status, rows == list(range(16)), list(map(len, loader)) == [2] * 8)
"""


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("engine", "lifetime"),
    [
        ("thread", "persistent"),
        ("helper", "persistent"),
        ("process", "persistent"),
        ("process", "short"),
    ],
)
@pytest.mark.slow
def test_a_fork_cannot_continue_its_parents_iterator_and_leaves_it_only(
    tmp_path: Path, engine: str, lifetime: str
) -> None:
    script = tmp_path / "script.py"
    script.write_text(FORKED)
    done = subprocess.run(
        [sys.executable, str(script), engine, lifetime],
        capture_output=True,
        text=True,
        timeout=DEADLINE,
        check=False,
    )

    assert done.stdout.splitlines() == ["True True", "0 True True"], done.stderr
