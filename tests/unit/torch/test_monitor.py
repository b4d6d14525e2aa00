"""The time of a training loop, measured on a fake clock so that it is exact."""

from __future__ import annotations

import copy
import inspect
import itertools
import re
import shlex
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from clocks import Clock
from helpers import make_dataset, make_folder
from refusals import refused
from torch.utils.data import DataLoader, IterableDataset, Subset, TensorDataset

from shardkit import (
    CenterCrop,
    DevicePrefetcher,
    RandomResizedCrop,
    Resize,
    ThroughputMonitor,
    make_loader,
    open_dataset,
)
from shardkit.errors import UsageError
from shardkit.measure.runner.material import parse_decode
from shardkit.torch import monitor as room

SIZE = 4
"""Samples in a batch of `Slow`."""

_TOO_LONG = 50.0
"""Seconds of a step that fails."""

CROP = CenterCrop(8)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(room, "time", clock)
    return clock


class Slow:
    """A loader whose batches, and then its end, take the given seconds."""

    def __init__(self, clock: Clock, *waits: float, end: float = 0.0) -> None:
        self._clock = clock
        self._waits = waits
        self._end = end

    def __len__(self) -> int:
        return len(self._waits)

    def __iter__(self) -> Iterator[Any]:
        for wait in self._waits:
            self._clock.now += wait
            yield torch.zeros(SIZE, 2), torch.zeros(SIZE)
        self._clock.now += self._end


def train(
    monitor: ThroughputMonitor, clock: Clock, step: float, batches: int | None = None
) -> None:
    for number, _ in enumerate(monitor, 1):
        clock.now += step
        if step > _TOO_LONG:
            raise ArithmeticError
        if number == batches:
            break


def test_waiting_and_training_time_are_separate(clock: Clock) -> None:
    monitor = ThroughputMonitor(Slow(clock, 5.0, 1.0, 3.0, 2.0, end=0.5))
    train(monitor, clock, 0.25)
    report = monitor.report
    assert (report.batches, report.images) == (4, 4 * SIZE)
    assert report.seconds == pytest.approx(5 + 6.5 + 4 * 0.25)
    assert report.first == pytest.approx(5)
    assert report.waited == pytest.approx(1 + 3 + 2 + 0.5)
    assert report.wait_fraction == pytest.approx(6.5 / 7.5)
    assert report.rate == pytest.approx(16 / 12.5)
    assert report.step == pytest.approx(0.25)
    assert report.longest == pytest.approx(3)
    assert report.longest_at == (0, 2)


def test_each_epoch_is_reported_and_totals_are_summed(clock: Clock) -> None:
    monitor = ThroughputMonitor(Slow(clock, 1.0, 1.0, 2.0))
    train(monitor, clock, 1.0)
    monitor.loader = Slow(clock, 3.0, 4.0)
    train(monitor, clock, 0.0)
    report = monitor.report
    assert [each.batches for each in report.epochs] == [3, 2]
    assert [each.first for each in report.epochs] == [1.0, 3.0]
    assert [each.longest_at for each in report.epochs] == [(0, 2), (1, 1)]
    assert (report.first, report.waited, report.seconds) == (4.0, 7.0, 14.0)
    assert (report.longest, report.longest_at) == (4.0, (1, 1))
    assert "2 epochs" in monitor.summary()
    assert "batch 1 of epoch 1" in monitor.summary()


def test_an_abandoned_loop_counts_up_to_its_end(clock: Clock) -> None:
    monitor = ThroughputMonitor(Slow(clock, 1.0, 1.0, 1.0, 1.0))
    train(monitor, clock, 2.0, batches=2)
    assert (monitor.report.batches, monitor.report.seconds) == (2, 6.0)
    train(monitor, clock, 2.0)
    assert [each.batches for each in monitor.report.epochs] == [2, 4]
    assert monitor.report.epochs[1].seconds == 12.0


def test_an_iterator_kept_after_the_loop_adds_no_step(clock: Clock) -> None:
    monitor = ThroughputMonitor(Slow(clock, 1.0, 1.0, 1.0, 1.0))
    held = iter(monitor)
    for _ in itertools.islice(held, 2):
        clock.now += 2.0
    assert monitor.report.seconds == 1 + 2 + 1 + 2 - 2  # of the last step the end is not known yet
    clock.now += 1000.0
    del held
    assert monitor.report.seconds == 6.0


