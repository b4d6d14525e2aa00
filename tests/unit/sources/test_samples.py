"""Python samples as a source: their fields, their values, and what is wrong with them."""

from __future__ import annotations

import gc
import io
import json
import math
import os
import pickle
import re
import signal
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from forked import run_forked
from helpers import FORMATS, tree
from PIL import Image
from refusals import refused
from table import for_each
from torch.utils.data import Dataset, IterableDataset, Subset, TensorDataset

from shardkit import Field, convert, open_dataset, verify
from shardkit.dataset.shardset import ShardSet, open_shards
from shardkit.errors import BadImages, UsageError
from shardkit.sources.samples import Samples

PIXELS = np.random.default_rng(0).integers(0, 256, (6, 5, 3), np.uint8)


class Pairs:
    """A dataset as torchvision has it."""

    classes = ("cat", "dog")

    def __len__(self) -> int:
        return 3

    def __getitem__(self, number: int) -> tuple[Image.Image, int]:
        return Image.fromarray(PIXELS + np.uint8(number)), number % 2


def png(pixels: Any = PIXELS) -> bytes:
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "png")
    return file.getvalue()


def shards(path: Path) -> ShardSet:
    return open_shards(path)


def stored(path: Path, name: str) -> list[bytes | None]:
    """Return the bytes of a field of each row, in the order of the samples."""
    dataset = shards(path)
    found = dataset.find(dataset.resolve_rows(np.arange(len(dataset))), name)
    rows = [
        None
        if found.fields[number] == "absent"
        else bytes(found.read(number, memoryview(bytearray(1 << 16))).data)
        for number in range(len(dataset))
    ]
    return [rows[list(dataset.paths).index(f"{number:09d}")] for number in range(len(dataset))]


def in_order(path: Path, name: str) -> list[Any]:
    """Return the values of a column, in the order of the samples."""
    dataset = shards(path)
    places = [list(dataset.paths).index(f"{number:09d}") for number in range(len(dataset))]
    column = dataset.column(name)
    return [column[place] for place in places]


def test_the_schema_follows_from_the_first_sample(tmp_path: Path) -> None:
    sample = {
        "image": Image.fromarray(PIXELS),
        "mask": PIXELS[..., 0],
        "right": png(),
        "latent": torch.zeros(4, 2, 2, dtype=torch.bfloat16),
        "points": np.zeros((2, 3), np.float16),
        "blob": b"no image",
        "count": 3,
        "price": np.float32(1.5),
        "good": True,
        "caption": "a cat",
        "info": {"a": [1, None]},
        "boxes": [],
        "keypoints": [[1, 2]],
    }
    scan = Samples([sample]).scan()
    assert dict(scan.understood) == {
        "image": "image",
        "mask": "mask",
        "right": "image",
        "latent": "bfloat16 array, 4 x 2 x 2",
        "points": "float16 array, 2 x 3",
        "blob": "bytes",
        "count": "int64 number",
        "price": "float32 number",
        "good": "bool number",
        "caption": "text",
        "info": "json",
        "boxes": "boxes",
        "keypoints": "keypoints",
    }
    convert([sample], tmp_path / "out", to="lmdb")
    assert verify(tmp_path / "out", "decode").findings == []


def test_pairs_are_images_and_labels(tmp_path: Path) -> None:
    made = convert(Pairs(), tmp_path / "out", to="webdataset")
    assert made.manifests[""].classes == ("cat", "dog")
    assert repr(made) == "Converted(3 images, 2 classes)"
    assert made.manifests[""].class_counts == (2, 1)
    assert in_order(tmp_path / "out", "label") == [0, 1, 0]


def shades(count: int = 3) -> list[Any]:
    return [PIXELS + np.uint8(number) for number in range(count)]


class Targets(Dataset[Any]):
    """A dataset of torchvision without names of classes."""

    targets = (0, 7, 2)

    def __len__(self) -> int:
        return 3

    def __getitem__(self, number: int) -> tuple[Any, int]:
        return Image.fromarray(shades()[number]), self.targets[number]


class HuggingFace:
    """A dataset as the package datasets has it: columns by name, rows by number."""

    def __init__(self, feature: Any) -> None:
        self.features = {"image": object(), "label": feature}

    def __len__(self) -> int:
        return 3

    def __getitem__(self, place: Any) -> Any:
        if place == "label":
            return [1, 0, 1]
        return {"image": Image.fromarray(shades()[place]), "label": [1, 0, 1][place]}


