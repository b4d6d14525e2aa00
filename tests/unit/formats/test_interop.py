"""Our files, read by other programs without shardkit."""

from __future__ import annotations

import gc
import io
import json
import shutil
import sys
import tarfile
from pathlib import Path
from typing import Any

import h5py
import lmdb
import numpy as np
import pytest
import webdataset
from helpers import execute, jpeg, make_dataset, make_tree, opened, png
from stated import shards_of

from shardkit import open_dataset

FILES = {
    "bird/größer ★ 1.v2.jpg": jpeg(9, 12, 1),
    "bird/deep/__2__.jpg": jpeg(10, 8, 2),
    "bird/.9/hidden.jpg": b"",
    "bird/" + "x" * 150 + ".jpg": jpeg(11, 13, 3),
    "cat/1.jpg": jpeg(12, 9, 4),
    "cat/1.png": png(8, 8, 5),
    "cat/3.png": png(40, 40, 6),
    "cat/4.jpg": jpeg(40, 40, 7),
    "dog/5.JPEG": jpeg(8, 11, 8),
}
PICTURES = {path: data for path, data in FILES.items() if data}
LABELS = {"bird": 0, "cat": 1, "dog": 2}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tree(tmp_path_factory.mktemp("source"), FILES)


@pytest.fixture(scope="module")
def lmdb_set(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made(source, tmp_path_factory.mktemp("lmdb") / "set", "lmdb")


@pytest.fixture(scope="module")
def hdf5_set(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made(source, tmp_path_factory.mktemp("hdf5") / "set", "hdf5")


@pytest.fixture(scope="module")
def tar_set(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made(source, tmp_path_factory.mktemp("tar") / "set", "webdataset")


RAW: dict[str, Any] = {"encode": "raw", "resize": "6x5", "resize_mode": "stretch"}


def made(source: Path, target: Path, to: str, **options: Any) -> Path:
    make_dataset(source, target, to=to, shard_samples=3, **options)
    assert len(shards_of(target)) == 3
    return target


def paths_and_labels(target: Path) -> list[tuple[str, int]]:
    """Return the dataset's own content by row."""
    dataset = open_dataset(target)
    found = list(zip(dataset.paths, dataset.targets.tolist(), strict=True))
    assert sorted(found) == sorted((path, LABELS[path.split("/")[0]]) for path in PICTURES)
    return found


# --- tar ---


ignore_what_webdataset_leaves_open = pytest.mark.filterwarnings("ignore::ResourceWarning")


def stream(target: Path, *stages: tuple[str, ...]) -> list[Any]:
    """Return all samples that webdataset reads; each stage is a method and its arguments."""
    found = webdataset.WebDataset([str(path) for path in shards_of(target)], shardshuffle=False)
    for method, *arguments in stages:
        found = getattr(found, method)(*arguments)
    samples = list(found)
    del found
    gc.collect()  # now, while its warnings are ignored
    return samples


@ignore_what_webdataset_leaves_open
def test_webdataset_gives_all_bytes_labels_and_metadata_in_order(tar_set: Path) -> None:
    samples = stream(tar_set)
    assert [sample["__key__"] for sample in samples] == list(open_dataset(tar_set).keys)
    expected = paths_and_labels(tar_set)
    assert len(samples) == len(expected)
    for sample, (path, label) in zip(samples, expected, strict=True):
        names = {name for name in sample if not name.startswith("__")}
        image = ({"jpg", "png"} & names).pop()
        assert names == {image, "cls", "json"}
        assert sample[image] == PICTURES[path]
        assert int(sample["cls"]) == label
        assert json.loads(sample["json"])["path"] == path


@ignore_what_webdataset_leaves_open
@pytest.mark.parametrize("decoder", ["pil", "rgb8"])
def test_webdataset_decodes_images_and_labels(tar_set: Path, decoder: str) -> None:
    samples = stream(tar_set, ("decode", decoder), ("to_tuple", "jpg;png", "cls", "json"))
    expected = paths_and_labels(tar_set)
    assert len(samples) == len(expected)
    for (image, label, meta), (path, number) in zip(samples, expected, strict=True):
        assert np.array_equal(np.asarray(image), np.asarray(opened(PICTURES[path]).convert("RGB")))
        assert type(label) is int
        assert label == number
        assert meta["path"] == path


@ignore_what_webdataset_leaves_open
def test_webdataset_gives_raw_pixels_as_arrays(source: Path, tmp_path: Path) -> None:
    target = made(source, tmp_path / "raw", "webdataset", **RAW)
    dataset = open_dataset(target, decode="numpy")
    samples = stream(target, ("decode",), ("to_tuple", "raw.npy", "cls"))
    assert len(samples) == len(dataset)
    for row, (pixels, label) in enumerate(samples):
        assert pixels.dtype == np.uint8
        assert np.array_equal(pixels, dataset[row][0])
        assert label == dataset[row][1]


def test_tarfile_lists_and_extracts_all(tar_set: Path) -> None:
    found: dict[str, bytes] = {}
    for path in shards_of(tar_set):
        with tarfile.open(path) as archive:
            members = archive.getmembers()
            assert members[0].name == "__shardkit__"
            for member in members:
                assert member.isreg()
                assert (member.uid, member.gid, member.mtime, member.mode) == (0, 0, 0, 0o644)
            for member in members[1:]:
                data = archive.extractfile(member)
                assert data is not None
                found[member.name] = data.read()
    by_key = dict(zip(open_dataset(tar_set).keys, paths_and_labels(tar_set), strict=True))
    assert len(found) == 3 * len(PICTURES)
    for name, content in found.items():
        key, _, field = name.rpartition(".")
        name_in_source, label = by_key[key]
        if field == "cls":
            assert content == b"%d" % label
        elif field != "json":
            assert content == PICTURES[name_in_source]


@pytest.mark.skipif(shutil.which("tar") is None, reason="there is no tar command")
def test_the_tar_command_lists_the_same_without_warnings(tar_set: Path) -> None:
    for path in shards_of(tar_set):
        done = execute("tar", "tf", path, check=True)
        with tarfile.open(path) as archive:
            assert done.stdout.splitlines() == archive.getnames()
        assert done.stderr == ""


# --- LMDB ---


def test_plain_lmdb_reads_everything(lmdb_set: Path) -> None:
    expected = iter(paths_and_labels(lmdb_set))
    keys = iter(open_dataset(lmdb_set).keys)
    for path in shards_of(lmdb_set):
        with (
            lmdb.open(str(path), readonly=True, lock=False, subdir=False) as environment,
            environment.begin() as transaction,
        ):
            values: dict[bytes, bytes] = dict(transaction.cursor())
        assert json.loads(values.pop(b"__shardkit__"))["classes"] == list(LABELS)
        for row in range(len(values) // 4):
            name, label = next(expected)
            field = b"png" if name.endswith("png") else b"jpg"
            assert values.pop(b"%09d.%b" % (row, field)) == PICTURES[name]
            assert int(values.pop(b"%09d.cls" % row)) == label
            assert json.loads(values.pop(b"%09d.json" % row))["path"] == name
            assert values.pop(b"%09d.__key__" % row).decode() == next(keys)
        assert not values
    assert next(expected, None) is None


def test_lmdb_gives_raw_pixels_that_numpy_loads(source: Path, tmp_path: Path) -> None:
    target = made(source, tmp_path / "raw", "lmdb", **RAW)
    dataset = open_dataset(target, decode="numpy")
    with (
        lmdb.open(
            str(shards_of(target)[0]), readonly=True, lock=False, subdir=False
        ) as environment,
        environment.begin() as transaction,
    ):
        for row in range(3):
            pixels = np.load(io.BytesIO(transaction.get(b"%09d.raw.npy" % row) or b""))
            assert np.array_equal(pixels, dataset[row][0])


def lmdb_tool(*arguments: str, folder: Path | None = None) -> str:
    run = [sys.executable, "-m", "lmdb", *arguments]
    done = execute(*run, cwd=folder)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_mdb_stat_finds_nothing_wrong(lmdb_set: Path) -> None:
    for path in shards_of(lmdb_set):
        if "verify" not in lmdb_tool("--help"):
            pytest.skip("this lmdb has no verify")
        assert "verify: OK" in lmdb_tool("verify", "-s", str(path))


# --- HDF5 ---


def test_plain_h5py_reads_everything(hdf5_set: Path) -> None:
    expected = iter(paths_and_labels(hdf5_set))
    keys = iter(open_dataset(hdf5_set).keys)
    for path in shards_of(hdf5_set):
        with h5py.File(path, "r") as file:
            assert json.loads(file["__shardkit__"][()].tobytes())["classes"] == list(LABELS)
            labels = file["cls/data"][()]
            for row in range(len(labels)):
                source, label = next(expected)
                field = "png" if source.endswith("png") else "jpg"
                assert cell(file, field, row) == PICTURES[source]
                assert labels[row] == label
                assert cell(file, "__key__", row).decode() == next(keys)
                assert json.loads(cell(file, "json", row))["path"] == source
                other = {"jpg": "png", "png": "jpg"}[field]
                assert other not in file or file[f"{other}/present"][row] == 0
    assert next(expected, None) is None


def cell(file: h5py.File, field: str, row: int) -> bytes:
    start, stop = file[f"{field}/offsets"][row : row + 2]
    value: bytes = file[f"{field}/data"][start:stop].tobytes()
    return value


def test_h5py_gives_raw_pixels_as_one_contiguous_array(source: Path, tmp_path: Path) -> None:
    target = made(source, tmp_path / "raw", "hdf5", **RAW)
    dataset = open_dataset(target, decode="numpy")
    with h5py.File(shards_of(target)[0], "r") as file:
        pixels = file["raw/data"]
        assert (pixels.shape, pixels.dtype, pixels.chunks) == ((3, 6, 5, 3), np.uint8, None)
        for row in range(3):
            assert np.array_equal(pixels[row], dataset[row][0])


def test_hdf5_files_use_only_features_of_hdf5_1_10(hdf5_set: Path) -> None:
    for path in shards_of(hdf5_set):
        # The superblock: versions 0 and 1 are of HDF5 1.6, 2 of 1.8, 3 of 1.10.
        data = path.read_bytes()
        assert data[:8] == b"\x89HDF\r\n\x1a\n"
        assert data[8] <= 3
        # Version 4 of the data layout message needs 1.10; 5 is what HDF5 2 writes as "latest".
        with h5py.File(path, "r") as file:
            names: list[str] = []
            file.visit(names.append)
            datasets = [file[name] for name in names if isinstance(file[name], h5py.Dataset)]
            assert len(datasets) > 5
            for dataset in datasets:
                creation = dataset.id.get_create_plist()
                assert creation.get_layout() == h5py.h5d.CONTIGUOUS
                assert creation.get_nfilters() == 0
                assert creation.get_external_count() == 0
                assert dataset.dtype in (np.uint8, np.int64)