def test_an_error_in_the_loop_or_the_loader_is_the_loops(clock: Clock) -> None:
    class Failing(Slow):
        def __iter__(self) -> Iterator[Any]:
            yield from super().__iter__()
            raise OSError("disk")

    monitor = ThroughputMonitor(Failing(clock, 1.0, 1.0))
    with pytest.raises(OSError, match="disk"):
        train(monitor, clock, 1.0)
    with pytest.raises(ArithmeticError):
        train(monitor, clock, 60.0)
    report = monitor.report
    assert [each.batches for each in report.epochs] == [2, 1]
    assert report.epochs[0].seconds == 4.0
    assert report.epochs[1].seconds == 61.0


def test_an_empty_loader_is_not_an_error(clock: Clock) -> None:
    monitor = ThroughputMonitor(Slow(clock, end=2.0))
    assert monitor.summary() == "no batch was read"
    assert monitor.postfix == {"img/s": "-", "waiting": "-"}
    train(monitor, clock, 1.0)
    assert (monitor.report.batches, monitor.report.rate, monitor.report.step) == (0, 0.0, 0.0)
    assert monitor.summary() == "no batch was read"


def test_nested_monitors_are_independent(clock: Clock) -> None:
    inner = ThroughputMonitor(Slow(clock, 1.0, 1.0))
    outer = ThroughputMonitor(Slow(clock, 2.0, 2.0))
    for _ in outer:
        train(inner, clock, 0.5)
    assert outer.report.step == 3.0
    assert outer.report.wait_fraction == pytest.approx(2 / 8)
    assert len(inner.report.epochs) == 2
    both = ThroughputMonitor(ThroughputMonitor(Slow(clock, 1.0, 3.0)))
    train(both, clock, 1.0)
    assert both.report == both.loader.report


def test_two_iterations_at_once_are_two_epochs(clock: Clock) -> None:
    monitor = ThroughputMonitor(Slow(clock, 1.0, 1.0))
    for _, _ in zip(monitor, monitor, strict=True):
        clock.now += 1.0
    assert [each.images for each in monitor.report.epochs] == [2 * SIZE, 2 * SIZE]


@pytest.mark.parametrize(
    ("waits", "step", "verdict"),
    [
        ((1.0, 0.01, 0.01), 1.0, "0.7% of the time: the loader keeps up$"),
        ((1.0, 0.1, 0.1), 1.0, "6.3% of the time: the loader keeps up except for some batches"),
        ((1.0, 0.1, 0.1), 0.05, "57% of the time: loading is the bottleneck.* 2.3x as fast"),
        ((1.0, 0.01, 0.01), 1.0, "^apart from the first batch of each epoch, the loop waited"),
        ((0.01, 0.01, 0.01), 1.0, "^the loop waited for data 0.7%"),
        ((0.1, 0.1, 0.1), 0.0, "100% of the time: the training step is too short"),
    ],
)
def test_the_verdict_has_a_remedy(
    clock: Clock, waits: tuple[float, ...], step: float, verdict: str
) -> None:
    monitor = ThroughputMonitor(Slow(clock, *waits))
    train(monitor, clock, step)
    found = monitor.summary().splitlines()[1]
    assert re.search(verdict, found), found
    command = f"`shardkit doctor DATASET --step-ms 50 --batch-size {SIZE}`"
    assert (command in found) == ("bottleneck" in found)


def test_slow_starts_are_reported(clock: Clock) -> None:
    monitor = ThroughputMonitor(Slow(clock, 2.0, 0.0))
    for _ in range(2):
        train(monitor, clock, 1.0)
    last = monitor.summary().splitlines()[-1]
    assert last.startswith("the first batch of an epoch took 2.0 s, 50% of the total time")


class Bar:
    """Records its calls."""

    def __init__(self) -> None:
        self.told: list[dict[str, str]] = []

    def set_postfix(self, values: dict[str, str]) -> None:
        self.told.append(values)


def test_a_bar_is_updated_a_few_times_per_second(clock: Clock) -> None:
    bar = Bar()
    train(ThroughputMonitor(Slow(clock, *[0.05] * 40), bar), clock, 0.05)
    assert 4 * 2 <= len(bar.told) <= 4 * 4
    assert bar.told[-1] == {"img/s": "41", "waiting": "50%"}


# Real loaders.


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("monitor")
    return make_dataset(make_folder(root / "photos"), root / "made")


def loaders(path: Path) -> Iterator[Any]:
    dataset = open_dataset(path, decode=CROP)
    options: dict[str, Any] = {"num_workers": 1}
    yield make_loader(dataset, 2, **options)
    yield DevicePrefetcher(make_loader(dataset, 2, **options), "cpu")
    yield DataLoader(dataset, 2)


