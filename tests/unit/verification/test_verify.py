"""Verify finds every changed byte and names its record."""

from __future__ import annotations

import errno
import json
import os
import random
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import FORMATS, jpeg, limit_memory, make_dataset, make_folder, make_tree, png
from hostile.forging import forge, restate, with_meta
from refusals import refused
from stated import shards_of, stated

from shardkit import verify
from shardkit.errors import UsageError
from shardkit.testing.tools import call_in

LEVELS = ("quick", "full", "decode")
RAW = {"resize": "8x10", "resize_mode": "stretch", "encode": "raw"}

each_format = pytest.mark.parametrize("pristine", FORMATS, indirect=True)
"""Of tests of what a format stores, or how it can be damaged."""


@pytest.fixture(scope="module")
def pristine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A read-only dataset of nine images in three shards."""
    to = getattr(request, "param", "lmdb")
    root = tmp_path_factory.mktemp(to)
    make_folder(root / "photos", ("ant", "bee", "cat"))
    (root / "photos/notes.txt").write_text("no image")  # gives a file that is no shard
    return make(root / "photos", root / "made", to=to)


@pytest.fixture
def place(pristine: Path, tmp_path: Path) -> Path:
    """A copy of the dataset to damage."""
    shutil.copytree(pristine, tmp_path / "made")
    return tmp_path / "made"


@pytest.fixture
def splits(tmp_path: Path) -> Path:
    """A dataset of two splits."""
    make_folder(tmp_path / "photos/train", each=2)
    make_folder(tmp_path / "photos/val", each=3)
    return make(tmp_path / "photos", tmp_path / "made", to="webdataset")


def make(source: Path, target: Path, *, to: str = "lmdb", **options: Any) -> Path:
    return make_dataset(source, target, to=to, **{"shard_samples": 3, **options})


def rows_of(place: Path) -> Any:
    return np.load(place / "index/rows.npy")


def strings_of(place: Path, name: str) -> list[str]:
    ends = np.load(place / f"index/{name}-ends.npy").tolist()
    text = np.load(place / f"index/{name}.npy").tobytes().decode()
    return [text[start:end] for start, end in zip([0, *ends], ends, strict=False)]


def flip(path: Path, at: int, mask: int = 0xFF) -> None:
    content = bytearray(path.read_bytes())
    content[at] ^= mask
    path.write_bytes(content)


def files_of(result: Any) -> set[str]:
    return {finding.file for finding in result.findings}


def reasons_of(result: Any) -> str:
    return "\n".join(f"{finding.file}: {finding.reason}" for finding in result.findings)


@pytest.mark.parametrize(("level", "workers"), [*((level, 1) for level in LEVELS), ("decode", 3)])
def test_an_intact_dataset_is_reported_intact(pristine: Path, level: Any, workers: int) -> None:
    seen: list[Any] = []
    result = verify(pristine, level, workers=workers, on_progress=seen.append)
    assert result.findings == []
    assert result.ok
    assert (result.level, result.datasets, result.shards, result.extras) == (level, 1, 3, [])
    assert result.bytes == sum(path.stat().st_size for path in shards_of(pristine))
    assert result.records == (0 if level == "quick" else 9)
    assert sum(progress.images for progress in seen) == result.records
    assert sum(progress.bad for progress in seen) == 0


@each_format
def test_any_flipped_byte_of_any_file_is_found(place: Path) -> None:
    chance = random.Random(0)
    files = sorted(path for path in place.rglob("*") if path.is_file())
    assert {path.name for path in files} >= {"shardkit.json", "rows.npy", "ignored.jsonl"}
    missed = []
    for path in files * 3:
        good = path.read_bytes()
        at, mask = chance.randrange(len(good)), chance.choice([1, 2, 4, 8, 16, 32, 64, 128, 255])
        flip(path, at, mask)
        result = verify(place)
        if result.ok or str(path.relative_to(place)) not in files_of(result):
            missed.append((path.name, at, mask, reasons_of(result)))
        if path.parent.name == "index" and verify(place, "quick").ok:
            missed.append((path.name, at, mask, "quick"))
        path.write_bytes(good)
    assert missed == []
    assert verify(place).ok


def test_a_damaged_label_does_not_cost_memory(place: Path) -> None:
    for label in (2**30, -(2**31)):
        rows = rows_of(place)
        rows["label"][0] = label
        np.save(place / "index/rows.npy", rows)
        assert "index/rows.npy" in call_in("fork", quick_findings, place)


def quick_findings(place: Path) -> list[str]:
    """Return the damaged files, found with little memory."""
    limit_memory(1 << 30)
    return [finding.file for finding in verify(place, "quick").findings]


@each_format
def test_a_flipped_byte_of_an_image_names_its_record(place: Path) -> None:
    rows, shards = rows_of(place), shards_of(place)
    keys, paths = strings_of(place, "keys"), strings_of(place, "paths")
    for row in range(9):
        path = shards[row // 3]
        good = path.read_bytes()
        offset, length = int(rows[row]["offset"]), int(rows[row]["length"])
        flip(path, offset + (row * 37) % length)
        result = verify(place)
        named = [finding for finding in result.findings if finding.row is not None]
        assert [(f.file, f.key, f.path, f.row) for f in named] == [
            (path.name, keys[row], paths[row], row)
        ]
        assert "checksum" in named[0].reason
        assert "SHA-256" in reasons_of(result)
        path.write_bytes(good)


def test_quick_need_not_read_images_but_finds_files_and_index(place: Path) -> None:
    flip(shards_of(place)[0], int(rows_of(place)[0]["offset"]))
    assert verify(place, "quick").ok
    assert not verify(place).ok


def place_of(place: Path, content: bytes) -> tuple[Path, int]:
    """Return the shard and offset of ``content``, which must be unique."""
    found = [(path, path.read_bytes()) for path in shards_of(place)]
    ((path, data),) = [(path, data) for path, data in found if content in data]
    assert data.count(content) == 1
    return path, data.index(content)


@each_format
def test_damage_to_the_metadata_of_one_record_blames_no_other(place: Path) -> None:
    for row in (0, 4):
        path, at = place_of(place, f'"{strings_of(place, "paths")[row]}"'.encode())
        for mask in (0x01, 0x80):  # another letter, and no UTF-8 at all
            flip(path, at + 1, mask)
            found = [f for f in verify(place).findings if f.row is not None]
            assert {f.row for f in found} == {row}
            assert found[0].key == strings_of(place, "keys")[row]
            flip(path, at + 1, mask)
    assert verify(place).ok


@pytest.mark.parametrize("to", ["hdf5", "lmdb"])
@pytest.mark.parametrize("mask", [0x01, 0x80])
def test_damage_to_the_key_of_one_record_blames_no_other(
    tmp_path: Path, to: str, mask: int
) -> None:
    make_tree(
        tmp_path / "photos", {f"c/{n}-a-key-like-no-other.png": png(seed=n) for n in range(3)}
    )
    place = make(tmp_path / "photos", tmp_path / "made", to=to)
    key = strings_of(place, "keys")[0].encode()
    (path,) = shards_of(place)
    data = path.read_bytes()
    at = next(  # a path begins with the same letters, and goes on with its suffix
        n for n in range(len(data)) if data.startswith(key, n) and data[n + len(key) :][:1] != b"."
    )
    flip(path, at, mask)
    result = verify(place)
    assert path.name in files_of(result)
    named = {finding.row for finding in result.findings if finding.row is not None}
    # LMDB cannot open a shard with a key that is no UTF-8, and then blames the file alone.
    assert named == {0} or (to == "lmdb" and mask == 0x80 and not named)


@pytest.mark.parametrize(
    ("pristine", "part"),
    [
        *[("lmdb", 0.0), ("hdf5", 0.1), ("webdataset", 0.5), ("lmdb", 0.9), ("hdf5", 0.999)],
        *[("lmdb", "longer"), ("lmdb", "it is missing"), ("lmdb", "it is not a file")],
    ],
    indirect=["pristine"],
)
def test_a_file_cut_longer_or_missing_is_found_at_every_level(
    place: Path, part: float | str
) -> None:
    for path in sorted(path for path in place.rglob("*") if path.is_file()):
        if isinstance(part, str) and part.startswith("it") and path.name == "shardkit.json":
            continue
        good = path.read_bytes()
        path.unlink()
        if part == "it is not a file":
            path.mkdir()
        elif part == "longer":
            path.write_bytes(good + b"\0")
        elif isinstance(part, float):
            path.write_bytes(good[: min(int(len(good) * part), len(good) - 1)])
        for level in LEVELS:
            result = verify(place, level)  # type: ignore[arg-type]
            assert str(path.relative_to(place)) in files_of(result), level
            assert str(part) in reasons_of(result) or not str(part).startswith("it")
        if path.is_dir():
            path.rmdir()
        path.write_bytes(good)


@each_format
def test_images_before_a_truncation_are_not_reported(place: Path) -> None:
    path = shards_of(place)[1]
    rows = rows_of(place)
    cut = max(int(rows[row]["offset"]) for row in (3, 4, 5)) + 5
    path.write_bytes(path.read_bytes()[:cut])
    named = {f.row for f in verify(place).findings if f.row is not None}
    last = max((3, 4, 5), key=lambda row: int(rows[row]["offset"]))
    assert last in named
    assert named <= {3, 4, 5}


def test_two_swapped_shards_are_found(tmp_path: Path) -> None:
    source = make_tree(tmp_path / "photos", {f"c/{n}.png": png(8, 8, n) for n in range(4)})
    place = make(source, tmp_path / "made", shard_samples=2)
    one, two = shards_of(place)
    one.rename(place / "aside")
    two.rename(one)
    (place / "aside").rename(two)
    result = verify(place)
    assert f"{one.name}: its SHA-256 differs from the manifest: it has" in reasons_of(result)
    assert f"the content of {two.name}" in reasons_of(result)
    assert f"the content of {one.name}" in reasons_of(result)
    assert {f.row for f in result.findings if f.row is not None} == {0, 1, 2, 3}


def test_an_edited_manifest_is_found_at_every_level(place: Path) -> None:
    good = (place / "shardkit.json").read_text()
    value = json.loads(good)
    edits: dict[str, Callable[[dict[str, Any]], object]] = {
        "rows": lambda value: value.update(rows=8),
        "class": lambda value: value["classes"].reverse(),
        "digest": lambda value: value.update(digest="0" * 64),
        "shards": lambda value: value["shards"].pop(),
    }
    for edit in edits.values():
        edited = json.loads(json.dumps(value))
        edit(edited)
        (place / "shardkit.json").write_text(json.dumps(edited))
        for level in LEVELS:
            assert files_of(verify(place, level)) == {"shardkit.json"}  # type: ignore[arg-type]
    (place / "shardkit.json").write_text(good)
    assert verify(place).ok


def test_an_index_of_other_rows_is_found(place: Path, tmp_path: Path) -> None:
    """An intact index of another dataset of the same size."""
    other = make_folder(tmp_path / "others", ("dog", "elk", "fox"))
    made = make(other, tmp_path / "other", to=stated(place).format)
    shutil.rmtree(place / "index")
    shutil.copytree(made / "index", place / "index")
    for level in LEVELS:
        assert "index/rows.npy" in files_of(verify(place, level))  # type: ignore[arg-type]
    named = {finding.row for finding in verify(place).findings if finding.row is not None}
    assert named == set(range(9))


def test_a_wrong_label_in_the_index_is_found_by_its_record_too(place: Path) -> None:
    rows = rows_of(place)
    rows["label"][4] = (rows["label"][4] + 1) % 3
    np.save(place / "index/rows.npy", rows)
    assert "index/rows.npy" in files_of(verify(place, "quick"))
    (named,) = [finding for finding in verify(place).findings if finding.row is not None]
    assert named.row == 4
    assert "label" in named.reason


def test_foreign_files_are_reported_but_are_not_damage(place: Path) -> None:
    for name in ("README", ".hidden", "index/more.npy", "sub/dir/file"):
        (place / name).parent.mkdir(parents=True, exist_ok=True)
        (place / name).write_bytes(b"x")
    result = verify(place)
    assert result.ok
    assert result.extras == sorted(["README", ".hidden", "index/more.npy", "sub/dir/file"])


def test_an_image_stored_unchecked_is_found_by_decoding_it(tmp_path: Path) -> None:
    whole = jpeg(32, 32)
    make_tree(
        tmp_path / "photos",
        {"a/cut.jpg": whole[:-200], "a/fine.jpg": whole, "a/head.png": png()[:40]},
    )
    place = make(tmp_path / "photos", tmp_path / "made", check="none")
    assert verify(place, "quick").ok
    assert verify(place, "full").ok
    result = verify(place, "decode")
    assert {finding.path for finding in result.findings} == {"a/cut.jpg", "a/head.png"}
    assert {finding.key for finding in result.findings} == {"a/cut", "a/head"}


def test_raw_images_are_verified_too(tmp_path: Path) -> None:
    place = make(make_folder(tmp_path / "photos"), tmp_path / "made", **RAW)
    assert verify(place, "decode").ok
    row = 4
    flip(shards_of(place)[1], int(rows_of(place)[row]["offset"]) + 100)
    assert {f.row for f in verify(place).findings if f.row is not None} == {row}


def test_all_damage_is_found_in_one_run_in_the_order_of_files_and_rows(place: Path) -> None:
    rows, shards = rows_of(place), shards_of(place)
    for row in (8, 1, 0, 5):
        flip(shards[row // 3], int(rows[row]["offset"]))
    (place / "index/paths.npy").unlink()
    found = [(f.file, -1 if f.row is None else f.row) for f in verify(place).findings]
    assert found == sorted(found)
    assert {file for file, _ in found} >= {*(path.name for path in shards), "index/paths.npy"}


def test_all_splits_are_verified(splits: Path) -> None:
    assert (stated(splits).kind, stated(splits / "val").kind) == ("splits", "dataset")
    for level in LEVELS:
        result = verify(splits, level)  # type: ignore[arg-type]
        assert result.ok
        assert (result.datasets, result.extras) == (2, [])
        assert result.records == (0 if level == "quick" else 10)


def test_damage_in_a_split_names_the_split(splits: Path) -> None:
    path = shards_of(splits / "val")[0]
    flip(path, int(rows_of(splits / "val")[0]["offset"]))
    result = verify(splits)
    assert files_of(result) == {f"val/{path.name}"}
    assert verify(splits / "train").ok
    assert not verify(splits / "val").ok


@pytest.mark.parametrize("what", ["manifest", "split"])
def test_a_missing_split_is_damage(splits: Path, what: str) -> None:
    if what == "manifest":
        (splits / "val" / "shardkit.json").unlink()
    else:
        shutil.rmtree(splits / "val")
    for level in LEVELS:
        assert "val/shardkit.json" in files_of(verify(splits, level))  # type: ignore[arg-type]


def test_another_valid_manifest_in_a_split_is_found(splits: Path, tmp_path: Path) -> None:
    """A complete dataset in place of a split: each is intact, but they do not belong together."""
    other = make(make_folder(tmp_path / "others"), tmp_path / "other", to="webdataset")
    assert verify(other).ok
    shutil.rmtree(splits / "val")
    shutil.copytree(other, splits / "val")
    for level in LEVELS:
        result = verify(splits, level)  # type: ignore[arg-type]
        assert files_of(result) == {"val/shardkit.json"}
        assert "other splits" in reasons_of(result)


def test_any_flipped_byte_of_the_manifest_of_splits_is_found(splits: Path) -> None:
    path = splits / "shardkit.json"
    good = path.read_bytes()
    missed = []
    for at in range(len(good)):
        flip(path, at, 0x2A)  # turns a space into a line break
        if verify(splits, "quick").ok:
            missed.append(at)
        path.write_bytes(good)
    assert missed == []


def test_a_split_inside_a_split_is_damage(splits: Path) -> None:
    shutil.copy(splits / "shardkit.json", splits / "val" / "shardkit.json")
    assert "val/shardkit.json" in files_of(verify(splits))


def test_a_dataset_without_rows_is_intact(tmp_path: Path) -> None:
    make_folder(tmp_path / "photos/train")
    make_tree(tmp_path / "photos/test", {"cat": None})
    for to in FORMATS:
        place = make(tmp_path / "photos", tmp_path / to, to=to)
        assert verify(place, "decode").findings == []


def test_wrong_use_is_refused(pristine: Path, tmp_path: Path) -> None:
    for place in (tmp_path, tmp_path / "nowhere"):
        with refused(UsageError, place):
            verify(place)
    with refused(UsageError, *LEVELS):
        verify(pristine, "thorough")  # type: ignore[arg-type]


def damage_records(place: Path) -> None:
    """Change the image of each record of the first shard."""
    for entry in rows_of(place)[:3]:
        flip(shards_of(place)[0], int(entry["offset"]))


def break_container(path: Path) -> None:
    """Make a shard one that its format cannot open, and leave its images alone."""
    flip(path, 0)
    if path.suffix == ".lmdb":  # the numbers by which LMDB knows its two first pages
        flip(path, 16)
        flip(path, 4096 + 16)


@pytest.mark.parametrize(
    ("pristine", "opens"),
    [("lmdb", True), *((to, False) for to in FORMATS)],
    indirect=["pristine"],
)
def test_damaged_records_are_listed_up_to_a_limit(
    place: Path, monkeypatch: pytest.MonkeyPatch, opens: bool
) -> None:
    damage_records(place)
    if not opens:
        break_container(shards_of(place)[0])
    every = verify(place)
    assert [finding.row for finding in every.findings if finding.row is not None] == [0, 1, 2]
    assert ("cannot be opened" in reasons_of(every) or "is damaged" in reasons_of(every)) != opens
    monkeypatch.setattr("shardkit.verification.shard_check.MOST_FINDINGS", 2)
    limited = verify(place)
    assert {finding.row for finding in limited.findings} == {None, 0, 1}
    assert "were not checked" in reasons_of(limited)


def test_a_record_that_neither_manifest_nor_index_counts_is_found(place: Path) -> None:
    """A forged manifest counts it for the next shard."""

    def change(manifest: Any) -> Any:
        one, two, three = manifest.shards
        return replace(manifest, shards=(replace(one, rows=2), replace(two, rows=4), three))

    restate(place, change)
    reasons = {(f.file, f.row): f.reason for f in verify(place).findings}
    one, two, _ = (path.name for path in shards_of(place))
    assert reasons[one, None] == "it has 3 records; the manifest lists 2"
    assert reasons[two, None] == "it has 3 records; the manifest lists 4"
    assert "it is not in the index" in reasons.values()


def test_a_raw_image_of_another_shape_is_found_by_decoding_it(tmp_path: Path) -> None:
    place = make(make_folder(tmp_path / "photos"), tmp_path / "made", to="webdataset", **RAW)
    forge(place, lambda r: [with_meta(r[0], width=8, height=10), *r[1:]])
    assert verify(place).ok
    (finding,) = verify(place, "decode").findings
    assert (finding.row, finding.reason) == (0, "its shape differs from the manifest's raw_shape")


@each_format
def test_a_shard_that_cannot_be_opened_and_has_no_index_is_one_finding(place: Path) -> None:
    damage_records(place)
    break_container(shards_of(place)[0])
    (place / "index/rows.npy").write_bytes(b"no array")
    result = verify(place)
    assert {shards_of(place)[0].name, "index/rows.npy"} <= files_of(result)
    assert [finding.row for finding in result.findings if finding.row is not None] == []


def test_files_that_cannot_be_read_are_reported_so(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> str:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr("shardkit.system.files.FileSha256.advance", fail)
    result = verify(place)
    assert files_of(result) >= {path.name for path in shards_of(place)} | {"index/rows.npy"}
    assert os.strerror(errno.EIO) in reasons_of(result)
    assert all(finding.unread for finding in result.findings)
