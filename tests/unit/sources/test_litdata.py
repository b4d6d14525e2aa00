"""Chunks that the package of LitData 0.2.76 wrote, and an index that lies."""

from __future__ import annotations

import io
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from foreign import pixels_of
from PIL import Image
from refusals import refused

from shardkit import attach, convert, open_dataset, open_source, verify
from shardkit.errors import UsageError

GOLDEN = Path(__file__).parents[2] / "golden" / "litdata"


def opened(name: str | Path, **options: Any) -> Any:
    return open_source("litdata", GOLDEN / name, **options)


def pixels(row: int) -> Any:
    return np.random.default_rng(row).integers(0, 256, (6 + row % 2, 5, 3), np.uint8)


def samples_of(target: Path) -> Any:
    """Return a dataset whose samples have all fields, by name."""
    names = (*open_dataset(target).schema,)
    return open_dataset(target, decode="bytes", fields=names, as_dict=True)


def jpeg(row: int) -> bytes:
    data = io.BytesIO()
    Image.fromarray(pixels(row)).save(data, "JPEG")
    return data.getvalue()


@pytest.mark.parametrize("name", ["fields", "tuple", "bytes", "zstd"])
def test_images_labels_and_order_are_those_given_to_litdata(name: str) -> None:
    if name == "zstd":
        pytest.importorskip("zstandard")
    options = {"label": "n"} if name == "bytes" else {}
    (images,) = opened(name, **options).scan().splits.values()
    assert len(images) == 8
    for row, record in enumerate(images.read(range(8))):
        assert record.fields["jpg"] == jpeg(row)
        assert record.fields["cls"] == b"%d" % (row if name == "bytes" else row % 3)


def test_pixels_become_png_files() -> None:
    (images,) = opened("pil").scan().splits.values()
    for row, record in enumerate(images.read(range(8))):
        assert pixels_of(record.fields["png"]).tolist() == pixels(row).tolist()


@pytest.mark.parametrize("in_place", [False, True])
def test_every_field_has_the_value_given_to_litdata(in_place: bool, tmp_path: Path) -> None:
    if in_place:
        with refused(UsageError):
            attach(opened("fields"), tmp_path / "made")
        attach(opened("fields", keep="w,ok,cap,raw"), tmp_path / "made")
    else:
        convert(opened("fields"), tmp_path / "made", to="hdf5", shuffle=False)
    assert verify(tmp_path / "made", level="decode").ok
    for row, sample in enumerate(samples_of(tmp_path / "made")):
        assert (sample["w"], sample["ok"], sample["cap"]) == (row / 2, row % 2 == 0, f"größe {row}")
        assert sample["raw"] == b"x" * row
        if in_place:
            continue
        arrays = {name: np.asarray(sample[name]) for name in ("lat", "vec", "t", "tv")}
        expected: dict[str, Any] = {
            "lat": np.full((2, 3), row, np.float16),
            "vec": np.arange(4, dtype=np.float32) + row,
            "t": np.full((2, 2), row),
            "tv": np.arange(3) + row,
        }
        for name, array in expected.items():
            assert arrays[name].dtype == array.dtype
            assert arrays[name].tolist() == array.tolist()


def test_columns_of_nested_samples_are_named_by_their_path() -> None:
    source = opened("nested", keep="none")
    (images,) = source.scan().splits.values()
    assert source.options.image == "a.image"
    assert [record.fields["cls"] for record in images.read(range(3))] == [b"0", b"1", b"2"]


def test_pickles_and_frames_are_refused() -> None:
    with refused(UsageError, "'p'"):
        opened("nested", image="a.image", label="a.n", keep="p")
    with refused(UsageError, "'batch'"):
        opened("framed")


LIES: list[tuple[Callable[[Any], object], tuple[str, ...]]] = [
    (lambda index: index["chunks"][0].update(chunk_size=-1), ("chunk_size", "-1")),
    (lambda index: index["chunks"][0].update(filename="../chunk-0-0.bin"), ()),
    (lambda index: index["config"].update(data_spec="[1, 5]"), ()),
    (lambda index: index["config"].update(encryption={"algorithm": "fernet"}), ()),
    (lambda index: index["config"].update(item_loader="TokensLoader"), ("'TokensLoader'",)),
    (lambda index: index.update(config=[], chunks=[]), ("config", "[]")),
    (lambda index: index.update(chunks=[["chunk-0-0.bin"]]), ("chunk-0-0.bin",)),
]


def test_an_index_that_lies_is_refused(tmp_path: Path) -> None:
    path = Path(shutil.copytree(GOLDEN / "tuple", tmp_path / "copy")) / "index.json"
    whole = path.read_text()
    for change, facts in LIES:
        index = json.loads(whole)
        change(index)
        path.write_text(json.dumps(index))
        with refused(UsageError, *facts):
            open_source("litdata", tmp_path / "copy")