def test_a_monitor_behaves_like_its_loader(path: Path) -> None:
    for loader in loaders(path):
        monitor = ThroughputMonitor(loader)
        assert len(monitor) == len(loader) == 3
        for found, expected in zip(list(monitor), list(loader), strict=True):
            assert torch.equal(found[0], expected[0])
        assert monitor.report.images == 6
        is_stateful = hasattr(loader, "state_dict")
        assert hasattr(monitor, "state_dict") == is_stateful
        assert (inspect.getattr_static(monitor, "state_dict", None) is not None) == is_stateful, (
            "isinstance looks there for the methods of a protocol since Python 3.12"
        )
        assert hasattr(monitor, "set_epoch") == hasattr(loader, "set_epoch")
        assert getattr(monitor, "batch_size", 0) == getattr(loader, "batch_size", 0)
        assert copy.copy(monitor).loader is loader


def test_the_next_step_names_the_dataset(path: Path, clock: Clock) -> None:
    for loader in loaders(path):
        monitor = ThroughputMonitor(loader)
        for _ in monitor:
            pass
        step = f"{10 / monitor.report.batches:.3g}"
        monitor._tallies[0].waited, monitor._tallies[0].steps = 1.0, 0.01
        num_workers = 0 if isinstance(loader, DataLoader) else 1
        assert (
            f"`shardkit doctor {path} --step-ms {step} --batch-size 2 --workers {num_workers} "
            "--decode 'CenterCrop(8)'`"
        ) in monitor.summary()


@pytest.mark.parametrize(
    ("decode", "option"),
    [
        (RandomResizedCrop((8, 9)), "RandomResizedCrop((8, 9))"),
        (RandomResizedCrop(8, scale=(0.5, 1.0), flip=0.0), None),
        (CenterCrop(8, resize=9, filter="bicubic"), None),
        (Resize((4, 5), oversample=float("inf")), None),
    ],
)
def test_the_command_uses_the_command_lines_decode(
    path: Path, clock: Clock, decode: Any, option: str | None
) -> None:
    awkward = path.parent / "a b's"
    if not awkward.exists():
        awkward.symlink_to(path)
    part = Subset(open_dataset(awkward, decode=decode), range(3))
    monitor = ThroughputMonitor(DataLoader(part, 2, collate_fn=list))
    list(monitor)
    monitor._tallies[0].waited, monitor._tallies[0].steps = 1.0, 0.1

    words = shlex.split(monitor.summary().split("`")[1])

    assert words[:3] == ["shardkit", "doctor", str(awkward)]
    assert words[words.index("--batch-size") + 1] == "2", "the largest, not the last"
    assert parse_decode(words[-1]) == decode
    assert option in (None, words[-1])


def test_unknown_operations_and_workers_are_left_out(path: Path, clock: Clock) -> None:
    loader = Slow(clock, 1.0, 1.0)
    loader.dataset = open_dataset(path, decode="torch")  # type: ignore[attr-defined]
    loader.num_workers = "auto"  # type: ignore[attr-defined]
    monitor = ThroughputMonitor(loader)
    train(monitor, clock, 0.1)
    assert monitor.summary().split("`")[1].endswith(f"--batch-size {SIZE}")


class Batches(IterableDataset[Any]):
    """Yields batches, like ``webdataset.WebLoader``, which is also an iterable dataset."""

    def __iter__(self) -> Iterator[Any]:
        return iter([(torch.zeros(3, 2), torch.zeros(3))] * 5)


def test_an_iterable_dataset_that_gives_batches_is_a_loader() -> None:
    monitor = ThroughputMonitor(Batches())
    assert len(list(monitor)) == 5
    assert monitor.report.images == 15


def test_an_object_without_batches_is_refused(path: Path) -> None:
    for wrong in (open_dataset(path), TensorDataset(torch.zeros(3)), "dataset", 3):
        with refused(UsageError):
            ThroughputMonitor(wrong)
    with pytest.raises(UsageError, match="set_postfix"):
        ThroughputMonitor([1], bar="bar")
    with pytest.raises(TypeError):
        len(ThroughputMonitor(iter([1])))
    with pytest.raises(AttributeError, match="set_epoch"):
        ThroughputMonitor([1]).set_epoch(1)


@pytest.mark.measures
def test_monitoring_costs_microseconds() -> None:
    """A hundredth of 5 ms, the quickest batches there are, is 50."""
    batches = [(torch.zeros(1), torch.zeros(1))] * 2000
    best = min(_seconds(ThroughputMonitor(batches, Bar())) for _ in range(5))
    assert best / len(batches) < 50e-6


def _seconds(batches: Any) -> float:
    begun = time.thread_time()  # other processes may keep the thread waiting
    for _ in batches:
        pass
    return time.thread_time() - begun
