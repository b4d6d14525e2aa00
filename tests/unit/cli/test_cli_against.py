"""``shardkit verify --against`` and receipts: output, files and exit codes."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from forging import forge, restate, with_image
from helpers import invoke, jpeg, make_dataset, make_folder, make_tree, run_main, tree

from shardkit.dataset.manifest import MANIFEST_NAME
from shardkit.errors import CorruptDataset, UsageError
from shardkit.recipe import Recipe

SOUND, DAMAGED, USAGE = 0, 1, 2


@pytest.fixture
def place(folder: Path, tmp_path: Path) -> Path:
    return make_dataset(folder, tmp_path / "made")


@pytest.fixture
def receipt(place: Path, folder: Path, tmp_path: Path) -> Path:
    """The receipt of ``place``."""
    path = tmp_path / "receipt.json"
    result = invoke("verify", place, "--against", folder, "--write-receipt", path, "--workers", 1)
    assert result.exit_code == SOUND
    assert f"receipt   written to {path}" in result.stdout
    return path


def test_the_report_states_what_was_verified(place: Path, folder: Path) -> None:
    result = invoke("verify", place, "--against", folder, "--workers", 1)
    assert result.exit_code == SOUND
    first, second = result.stdout.splitlines()
    assert first.startswith(f"{place}: intact (full: 2 shards, 6 records")
    assert second.startswith("  source    6 files of photos, ")
    assert second.endswith(": each present once, every byte matches")
    assert result.stderr == ""


def test_skipped_files_are_counted(folder: Path, tmp_path: Path) -> None:
    (folder / "cat/bad.jpg").write_bytes(b"bad")
    place = make_dataset(folder, tmp_path / "made", on_error="skip", limit=5)
    result = invoke("verify", place, "--against", folder, "--workers", 1)
    count = sum(1 for _ in folder.rglob("*.*")) - 5 + ("bad.jpg" in result.stdout)
    others = f"{count} others were" if count > 1 else "1 other was"
    assert f" ({others} skipped, not selected or beyond --limit): each" in result.stdout


def test_the_psnr_is_reported_if_libraries_changed(folder: Path, tmp_path: Path) -> None:
    recipe = Recipe(encode="raw", resize=(8, 8), resize_mode="stretch")
    place = make_dataset(folder, tmp_path / "made", recipe=recipe)
    forge(
        place,
        lambda r: [
            with_image(r[0], (np.frombuffer(r[0].fields["raw"], np.uint8) ^ 1).tobytes()),
            *r[1:],
        ],
    )
    arguments = ("verify", place, "--against", folder, "--workers", 1)
    assert invoke(*arguments).exit_code == DAMAGED
    restate(place, lambda m: replace(m, software={**m.software, "pillow": "1.0"}))
    result = invoke(*arguments)
    assert result.exit_code == SOUND
    assert "5 match exactly, 1 but for library versions (PSNR at least 48.1 dB)" in result.stdout


def test_json_has_the_source(place: Path, folder: Path) -> None:
    result = invoke("verify", place, "--against", folder, "--workers", 1, "--json")
    value = json.loads(result.stdout)
    assert (value["ok"], value["source"]["files"], value["source"]["same"]) == (True, 6, 6)
    assert list(value["manifests"]) == [""]
    assert json.loads(invoke("verify", place, "--json").stdout)["source"] is None


def test_no_receipt_is_written_with_findings(place: Path, folder: Path, tmp_path: Path) -> None:
    (folder / "cat/new.jpg").write_bytes(jpeg())
    path = tmp_path / "receipt.json"
    before = tree(tmp_path)
    result = invoke("verify", place, "--against", folder, "--write-receipt", path)
    assert result.exit_code == DAMAGED
    assert "differs: cat/new.jpg: it is in the source but not in the dataset" in result.stderr
    assert "note      the dataset is unchanged; its source has changed" in result.stdout
    assert "receipt   not written: see the findings" in result.stdout
    assert tree(tmp_path) == before


def test_a_receipt_is_valid_until_something_changes(
    place: Path, folder: Path, receipt: Path
) -> None:
    time = json.loads(receipt.read_bytes())["time"]
    for level in ("full", "decode"):
        result = invoke(
            "verify", place, "--check-receipt", receipt, "--level", level, "--workers", 1
        )
        assert result.exit_code == SOUND
        assert f"receipt   of {time[:10]} {time[11:16]} UTC, against photos: holds" in result.stdout
    make_tree(folder, {"dog/more.jpg": jpeg(seed=9)})
    shutil.rmtree(place)
    make_dataset(folder, place)
    result = invoke("verify", place, "--check-receipt", receipt, "--workers", 1)
    assert result.exit_code == DAMAGED
    assert f"receipt   of {time[:10]} {time[11:16]} UTC: does not hold" in result.stdout
    assert "the receipt is of another dataset: made, with 6 images" in result.stderr
    assert invoke("verify", place, "--workers", 1).exit_code == SOUND


@pytest.mark.parametrize("against", [True, False])
def test_level_quick_is_refused_with_a_source(
    place: Path, folder: Path, tmp_path: Path, receipt: Path, against: bool
) -> None:
    options = ["--against", folder, "--write-receipt", tmp_path / "new"] if against else []
    options = options or ["--check-receipt", receipt]
    result = invoke("verify", place, *options, "--level", "quick")
    assert isinstance(result.exception, UsageError)


@pytest.mark.slow
def test_json_reports_whether_a_receipt_is_valid(place: Path, receipt: Path) -> None:
    for holds in (True, False):
        told = json.loads(invoke("verify", place, "--check-receipt", receipt, "--json").stdout)
        assert told["receipt"]["holds"] is told["ok"] is holds
        (place / "shard-000000.lmdb").write_bytes(b"")
    assert json.loads(invoke("verify", place, "--json").stdout)["receipt"] is None


def test_one_run_checks_a_receipt_and_writes_another(
    place: Path, folder: Path, tmp_path: Path, receipt: Path
) -> None:
    new = tmp_path / "new.json"
    options = ("--against", folder, "--check-receipt", receipt, "--write-receipt", new)
    result = invoke("verify", place, *options, "--workers", 1)
    assert result.exit_code == SOUND
    assert "against photos: holds" in result.stdout
    assert f"written to {new}" in result.stdout
    assert invoke("verify", place, "--check-receipt", new, "--workers", 1).exit_code == SOUND


def test_a_damaged_dataset_fails_its_receipt(place: Path, receipt: Path) -> None:
    (place / "shard-000000.lmdb").write_bytes(b"")
    result = invoke("verify", place, "--check-receipt", receipt, "--workers", 1)
    assert result.exit_code == DAMAGED
    assert "does not hold" in result.stdout


@pytest.mark.parametrize("harm", ["lost", "changed"])
@pytest.mark.slow
def test_a_split_without_its_manifest_is_a_finding(tmp_path: Path, harm: str) -> None:
    make_folder(tmp_path / "photos/train")
    make_folder(tmp_path / "photos/val")
    place = make_dataset(tmp_path / "photos", tmp_path / "made", to="webdataset")
    receipt = tmp_path / "receipt.json"
    invoke("verify", place, "--against", tmp_path / "photos", "--write-receipt", receipt)
    assert receipt.exists()
    (place / "val" / MANIFEST_NAME).unlink()
    if harm == "changed":
        (place / "val" / MANIFEST_NAME).write_bytes(b"{}")
    result = invoke("verify", place, "--check-receipt", receipt, "--workers", 1)
    assert result.exit_code == DAMAGED
    assert f"val/{MANIFEST_NAME}" in result.stderr
    assert "does not hold" in result.stdout


def test_an_existing_receipt_is_refused_before_verifying(
    place: Path, folder: Path, receipt: Path
) -> None:
    content = receipt.read_bytes()
    result = invoke("verify", place, "--against", folder, "--write-receipt", receipt)
    assert isinstance(result.exception, UsageError)
    assert "exists already; choose another file" in str(result.exception)
    assert receipt.read_bytes() == content


def test_an_edited_receipt_is_refused(place: Path, receipt: Path) -> None:
    receipt.write_text(receipt.read_text().replace('"photos"', '"plates"'))
    result = invoke("verify", place, "--check-receipt", receipt)
    assert isinstance(result.exception, CorruptDataset)
    assert "was changed after it was written" in str(result.exception)


def test_errors_are_one_line_and_no_traceback(place: Path, folder: Path, tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"{}")
    cases = {
        ("--against", tmp_path / "missing"): "does not exist",
        ("--against", folder, "--level", "quick"): "--against needs --level full or decode",
        ("--check-receipt", tmp_path / "x"): "is not a receipt of shardkit",
        ("--check-receipt", tmp_path): "it is not a file",
        ("--write-receipt", tmp_path / "new"): "--write-receipt requires --against SRC",
    }
    for arguments, said in cases.items():
        result = run_main("verify", place, *arguments)
        assert result.returncode == USAGE
        assert result.stdout == ""
        assert said in result.stderr
        assert result.stderr.startswith("shardkit: error: ")
        assert result.stderr.count("\n") == 1


def test_names_in_the_source_are_escaped(place: Path, folder: Path) -> None:
    make_tree(folder, {"cat/a\n\x1b[31m.jpg": jpeg()})
    result = invoke("verify", place, "--against", folder, "--workers", 1)
    assert result.exit_code == DAMAGED
    assert "\x1b" not in result.output
    assert r"differs: cat/a\n\x1b[31m.jpg: it is in the source" in result.stderr


@pytest.mark.slow
def test_undecodable_names_are_shown(place: Path, folder: Path) -> None:
    make_tree(folder, {"cat/\udcff.jpg": jpeg()})
    result = run_main("verify", place, "--against", folder)
    assert result.returncode == DAMAGED
    assert r"cat/\udcff.jpg: it is in the source" in result.stderr


def test_quiet_prints_nothing(place: Path, folder: Path, tmp_path: Path) -> None:
    arguments = ("--against", folder, "--write-receipt", tmp_path / "r", "--quiet", "--workers", 1)
    result = invoke("verify", place, *arguments)
    assert (result.output, result.exit_code) == ("", SOUND)
    assert (tmp_path / "r").exists()