class Unnamed(Pairs):
    classes: Any = None


class Named(Targets):
    targets = (0, 2, 1)
    classes = ("a", "b", "c")


class Flowers(Targets):
    """As Flowers102 has it."""

    targets: Any = None
    _labels = (1, 0, 2)

    def __getitem__(self, number: int) -> tuple[Any, int]:
        return Image.fromarray(shades()[number]), self._labels[number]


@for_each(
    ("samples", "classes", "labels"),
    [
        ([(Image.fromarray(one), 3 - i) for i, one in enumerate(shades())], 4, [3, 2, 1]),
        ([(one, np.int64(i)) for i, one in enumerate(shades())], 3, [0, 1, 2]),
        ([(one, torch.tensor(2)) for one in shades()], 3, [2, 2, 2]),
        (list(zip(shades(), ("dog", "cat", "dog"), strict=True)), ["cat", "dog"], [1, 0, 1]),
        ([{"image": one, "label": i} for i, one in enumerate(shades())], 3, [0, 1, 2]),
        (Targets(), 8, [0, 7, 2]),
        (HuggingFace(SimpleNamespace(names=["a", "b"])), ["a", "b"], [1, 0, 1]),
        (HuggingFace(SimpleNamespace()), 2, [1, 0, 1]),
        (((one, i) for i, one in enumerate(shades())), 3, [0, 1, 2]),
        (Flowers(), 3, [1, 0, 2]),
        (Subset(Targets(), [0, 1, 2]), 8, [0, 7, 2]),
        (Subset(Named(), [0, 1, 2]), ["a", "b", "c"], [0, 2, 1]),
        (TensorDataset(torch.tensor(np.stack(shades())), torch.tensor([2, 0, 1])), 3, [2, 0, 1]),
    ],
)
def test_labels_need_no_schema(
    samples: Any, classes: int | list[str], labels: list[int], tmp_path: Path
) -> None:
    out = Path(tempfile.mkdtemp(dir=tmp_path))
    made = convert(samples, out / "made", to="lmdb", workers=1)
    names = [*map(str, range(classes))] if isinstance(classes, int) else classes
    assert list(made.manifests[""].classes or ()) == names
    assert in_order(out / "made", "label") == labels
    dataset = open_dataset(out / "made", decode="numpy")
    for row, path in enumerate(dataset.paths):
        assert np.array_equal(dataset[row][0], shades()[int(path)])


def test_a_label_that_no_class_has_names_its_sample(tmp_path: Path) -> None:
    class Wrong(Targets):
        targets = (0, 1, 1)

        def __getitem__(self, number: int) -> tuple[Any, int]:
            return super().__getitem__(number)[0], number

    with refused(BadImages, "000000002", "2", "between 0 and 1"):
        convert(Wrong(), tmp_path / "made", to="lmdb", workers=1)


@for_each(
    ("shape", "axes"),
    [
        ((6, 5), ""),
        ((6, 5, 3), "last"),
        ((6, 5, 1), "last"),
        ((4, 6, 5), "first"),
        ((3, 6, 5), "first"),
        ((1, 6, 5), "first"),
        ((6, 5, 4), "last"),
    ],
)
@pytest.mark.parametrize("kind", ["image", "mask"])
@pytest.mark.parametrize("make", [np.array, torch.tensor])
def test_channels_are_the_axis_of_so_many_values(
    make: Any, kind: str, shape: tuple[int, ...], axes: str, tmp_path: Path
) -> None:
    values = np.arange(np.prod(shape), dtype=np.uint8).reshape(shape)
    out = Path(tempfile.mkdtemp(dir=tmp_path)) / "made"
    sample = {"image": values, kind: make(values)}
    convert([sample], out, to="lmdb", workers=1, pixels="keep", encode="png")
    expected = np.moveaxis(values, 0, -1) if axes == "first" else values
    (content,) = stored(out, "image" if kind == "image" else "mask")
    assert content is not None
    with Image.open(io.BytesIO(content)) as image:
        assert np.array_equal(np.asarray(image), np.squeeze(expected))
    assert verify(out, "decode", against=[sample]).findings == []


