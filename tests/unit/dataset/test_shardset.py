"""A dataset as one sequence of images: correct bytes for each row, or an error that names it."""

from __future__ import annotations

import os
import pickle
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers import FORMATS, make_dataset, make_folder

from shardkit.conversion.convert import convert, convert_scan
from shardkit.conversion.plan import ConvertOptions
from shardkit.dataset import handles
from shardkit.dataset import index_reader as columns
from shardkit.dataset.index import HEAD, ROW, row_check
from shardkit.dataset.located import EncodedImage
from shardkit.dataset.manifest import MANIFEST_NAME
from shardkit.dataset.shardset import ShardSet, open_shards
from shardkit.errors import CorruptDataset, CorruptRecord, UsageError
from shardkit.recipe import Recipe
from shardkit.sources.imagefolder import scan_imagefolder

ROWS = 9


@pytest.fixture(scope="module", params=FORMATS)
def pristine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A read-only dataset of nine images in three shards, with its source."""
    root = tmp_path_factory.mktemp(str(request.param))
    make_folder(root / "photos", ("ant", "bee", "cat"))
    return make(root / "photos", root / "made", to=str(request.param))


@pytest.fixture
def place(pristine: Path, tmp_path: Path) -> Path:
    """A copy of the dataset to damage."""
    shutil.copytree(pristine, tmp_path / "made")
    return tmp_path / "made"


@pytest.fixture(autouse=True)
def _empty_pool() -> Iterator[None]:
    handles._POOL.reset()
    yield
    handles._POOL.reset()


def make(source: Path, target: Path, *, to: str, per_shard: int = 4, **options: Any) -> Path:
    chosen = ConvertOptions(to=to, shard_samples=per_shard, **options)
    convert_scan(scan_imagefolder(source), target, chosen)
    return target


def flip(path: Path, at: int, mask: int = 0xFF) -> None:
    content = bytearray(path.read_bytes())
    content[at] ^= mask
    path.write_bytes(content)


def read(shards: ShardSet, *rows: int) -> list[EncodedImage]:
    found = shards.find(shards.resolve_rows(rows))
    return [
        found.read(number, memoryview(bytearray(length)))
        for number, length in enumerate(found.lengths)
    ]


def row_start(row: int) -> int:
    return (row - ROWS) * ROW.itemsize  # from the end of rows.npy


def test_each_row_is_the_file_it_came_from(pristine: Path) -> None:
    shards = open_shards(pristine)
    assert len(shards) == ROWS
    for row, image in enumerate(read(shards, *range(ROWS))):
        path = pristine.parent / "photos" / shards.paths[row]
        assert image.data == path.read_bytes()
        assert image.label == ("ant", "bee", "cat").index(path.parent.name)
        assert image.field == path.suffix[1:]
        assert shards.keys[row] == f"{path.parent.name}/{path.stem}"


def test_rows_come_in_the_requested_order_with_duplicates(pristine: Path) -> None:
    shards = open_shards(pristine)
    every = read(shards, *range(ROWS))
    order = [8, 0, 4, 4, 8, 1, 7, 0]
    assert read(shards, *order) == [every[row] for row in order]
    assert read(shards) == []


def test_resolve_rows_counts_negative_rows_from_the_end(pristine: Path) -> None:
    rows = open_shards(pristine).resolve_rows([-1, -ROWS, 0, ROWS - 1])
    assert rows.tolist() == [8, 0, 0, 8]
    assert rows.dtype == np.int64


@pytest.mark.parametrize(
    "rows",
    [
        (1, -1),
        range(1, 9, 7),
        [np.int32(1), np.uint8(8)],
        np.array([1, 8], np.uint64),
        np.array([1, -1], np.int8),
        torch.tensor([1, 8]),
        [torch.tensor(1), torch.tensor(8)],
    ],
)
def test_resolve_rows_accepts_any_integer_type(pristine: Path, rows: Any) -> None:
    assert open_shards(pristine).resolve_rows(rows).tolist() == [1, 8]


@pytest.mark.parametrize("rows", [[], (), np.zeros(0), range(0), torch.zeros(0)])
def test_resolve_rows_accepts_no_rows(pristine: Path, rows: Any) -> None:
    assert open_shards(pristine).resolve_rows(rows).tolist() == []


@pytest.mark.parametrize(
    "rows",
    [
        [ROWS],
        [-ROWS - 1],
        [0, 2**40],
        [2**63],
        [2**64 - 1],  # -1 in 64 bits
        [2**80],
        np.array([2**64 - 1], np.uint64),
        [0.0],
        [1.5],
        [True],
        np.ones(ROWS, bool),
        torch.ones(2, dtype=torch.bool),
        torch.ones(2),
        ["1"],
        [None],
        [float("nan")],
        [[0], [1, 2]],
        [[0, 1]],
    ],
)
def test_resolve_rows_refuses_other_values(pristine: Path, rows: Any) -> None:
    with pytest.raises(IndexError):
        open_shards(pristine).resolve_rows(rows)


def test_an_index_error_names_row_dataset_and_length(pristine: Path) -> None:
    with pytest.raises(IndexError, match=rf"row 12 .*{pristine}.* {ROWS} rows"):
        open_shards(pristine).resolve_rows([0, 12])


@pytest.mark.parametrize("to", FORMATS)
def test_many_shards_are_one_dataset(tmp_path: Path, to: str) -> None:
    make_folder(tmp_path / "photos", ("ant", "bee"), each=9)
    one = open_shards(make(tmp_path / "photos", tmp_path / "one", to=to, per_shard=100))
    many = open_shards(make(tmp_path / "photos", tmp_path / "many", to=to, per_shard=1))
    assert (len(one.manifest.shards), len(many.manifest.shards)) == (1, 18)
    rows = np.random.default_rng(0).integers(0, 18, 60)
    assert read(one, *rows.tolist()) == read(many, *rows.tolist())
    assert list(one.keys) == list(many.keys)


def test_a_flipped_byte_of_an_image_names_the_record(place: Path) -> None:
    shards = open_shards(place)
    row = 6
    offset, length = (int(shards.rows[row][name]) for name in ("offset", "length"))
    shard = place / shards.manifest.shards[1].name
    for at in (offset, offset + length // 2, offset + length - 1):
        good = shard.read_bytes()
        flip(shard, at)
        for rows in ([row], [0, row, 8]):
            with pytest.raises(CorruptRecord) as caught:
                read(open_shards(place), *rows)
            for part in (shards.keys[row], shards.paths[row], str(shard), f"byte {offset} "):
                assert part in str(caught.value)
            assert f"row {row}," in str(caught.value)
            assert "shardkit verify" in str(caught.value)
        assert len(read(open_shards(place), *(n for n in range(ROWS) if n != row))) == ROWS - 1
        shard.write_bytes(good)


@pytest.fixture
def _index_not_hashed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Treat the index as so large that it is not hashed on opening."""
    monkeypatch.setattr(columns, "_HASHED", 0)


