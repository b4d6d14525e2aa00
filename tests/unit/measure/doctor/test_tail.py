"""The few images that take most of the time are found, also without decoding."""

from __future__ import annotations

import dataclasses
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from diagnoses import profile
from helpers import jpeg, make_dataset, make_tree
from PIL import Image
from torch.utils.data import Dataset, Subset

from shardkit import attach, convert, open_dataset
from shardkit.cli.doctor_report import _tail
from shardkit.measure.doctor.pipeline import Remedy
from shardkit.measure.doctor.remedies import together
from shardkit.measure.doctor.stored import headers, stored_images
from shardkit.measure.doctor.tail import Sample, Tail, find_tail
from shardkit.measure.runner import clock
from shardkit.recipe import Recipe

USUAL = 0.0025


class Own(Dataset[Any]):
    """Samples whose time is a function of the row; a sample is a pair with a label."""

    classes = tuple(f"c{n}" for n in range(10))

    def __init__(self, seconds: Callable[[int], float], spent: list[float]) -> None:
        self.seconds, self.spent = seconds, spent

    def __len__(self) -> int:
        return 1000

    def __getitem__(self, row: int) -> tuple[int, int]:
        self.spent.append(self.seconds(row))
        return 0, row % 10


@pytest.fixture
def spent(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Times that samples take, on a clock of their own."""
    times: list[float] = []
    monkeypatch.setattr(clock, "_clock", lambda: np.array([1.0, 1.0]) * sum(times))
    return times


def tail_of(dataset: Any, rows: range = range(200)) -> Tail | None:
    sample = Sample(dataset, [], [], [])
    for row in rows:
        sample.read(row)
    return find_tail(sample)


@pytest.mark.parametrize("seed", range(5))
def test_rare_slow_images_are_found_and_named(seed: int, spent: list[float]) -> None:
    rng = np.random.default_rng(seed)
    slow = set(rng.choice(200, int(rng.integers(2, 20)), replace=False).tolist())
    times = rng.uniform(0.8, 1.2, 1000) * USUAL
    factor = float(rng.uniform(40, 200))
    found = tail_of(Own(lambda row: times[row] * (factor if row in slow else 1), spent))
    assert found is not None
    assert found.images == pytest.approx(len(slow) / 200)
    worst = sorted(slow, key=lambda row: -times[row])[:3]
    assert found.examples == [f"row {row}" for row in worst]
    assert not found.passing
    whole = times[:200].sum() + sum(times[row] * (factor - 1) for row in slow)
    rest = (times[:200].sum() - sum(times[row] for row in slow)) / (200 - len(slow))
    assert found.speedup == pytest.approx(whole / 200 / rest, rel=1e-6)


def test_images_of_about_one_time_have_no_tail_nor_have_half_of_them(spent: list[float]) -> None:
    for seed in range(5):
        times = np.random.default_rng(seed).lognormal(np.log(USUAL), 0.4, 1000)
        assert tail_of(Own(times.__getitem__, spent)) is None
    assert tail_of(Own(lambda row: USUAL * (50 if row % 2 else 1), spent)) is None


@pytest.mark.parametrize("label", [0, 4, 9])
def test_a_slow_class_is_named(label: int, spent: list[float]) -> None:
    own = Own(lambda row: USUAL * (60 if row % 10 == label else 1), spent)
    found = tail_of(Subset(own, range(0, 1000, 3)), range(100))
    assert found is not None
    assert found.common == f"class 'c{label}'"
    assert all(int(name.removeprefix("row ")) % 10 == label for name in found.examples)


def test_images_that_were_slow_once_are_told_apart(spent: list[float]) -> None:
    seen: set[int] = set()

    def seconds(row: int) -> float:
        first = row not in seen
        seen.add(row)
        return USUAL * (100 if row % 40 == 7 and first else 1)

    found = tail_of(Own(seconds, spent))
    assert found is not None
    assert found.passing
    assert "they were fast on a second read" in _tail(found)


def stored(folder: Path, sizes: list[int], kinds: list[str]) -> Any:
    for row, (size, kind) in enumerate(zip(sizes, kinds, strict=True)):
        path = folder / "photos" / "abc"[row % 3] / f"{row:02d}.{kind}"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (size, size)).save(path)
    convert(folder / "photos", folder / "made", to="lmdb", shuffle=False, shard_samples=20)
    return open_dataset(folder / "made")


@pytest.mark.parametrize(
    ("sizes", "kinds", "common"),
    [
        ([300 if row in (3, 50, 51) else 30 for row in range(60)], ["png"] * 60, "over 0.09 meg"),
        ([30] * 60, ["webp" if row in (4, 22, 41) else "png" for row in range(60)], "WEBP files"),
    ],
)
def test_slow_images_of_a_dataset_share_size_or_encoding(
    sizes: list[int], kinds: list[str], common: str, tmp_path: Path
) -> None:
    dataset = stored(tmp_path, sizes, kinds)
    slow = [
        row
        for row, key in enumerate(dataset.keys)
        if sizes[int(key[-2:])] > 30 or kinds[int(key[-2:])] == "webp"
    ]
    times = [USUAL * (100 if row in slow else 1) for row in range(60)]
    labels: list[int | None] = ["abc".index(key[0]) for key in dataset.keys]
    found = find_tail(Sample(dataset, list(range(60)), times, labels))
    assert found is not None
    assert found.common.startswith(common)
    assert set(found.examples) == {dataset.keys[row] for row in slow}


def test_a_slow_shard_is_named(tmp_path: Path) -> None:
    dataset = stored(tmp_path, [30] * 120, ["png"] * 120)
    times = [USUAL * (100 if 40 <= row < 60 else 1) for row in range(120)]
    found = find_tail(Sample(dataset, list(range(120)), times, [0] * 120))
    assert found is not None
    assert found.common == "shard 2"


def test_the_report_names_the_tail() -> None:
    tail = Tail(
        images=0.026, time=0.8, median=0.4, common="class 'c'", examples=["a", "b"], passing=False
    )
    assert _tail(tail) == (
        "2.6% of the images take 80% of the time, 400 ms each (all of class 'c', such as a, b); "
        "without them, the rate would be 4.9 times as high"
    )
    assert dataclasses.asdict(dataclasses.replace(profile(), tail=tail))["tail"]["time"] == 0.8


WORKERS = Remedy(name="9 workers", options={"num_workers": 9}, code="num_workers=9")
ENGINE = Remedy(name="threads", options={"engine": "thread"}, code="engine")
RAW = Remedy(name="raw", recipe=Recipe(encode="raw", resize=(8, 8), resize_mode="crop"))
SHARDS = Remedy(name="shards", recipe=Recipe())


def test_remedies_add_up_unless_they_exclude_each_other() -> None:
    both = together(SHARDS, WORKERS)
    assert both is not None
    assert both.name == "shards and 9 workers"
    assert (both.options, both.recipe, both.code) == (WORKERS.options, Recipe(), "num_workers=9")
    assert together(WORKERS, ENGINE) is not None
    for one, other in ((RAW, SHARDS), (WORKERS, WORKERS)):
        assert together(one, other) is None


# Stored images are known without decoding.


class Folder(Dataset[Any]):
    """What torchvision's ImageFolder shows of its files."""

    def __init__(self, samples: list[tuple[str, int]]) -> None:
        self.samples = samples


def test_the_files_of_an_image_folder_are_known(tmp_path: Path) -> None:
    tree = {f"a/{n}.jpg": jpeg(64, 48, n) for n in range(3)}
    files = sorted(make_tree(tmp_path / "photos", {**tree}).rglob("*.jpg"))
    folder = Folder([(str(path), number) for number, path in enumerate(files)])
    dataset = Subset(Subset(folder, [0, 2, 1]), [1, 2])

    assert stored_images(dataset)[0] == (files[2].read_bytes(), 2)
    assert [(h.kind, h.width, h.label) for h in headers(dataset, [1, 0])] == [
        ("jpg", 64, 1),
        ("jpg", 64, 2),
    ]
    assert stored_images(Folder([])) is None


def test_the_stored_images_of_a_selection_are_those_of_its_rows(tmp_path: Path) -> None:
    files = {f"a/{n}.jpg": jpeg(64, 48, n) for n in range(5)}
    photos = make_tree(tmp_path / "photos", {**files})
    made = make_dataset(photos, tmp_path / "made")
    dataset = open_dataset(made, fields=("image",), as_dict=True, decode="torch").select([4, 1])

    paths = open_dataset(made).paths
    expected = [(photos / paths[row]).read_bytes() for row in (4, 1)]
    assert [data for data, _ in stored_images(dataset)[:]] == expected


def test_the_stored_images_of_an_attached_dataset_are_found_where_it_was_opened(
    tmp_path: Path,
) -> None:
    image = jpeg(64, 48, 1)
    files = make_tree(tmp_path / "files", {"0.jpg": image, "0.cls": b"0"})
    (tmp_path / "old").mkdir()
    with tarfile.open(tmp_path / "old/a.tar", "w") as archive:
        archive.add(files, "")
    attach(tmp_path / "old", tmp_path / "attached")
    moved = (tmp_path / "old").rename(tmp_path / "new")

    dataset = open_dataset(tmp_path / "attached", root=moved)
    assert stored_images(dataset)[0][0] == image
