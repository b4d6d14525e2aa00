"""Map-style datasets: a replacement for ImageFolder with the pixels of the source files."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers import FORMATS, jpeg, make_dataset, make_folder, make_tree, png
from pairwise import pairwise
from PIL import Image
from refusals import refused
from torch.utils.data import DataLoader, default_collate

from shardkit import (
    CenterCrop,
    HDF5Dataset,
    LMDBDataset,
    Resize,
    ShardDataset,
    TarDataset,
    collate,
    open_dataset,
    verify,
)
from shardkit.errors import BadImage, CorruptDataset, CorruptRecord, TransformFailed, UsageError
from shardkit.torch.data.images import DecodeName

KINDS: dict[str, type[ShardDataset]] = {
    "hdf5": HDF5Dataset,
    "lmdb": LMDBDataset,
    "webdataset": TarDataset,
}
CLASSES = ["ant", "bee", "cat"]
DECODES = ["pil", "numpy", "torch", "bytes"]

ROW_BYTES = 32
"""Of an entry of the index: its label at byte 16, its width at 20, and at 29 its check."""


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """``photos``: images of different sizes and kinds; ``even``: all of one size; and datasets."""
    root = tmp_path_factory.mktemp("datasets")
    make_folder(root / "photos", CLASSES, each=4)
    files: dict[str, bytes | None] = {
        f"{name}/{n}.{kind}": (jpeg if kind == "jpg" else png)(24, 16, 10 * label + n)
        for label, name in enumerate(CLASSES)
        for n, kind in enumerate(("jpg", "png", "jpg"))
    }
    make_tree(root / "even", files)
    for source in ("photos", "even"):
        for to in FORMATS:
            make_dataset(root / source, root / f"{source}-{to}", to=to)
    return root


@pytest.fixture(params=FORMATS)
def to(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def photos(root: Path, to: str) -> Path:
    return root / f"photos-{to}"


@pytest.fixture
def even(root: Path, to: str) -> Path:
    return root / f"even-{to}"


def test_a_dataset_looks_like_an_image_folder(root: Path, photos: Path, to: str) -> None:
    dataset = KINDS[to](photos)
    assert len(dataset) == 12
    assert dataset.classes == CLASSES
    assert dataset.class_to_idx == {"ant": 0, "bee": 1, "cat": 2}
    assert sorted(dataset.paths) == sorted(
        str(path.relative_to(root / "photos")) for path in (root / "photos").rglob("*.*")
    )
    assert [Path(path).with_suffix("").as_posix() for path in dataset.paths] == list(dataset.keys)
    labels = [CLASSES.index(Path(path).parent.name) for path in dataset.paths]
    assert list(dataset.targets) == labels
    assert [label for _, label in dataset] == labels  # type: ignore[attr-defined]
    assert all(type(label) is int for _, label in dataset[:])
    assert "12 images, 3 classes" in repr(dataset)


def test_samples_equal_the_files(root: Path, photos: Path, to: str) -> None:
    pil, numpy, torches, stored = (KINDS[to](photos, decode=decode) for decode in DECODES)  # type: ignore[arg-type]
    for row, path in enumerate(pil.paths):
        source = root / "photos" / path
        expected = np.asarray(Image.open(source).convert("RGB"))
        image = pil[row][0]
        assert isinstance(image, Image.Image)
        assert image.mode == "RGB"
        np.testing.assert_array_equal(np.asarray(image), expected)
        array, tensor = numpy[row][0], torches[row][0]
        assert (array.dtype, tensor.dtype) == (np.uint8, torch.uint8)
        np.testing.assert_array_equal(array, expected)
        np.testing.assert_array_equal(tensor.numpy().transpose(1, 2, 0), expected)
        assert stored[row][0] == source.read_bytes()


@pytest.mark.parametrize(("source", "to", "decode"), pairwise(["photos", "even"], FORMATS, DECODES))
def test_a_batch_equals_its_single_rows(
    root: Path, source: str, to: str, decode: DecodeName
) -> None:
    dataset = KINDS[to](root / f"{source}-{to}", decode=decode)
    rows = [7, 0, -1, 3, 3, 8, 0]
    batch = dataset.__getitems__(rows)
    assert len(batch) == len(rows)
    for (image, label), row in zip(batch, rows, strict=True):
        expected, expected_label = dataset[row]
        assert label == expected_label
        assert type(image) is type(expected)
        np.testing.assert_array_equal(_values(image), _values(expected))


def _values(image: Any) -> Any:
    return np.frombuffer(image, np.uint8) if isinstance(image, bytes) else np.asarray(image)


@pytest.mark.parametrize("decode", ["numpy", "torch", "pil"])
@pytest.mark.parametrize("source", ["photos", "even"])
def test_images_are_writable(root: Path, source: str, decode: DecodeName) -> None:
    dataset = open_dataset(root / f"{source}-lmdb", decode=decode)
    before = [_values(image).copy() for image, _ in dataset[:]]
    for image, _ in dataset[:]:
        if decode == "pil":
            image.putpixel((0, 0), (1, 2, 3))
        else:
            image[:] = 7
    after = [_values(image) for image, _ in dataset[:]]
    for one, other in zip(before, after, strict=True):
        np.testing.assert_array_equal(one, other)  # and the dataset does not remember it


NO_ROWS: list[Any] = [
    *(12, -13, 2**40, 2**63, 2**64 - 1, 2**80, np.int64(12), np.uint64(2**64 - 1)),
    *(1.5, 1.0, "1", None, b"1", True, float("nan"), np.float32(1), torch.tensor(1.5)),
]


def test_a_row_out_of_range_or_no_integer_is_an_index_error(photos: Path) -> None:
    dataset = open_dataset(photos, decode="bytes")
    more: list[Any] = [np.ones(12, bool), torch.ones(2, dtype=torch.bool), [[0, 1]]]
    more += [[[0], [1, 2]], [0, [1]]]
    for rows in [*NO_ROWS, *([row] for row in NO_ROWS), *([0, row] for row in NO_ROWS[:8]), *more]:
        with pytest.raises(IndexError):
            dataset[rows]
    for read in (dataset.__getitems__, dataset.select):
        with pytest.raises(IndexError):
            read([[0], [1, 2]])  # type: ignore[list-item]
    with pytest.raises(IndexError, match=rf"row 12 .*{photos}.* 12 rows"):
        dataset[[0, 12]]
    with pytest.raises(IndexError, match=r"select\(\)"):
        dataset[dataset.targets == 1]


def test_integers_lists_arrays_and_slices_are_rows(photos: Path) -> None:
    dataset = open_dataset(photos, decode="bytes")
    integers: list[Any] = [np.int64(3), np.uint8(3), np.array(3), torch.tensor(3)]
    for row in [*integers, torch.tensor(3, dtype=torch.int8)]:
        assert dataset[row] == dataset[3]
    several: list[Any] = [[1, 3], (1, 3), np.array([1, 3]), torch.tensor([1, 3]), slice(1, 4, 2)]
    several += [range(1, 5, 2), [np.int32(1), np.uint8(3)], np.array([1, -9], np.int8)]
    for rows in [*several, np.array([1, 3], np.uint64), [torch.tensor(1), torch.tensor(3)]]:
        assert list(dataset[rows]) == [dataset[1], dataset[3]]
    assert list(dataset[-2:]) == [dataset[10], dataset[11]]
    nothing: list[Any] = [slice(5, 2), [], (), np.zeros(0), range(0), torch.zeros(0)]
    assert [len(dataset[rows]) for rows in nothing] == [0] * 6


def test_transforms_are_applied_to_image_and_label(photos: Path) -> None:
    dataset = open_dataset(photos, lambda image: image.size, lambda label: f"class {label}")
    (width, height), label = dataset[0]
    assert (width, height) == open_dataset(photos)[0][0].size
    assert label == f"class {open_dataset(photos)[0][1]}"
    assert [label for _, label in dataset[:3]] == [
        f"class {label}" for label in open_dataset(photos).targets[:3]
    ]


def test_a_transform_runs_once_for_each_sample_in_order(even: Path) -> None:
    seen: list[int] = []

    def transform(image: torch.Tensor) -> torch.Tensor:
        seen.append(int(image.sum()))
        return image.float() / 255

    dataset = open_dataset(even, transform, decode="torch")
    images, _ = collate(dataset[[4, 2, 4]])
    plain = open_dataset(even, decode="torch")
    assert seen == [int(plain[row][0].sum()) for row in (4, 2, 4)]
    assert images.shape == (3, 3, 16, 24)
    assert images.dtype == torch.float32


def test_an_error_of_a_transform_names_the_sample(photos: Path) -> None:
    def transform(image: Any) -> Any:
        raise ZeroDivisionError("mine")

    dataset = open_dataset(photos, transform)
    with pytest.raises(TransformFailed, match="ZeroDivisionError: mine") as caught:
        dataset[1]
    line = transform.__code__.co_firstlineno + 1
    assert str(caught.value).endswith(f"mine (test_datasets.py, line {line})")
    assert isinstance(caught.value.__cause__, ZeroDivisionError)
    assert f"{dataset.keys[1]!r} (row 1, from {dataset.paths[1]!r})" in str(caught.value)


def test_an_error_inside_other_code_names_the_line_that_called_it(photos: Path) -> None:
    made: dict[str, Any] = {}
    exec(compile("def fail(image): raise ValueError(3)", "<made>", "exec"), made)

    def stack(image: Any) -> Any:
        return torch.stack([torch.zeros(1), torch.zeros(2)])

    def call(image: Any) -> Any:
        return made["fail"](image)

    for transform in (stack, call):
        line = transform.__code__.co_firstlineno + 1
        with pytest.raises(TransformFailed, match=rf" \(test_datasets.py, line {line}\)$"):
            open_dataset(photos, transform)[0]
    with pytest.raises(TransformFailed) as caught:  # there is no file to name
        open_dataset(photos, int)[0]
    assert " line " not in str(caught.value)


def test_an_unlabeled_dataset_gives_minus_one(tmp_path: Path, to: str) -> None:
    make_tree(tmp_path / "photos", {"a.jpg": jpeg(), "b.png": png()})
    place = make_dataset(tmp_path / "photos", tmp_path / "made", to=to)
    for decode in DECODES:
        dataset = open_dataset(place, decode=decode)  # type: ignore[arg-type]
        assert [label for _, label in dataset[:]] == [-1, -1]
        assert (dataset.classes, dataset.class_to_idx) == ([], {})
        assert dataset.targets.tolist() == [-1, -1]
        assert dataset.manifest.classes is None


@pytest.mark.parametrize("decode", ["numpy", "torch"])
def test_our_collate_returns_the_block_of_a_dataset_without_a_copy(
    even: Path, decode: DecodeName
) -> None:
    view = open_dataset(even, decode=decode)[[3, 1, 4]]
    images, labels = collate(view)
    first = view[0][0]
    pointer = first.data_ptr() if decode == "torch" else first.ctypes.data
    assert images.data_ptr() == pointer
    assert images.shape == ((3, 3, 16, 24) if decode == "torch" else (3, 16, 24, 3))
    if decode == "torch":
        assert images.is_contiguous(memory_format=torch.channels_last)
    for batch in (view, list(view)):
        assert torch.equal(images, default_collate(batch)[0])
        assert torch.equal(labels, default_collate(batch)[1])
    assert labels.tolist() == [label for _, label in view]


def test_the_error_of_the_wrong_class_names_open_dataset(root: Path) -> None:
    for to, kind in KINDS.items():
        for other in FORMATS:
            if other == to:
                assert type(open_dataset(root / f"even-{to}")) is kind
                continue
            with pytest.raises(UsageError, match=rf"'{other}'.*{kind.__name__}.*open_dataset"):
                kind(root / f"even-{other}")


def test_wrong_arguments_are_refused(photos: Path) -> None:
    with refused(UsageError, "'jpeg'", "pil, numpy, torch, bytes"):
        open_dataset(photos, decode="jpeg")  # type: ignore[arg-type]
    with refused(UsageError, "decode=shardkit.CenterCrop"):  # an operation, without quotes
        open_dataset(photos, decode="RandomResizedCrop(64)")  # type: ignore[arg-type]
    wrong: list[Any] = [["train"], 3, b"train"]
    for split in wrong:
        with refused(UsageError, split):
            open_dataset(photos, split=split)
    paths: list[Any] = [None, 3, ["a"], b"a"]
    for path in paths:
        with refused(UsageError, path):
            open_dataset(path)


def test_a_wrong_value_of_an_attribute_is_refused_as_in_a_new_dataset(even: Path) -> None:
    wrong: dict[str, list[Any]] = {
        "decode": ["trch", 3, {"mask": "torch"}],
        "transform": [3, {"mask": len}, {"image": 3}],
        "target_transform": ["half", {"label": 3}],
        "view": [-1, "1"],
    }
    dataset = open_dataset(even, decode="numpy", view=2)
    for name, values in wrong.items():
        for value in values:
            with pytest.raises(UsageError) as new:
                open_dataset(even, **{name: value})
            with pytest.raises(UsageError) as assigned:
                setattr(dataset, name, value)
            assert str(assigned.value) == str(new.value)
    assert dataset[1][0].shape == (16, 24, 3)
    assert (dataset.transform, dataset.target_transform, dataset.view) == (None, None, 2)


def test_a_new_value_of_an_attribute_is_used(even: Path) -> None:
    dataset = open_dataset(even)
    rest = dataset.select([1, 0])
    dataset.decode = "torch"
    dataset.target_transform = str
    dataset.view = 3
    assert (dataset[1][0].shape, dataset[1][1], dataset.reopened().view) == ((3, 16, 24), "0", 3)
    assert rest[0][0].size == (24, 16)  # another dataset
    rest.transform = CenterCrop(4)  # type: ignore[assignment]
    assert (rest[0][0].shape, rest.decode, rest.transform) == ((3, 4, 4), CenterCrop(4), None)


def test_an_operation_works_as_transform(even: Path) -> None:
    op = CenterCrop(4)
    for decode in ("pil", "torch"):
        dataset = open_dataset(even, op, decode=decode)
        assert (dataset.decode, dataset.transform) == (op, None)
    assert torch.equal(dataset[1][0], open_dataset(even, decode=op)[1][0])
    for wrong in ("numpy", "bytes", Resize(4)):
        with refused(UsageError, "transform=", "decode="):
            open_dataset(even, op, decode=wrong)


def test_a_split_is_opened_by_its_name(even: Path, tmp_path: Path) -> None:
    assert open_dataset(even.parent, split=even.name).path == even
    with refused(UsageError, "missing"):
        open_dataset(even.parent, split="missing")
    with refused(UsageError, "split='train'"):
        open_dataset(even, split="train")
    for name in ("train", "val"):
        make_folder(tmp_path / "photos" / name, each=1)
    make_dataset(tmp_path / "photos", tmp_path / "made")
    with refused(UsageError, "'test'", "train, val"):
        open_dataset(tmp_path / "made", split="test")


def test_a_path_without_a_dataset_is_a_usage_error(tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "file").touch()
    names = ["nowhere", "", "loop", "file", "file/below", "x" * 300]
    ways: list[Callable[[Any], object]] = [open_dataset, *KINDS.values(), verify]
    for way, name in itertools.product(ways, names):
        with refused(UsageError, tmp_path / name):
            way(tmp_path / name)


@pytest.mark.parametrize(
    ("to", "kind", "decode"),
    pairwise(FORMATS, ["jpg", "png"], ["pil", "numpy", "torch", CenterCrop(8)]),
)
def test_the_error_for_an_undecodable_image_names_its_record(
    tmp_path: Path, to: str, kind: str, decode: Any
) -> None:
    whole = jpeg() if kind == "jpg" else png()
    broken = {
        f"cut.{kind}": whole[: len(whole) * 2 // 3],
        f"head.{kind}": whole[:20],
        f"fine.{kind}": whole,
    }
    make_tree(tmp_path / "photos", {f"a/{name}": data for name, data in broken.items()})
    place = make_dataset(tmp_path / "photos", tmp_path / "made", to=to, check="none")
    dataset = open_dataset(place, decode=decode)
    for row, path in enumerate(dataset.paths):
        if "fine" in path:
            assert len(dataset[row]) == 2
            continue
        with pytest.raises(BadImage) as caught:
            dataset[row]
        for part in (path, dataset.keys[row], f"row {row},", str(place)):
            assert part in str(caught.value)
    with pytest.raises(BadImage):
        dataset[:]
    assert len(open_dataset(place, decode="bytes")[:]) == 3


def test_the_labels_of_a_damaged_index_are_refused(root: Path, tmp_path: Path) -> None:
    place = make_dataset(root / "even", tmp_path / "made", to="lmdb")
    index = bytearray((place / "index/rows.npy").read_bytes())
    index[-9 * ROW_BYTES + 16] ^= 1  # the label of row 0
    (place / "index/rows.npy").write_bytes(index)
    for checks in (None, False):
        with pytest.raises(CorruptDataset, match="shardkit index"):
            _ = open_dataset(place, verify=checks).targets
    with pytest.raises(CorruptRecord):
        open_dataset(place, verify=False)[0]


def test_a_split_without_images_is_an_empty_dataset(tmp_path: Path, to: str) -> None:
    make_folder(tmp_path / "photos/train")
    make_tree(tmp_path / "photos/test", {"cat": None})
    place = make_dataset(tmp_path / "photos", tmp_path / "made", to=to)
    for decode in ("pil", "torch"):
        dataset = open_dataset(place / "test", decode=decode)
        assert len(dataset) == 0
        assert list(dataset) == []  # type: ignore[call-overload]
        assert list(dataset.keys) == []
        assert dataset.targets.tolist() == []
        assert dataset.classes == ["cat", "dog"]
        assert len(dataset[:]) == 0
        with pytest.raises(IndexError):
            dataset[0]
        assert list(DataLoader(dataset, batch_size=2)) == []
