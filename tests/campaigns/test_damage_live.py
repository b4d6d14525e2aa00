"""Datasets damaged, replaced or removed during reading: an error or correct samples."""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from campaign import cases
from helpers import DEADLINE, FORMATS, make_dataset, make_tree, png
from refusals import refused
from torch.utils.data import DataLoader

from shardkit import collate, convert, make_loader, open_dataset
from shardkit.dataset import index_reader
from shardkit.errors import CorruptDataset
from shardkit.recipe import Recipe
from shardkit.testing.tools import call_in
from shardkit.torch.engine.preflight import sample_bytes

ROWS = 24
BATCH = 2

RAW = Recipe(resize=(9, 10), resize_mode="stretch", encode="raw", enlarge=True)

KINDS: dict[str, dict[str, Any]] = {"encoded": {}, "raw": {"recipe": RAW}}

Damage = Callable[[Path], None]


def empty(path: Path) -> None:
    os.truncate(path, 0)


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def replace(path: Path) -> None:
    """Put another file in its place, which those who have the old one open do not see."""
    other = path.with_name("other")
    other.write_bytes(bytes(path.stat().st_size))
    other.replace(path)


def delete(path: Path) -> None:
    path.unlink()


DAMAGES: dict[str, Damage] = {f.__name__: f for f in (empty, cut, replace, delete)}


@pytest.fixture(scope="module", params=cases(itertools.product(FORMATS, KINDS), 2), ids="-".join)
def pristine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dataset of six shards."""
    to, kind = request.param
    root = tmp_path_factory.mktemp(f"{to}-{kind}")
    make_tree(root / "photos", {f"{'ab'[n % 2]}/{n:02d}.png": png(9, 10, n) for n in range(ROWS)})
    return make_dataset(root / "photos", root / "made", to=to, **KINDS[kind])


@pytest.fixture(autouse=True)
def _index_not_held(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let rows be read from the file, as those of a large index are: held ones cannot be harmed."""
    monkeypatch.setattr(index_reader, "_HELD", 0)


@pytest.fixture
def place(pristine: Path, tmp_path: Path) -> Path:
    """A copy, to be damaged."""
    return shutil.copytree(pristine, tmp_path / "made")


def images_of(batch: Any) -> np.ndarray[Any, Any]:
    """Return the images of a batch, to be kept."""
    return np.asarray(batch[0]).copy()


def batches_of(place: Path) -> list[np.ndarray[Any, Any]]:
    dataset = open_dataset(place, decode="numpy", verify=True)
    return [images_of(dataset[row : row + BATCH].batch) for row in range(0, ROWS, BATCH)]


def loading(engine: str, place: Path, verify: bool | None) -> Iterator[np.ndarray[Any, Any]]:
    """Give the batches of an epoch, in order, from a loader with two workers."""
    dataset = open_dataset(place, decode="numpy", verify=verify)
    if engine == "DataLoader":
        yield from map(images_of, DataLoader(dataset, BATCH, num_workers=2, collate_fn=collate))
        return
    options: dict[str, Any] = {
        "engine": engine,
        "num_workers": 2,
        "prefetch_factor": 1,
        "start_method": START[engine],
    }
    loader = make_loader(dataset, BATCH, **options)
    with contextlib.closing(loader):
        yield from map(images_of, loader)


START = {"thread": "auto", "helper": "fork", "process": "fork"}


def outcome_of(batches: Iterator[np.ndarray[Any, Any]], expected: list[Any], *, raw: bool) -> str:
    """Return what becomes of the rest of an epoch: each batch is right, up to an error."""
    try:
        for number, batch in enumerate(batches, 1):
            if not np.array_equal(batch, expected[number]) and not raw:
                return f"batch {number} is wrong"
    except CorruptDataset as error:
        return f"refused: {error}"
    return "right"


def damage_while_reading(engine: str, name: str, damage: str, place: Path, verify: bool) -> str:
    """Read a batch, damage a file, read on; in a child, which may die of it."""
    signal.alarm(int(DEADLINE))
    torch.set_num_threads(1)
    expected = batches_of(place)
    batches = loading(engine, place, verify or None)
    if not np.array_equal(next(batches), expected[0]):
        return "the first batch is wrong"
    DAMAGES[damage](place / name)
    return outcome_of(batches, expected, raw=False)


