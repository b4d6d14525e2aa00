"""What the functions of a measurement process return, without a process around them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from clocks import Clock
from helpers import jpeg, make_tree
from refusals import refused

from shardkit import convert
from shardkit.errors import MeasurementFailed, UsageError
from shardkit.measure.runner import clock, page_cache, session, steps
from shardkit.measure.runner.material import SubjectInfo
from shardkit.measure.runner.session import Session, answer, last_words
from shardkit.measure.runner.spec import LoaderSpec, StepSpec, StopCondition, Subject, parse_loader
from shardkit.measure.runner.timing import Measurement

PLAIN = LoaderSpec(engine="plain", batch_size=4)
EPOCH = {"loader": PLAIN, "stop": StopCondition(epochs=1, whole=True), "step": StepSpec()}


def opened(path: Path, **more: Any) -> tuple[Session, SubjectInfo]:
    found, subject = Session(), Subject(path=str(path), **{"decode": "CenterCrop(8)", **more})
    return found, session.open_subject(found, subject=subject)


def converted(source: Path, place: Path) -> Path:
    convert(source, place, to="lmdb", workers=1)
    return place


def measured(found: Session) -> Measurement:
    return session.measure(found, **EPOCH)  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", ["folder", "dataset"])
def test_a_subject_and_a_sample_of_it_are_opened_and_measured(
    kind: str, folder: Path, tmp_path: Path
) -> None:
    path = folder if kind == "folder" else converted(folder, tmp_path / "made")
    found, about = opened(path)
    seen = measured(found)

    stored = sum(each.stat().st_size for each in folder.rglob("*.*"))
    assert (about.images, about.total) == (6, 6)
    assert about.bytes == stored if kind == "folder" else about.bytes > stored
    assert (seen.images, len(seen.waits), seen.engine) == (6, 2, "plain")

    found, few = opened(path, limit=4)
    assert (few.images, few.total, few.bytes) == (4, 6, about.bytes)
    assert measured(found).images == 4
    assert kind == "dataset" or len(found.files) == 4
    assert opened(path, limit=4)[1] == few
    assert opened(path, limit=40)[1].images == 6


@pytest.mark.parametrize("kind", ["folder", "dataset"])
def test_the_largest_split_is_read_and_named(kind: str, tmp_path: Path) -> None:
    images = {f"train/a/{number}.jpg": jpeg(seed=number) for number in range(3)}
    path = make_tree(tmp_path / "splits", {**images, "val/a/0.jpg": jpeg(seed=9)})
    if kind == "dataset":
        path = converted(path, tmp_path / "made")

    assert (opened(path)[1].split, opened(path)[1].images) == ("train", 3)
    assert opened(path / "val")[1].split == ""


def test_the_reason_for_processes_is_reported(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = converted(folder, tmp_path / "made")
    (tmp_path / "planted_unmarked.py").write_text("def unmarked(image): return image\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)

    assert opened(made)[1].processes == ""
    unmarked = opened(made, decode="pil", transform="planted_unmarked:unmarked")[1]
    assert "unmarked may hold the GIL" in unmarked.processes


def test_pages_that_come_back_are_dropped_again(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thread of the previous measurement was still reading."""
    drops: list[int] = []
    fractions = iter([0.5, 0.2, 0.0])
    monkeypatch.setattr(page_cache, "drop", lambda files: drops.append(len(files)))
    monkeypatch.setattr(page_cache, "resident", lambda files: next(fractions))
    found, _ = opened(folder)
    session.warm(found)

    assert session.drop(found) == 0.0
    assert drops == [6, 6, 6]


