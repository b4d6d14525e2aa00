"""``shardkit diff``: records added, removed and changed, by key and content."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import copy_dataset, invoke, jpeg, make_dataset, make_folder, make_tree, png, run_main
from hostile.forging import forge, restate
from refusals import refused, refuses

from shardkit import Field, convert, diff, verify
from shardkit.dataset.opened import OpenedDirectory
from shardkit.errors import CorruptDataset, UsageError
from shardkit.reporting.describe import _spread
from shardkit.system.files import sha256_of
from shardkit.verification import diff as diffing
from shardkit.verification.named_sources import Sources
from shardkit.verification.receipt import check_receipt, load_receipt, save_receipt
from shardkit.verification.record_comparison import ComparisonResult
from shardkit.verification.source_match import match_rows


@pytest.fixture
def place(folder: Path, tmp_path: Path) -> Path:
    return copy_dataset(folder, tmp_path / "made")


def changed(split: Any) -> dict[str, tuple[str, ...]]:
    """Return the fields of each changed record."""
    return {record.key: record.fields for record in split.changed}


def test_equal_content_in_other_formats_and_orders_is_equal(
    place: Path, folder: Path, tmp_path: Path
) -> None:
    for to, options in (("hdf5", {"seed": 3}), ("webdataset", {"shuffle": False})):
        other = make_dataset(folder, tmp_path / to, to=to, **options)
        found = diff(place, other)
        assert found.equal
        assert found.splits[""].reordered


def test_added_removed_and_changed_records_are_named(
    place: Path, folder: Path, tmp_path: Path
) -> None:
    (folder / "cat/000.jpg").write_bytes(jpeg(20, 18, 7))  # changed
    (folder / "cat/001.jpg").unlink()
    make_tree(folder, {"dog/new.png": png()})
    found = diff(place, make_dataset(folder, tmp_path / "new"))
    assert not found.equal
    (split,) = found.splits.values()
    assert (split.rows, split.added, split.removed) == ((6, 6), ["dog/new"], ["cat/001"])
    assert changed(split) == {"cat/000": ("image",)}
    assert split.described == {}


def test_labels_are_compared_by_class_name_and_apart_from_images(
    place: Path, folder: Path, tmp_path: Path
) -> None:
    (tmp_path / "order.txt").write_text("dog\ncat\nbird\n")
    convert(folder, tmp_path / "new", to="hdf5", class_order=str(tmp_path / "order.txt"))
    (split,) = diff(place, tmp_path / "new").splits.values()
    assert split.changed == []
    assert split.described == {"classes": (("cat", "dog"), ("dog", "cat", "bird"))}

    one, other = (
        [{"key": f"k{n}", "image": png(seed=n), "label": label} for n, label in enumerate(labels)]
        for labels in ((0, 1, 2), (0, 2, 2))
    )
    schema = {"label": Field("label", classes=3)}
    convert(one, tmp_path / "one", to="lmdb", schema=schema)
    convert(other, tmp_path / "other", to="lmdb", schema=schema)
    (split,) = diff(tmp_path / "one", tmp_path / "other").splits.values()
    assert changed(split) == {"k1": ("label",)}


def test_other_fields_are_compared(tmp_path: Path) -> None:
    def samples(number: int, caption: str | None) -> list[dict[str, object]]:
        array = np.full((2, 2), number, np.float32)
        return [{"image": png(), "caption": caption, "array": array, "age": number}]

    schema: dict[str, Field | str] = {"caption": "text"}
    convert(samples(1, "a"), tmp_path / "a", to="lmdb", schema=schema)
    convert(samples(2, None), tmp_path / "b", to="webdataset", schema=schema)
    (split,) = diff(tmp_path / "a", tmp_path / "b").splits.values()
    assert changed(split) == {"000000000": ("array", "caption", "age")}
    convert([{"image": png()}], tmp_path / "c", to="lmdb")
    (split,) = diff(tmp_path / "a", tmp_path / "c").splits.values()
    assert split.changed == []
    assert split.described["caption"] == ("text", None)


def test_splits_are_compared_by_name(tmp_path: Path) -> None:
    for split in ("train", "val"):
        make_folder(tmp_path / "photos" / split, each=2)
    place = make_dataset(tmp_path / "photos", tmp_path / "made")
    shutil.move(tmp_path / "photos/val", tmp_path / "photos/test")
    other = make_dataset(tmp_path / "photos", tmp_path / "other")
    found = diff(place, other)
    assert [found.splits[name].equal for name in ("train", "val", "test")] == [True, False, False]
    assert len(found.splits["val"].removed) == len(found.splits["test"].added) == 4
    assert diff(place / "val", other / "test").equal
    with refused(UsageError, "train, val", "made/train"):
        diff(place, other / "test")


def test_records_of_one_key_are_refused(place: Path, tmp_path: Path) -> None:
    forge(place, lambda records: [records[0], *records[:-1]])
    shutil.copytree(place, tmp_path / "copy")
    with refused(CorruptDataset, 6, 5):
        diff(place, tmp_path / "copy")


def test_the_command_reports_and_exits_with_1(place: Path, folder: Path, tmp_path: Path) -> None:
    (folder / "cat/001.jpg").unlink()
    (folder / "cat/000.jpg").write_bytes(jpeg(20, 18, 7))
    other = make_dataset(folder, tmp_path / "new")
    assert run_main("diff", place, place).stdout == (
        f"{place} and {place}: equal, 6 records (compared indexes only, read no records)\n"
    )
    shown = run_main("diff", place, other)
    assert shown.returncode == 1
    assert shown.stdout.splitlines() == [
        f"{place} -> {other} (compared indexes only, read no records)",
        "  removed   1 record: cat/001",
        "  changed   1 record: image 1",
        "    cat/000  image",
    ]
    quiet = run_main("diff", place, other, "--quiet")
    assert (quiet.returncode, quiet.stdout, quiet.stderr) == (1, "", shown.stdout)
    assert run_main("diff", place, place, "--quiet").stderr == ""
    value = json.loads(invoke("diff", place, other, "--json").stdout)
    assert value["equal"] is False
    assert value["splits"][""]["changed"] == [{"key": "cat/000", "fields": ["image"]}]
    refuses(2, "diff", place, tmp_path / "nowhere", facts=(tmp_path / "nowhere",))


# Parts of verification whose laws no command shows: statistics in parts, and bounded memory.


def test_the_spread_of_numbers_in_parts_is_that_of_all() -> None:
    random = np.random.default_rng(1)
    for most in (1, 3, 1 << 16, 1 << 17, 1 << 32):
        for count in (1, 2, 3, 10, 1001):
            values = random.integers(0, most, count, np.uint32)
            expected = [int(values.min()), int(np.median(values)), int(values.max())]
            assert _spread(partial(np.array_split, values, 3)) == expected
    assert _spread(lambda: [np.zeros(0, np.uint32)]) == []


def test_results_of_several_shards_are_summed() -> None:
    total = ComparisonResult()
    total.add(ComparisonResult(same=2, bytes=5, files={"a": "1"}))
    assert total.least_psnr is None
    total.add(ComparisonResult(alike=3, least_psnr=44.0, bytes=6, files={"b": "2"}))
    total.add(ComparisonResult(same=1, alike=1, least_psnr=46.0))
    assert total == ComparisonResult(
        same=3, alike=4, least_psnr=44.0, bytes=11, files={"a": "1", "b": "2"}
    )


def test_only_records_in_another_order_are_matched_in_memory(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = make_dataset(folder, tmp_path / "made")
    (folder / "cat/000.jpg").unlink()
    make_tree(folder, {"dog/new.png": png()})
    same_order = make_dataset(folder, tmp_path / "same")
    other_order = make_dataset(folder, tmp_path / "other", seed=3)
    monkeypatch.setattr(diffing, "_COMPARED_ROWS", 2)
    expected = diff(place, other_order).splits[""]

    monkeypatch.delattr(diffing, "_rows_by_key")
    split = diff(place, same_order).splits[""]
    assert not split.reordered
    assert (split.added, split.removed, split.changed) == (
        *(expected.added, expected.removed, expected.changed),
    )
    with pytest.raises(NameError, match="_rows_by_key"):
        diff(place, other_order)


def test_forged_paths_that_are_no_index_leave_the_order_of_the_source(
    folder: Path, tmp_path: Path
) -> None:
    place = make_dataset(folder, tmp_path / "made")
    (place / "index/paths-ends.npy").write_bytes(b"no array")
    digest = sha256_of(place / "index/paths-ends.npy")

    def change(manifest: Any) -> Any:
        files = [
            replace(file, sha256=digest, bytes=8) if "paths-ends" in file.name else file
            for file in manifest.files
        ]
        return replace(manifest, files=tuple(files))

    restate(place, change)
    splits = OpenedDirectory(place).splits
    (match,) = Sources(splits, folder).of(splits[""])
    assert match.stored is None
    assert match.keys is not None
    rows, findings = match_rows(match)
    assert (len(rows), findings) == (6, [])


def test_a_dataset_replaced_during_or_after_verification_has_no_receipt(
    folder: Path, tmp_path: Path
) -> None:
    place = make_dataset(folder, tmp_path / "made")
    result = verify(place, against=folder)
    save_receipt(tmp_path / "receipt.json", place, result)
    (finding,) = check_receipt(load_receipt(tmp_path / "receipt.json"), place, {"": "another"})
    assert finding.file == "shardkit.json"
    restate(place, lambda manifest: replace(manifest, notes={"small": 1}))
    with refused(CorruptDataset, place):
        save_receipt(tmp_path / "other.json", place, result)
    assert not (tmp_path / "other.json").exists()