@pytest.mark.parametrize("engine", ["thread", "process", "DataLoader"])
@pytest.mark.parametrize("damage", DAMAGES)
def test_a_shard_damaged_under_a_loader_is_refused_or_read_right(
    place: Path, engine: str, damage: str
) -> None:
    last = open_dataset(place).manifest.shards[-1].name
    found = call_in("fork", damage_while_reading, engine, last, damage, place, True)
    if damage == "empty":  # a cut may lie behind the images
        assert found.startswith("refused: ")
        assert str(place / last) in found
    assert found == "right" or found.startswith("refused: ")


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("name", ["rows", "keys", "paths-ends"])
def test_an_index_damaged_under_a_reader_kills_nobody(place: Path, damage: str, name: str) -> None:
    """A page of a map that is no more would be a signal that ends the process."""
    found = call_in(
        "fork", damage_while_reading, "thread", f"index/{name}.npy", damage, place, False
    )
    assert found == "right" or found.startswith("refused: ")


@pytest.mark.parametrize("damage", DAMAGES)
def test_columns_of_an_index_damaged_after_it_was_opened_kill_nobody(
    place: Path, damage: str
) -> None:
    assert call_in("fork", read_columns, damage, "rows", place) in ("right", "refused")


def read_columns(damage: str, name: str, place: Path) -> str:
    dataset = open_dataset(place, decode="numpy")
    expected = [label for _, label in dataset[:]]
    sample_bytes(dataset)
    DAMAGES[damage](place / f"index/{name}.npy")
    try:
        sample_bytes(dataset)
        right = dataset.targets.tolist() == expected == [label for _, label in dataset[:]]
    except CorruptDataset:
        return "refused"
    return "right" if right else "wrong"


def test_an_index_restored_from_a_copy_is_read_without_a_new_process(place: Path) -> None:
    path = place / "index/rows.npy"
    dataset = open_dataset(place, decode="bytes")
    expected = list(dataset[:])
    copy = path.read_bytes()
    empty(path)
    for rows in ([0], [0, ROWS - 1], range(ROWS)):
        with pytest.raises(CorruptDataset, match=r"index/rows\.npy"):
            dataset[rows]
    path.unlink()  # as cp --remove-destination, rsync and mv do
    path.write_bytes(copy)
    assert list(dataset[:]) == expected


@pytest.mark.parametrize("engine", ["thread", "helper", "process"])
@pytest.mark.parametrize("seed", [0, 1])
def test_a_dataset_written_anew_under_a_loader_is_never_mixed_in(
    pristine: Path, place: Path, engine: str, seed: int
) -> None:
    """With the same seed it becomes the same dataset, with another one of the same sizes."""
    found = call_in("fork", write_anew_while_reading, engine, pristine, place, seed)
    assert found == "right" or (seed and found.startswith("refused: "))


def write_anew_while_reading(engine: str, pristine: Path, place: Path, seed: int) -> str:
    signal.alarm(int(DEADLINE))
    manifest = open_dataset(place).manifest
    recipe = RAW if manifest.raw_shape else Recipe()
    options: dict[str, Any] = {"to": manifest.format, "shard_samples": 4, "recipe": recipe}
    expected = batches_of(place)
    batches = loading(engine, place, None)
    if not np.array_equal(next(batches), expected[0]):
        return "the first batch is wrong"
    convert(pristine.parent / "photos", place, seed=seed, force=True, **options)
    return outcome_of(batches, expected, raw=False)


def test_what_was_opened_of_a_successor_is_not_read_when_the_older_one_is_back(
    pristine: Path, place: Path, tmp_path: Path
) -> None:
    """A reader that met another dataset for a moment must not keep its files."""
    dataset = open_dataset(place, decode="numpy")
    expected = batches_of(pristine)
    dataset[0]
    other = shutil.copytree(place, tmp_path / "other")
    manifest = dataset.manifest
    for shard in manifest.shards[1:]:
        (other / shard.name).write_bytes((other / manifest.shards[0].name).read_bytes())
    place.rename(tmp_path / "aside")
    other.rename(place)
    (place / "shardkit.json").unlink()
    for row in (ROWS - 1, ROWS - 2):
        with refused(CorruptDataset):
            dataset[row]
    dataset.announce(np.arange(ROWS))
    place.rename(tmp_path / "gone")
    (tmp_path / "aside").rename(place)
    for number, batch in enumerate(expected):
        found = dataset[number * BATCH : (number + 1) * BATCH].batch
        assert np.array_equal(images_of(found), batch)
