"""Conformance tests: datasets converted to a registered format."""

from __future__ import annotations

import operator
import pickle
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from shardkit.changes import fields
from shardkit.contracts import Format
from shardkit.conversion.build_all import Builder
from shardkit.conversion.convert import convert, convert_scan
from shardkit.conversion.plan import ConvertOptions
from shardkit.kinds.field import Field
from shardkit.recipe import Recipe
from shardkit.sources.imagefolder import scan_imagefolder
from shardkit.system import compiled
from shardkit.testing.tools import NEW_PROCESS, call_in, contents, flipped, random_image
from shardkit.torch.data.datasets import open_dataset
from shardkit.verification.verify import verify

_PICTURES = (
    "bird/a b.png",
    "bird/größer.v2.png",
    "cat/1.png",
    "cat/1.bmp",
    "cat/deep/__2__.png",
    "cat/" + "x" * 120 + ".png",
    "dog/UPPER.PNG",
    "dog/z.ppm",
)


class DatasetConformance:
    """Tests of datasets; the format must be registered."""

    def test_a_dataset_has_the_bytes_of_its_source(self, storage: Format, tmp_path: Path) -> None:
        target = _convert(storage, tmp_path)
        assert verify(target, "decode").findings == []
        dataset = open_dataset(target, decode="bytes")
        assert sorted(dataset.paths) == sorted(_PICTURES)
        for row, path in enumerate(dataset.paths):
            data, label = dataset[row]
            assert data == (tmp_path / "source" / path).read_bytes()
            assert dataset.classes[label] == path.split("/")[0]

    def test_the_index_locates_the_bytes_of_the_source(
        self, storage: Format, tmp_path: Path
    ) -> None:
        target = _convert(storage, tmp_path)
        dataset = open_dataset(target)
        row = 0
        for shard in dataset.manifest.shards:
            data = (target / shard.name).read_bytes()
            for _ in range(shard.rows):
                offset, length = (int(dataset.shards.rows[n][row]) for n in ("offset", "length"))
                source = (tmp_path / "source" / dataset.paths[row]).read_bytes()
                assert length == len(source)
                assert offset == -1 or data[offset : offset + length] == source
                row += 1

    def test_a_dataset_of_raw_pixels_has_the_pixels_of_its_source(
        self, storage: Format, tmp_path: Path
    ) -> None:
        recipe = Recipe(encode="raw", resize=(6, 5), resize_mode="stretch")
        target = _convert(storage, tmp_path, recipe=recipe)
        assert verify(target, "decode").findings == []
        dataset = open_dataset(target, decode="numpy")
        for row, path in enumerate(dataset.paths):
            with Image.open(tmp_path / "source" / path) as image:
                assert np.array_equal(dataset[row][0], np.asarray(image.convert("RGB")))

    def test_images_of_other_types_come_back(self, storage: Format, tmp_path: Path) -> None:
        drawn = [
            np.random.default_rng(n).integers(0, 1 << 16, (16, 12, 5), np.uint16) for n in range(4)
        ]
        raw: dict[str, Any] = {"encode": "raw", "resize": "16x12"}
        for dtype, options in (("uint16", raw), ("float32", raw), ("float32", dict[str, Any]())):
            images = [image.astype(dtype) for image in drawn]
            samples = [{"image": image} for image in images]
            target = tmp_path / f"{dtype} {len(options)}"
            convert(samples, target, **_options(storage), pixels="keep", **options)
            assert verify(target, "decode").findings == []
            dataset = open_dataset(target, decode="numpy")
            for row, image in enumerate(images):
                stored = dataset[row][0]
                assert stored.dtype == image.dtype
                assert np.array_equal(stored, image)

    def test_planes_have_the_pixels_of_their_jpegs(self, storage: Format, tmp_path: Path) -> None:
        if not compiled.is_available():
            pytest.skip("only the compiled module writes planes")
        source = tmp_path / "source"
        source.mkdir()
        for number, subsampling in enumerate((0, 1, 2)):
            pixels = np.random.default_rng(number).integers(0, 256, (9, 10, 3), np.uint8)
            drawn = Image.fromarray(pixels).resize((41, 33))
            drawn.save(source / f"{number}.jpg", subsampling=subsampling)
        target = tmp_path / "dataset"
        convert(source, target, **_options(storage), encode="planes")
        assert verify(target, "decode").findings == []
        dataset = open_dataset(target, decode="numpy")
        assert dataset.manifest.fields["y4m"] == 3
        for row, path in enumerate(dataset.paths):
            with Image.open(source / path) as picture:
                assert np.array_equal(dataset[row][0], np.asarray(picture))

    def test_fields_and_layers_have_the_values_of_their_samples(
        self, storage: Format, tmp_path: Path
    ) -> None:
        samples = [
            {
                "label": n % 3,
                "count": n * 7,
                "score": None if n == 1 else n / 4,
                "text": None if n == 2 else f"ä{n}\n★",
                "latent": np.arange(n, n + 6, dtype=np.float16).reshape(2, 3),
                "ragged": np.arange(2 * n, dtype=np.int32).reshape(n, 2),
                "blob": b"" if n == 3 else bytes(range(n)),
            }
            for n in range(5)
        ]
        schema = {
            "label": Field("label", classes=3),
            "count": Field("number", "uint16"),
            "score": Field("number", "float32"),
            "ragged": Field("array"),
            "blob": Field("bytes"),
        }
        target = tmp_path / "dataset"
        convert(samples, target, **_options(storage), schema=schema)
        before = contents(target)
        shards = [name for name in before if name.startswith("shard-")]
        added: dict[str, Any] = {
            "more": [n * 0.5 for n in range(5)],
            "vector": np.eye(5, 4, dtype=np.float32),
        }
        fields.add(target, added)
        fields.undo(target)
        assert contents(target) == before
        fields.add(target, added)
        fields.replace(target, {"count": [n + 1 for n in range(5)]})
        assert {name: contents(target)[name] for name in shards} == {
            name: before[name] for name in shards
        }
        assert verify(target, "decode").findings == []
        dataset = open_dataset(target, fields=[*samples[0], "more", "vector"])
        for row, sample in enumerate(samples):
            values = {**sample, "count": row + 1, "more": row * 0.5, "vector": added["vector"][row]}
            for stored, (name, value) in zip(dataset[row], values.items(), strict=True):
                equal = np.array_equal if isinstance(value, np.ndarray) else operator.eq
                assert equal(stored, value), name

    def test_a_pickled_dataset_reads_the_same(self, storage: Format, tmp_path: Path) -> None:
        dataset = open_dataset(_convert(storage, tmp_path), decode="bytes")
        rows = [3, 0, 5, 3]
        expected = list(dataset[rows])
        copy = pickle.loads(pickle.dumps(dataset))
        assert list(copy[rows]) == expected
        assert call_in(NEW_PROCESS, _samples, copy, rows) == expected

    def test_the_number_of_workers_does_not_change_a_byte(
        self, storage: Format, tmp_path: Path
    ) -> None:
        one = _convert(storage, tmp_path, name="one", workers=1)
        three = _convert(storage, tmp_path, name="three", workers=3)
        assert contents(one) == contents(three)

    def test_verify_finds_a_flipped_byte(self, storage: Format, tmp_path: Path) -> None:
        target = _convert(storage, tmp_path)
        name = open_dataset(target).manifest.shards[1].name
        data = (target / name).read_bytes()
        for position in random.Random(0).sample(range(len(data)), k=5):
            (target / name).write_bytes(flipped(data, position))
            verification = verify(target)
            assert {finding.file for finding in verification.findings} == {name}
        (target / name).write_bytes(data)
        assert verify(target).ok


def _convert(
    storage: Format,
    folder: Path,
    *,
    name: str = "dataset",
    recipe: Recipe | None = None,
    workers: int = 1,
) -> Path:
    """Convert a small image folder, created on first use, to a dataset of several shards."""
    source = folder / "source"
    for number, path in enumerate(_PICTURES):
        if not (source / path).exists():
            (source / path).parent.mkdir(parents=True, exist_ok=True)
            random_image(number).save(source / path)
    options = ConvertOptions(to=storage.name, recipe=recipe or Recipe(), shard_samples=3)
    convert_scan(scan_imagefolder(source), folder / name, options, Builder(workers=workers))
    return folder / name


def _options(storage: Format) -> dict[str, Any]:
    """Return options of conversions whose rows are in the order of their source."""
    return {"to": storage.name, "shard_samples": 3, "shuffle": False, "workers": 1}


def _samples(dataset: Any, rows: Sequence[int]) -> list[Any]:
    return list(dataset[rows])