def test_a_step_is_timed_on_a_batch_that_is_ready(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(steps, "time", Clock())
    found, _ = opened(folder)

    seconds = session.step_seconds(found, loader=PLAIN, step=StepSpec(milliseconds=20.0))

    assert seconds == pytest.approx(0.02)


def test_invalid_requests_are_refused_and_errors_are_failures(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "planted_failure.py").write_text("def fails(image): raise ValueError('planted')\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    missing = Subject(path=str(folder / "nowhere"))
    with refused(UsageError):
        answer(session.open_subject, (), {"subject": missing})
    with refused(UsageError):
        parse_loader("plain:num_workers=-1", 4)

    found, _ = opened(folder, decode="pil", transform="planted_failure:fails")
    monkeypatch.setattr(session, "_SESSION", found)
    message = r"^ValueError: planted \(planted_failure.py:1 fails\)$"
    with pytest.raises(MeasurementFailed, match=message):
        answer(session.measure, (), EPOCH)


def test_a_workers_error_is_reported_without_its_traceback() -> None:
    message = (
        "ValueError: Caught ValueError in DataLoader worker process 0.\n"
        "Original Traceback (most recent call last):\n"
        '  File "fetch.py", line 1, in fetch\n'
        "    raise ValueError\n"
        "ValueError: first\nsecond\n"
    )

    assert last_words(message) == "ValueError: first\nsecond"
    assert last_words("one\n  two") == "one\n  two"


LOADERS = """
import torch
from torch.utils.data import DataLoader, TensorDataset
def loader(): return DataLoader(TensorDataset(torch.zeros(10, 3, 4, 4), torch.arange(10)), 5)
def batches(): return [(torch.zeros(4, 3), torch.zeros(4))] * 3
def needs(path): return path
"""


def test_a_users_loader_is_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "planted_loaders.py").write_text(LOADERS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    found = Session()

    subject = Subject(loader="planted_loaders:loader")
    assert session.open_subject(found, subject=subject).images == 10
    assert found.dataset is found.loader.dataset
    subject = Subject(loader="planted_loaders:batches")
    assert session.open_subject(found, subject=subject).images == 0
    with refused(UsageError):
        session.open_subject(found, subject=Subject(loader="planted_loaders:needs"))


class Timed:
    """A dataset on a clock: an image computes and waits so many seconds."""

    def __init__(self, clock: Clock, computing: float, waiting: float) -> None:
        self.clock, self.computing, self.waiting = clock, computing, waiting
        self.used = 0.0

    def __len__(self) -> int:
        return 100

    def __getitem__(self, row: int) -> int:
        self.used += self.computing
        self.clock.now += self.computing + self.waiting
        return row


@pytest.mark.parametrize(
    ("computing", "waiting", "held"), [(0.001, 0.0, 0.0), (0.002, 0.018, 0.0), (0.004, 0.0, 0.5)]
)
def test_the_cost_of_loading_is_that_of_one_image(
    computing: float, waiting: float, held: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    time = Clock()
    data = Timed(time, computing, waiting)
    monkeypatch.setattr(session, "time", time)
    monkeypatch.setattr(clock, "_clock", lambda: np.array((time.now, data.used)))
    monkeypatch.setattr(session, "held_fraction", lambda work, seconds: held)

    cost = session.load_cost(Session(dataset=data), seconds=1.0)

    assert cost.seconds == pytest.approx(computing + waiting)
    assert cost.computing == pytest.approx(computing)
    assert cost.held == pytest.approx(held * computing)


class Together(Timed):
    """As above, but a call takes 2 ms."""

    def __getitems__(self, rows: list[int]) -> list[int]:
        self.used += 0.002
        self.clock.now += 0.002
        return [self[row] for row in rows]


def test_rows_cost_what_they_do_together(monkeypatch: pytest.MonkeyPatch) -> None:
    time = Clock()
    data = Together(time, 0.0001, 0.001)
    monkeypatch.setattr(session, "time", time)
    monkeypatch.setattr(clock, "_clock", lambda: np.array((time.now, data.used)))
    monkeypatch.setattr(session, "held_fraction", lambda work, seconds: 0.0)

    cost = session.load_cost(Session(dataset=data), seconds=1.0)

    assert cost.seconds == pytest.approx(0.0011, rel=0.2)
    assert cost.computing < 0.0003, "0.0021 one by one"


def test_an_epoch_of_a_sample_is_as_long_as_workers_need(folder: Path) -> None:
    stop = StopCondition(seconds=0.0, turn=3)
    few, _ = opened(folder, limit=4)

    seen = session.measure(few, loader=replace(PLAIN, batch_size=2), stop=stop, step=StepSpec())

    assert seen.images >= 3 * 2
    assert len(few.dataset) == 4