@pytest.mark.usefixtures("_index_not_hashed")
@pytest.mark.parametrize("mask", [0x01, 0x80, 0xFF])
def test_a_flipped_byte_of_the_index_never_gives_another_sample(place: Path, mask: int) -> None:
    row = 4
    good = read(open_shards(place), *range(ROWS))
    refused = 0
    for at in range(ROW.itemsize):
        flip(place / "index/rows.npy", row_start(row) + at, mask)
        for rows in ([row], [0, row, 8]):
            try:
                found = read(open_shards(place), *rows)
            except CorruptRecord:
                refused += 1
            else:
                # Nothing but the spare bytes may pass, and an offset below 0, which sends the
                # read through the format's library to the same image.
                assert found == [good[n] for n in rows]
                assert at in (7, *range(HEAD.stop, ROW.itemsize))
        flip(place / "index/rows.npy", row_start(row) + at, mask)
    assert refused >= 2 * (HEAD.stop - 1)


@pytest.mark.usefixtures("_index_not_hashed")
def test_swapped_offsets_are_noticed_by_the_checksums(place: Path) -> None:
    rows = np.load(place / "index/rows.npy")
    rows["offset"][[1, 2]] = rows["offset"][[2, 1]]
    np.save(place / "index/rows.npy", rows)
    for verify in (None, False):  # by the image's checksum, or by the row's own
        with pytest.raises(CorruptRecord):
            read(open_shards(place, verify=verify), 1)


def test_an_unknown_field_code_is_damage_even_without_checksums(place: Path) -> None:
    flip(place / "index/rows.npy", row_start(2) + 28, 0xF0)
    with pytest.raises(CorruptRecord, match="index"):
        read(open_shards(place, verify=False), 2)


@pytest.mark.usefixtures("_index_not_hashed")
@pytest.mark.parametrize("length", [1 << 31, 1 << 20])
def test_no_memory_is_allocated_for_an_image_beyond_its_shard(place: Path, length: int) -> None:
    """Its row may be valid by itself, in an index of another dataset."""
    rows = np.load(place / "index/rows.npy")
    rows["length"][2] = length
    rows["check"][2] = tuple(row_check(rows[2:3].tobytes()))
    np.save(place / "index/rows.npy", rows)
    shards = open_shards(place)
    with pytest.raises(CorruptRecord, match=r"\(row 2, .*it ends beyond its shard"):
        shards.find(shards.resolve_rows([0, 2, 1]))


