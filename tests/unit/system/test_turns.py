"""One at a time: threads and processes that share work take turns."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from colliding import collide
from helpers import encoded, jpeg, make_tree, picture, png
from PIL import Image

from shardkit import convert, make_loader, open_dataset
from shardkit.codecs import limits
from shardkit.codecs.image import decode, decode_mask, inspect
from shardkit.pipeline import convert_record
from shardkit.recipe import Recipe
from shardkit.record import FOREIGN_FIELD, Record
from shardkit.system.pool import run_tasks


def test_processes_take_turns(tmp_path: Path) -> None:
    tasks = [tmp_path / "turn"] * 3
    assert [found for _, found in run_tasks(collide, tasks, workers=3)] == [0, 0, 0]


def test_threads_take_turns(tmp_path: Path) -> None:
    found: list[int] = []
    work = partial(collide, tmp_path / "turn")
    threads = [threading.Thread(target=lambda: found.append(work())) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert found == [0, 0, 0]


class Colliding:
    """A transform that counts collisions."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __call__(self, _: object) -> int:
        return collide(self.path)


@pytest.mark.parametrize("start_method", ["fork", pytest.param("spawn", marks=pytest.mark.slow)])
def test_worker_processes_of_a_loader_take_turns(tmp_path: Path, start_method: str) -> None:
    source = make_tree(tmp_path / "photos", {f"a/{n}.png": png() for n in range(4)})
    convert(source, tmp_path / "set", to="lmdb", workers=1)
    dataset = open_dataset(tmp_path / "set", transform=Colliding(tmp_path / "turn"))
    options: dict[str, Any] = {"engine": "process", "num_workers": 2, "start_method": start_method}
    loader = make_loader(dataset, batch_size=1, **options)
    try:
        assert [int(found) for found, _ in loader] == [0] * 4
    finally:
        loader.close()


LARGE = {
    "jpg": jpeg(40, 40),
    "png": png(40, 40),
    "webp": encoded(picture(40, 40), "WEBP"),
    "gif": encoded(picture(40, 40), "GIF"),
    "tiff": encoded(picture(40, 40), "TIFF"),
    "bmp": encoded(picture(40, 40), "BMP"),
    "ppm": encoded(picture(40, 40), "PPM"),
    FOREIGN_FIELD: encoded(picture(40, 40), "TGA"),
}


@pytest.mark.parametrize("field", LARGE)
def test_large_images_are_decoded_in_turn(field: str, monkeypatch: pytest.MonkeyPatch) -> None:
    depth, turns = 0, 0

    @contextmanager
    def turn() -> Iterator[None]:
        nonlocal depth, turns
        depth, turns = depth + 1, turns + 1
        yield
        depth -= 1

    monkeypatch.setattr(limits, "in_turn", turn)
    data = LARGE[field]
    recipe = Recipe(encode="png", resize=8)
    steps = (
        partial(inspect, encoded(picture(40, 40), "WEBP"), "webp"),  # opening it takes memory
        partial(decode, data, field),
        partial(decode_mask, data, field),
        partial(convert_record, recipe, Record("a", {field: data})),
    )
    for step in steps:
        step()
    assert turns == 0
    monkeypatch.setattr(limits, "LARGE_PIXELS", 1599)
    resize = Image.Image.resize
    monkeypatch.setattr("shardkit.system.compiled.resize", lambda *_: None)
    # It has the same limit, and leaves larger images to Python.
    monkeypatch.setattr("shardkit.system.compiled.decode_png", lambda *_: None)

    def resized(*arguments: object) -> Image.Image:
        assert depth > 0  # the pixels are in memory
        return resize(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(Image.Image, "resize", resized)
    for step in steps:
        before = turns
        step()
        assert turns > before
        assert depth == 0
    assert np.array_equal(decode(data, field).shape, (40, 40, 3))
