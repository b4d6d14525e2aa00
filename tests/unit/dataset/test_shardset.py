"""A dataset as one sequence of images: correct bytes for each row, or an error that names it."""

from __future__ import annotations

import os
import pickle
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import FORMATS, make_dataset, make_folder
from hostile.damage import restate_files, with_checks
from refusals import refused

from shardkit import ShardDataset, open_dataset
from shardkit.errors import CorruptDataset, CorruptRecord, UsageError

ROWS = 9
INDEX = "index/rows.npy"
BYTES = 32
"""Of an entry of the index, of which the last 3 are its check."""
FORGED = range(29, 32)


@pytest.fixture(scope="module", params=FORMATS)
def pristine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A read-only dataset of nine images in three shards, with its source."""
    root = tmp_path_factory.mktemp(str(request.param))
    photos = make_folder(root / "photos", ("ant", "bee", "cat"))
    return make_dataset(photos, root / "made", to=str(request.param))


@pytest.fixture
def place(pristine: Path, tmp_path: Path) -> Path:
    """A copy of the dataset to damage."""
    return Path(shutil.copytree(pristine, tmp_path / "made"))


def opened(place: Path, verify: bool | None = None) -> ShardDataset:
    return open_dataset(place, decode="bytes", verify=verify)


def read(place: Path, *rows: int, verify: bool | None = None) -> list[tuple[bytes, int]]:
    return list(opened(place, verify)[list(rows)])


def flip(path: Path, at: int, mask: int = 0xFF) -> None:
    content = bytearray(path.read_bytes())
    content[at] ^= mask
    path.write_bytes(content)


def offsets_of(place: Path) -> list[int]:
    offsets: list[int] = np.load(place / INDEX)["offset"].tolist()
    return offsets


def save_index(place: Path, rows: Any, *, signed: bool) -> None:
    """Save entries of an index, perhaps as a forger would: with their digest in the manifest."""
    np.save(place / INDEX, rows)
    if signed:
        restate_files(place, INDEX)


@pytest.mark.parametrize("to", FORMATS)
def test_many_shards_are_one_dataset(tmp_path: Path, to: str) -> None:
    photos = make_folder(tmp_path / "photos", ("ant", "bee"), each=9)
    one = opened(make_dataset(photos, tmp_path / "one", to=to, shard_samples=100))
    many = opened(make_dataset(photos, tmp_path / "many", to=to, shard_samples=1))
    assert (len(one.shard_paths), len(many.shard_paths)) == (1, 18)
    rows = np.random.default_rng(0).integers(0, 18, 60)
    assert list(one[rows]) == list(many[rows])
    assert list(one.keys) == list(many.keys)


def test_a_flipped_byte_of_an_image_names_the_record(place: Path) -> None:
    dataset, row = opened(place), 6
    shard, good = dataset.shard_paths[1], dataset.shard_paths[1].read_bytes()
    offset, length = offsets_of(place)[row], len(dataset[row][0])
    facts = (dataset.keys[row], dataset.paths[row], shard, f"byte {offset} ", f"row {row},")
    for at in (offset, offset + length // 2, offset + length - 1):
        flip(shard, at)
        for rows in ([row], [0, row, 8]):
            with refused(CorruptRecord, *facts, "shardkit verify"):
                read(place, *rows)
        assert len(read(place, *(n for n in range(ROWS) if n != row))) == ROWS - 1
        shard.write_bytes(good)


@pytest.mark.parametrize("mask", [0x01, 0x80, 0xFF])
def test_a_flipped_byte_of_the_index_never_gives_another_sample(place: Path, mask: int) -> None:
    """Even if the manifest states the digest of the damaged index."""
    row, good = 4, read(place, *range(ROWS))
    refusals = 0
    for at in range(BYTES):
        flip(place / INDEX, (row - ROWS) * BYTES + at, mask)
        restate_files(place, INDEX)
        for rows in ([row], [0, row, 8]):
            try:
                found = read(place, *rows)
            except CorruptRecord:
                refusals += 1
            else:
                # Nothing but the check may pass, and an offset below 0, which sends the read
                # through the format's library to the same image.
                assert found == [good[n] for n in rows]
                assert at in (7, *FORGED)
        flip(place / INDEX, (row - ROWS) * BYTES + at, mask)
    assert refusals >= 2 * (FORGED.start - 1)


def test_swapped_offsets_are_noticed_by_the_checksums(place: Path) -> None:
    rows = np.load(place / INDEX)
    rows["offset"][[1, 2]] = rows["offset"][[2, 1]]
    save_index(place, rows, signed=True)
    for verify in (None, False):  # by the image's checksum, or by the row's own
        with pytest.raises(CorruptRecord):
            read(place, 1, verify=verify)


def test_an_unknown_field_code_is_damage_even_without_checksums(place: Path) -> None:
    flip(place / INDEX, (2 - ROWS) * BYTES + 28, 0xF0)
    with pytest.raises(CorruptRecord, match="index"):
        read(place, 2, verify=False)


def test_no_memory_is_allocated_for_an_image_beyond_its_shard(place: Path) -> None:
    """Its entry may be valid by itself, in an index of another dataset."""
    for length in (1 << 20, 1 << 31, (1 << 32) - 1):
        rows = np.load(place / INDEX)
        rows["length"][2] = length
        save_index(place, with_checks(rows), signed=True)
        with refused(CorruptRecord, "2"):
            read(place, 0, 2, 1)


@pytest.mark.parametrize("change", ["swapped rows", "rows of another dataset", "swapped names"])
def test_an_intact_index_of_another_dataset_is_refused(place: Path, change: str) -> None:
    """Each row could belong to this dataset; no checksum of a row shows that it does not."""
    rows = np.load(place / INDEX)
    if change == "swapped rows":
        rows[[1, 2]] = rows[[2, 1]]
        save_index(place, rows, signed=False)
    elif change == "rows of another dataset":
        rows["label"] = rows["label"][::-1]
        save_index(place, with_checks(rows), signed=False)
    else:
        for name in ("keys.npy", "keys-ends.npy"):
            (place / "index" / name).rename(place / "index/aside")
            (place / "index" / name.replace("keys", "paths")).rename(place / "index" / name)
            (place / "index/aside").rename(place / "index" / name.replace("keys", "paths"))
    name = "keys" if change == "swapped names" else "targets"
    for verify in (None, True):
        with refused(CorruptDataset, place / "index" / name.replace("targets", "rows.npy")):
            getattr(opened(place, verify), name)
    assert len(getattr(opened(place, verify=False), name)) == ROWS


def test_advice_that_the_kernel_refuses_changes_nothing(
    place: Path, monkeypatch: pytest.MonkeyPatch, without_native: None
) -> None:
    """Not every file system supports it, nor reports what is in memory."""
    expected, preadv = read(place, *range(6)), os.preadv

    def refuse(*_: object) -> None:
        raise OSError(22, "Invalid argument")

    def refuse_flags(file: int, buffers: Any, offset: int, flags: int = 0) -> int:
        return refuse() if flags else preadv(file, buffers, offset)  # type: ignore[func-returns-value,return-value]

    monkeypatch.setattr(os, "posix_fadvise", refuse)
    monkeypatch.setattr(os, "preadv", refuse_flags)
    dataset = opened(place)
    dataset.announce(np.arange(6))
    assert list(dataset[:6]) == expected


def test_readahead_of_a_missing_shard_leaves_the_error_to_the_read(place: Path) -> None:
    dataset = opened(place)
    (path, *_) = dataset.shard_paths
    path.unlink()
    dataset.announce(np.arange(ROWS))
    with pytest.raises(CorruptDataset, match=str(path)):
        dataset[0]


def test_a_dataset_that_loses_its_manifest_is_not_read(place: Path) -> None:
    dataset = opened(place)
    (place / "shardkit.json").unlink()
    with refused(CorruptDataset, place):
        dataset[0]


def test_without_checksums_damaged_bytes_are_returned(place: Path) -> None:
    dataset = opened(place, verify=False)
    before, label = dataset[0]
    flip(dataset.shard_paths[0], offsets_of(place)[0] + 5)
    ((after, its_label),) = read(place, 0, verify=False)
    assert before != after
    assert (len(before), label) == (len(after), its_label)


def test_damage_is_reported_even_if_names_are_damaged(place: Path) -> None:
    flip(opened(place).shard_paths[0], offsets_of(place)[0])
    (place / "index/keys.npy").write_bytes(b"")
    with pytest.raises(CorruptRecord, match=r"row 0, .*damaged"):
        read(place, 0)


@pytest.mark.parametrize("name", ["targets", "keys", "paths"])
def test_a_missing_index_names_its_remedy(place: Path, name: str) -> None:
    (place / f"index/{name.replace('targets', 'rows')}.npy").unlink()
    with pytest.raises(CorruptDataset, match="shardkit index"):
        getattr(opened(place), name)


@pytest.mark.parametrize("change", ["missing", "cut", "longer", "a directory"])
def test_an_incomplete_shard_is_refused(place: Path, change: str) -> None:
    path = opened(place).shard_paths[1]
    content = path.read_bytes()
    path.unlink()
    if change == "a directory":
        path.mkdir()
    elif change != "missing":
        path.write_bytes(content[:-1] if change == "cut" else content + b"\0")
    assert len(read(place, 0)) == 1
    for rows in ([4], [0, 4]):
        with pytest.raises(CorruptDataset, match=str(path)):
            read(place, *rows)


@pytest.mark.parametrize("to", FORMATS)
def test_raw_pixels_are_checked_only_on_request(tmp_path: Path, to: str) -> None:
    raw = {"resize": "8x10", "resize_mode": "crop", "encode": "raw", "enlarge": True}
    place = make_dataset(make_folder(tmp_path / "photos"), tmp_path / "made", to=to, **raw)
    images = read(place, *range(6))
    assert {len(image) for image, _ in images} == {8 * 10 * 3}
    assert images == read(place, *range(6), verify=True)
    flip(opened(place).shard_paths[0], offsets_of(place)[1] + 3)
    assert len(read(place, 1)) == 1
    with pytest.raises(CorruptRecord):
        read(place, 1, verify=True)


def test_a_dataset_never_mixes_the_rows_of_another_in_its_place(place: Path) -> None:
    """Although its files are still open."""
    before = opened(place)
    assert len(before[:]) == ROWS
    packed = pickle.dumps(before)
    source = make_folder(place.parent / "others", ("ant", "bee"), each=4)
    make_dataset(source, place, to=before.manifest.format, force=True)
    after = opened(place)
    assert [data for data, _ in after[:]] == [(source / path).read_bytes() for path in after.paths]
    with pytest.raises(CorruptDataset, match=str(place)):
        before[0]
    with pytest.raises(CorruptDataset, match=str(place)):
        pickle.loads(packed)


@pytest.mark.parametrize("to", FORMATS)
def test_rows_of_a_replaced_raw_dataset_are_never_mixed(tmp_path: Path, to: str) -> None:
    """Its shards have the same sizes, and no checksum of pixels is compared."""
    source, target = make_folder(tmp_path / "photos", each=4), tmp_path / "made"
    raw: dict[str, Any] = {"resize": "8x8", "resize_mode": "stretch", "encode": "raw"}
    before = opened(make_dataset(source, target, to=to, enlarge=True, **raw))
    assert len(before.targets) == 8
    make_dataset(source, target, to=to, enlarge=True, seed=1, force=True, **raw)
    with refused(CorruptDataset, target):
        before[0]


def test_a_restored_manifest_and_shard_are_read_without_a_new_process(place: Path) -> None:
    dataset = opened(place)
    old, (path, *_) = dataset[0], dataset.shard_paths
    manifest, shard = (place / "shardkit.json").read_bytes(), path.read_bytes()
    (place / "shardkit.json").unlink()
    (place / "shardkit.json").write_bytes(manifest)
    assert dataset[0] == old
    flip(path, offsets_of(place)[0])
    with pytest.raises(CorruptRecord):
        dataset[0]
    (place / "restored").write_bytes(shard)
    (place / "restored").replace(path)  # as cp --remove-destination, rsync and mv do
    assert read(place, 0) == [old]


def test_a_relative_path_survives_a_change_of_directory(
    pristine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(pristine.parent)
    dataset = opened(Path(pristine.name))
    monkeypatch.chdir(tmp_path)
    assert len(dataset[[0, 8]]) == 2
    assert len(pickle.loads(pickle.dumps(dataset))[[0]]) == 1


def test_verify_is_true_false_or_none(pristine: Path) -> None:
    with refused(UsageError, "verify='yes'", "True", "False", "None"):
        opened(pristine, verify="yes")  # type: ignore[arg-type]