@pytest.mark.parametrize("change", ["swapped rows", "rows of another dataset", "swapped names"])
def test_an_intact_index_of_another_dataset_is_refused(place: Path, change: str) -> None:
    """Each row could belong to this dataset; no checksum of a row shows that it does not."""
    rows = np.load(place / "index/rows.npy")
    if change == "swapped rows":
        rows[[1, 2]] = rows[[2, 1]]
        np.save(place / "index/rows.npy", rows)
    elif change == "rows of another dataset":
        rows["label"] = rows["label"][::-1]
        for row in range(ROWS):
            rows["check"][row] = tuple(row_check(rows[row : row + 1].tobytes()))
        np.save(place / "index/rows.npy", rows)
    else:
        for name in ("keys.npy", "keys-ends.npy"):
            (place / "index" / name).rename(place / "index/aside")
            (place / "index" / name.replace("keys", "paths")).rename(place / "index" / name)
            (place / "index/aside").rename(place / "index" / name.replace("keys", "paths"))
    name = "keys" if change == "swapped names" else "rows"
    for verify in (None, True):
        with pytest.raises(CorruptDataset, match=rf"index/{name}.npy .*shardkit index"):
            getattr(open_shards(place, verify=verify), name)
    assert len(getattr(open_shards(place, verify=False), name)) == ROWS