def test_images_that_huggingface_did_not_decode_are_stored_unchanged(tmp_path: Path) -> None:
    first, second = png(), png(PIXELS + np.uint8(1))
    (tmp_path / "second.png").write_bytes(second)
    samples = [
        {"image": {"bytes": first, "path": "elsewhere.png"}, "label": 1},
        {"image": {"bytes": None, "path": str(tmp_path / "second.png")}, "label": 0},
        {"image": {"bytes": None, "path": None}, "label": 0},
    ]
    with refused(BadImages, "has no image"):
        convert(samples, tmp_path / "out", to="lmdb", workers=1)
    convert(samples, tmp_path / "out", to="lmdb", on_error="skip", workers=1)
    assert stored(tmp_path / "out", "image") == [first, second]
    assert in_order(tmp_path / "out", "label") == [1, 0]


@for_each("shape", [(3, 6, 3), (1, 6, 4), (4, 1, 1)])
@pytest.mark.parametrize("make", [np.zeros, torch.zeros])
def test_channels_at_both_ends_are_refused(
    make: Any, shape: tuple[int, ...], tmp_path: Path
) -> None:
    with refused(BadImages, shape, "PIL.Image.fromarray"):
        convert([{"image": make(shape)}], tmp_path / "made", to="lmdb", workers=1)


def test_values_come_back(tmp_path: Path) -> None:
    samples: list[Mapping[str, Any]] = [
        {
            "image": png(PIXELS + np.uint8(n)),
            "label": ["a", "b"][n % 2],
            "tags": [] if n == 2 else {"x", "z"},
            "boxes": (np.array([[0, 0, 2.5, 3]] * n).reshape(-1, 4), ["b"] * n),
            "people": [[[n, 0.5, 2], [1, 2, 1]], [[9, 9, 0], [n, n, 2]]][: n % 3],
            "spots": torch.tensor([[n, 0.5], [1, 2]]),
            "score": [1.5, float("nan"), -float("inf"), None][n],
            "tiny": 255 - n,
            "tenth": n / 10,
            "caption": None if n == 3 else f"ä{n}" * n,
            "info": {"n": n},
            "ragged": np.arange(n, dtype="<i2"),
            "latent": torch.full((2, 3), n, dtype=torch.float16),
            "blob": None if n == 1 else bytes(n),
        }
        for n in range(4)
    ]
    schema = {
        "label": Field("label", classes=("a", "b")),
        "tags": Field("labels", classes=("x", "y", "z")),
        "boxes": Field("boxes", classes=("a", "b")),
        "people": Field("keypoints", classes=2),
        "spots": Field("keypoints"),
        "tiny": Field("number", "uint8"),
        "tenth": Field("number", "float32"),
        "ragged": Field("array", "int16"),
    }
    path = tmp_path / "out"
    convert(samples, path, to="hdf5", schema=schema, shard_samples=3)
    assert in_order(path, "label") == [0, 1, 0, 1]
    assert [each.tolist() for each in in_order(path, "tags")] == [[0, 2], [0, 2], [], [0, 2]]
    boxes = in_order(path, "boxes")
    assert [corners.shape for corners, _ in boxes] == [(n, 4) for n in range(4)]
    assert boxes[3][1].tolist() == [1, 1, 1]
    people = in_order(path, "people")
    assert [each.tolist() for each in people] == [
        [[[n, 0.5, 2], [1, 2, 1]], [[9, 9, 0], [n, n, 2]]][: n % 3] for n in range(4)
    ]
    assert in_order(path, "spots")[2].tolist() == [[2, 0.5, 2], [1, 2, 2]]
    score = in_order(path, "score")
    assert (score[0], np.isnan(score[1]), score[2]) == (1.5, True, -np.inf)
    assert score[3] is np.ma.masked
    assert in_order(path, "tiny") == [255, 254, 253, 252]
    assert in_order(path, "tenth") == [np.float32(n / 10) for n in range(4)]
    assert in_order(path, "caption") == ["", "ä1", "ä2ä2", None]
    assert in_order(path, "info") == [{"n": n} for n in range(4)]
    assert stored(path, "blob") == [b"", None, bytes(2), bytes(3)]
    latents = [np.full((2, 3), n, np.float16).tobytes() for n in range(4)]
    assert stored(path, "latent") == latents
    ragged = [np.load(io.BytesIO(data or b"")) for data in stored(path, "ragged")]
    assert [array.tolist() for array in ragged] == [list(range(n)) for n in range(4)]
    rows = {field.name: field.rows for field in shards(path).manifest.schema}
    assert (rows["blob"], rows["score"], rows["caption"], rows["image"]) == (3, 3, 3, 4)


