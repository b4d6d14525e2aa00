"""Parts of verification whose laws no command shows: statistics in parts, and bounded memory."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import make_dataset, make_tree, png
from hostile.forging import restate
from refusals import refused

from shardkit import CorruptDataset, diff, verify
from shardkit.dataset.opened import OpenedDirectory
from shardkit.reporting.describe import _spread
from shardkit.system.files import sha256_of
from shardkit.verification import diff as diffing
from shardkit.verification.named_sources import Sources
from shardkit.verification.receipt import check_receipt, load_receipt, save_receipt
from shardkit.verification.record_comparison import ComparisonResult
from shardkit.verification.source_match import match_rows


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
