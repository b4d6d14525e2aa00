"""Batches on a device: order, values, ownership and state; CUDA's streams are played by a script.

No GPU is needed: `Stage` puts recorders in the place of streams and events, and the prefetcher's
own code decides in which order they are called.
"""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections import namedtuple
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import make_dataset, make_tree, png
from refusals import refused

from shardkit import DevicePrefetcher, Normalize, make_loader, open_dataset
from shardkit.errors import UsageError
from shardkit.torch import prefetch

ROWS = 11
Pair = namedtuple("Pair", "images labels")


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("prefetch")
    files: dict[str, bytes | None] = {f"a/{n}.png": png(12, 8, n) for n in range(ROWS)}
    return make_dataset(make_tree(root / "photos", files), root / "made")


def loader_of(root: Path, **options: Any) -> Any:
    dataset = open_dataset(root, decode="torch")
    settings: dict[str, Any] = {"num_workers": 2, "with_rows": True, **options}
    return make_loader(dataset, 2, shuffle=True, seed=3, **settings)


class Stage:
    """A fake CUDA device: records operations; a copy is a clone."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.log: list[tuple[Any, ...]] = []
        self.within: list[str] = ["main"]
        self.copies: list[weakref.ref[torch.Tensor]] = []
        stage, to = self, torch.Tensor.to

        class Stream:
            def __init__(self, device: Any = None, name: str = "side") -> None:
                self.name = name
                self.device = torch.device("cuda", 3)  # the current one, unless the user names one

            def wait_event(self, event: Any) -> None:
                stage.log.append(("wait", self.name, event.number))

            def wait_stream(self, stream: Any) -> None:
                stage.log.append(("wait for", self.name, stream.name))

        class Event:
            count = 0

            def __init__(self) -> None:
                Event.count += 1
                self.number = Event.count

            def record(self, stream: Stream) -> None:
                stage.log.append(("record", stream.name, self.number))

            def synchronize(self) -> None:
                stage.log.append(("synchronize", self.number))

        @contextlib.contextmanager
        def stream(which: Stream) -> Iterator[None]:
            stage.within.append(which.name)
            yield
            stage.within.pop()

        def move(tensor: torch.Tensor, *arguments: Any, **options: Any) -> torch.Tensor:
            device = arguments[0]
            if not (isinstance(device, torch.device) and device.type == "cuda"):
                return to(tensor, *arguments, **options)
            assert options == {"non_blocking": True}
            copied = tensor.clone(memory_format=torch.preserve_format)
            stage.log.append(("copy", stage.within[-1]))
            stage.copies.append(weakref.ref(copied))
            return copied

        def current_stream(device: torch.device) -> Stream:
            assert device.index == 3, "the current device may change"
            return Stream(name="main")

        def record_stream(tensor: torch.Tensor, which: Stream) -> None:
            stage.log.append(("keep", which.name, tuple(tensor.shape)))

        monkeypatch.setattr(prefetch, "_require_device", torch.device)
        monkeypatch.setattr(torch.cuda, "Stream", Stream)
        monkeypatch.setattr(torch.cuda, "Event", Event)
        monkeypatch.setattr(torch.cuda, "stream", stream)
        monkeypatch.setattr(torch.cuda, "current_stream", current_stream)
        monkeypatch.setattr(torch.Tensor, "to", move)
        monkeypatch.setattr(torch.Tensor, "record_stream", record_stream)

    def names(self) -> list[str]:
        return [entry[0] for entry in self.log]


@pytest.fixture
def stage(monkeypatch: pytest.MonkeyPatch) -> Stage:
    return Stage(monkeypatch)


@pytest.fixture(params=["cpu", "cuda"])
def device(request: pytest.FixtureRequest) -> str:
    """Both branches: on the CPU, and on the fake CUDA device `Stage`."""
    if request.param == "cuda":
        request.getfixturevalue("stage")
    return str(request.param)


def same(one: Any, other: Any) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def test_a_device_that_this_machine_lacks_is_a_usage_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for device in ("cuda", "cuda:1", "gpu", None):
        with refused(UsageError, "'cpu'"):
            DevicePrefetcher([], device)  # type: ignore[arg-type]


# Values.


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("channels_last", [False, True])
def test_normalize_matches_plain_arithmetic(dtype: torch.dtype, channels_last: bool) -> None:
    order = torch.channels_last if channels_last else torch.contiguous_format
    every = torch.arange(256, dtype=torch.uint8).view(1, 1, 16, 16).expand(2, 3, 16, 16)
    images = every.contiguous(memory_format=order)
    mean, std = (0.485, 0.0, 0.9), (0.229, 1.0, 0.01)
    found = Normalize(mean=mean, std=std, dtype=dtype)(images)
    assert found.dtype == dtype
    assert found.is_contiguous(memory_format=order)
    exact = images.to(torch.float64) / 255
    exact = (exact - torch.tensor(mean).double().view(-1, 1, 1)) / torch.tensor(std).view(-1, 1, 1)
    coarse = dtype in (torch.float16, torch.bfloat16)
    close = torch.finfo(dtype).eps if coarse else 3e-6
    assert torch.allclose(found.double(), exact, rtol=close, atol=close * 4)
    assert torch.equal(images, every)  # what it was given is left as it was


def test_normalize_accepts_any_number_of_channels_and_defaults_to_imagenet() -> None:
    grey = Normalize(mean=[0.5], std=[0.5])(torch.full((1, 1, 2, 2), 255, dtype=torch.uint8))
    assert grey.tolist() == [[[[1.0, 1.0], [1.0, 1.0]]]]
    assert Normalize().mean == (0.485, 0.456, 0.406)
    assert Normalize().std == (0.229, 0.224, 0.225)


def test_a_wrong_normalization_is_a_usage_error() -> None:
    wrong: dict[str, tuple[Any, ...]] = {
        "mean": ((0.5,), 0.5, "abc", (0, 0, float("nan"))),
        "std": ((1, 1, 0), (1, 1, -1), (1, 1, float("nan")), (1, 1, float("inf")), 0.5, "abc"),
        "dtype": (torch.uint8, torch.int64, "float16"),
    }
    for name, values in wrong.items():
        for value in values:
            with pytest.raises(UsageError):
                Normalize(**{name: value})


def test_only_images_are_normalized(device: str) -> None:
    images = torch.full((2, 3, 4, 4), 255, dtype=torch.uint8)
    batch = {
        "images": images,
        "again": [images, (images, "name")],
        "pair": Pair(images, torch.tensor([1, 2], dtype=torch.uint8)),
        "floats": torch.ones(2, 3, 4, 4),
        "labels": torch.arange(2),
        "none": None,
        "number": 5,
    }
    normalize = Normalize(mean=(0, 0, 0), std=(0.5, 0.5, 0.5))
    (found,) = DevicePrefetcher([batch], device, normalize)
    for part in (found["images"], found["again"][0], found["again"][1][0], found["pair"].images):
        assert part.dtype == torch.float32
        assert bool((part == 2).all())
    assert type(found["pair"]) is Pair
    assert found["pair"].labels.dtype == torch.uint8
    assert bool((found["floats"] == 1).all())
    assert found["labels"].tolist() == [0, 1]
    assert (found["none"], found["number"], found["again"][1][1]) == (None, 5, "name")
    assert bool((images == 255).all())


@pytest.mark.parametrize("engine", ["thread", "helper", "process"])
def test_batches_come_in_order_with_the_values_of_the_loader(
    root: Path, engine: str, device: str
) -> None:
    options = {"engine": engine, "num_workers": 1, "start_method": "fork"}
    expected = list(loader_of(root))
    normalize = Normalize()
    with closing(loader_of(root, **options)) as loader:
        found = list(DevicePrefetcher(loader, device, normalize))
    assert len(found) == len(expected) == 6
    for (images, labels, rows), (stored, *others) in zip(found, expected, strict=True):
        assert torch.equal(images, normalize(stored))
        assert images.is_contiguous(memory_format=torch.channels_last)
        assert same((labels, rows), others)


# Ownership.


@pytest.mark.parametrize("normalize", [None, Normalize()])
def test_batches_can_be_kept(root: Path, device: str, normalize: Normalize | None) -> None:
    loader = loader_of(root, prefetch_factor=1)
    prefetcher = DevicePrefetcher(loader, device, normalize)
    held = [(batch, [part.clone() for part in batch]) for _ in range(3) for batch in prefetcher]
    assert len(held) == 18
    for batch, copied in held:
        assert same(batch, copied)


def test_a_released_batch_is_freed_before_the_next_one(device: str) -> None:
    """Otherwise the device would hold more batches than the one in use and the next one."""

    def batches() -> Iterator[list[torch.Tensor]]:
        for _ in range(5):
            yield [torch.zeros(2, 3, 4, 4, dtype=torch.uint8)]

    iterator = iter(DevicePrefetcher(batches(), device, Normalize()))
    before: weakref.ref[torch.Tensor] | None = None
    for _ in range(5):
        (images,) = next(iterator)
        assert before is None or before() is None
        before = weakref.ref(images)
        del images


# State.


def test_a_run_resumes_with_the_exact_next_batch(root: Path, device: str) -> None:
    both = loader_of(root)
    whole = [*both, *both]
    for stop in range(1, 7):
        prefetcher = DevicePrefetcher(loader_of(root), device)
        iterator = iter(prefetcher)
        for _ in range(stop):
            next(iterator)
        state = prefetcher.state_dict()
        iterator.close()  # type: ignore[attr-defined]
        assert prefetcher.state_dict() == state  # also after the loop was left
        again = DevicePrefetcher(loader_of(root), device)
        again.load_state_dict(state)
        assert again.state_dict() == state
        rest = [*again, *(again if stop < 6 else ())]
        assert len(rest) == 12 - stop
        assert all(map(same, rest, whole[stop:]))


def test_a_state_loaded_after_an_abandoned_loop_takes_effect(root: Path, device: str) -> None:
    prefetcher = DevicePrefetcher(loader_of(root), device)
    fresh = prefetcher.state_dict()
    for _ in prefetcher:
        break
    assert prefetcher.state_dict() != fresh
    prefetcher.load_state_dict(fresh)
    assert prefetcher.state_dict() == fresh
    for _ in prefetcher:
        break
    prefetcher.set_epoch(7)
    assert prefetcher.state_dict() == prefetcher.loader.state_dict()
    assert prefetcher.state_dict()["epoch"] == 7


def test_length_and_epoch_come_from_the_loader(root: Path, device: str) -> None:
    prefetcher, plain = DevicePrefetcher(loader_of(root), device), loader_of(root)
    assert len(prefetcher) == len(plain) == 6
    assert len(prefetcher.dataset) == len(plain.dataset)
    assert prefetcher.batch_size == plain.batch_size
    assert repr(prefetcher.loader) in repr(prefetcher)
    assert prefetcher.epoch == 0
    list(prefetcher)
    assert prefetcher.epoch == 1
    prefetcher.set_epoch(5)
    plain.set_epoch(5)
    assert prefetcher.epoch == 5
    for found, expected in zip(prefetcher, plain, strict=True):
        assert same(found, expected)
    assert prefetcher.epoch == 6


def test_any_iterable_of_batches_is_accepted(device: str) -> None:
    batches = [torch.full((2,), value) for value in range(4)]
    prefetcher = DevicePrefetcher(batches, device)
    for _ in range(2):
        assert [int(batch[0]) for batch in prefetcher] == [0, 1, 2, 3]
    assert len(prefetcher) == 4
    assert list(DevicePrefetcher([], device)) == []
    assert list(DevicePrefetcher([torch.ones(1)], device)) == [torch.ones(1)]


def test_webdatasets_loader_is_accepted_and_its_dataset_is_not() -> None:
    webdataset = pytest.importorskip("webdataset")
    samples = webdataset.DataPipeline(lambda: iter([torch.tensor([1]), torch.tensor([2])]))
    found = DevicePrefetcher(webdataset.WebLoader(samples, batch_size=2), "cpu")
    assert [batch.tolist() for batch in found] == [[[1], [2]]]
    with refused(UsageError, "a loader"):
        DevicePrefetcher(samples, "cpu")


def test_an_error_of_the_loader_is_raised(device: str) -> None:
    """Each batch before it is given out first, or its state says that it was not."""

    class Failing:
        """A loader that fails after three batches."""

        position = 0

        def __iter__(self) -> Iterator[torch.Tensor]:
            for self.position in range(1, 4):
                yield torch.tensor([self.position])
            raise ZeroDivisionError("the loader fails")

        def state_dict(self) -> dict[str, int]:
            return {"position": self.position}

    prefetcher = DevicePrefetcher(Failing(), device)
    seen: list[int] = []
    with refused(ZeroDivisionError):
        note(prefetcher, seen)
    assert seen in ([1, 2, 3], [1, 2])
    assert prefetcher.state_dict() == {"position": seen[-1]}


def note(batches: Any, seen: list[int]) -> None:
    seen.extend(int(batch) for batch in batches)


def test_leaving_the_loop_ends_the_loaders_iteration(device: str) -> None:
    ended = []

    class Watched:
        def __iter__(self) -> Iterator[torch.Tensor]:
            try:
                for _ in range(9):
                    yield torch.zeros(1)
            finally:
                ended.append(True)

    iterator = iter(DevicePrefetcher(Watched(), device))
    next(iterator)
    assert ended == []
    iterator.close()  # type: ignore[attr-defined]
    del iterator
    gc.collect()
    assert ended == [True]


# What happens on the streams.


def test_the_next_batch_is_copied_on_a_side_stream(stage: Stage) -> None:
    read = []

    def batches() -> Iterator[torch.Tensor]:
        for value in range(4):
            read.append(value)
            yield torch.full((value + 1,), value)

    iterator = iter(DevicePrefetcher(batches(), "cuda"))
    for value in range(4):
        batch = next(iterator)
        assert batch.tolist() == [value] * (value + 1)
        assert read == list(range(min(4, value + 2)))  # one batch ahead, and no more
    with pytest.raises(StopIteration):
        next(iterator)
    expected: list[Any] = []
    for number in range(1, 5):
        copied, ready = 2 * number - 1, 2 * number
        expected += [("copy", "side"), ("record", "side", copied), ("record", "side", ready)]
        if number > 1:
            expected += [("wait", "main", ready - 2), ("keep", "main", (number - 1,))]
        expected += [("synchronize", copied)]
    assert stage.log == [*expected, ("wait", "main", 8), ("keep", "main", (4,))]


@pytest.mark.parametrize("stop", [1, 2, 3])
def test_a_batch_is_copied_before_the_loader_may_overwrite_it(stage: Stage, stop: int) -> None:
    """Its memory may be a slot that PyTorch's allocator does not know."""
    released = []

    def batches() -> Iterator[torch.Tensor]:
        for number in range(1, 4):
            try:
                yield torch.zeros(number)
            finally:
                released.append(number)
                assert stage.log[-1] == ("synchronize", 2 * number - 1)

    iterator = iter(DevicePrefetcher(batches(), "cuda"))
    for _ in range(stop):
        next(iterator)
    iterator.close()  # type: ignore[attr-defined]
    del iterator
    gc.collect()
    assert released == list(range(1, min(stop + 1, 3) + 1))