@for_each("key", [b"7", {"image": 1}, 0.5])
def test_a_key_that_is_no_text_is_refused(key: Any, tmp_path: Path) -> None:
    with refused(UsageError, "key", str(key)):
        convert([{"key": key, "text": "a"}], tmp_path / "out", to="lmdb")


def test_bfloat16_tensors_give_their_values(tmp_path: Path) -> None:
    sample = {
        "score": torch.tensor(1.5),
        "boxes": torch.tensor([[1.0, 2, 3, 4.5]]),
        "keypoints": torch.tensor([[1.0, 2, 1]]),
        "points": torch.tensor([0.5, -2]),
        "mask": torch.tensor([[1.0, 2]]),
    }
    narrow = {name: value.bfloat16() for name, value in sample.items()}
    with refused(BadImages, "mask cannot be float32"):
        convert([narrow], tmp_path / "out", to="lmdb", workers=1)
    del narrow["mask"]
    convert([narrow], tmp_path / "out", to="lmdb", workers=1)
    dataset = open_dataset(tmp_path / "out", fields=[*narrow], decode="torch")
    score, boxes, keypoints, points = dataset[0]
    assert score == 1.5
    assert boxes.tolist() == [[1, 2, 3, 4.5]]
    assert keypoints.tolist() == [[1, 2, 1]]
    assert points.tolist() == [0.5, -2]


def test_arrays_whose_schema_has_no_dtype_keep_the_values_of_bfloat16(tmp_path: Path) -> None:
    samples = [{"latent": torch.tensor(values).bfloat16()} for values in ([1.5, -2], [0.25])]
    schema = {"latent": Field("array")}
    convert(samples, tmp_path / "out", to="lmdb", schema=schema, shuffle=False)
    dataset = open_dataset(tmp_path / "out", fields=["latent"])
    assert [dataset[row][0].tolist() for row in range(2)] == [[1.5, -2], [0.25]]


def test_sparse_tensors_and_masked_arrays_are_refused(tmp_path: Path) -> None:
    values: dict[str, Any] = {
        "tensor": torch.zeros(2).to_sparse(),
        "masked": np.ma.masked_array([1, 2], [False, True]),
    }
    for fact, value in values.items():
        schema = {"latent": Field("array")}
        with refused(BadImages, "latent", fact):
            convert([{"latent": value}], tmp_path / "out", to="lmdb", schema=schema, workers=1)


def test_samples_may_have_keys(tmp_path: Path) -> None:
    samples = [{"key": "x/1", "text": "a"}, {"key": 7, "text": "b"}, {"text": "c"}]
    convert(samples, tmp_path / "out", to="lmdb", shuffle=False)
    assert list(shards(tmp_path / "out").keys) == ["x/1", "7", "000000002"]


@for_each("label", [0.5, 1e300, float("nan")])
def test_a_fraction_is_not_the_label_of_a_box(tmp_path: Path, label: float) -> None:
    schema = {"boxes": Field("boxes", classes=2)}
    samples = [{"boxes": [[1, 1, 2, 2, number]]} for number in (1.0, label)]
    convert(samples, tmp_path / "made", to="lmdb", schema=schema, on_error="skip", force=True)
    ((_, labels),) = in_order(tmp_path / "made", "boxes")
    assert labels.tolist() == [1]