def test_a_large_index_is_hashed_only_on_request(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(columns, "_HASHED", 300)  # less than rows.npy has
    rows = np.load(place / "index/rows.npy")
    rows[[1, 2]] = rows[[2, 1]]
    np.save(place / "index/rows.npy", rows)
    assert len(open_shards(place).rows) == ROWS
    with pytest.raises(CorruptDataset, match="SHA-256"):
        open_shards(place, verify=True).rows  # noqa: B018


def test_advice_that_the_kernel_refuses_changes_nothing(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not every file system supports it."""
    expected = [bytes(image.data) for image in read(open_shards(place), *range(6))]

    def refuse(*_: object) -> None:
        raise OSError(22, "Invalid argument")

    monkeypatch.setattr(os, "posix_fadvise", refuse)
    monkeypatch.setattr(handles, "_NOWAIT", 0)
    shards = open_shards(place)
    shards.announce(np.arange(6))
    assert [bytes(image.data) for image in read(shards, *range(6))] == expected


def test_readahead_of_a_missing_shard_leaves_the_error_to_the_read(place: Path) -> None:
    shards = open_shards(place)
    path = place / shards.manifest.shards[0].name
    path.unlink()
    shards.announce(np.arange(ROWS))
    with pytest.raises(CorruptDataset, match=str(path)):
        read(shards, 0)


def test_a_dataset_that_loses_its_manifest_is_not_read(place: Path) -> None:
    shards = open_shards(place)
    (place / MANIFEST_NAME).unlink()
    with pytest.raises(CorruptDataset, match="has lost its manifest"):
        read(shards, 0)


def test_without_checksums_damaged_bytes_are_returned(place: Path) -> None:
    shards = open_shards(place, verify=False)
    (before,) = read(shards, 0)
    flip(place / shards.manifest.shards[0].name, int(shards.rows[0]["offset"]) + 5)
    (after,) = read(open_shards(place, verify=False), 0)
    assert before.data != after.data
    assert before[1:] == after[1:]


def test_damage_is_reported_even_if_names_are_damaged(place: Path) -> None:
    shards = open_shards(place)
    flip(place / shards.manifest.shards[0].name, int(shards.rows[0]["offset"]))
    (place / "index/keys.npy").write_bytes(b"")
    with pytest.raises(CorruptRecord, match=r"row 0, .*damaged"):
        read(open_shards(place), 0)


@pytest.mark.parametrize("name", ["rows", "keys", "paths"])
def test_a_missing_index_names_its_remedy(place: Path, name: str) -> None:
    (place / f"index/{name}.npy").unlink()
    with pytest.raises(CorruptDataset, match="shardkit index"):
        getattr(open_shards(place), name)


@pytest.mark.parametrize("change", ["missing", "cut", "longer", "a directory"])
def test_an_incomplete_shard_is_refused(place: Path, change: str) -> None:
    shards = open_shards(place)
    path = place / shards.manifest.shards[1].name
    content = path.read_bytes()
    path.unlink()
    if change == "a directory":
        path.mkdir()
    elif change != "missing":
        path.write_bytes(content[:-1] if change == "cut" else content + b"\0")
    assert len(read(shards, 0)) == 1
    for rows in ([4], [0, 4]):
        with pytest.raises(CorruptDataset, match=str(path)):
            read(shards, *rows)


@pytest.mark.parametrize("to", FORMATS)
def test_raw_pixels_are_checked_only_on_request(tmp_path: Path, to: str) -> None:
    make_folder(tmp_path / "photos")
    recipe = Recipe(resize=(8, 10), resize_mode="crop", encode="raw", enlarge=True)
    place = make(tmp_path / "photos", tmp_path / "made", to=to, recipe=recipe)
    shards = open_shards(place)
    images = read(shards, *range(6))
    assert {(len(image.data), image.field) for image in images} == {(8 * 10 * 3, "raw")}
    assert images == read(open_shards(place, verify=True), *range(6))
    flip(place / shards.manifest.shards[0].name, int(shards.rows[1]["offset"]) + 3)
    handles._POOL.reset()
    assert len(read(open_shards(place), 1)) == 1
    with pytest.raises(CorruptRecord):
        read(open_shards(place, verify=True), 1)


def test_a_pickled_dataset_is_small_and_reads_the_same(pristine: Path) -> None:
    shards = open_shards(pristine, verify=True)
    expected = read(shards, *range(ROWS))  # with the index and the shards open
    packed = pickle.dumps(shards)
    assert len(packed) < 1000
    again = pickle.loads(packed)
    assert again.verifies() is True
    assert read(again, *range(ROWS)) == expected


def test_a_pickled_dataset_refuses_another_in_its_place(place: Path) -> None:
    packed = pickle.dumps(open_shards(place))
    source = make_folder(place.parent / "others", ("ant", "bee", "dog"))
    to = open_shards(place).manifest.format
    convert(source, place, to=to, force=True)
    with pytest.raises(CorruptDataset, match="was rewritten"):
        pickle.loads(packed)


def test_a_rewritten_dataset_is_reopened(place: Path) -> None:
    before = open_shards(place)
    old = read(before, *range(ROWS))
    source = make_folder(place.parent / "others", ("ant", "bee"), each=4)
    to = before.manifest.format
    convert(source, place, to=to, shard_samples=4, force=True)
    after = open_shards(place)
    assert [image.data for image in read(after, *range(8))] == [
        (source / after.paths[row]).read_bytes() for row in range(8)
    ]
    assert len(old) == ROWS
    with pytest.raises(CorruptDataset, match="was rewritten"):  # although its files are open still
        read(before, 0)


@pytest.mark.parametrize("to", FORMATS)
def test_rows_of_a_replaced_raw_dataset_are_never_mixed(tmp_path: Path, to: str) -> None:
    """Its shards have the same sizes, and no checksum of pixels is compared."""
    source = make_folder(tmp_path / "photos", ("ant", "bee"), each=4)
    recipe = Recipe(resize=(8, 8), resize_mode="stretch", encode="raw", enlarge=True)
    scan = scan_imagefolder(source)
    convert_scan(scan, tmp_path / "made", ConvertOptions(to=to, recipe=recipe))
    before = open_shards(tmp_path / "made")
    assert len(before.labels) == 8
    convert_scan(scan, tmp_path / "made", ConvertOptions(to=to, recipe=recipe, seed=1), force=True)
    with pytest.raises(CorruptDataset, match="was rewritten"):
        read(before, 0)


def test_a_copy_of_the_same_dataset_is_the_same(place: Path) -> None:
    shards = open_shards(place)
    old = read(shards, 0)
    manifest = (place / "shardkit.json").read_bytes()
    (place / "shardkit.json").unlink()
    (place / "shardkit.json").write_bytes(manifest)
    assert read(shards, 0) == old


def test_a_shard_restored_from_a_copy_is_read_without_a_new_process(place: Path) -> None:
    shards = open_shards(place)
    path = place / shards.manifest.shards[0].name
    copy = path.read_bytes()
    flip(path, int(shards.rows[0]["offset"]))
    with pytest.raises(CorruptRecord):
        read(shards, 0)
    (place / "restored").write_bytes(copy)
    (place / "restored").replace(path)  # as cp --remove-destination, rsync and mv do
    assert len(read(open_shards(place), 0)) == 1


def test_the_index_is_mapped_lazily(pristine: Path) -> None:
    shards = open_shards(pristine)
    assert not {"rows", "keys", "paths"} & vars(shards).keys()
    assert isinstance(shards.rows.base, np.memmap)
    assert shards.rows.dtype == ROW


def test_a_relative_path_survives_a_change_of_directory(
    pristine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(pristine.parent)
    shards = open_shards(Path(pristine.name))
    monkeypatch.chdir(tmp_path)
    assert len(read(shards, 0, 8)) == 2
    assert len(read(pickle.loads(pickle.dumps(shards)), 0)) == 1


def test_a_missing_dataset_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="not a shardkit dataset"):
        open_shards(tmp_path)


def test_verify_is_true_false_or_none(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="verify='yes' is neither True, False nor None"):
        open_shards(make_dataset(folder, tmp_path / "made"), verify="yes")  # type: ignore[arg-type]