def test_tensors_that_the_loader_made_on_the_device_are_awaited(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of a collate function that decodes there: its kernels may still be running."""
    images = torch.zeros(2, 3, 4, 4, dtype=torch.uint8)
    monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda tensor: tensor is images))
    monkeypatch.setattr(torch.Tensor, "device", torch.device("cuda", 3))
    stage.log.clear()
    (_, labels), _ = DevicePrefetcher([(images, torch.arange(2)), torch.ones(1)], "cuda")
    assert labels.tolist() == [0, 1]
    assert stage.log[:3] == [
        ("wait for", "side", "main"),
        ("keep", "side", (2, 3, 4, 4)),
        ("copy", "side"),
    ]
    assert stage.names().count("wait for") == 1


def test_every_tensor_of_a_batch_is_kept_for_the_stream_that_uses_it(stage: Stage) -> None:
    batch = {
        "a": torch.zeros(1),
        "b": [torch.zeros(2), (torch.zeros(3), "x")],
        "c": Pair(torch.zeros(4), 5),
    }
    list(DevicePrefetcher([batch], "cuda"))
    kept = [entry for entry in stage.log if entry[0] == "keep"]
    assert kept == [("keep", "main", (size,)) for size in (1, 2, 3, 4)]
    before = ["copy"] * 4 + ["record", "record", "synchronize", "wait"]
    assert stage.names() == before + ["keep"] * 4


def test_normalizing_runs_on_the_side_stream(stage: Stage) -> None:
    within: list[str] = []

    class Watched(Normalize):
        def __call__(self, images: torch.Tensor) -> torch.Tensor:
            within.append(stage.within[-1])
            return super().__call__(images)[:, :, :1]

    images = torch.zeros(2, 3, 4, 4, dtype=torch.uint8)
    list(DevicePrefetcher([images, images], "cuda", Watched()))
    assert within == ["side", "side"]
    kept = [entry[2] for entry in stage.log if entry[0] == "keep"]
    assert kept == [(2, 3, 1, 4)] * 2


def test_on_the_cpu_cuda_is_not_used(root: Path, stage: Stage) -> None:
    assert len(list(DevicePrefetcher(loader_of(root), "cpu", Normalize()))) == 6
    assert stage.log == []


def test_on_the_cpu_a_batch_is_read_on_request() -> None:
    read = []

    def batches() -> Iterator[torch.Tensor]:
        for value in range(3):
            read.append(value)
            yield torch.tensor(value)

    iterator = iter(DevicePrefetcher(batches(), "cpu"))
    for value in range(3):
        assert int(next(iterator)) == value
        assert read == list(range(value + 1))