@pytest.mark.parametrize("to", FORMATS)
@pytest.mark.parametrize("shard_samples", [1, 9])
def test_equal_keys_are_named(to: Any, shard_samples: int, tmp_path: Path) -> None:
    samples = [{"key": key, "text": "1"} for key in "abac"]
    with refused(UsageError, "'a'"):
        convert(samples, tmp_path / "out", to=to, shard_samples=shard_samples)


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        ({"points": np.zeros((2, 2), np.float32)}, "points: it is float32"),
        ({"points": np.zeros((2, 3), np.float16)}, r"points: it has the shape \(2, 3\)"),
        ({"other": 1}, "no field 'other'"),
        ({"label": 2}, "label: the label 2 is not between 0 and 1"),
        ({"label": "cow"}, "label: 'cow' is not one of 2 classes"),
        ({"count": 1.5}, "count: 1.5 is not a number of type int64"),
        ({"count": math.nan}, "count: nan is not a number of type int64"),
        ({"count": math.inf}, "count: inf is not a number of type int64"),
        ({"count": "1"}, "count: it is not a number"),
        ({"half": 70_000}, "half: 70000 is not a number of type float16"),
        ({"text": 1}, "text: its type is int, not text"),
        ({"image": "/no/file"}, "image: /no/file cannot be read: No such file or directory"),
        ({"mask": np.full((2, 2), 70_000)}, "mask: a mask has values from 0 to 70000"),
        ({"mask": np.zeros((2, 2), np.float32)}, "mask: a mask cannot be float32"),
        ({"boxes": [[1, 1, 0, 2]]}, "boxes: boxes are left, top, right, bottom"),
        ({"boxes": [[1, 1, 2]]}, "boxes: each box is four numbers"),
        ({"boxes": [[1, 1, float("nan"), 2]]}, "boxes: a number of a box is NaN"),
        ({"joints": [[1, float("inf")]] * 2}, "joints: a number of a keypoint is NaN"),
        ({"boxes": {"boxes": [[1, 1, 2, 2]], "labels": [0]}}, "boxes: the boxes have labels: use"),
        ({"joints": [1, 2, 2]}, r"joints: each keypoint is .* shape \(3,\): use .*reshape"),
        ({"joints": [[1, 2, 3]]}, "joints: the visibility of a keypoint is 0, 1 or 2"),
        ({"joints": [[1, 2]] * 3}, "joints: 3 keypoints cannot form objects of 2 points"),
        ({"image": b"no image"}, "image: its content is not an image"),
        ({"info": float("nan")}, "info: "),
        (7, "it is of type int, not a dict"),
    ],
)
def test_a_wrong_value_names_the_sample_and_the_field(
    tmp_path: Path, value: Any, reason: str
) -> None:
    good = {"points": np.zeros((2, 2), np.float16), "count": 1, "text": "a"}
    schema: dict[str, Field | str] = {
        "label": Field("label", classes=2),
        "mask": "mask",
        "boxes": "boxes",
        "joints": Field("keypoints", classes=2),
        "half": Field("number", "float16"),
        "image": "image",
        "info": "json",
    }
    with pytest.raises(BadImages) as raised:
        convert([good, value], tmp_path / "out", to="lmdb", schema=schema)
    (problem,) = raised.value.problems
    assert problem.path == "000000001"
    assert re.search(reason, problem.reason)
    assert str(raised.value).endswith(f" The first is 000000001: {problem.reason}")


def test_an_exception_of_a_sample_is_reported(tmp_path: Path) -> None:
    class Failing(Pairs):
        def __getitem__(self, number: int) -> tuple[Image.Image, int]:
            if number == 1:
                raise OSError("the disk is gone")
            return super().__getitem__(number)

    with pytest.raises(BadImages) as raised:
        convert(Failing(), tmp_path / "out", to="lmdb")
    assert raised.value.problems[0].reason == "it cannot be read: OSError: the disk is gone"
    made = convert(Failing(), tmp_path / "out", to="lmdb", on_error="skip")
    assert made.manifests[""].rows == 2


@for_each(
    ("samples", "schema", "reason"),
    [
        ([], {}, "there are no samples"),
        (7, {}, "int is neither a sequence"),
        (iter([]), {}, "there are no samples"),
        (map(int, "x"), {}, "sample 0 cannot be read: ValueError: invalid literal"),
        (iter([lambda: 1]), {}, "sample 0 cannot be read: .*pickle"),
        (Unnamed(), {}, "the classes of the 'label' field are unknown"),
        ([(PIXELS, 1), (PIXELS, "cat")], {}, "neither all names nor all numbers.*'cat', 1"),
        ([(PIXELS, -1)], {}, "all numbers from 0"),
        ([(PIXELS, 0.5)], {}, "all numbers from 0"),
        ([(PIXELS, 1 << 40)], {}, "all numbers from 0"),
        ([(PIXELS, 0), (PIXELS, [1, 2])], {}, r"a label is \[1, 2\]"),
        ([(PIXELS, {"boxes": []})], {}, "a label is {'boxes'"),
        ([{"a": None}], {}, "the 'a' field of the first sample is missing"),
        ([{"a": object()}], {}, "is of type object"),
        ([{"Ä": 1}], {}, "a field cannot be named"),
        ([{"width": 1}], {}, "a field cannot be named"),
        ([{"a": 1}], {"a": "numbers"}, "is unknown"),
        ([{"a": 1}], {"a": "labels"}, "classes are missing"),
        ([{"image": b""}], {"image": "bytes"}, "only the image of a record"),
        ([1], {}, "the first sample"),
    ],
)
def test_an_unclear_schema_is_a_usage_error(
    tmp_path: Path, samples: Any, schema: Any, reason: str
) -> None:
    with pytest.raises(UsageError, match=reason):
        convert(samples, tmp_path / "made", to="lmdb", schema=schema)
    assert not (tmp_path / "made").exists()


def test_options_of_samples_do_not_apply_to_folders(tmp_path: Path) -> None:
    with refused(UsageError):
        convert(tmp_path, tmp_path / "out", to="lmdb", schema={})


def test_the_result_does_not_depend_on_the_workers(tmp_path: Path) -> None:
    samples = [{"image": png(PIXELS + np.uint8(n)), "text": str(n)} for n in range(6)]
    for workers in (1, 2):
        convert(samples, tmp_path / str(workers), to="lmdb", shard_samples=3, workers=workers)
    one, two = (
        {each.name: each.read_bytes() for each in (tmp_path / name).rglob("*") if each.is_file()}
        for name in ("1", "2")
    )
    assert one == two


def test_a_worker_gets_only_its_own_samples() -> None:
    samples = [{"blob": bytes(100_000 + n)} for n in range(20)]
    images = Samples(samples).scan().splits[""].take([3, 7])
    packed = pickle.dumps(images)
    assert len(packed) < 250_000
    assert pickle.loads(packed).read([1, 0]) == images.read([1, 0])


def rows(count: int = 6) -> Iterator[tuple[Any, ...]]:
    for number in range(count):
        picture = Image.fromarray(PIXELS + np.uint8(number))
        yield picture, number % 2, torch.full((2, 3), number, dtype=torch.bfloat16)


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[tuple[Any, ...]]:
        return rows()

    def __len__(self) -> int:
        return 6


STATED: dict[str, Any] = {
    "schema": {"label": Field("label", classes=2)},
    "fields": ("image", "label", "latent"),
}


@pytest.mark.parametrize(
    ("samples", "workers"), [(Stream, 1), pytest.param(rows, 2, marks=pytest.mark.slow)]
)
def test_an_iterable_is_read_once(
    tmp_path: Path, samples: Any, workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    listed = convert(list(rows()), tmp_path / "listed", to="lmdb", **STATED)
    options: dict[str, Any] = {"to": "lmdb", "shard_samples": 2, "workers": workers, **STATED}
    made = convert(samples(), tmp_path / "made", **options)
    assert made.manifests[""].content_digest == listed.manifests[""].content_digest
    assert convert(samples(), tmp_path / "made", **options).unchanged
    assert verify(tmp_path / "made", against=samples()).findings == []
    del made
    gc.collect()
    assert not list(tmp_path.glob("shardkit-*"))


class Precomputed:
    """A dataset with a slow transform; reads sample 4 a second time only if it is not killed."""

    def __init__(self, fatal: bool) -> None:
        self.fatal, self.read = fatal, 0

    def __len__(self) -> int:
        return 6

    def __getitem__(self, number: int) -> tuple[Any, ...]:
        self.read += number == 4
        if self.fatal and self.read > 1:
            os.kill(os.getpid(), signal.SIGKILL)
        rng = np.random.default_rng(number)
        return rng.random((3, 4), np.float32), np.int64(number)


def convert_fatally() -> None:
    """Convert, in a process of its own, and be killed."""
    convert(Precomputed(True), sys.argv[1], **json.loads(sys.argv[2]))


@pytest.mark.parametrize("workers", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_killed_conversion_resumes(tmp_path: Path, workers: int) -> None:
    options: dict[str, Any] = {"to": "hdf5", "fields": ("view", "number"), "shuffle": False}
    options |= {"shard_samples": 2, "workers": workers}
    done = run_forked(convert_fatally, ["test", tmp_path / "made", json.dumps(options)])
    assert done.returncode != 0
    assert not (tmp_path / "made/shardkit.json").exists()
    resumed = convert(Precomputed(False), tmp_path / "made", **options)
    convert(Precomputed(False), tmp_path / "whole", **options)
    assert resumed.reused_shards >= (workers == 1)
    assert tree(tmp_path / "made") == tree(tmp_path / "whole")


def test_random_samples_are_noticed(tmp_path: Path) -> None:
    class Random:
        def __len__(self) -> int:
            return 3

        def __getitem__(self, number: int) -> dict[str, Any]:
            return {"view": torch.rand(3)}

    with pytest.warns(UserWarning, match="sample 0 of Random"):
        convert(Random(), tmp_path / "made", to="hdf5")
    assert verify(tmp_path / "made").findings == []
