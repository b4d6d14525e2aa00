"""``shardkit verify --against`` and receipts: output, files and exit codes."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import jpeg, make_folder, make_tree, run_main, tree
from hostile.forging import forge, restate, with_image
from refusals import refuses
from table import for_each

from shardkit import convert, fields

SOUND, DAMAGED, USAGE = 0, 1, 2


def verify(place: Path, *options: object, code: int = SOUND) -> tuple[str, str]:
    """Run the command; return what it prints to stdout and stderr."""
    done = run_main("verify", place, *options, "--workers", 1)
    assert done.returncode == code, done.stderr
    return done.stdout, done.stderr


@pytest.fixture
def place(folder: Path, tmp_path: Path) -> Path:
    convert(folder, tmp_path / "made", to="lmdb", shard_samples=4, workers=1)
    return tmp_path / "made"


@pytest.fixture
def receipt(place: Path, folder: Path, tmp_path: Path) -> Path:
    """The receipt of ``place``."""
    path = tmp_path / "receipt.json"
    said, _ = verify(place, "--against", folder, "--write-receipt", path)
    assert f"  receipt   written to {path}" in said
    return path


def test_the_report_states_what_was_verified(place: Path, folder: Path) -> None:
    said, errors = verify(place, "--against", folder)
    first, second = said.splitlines()
    assert first.startswith(f"{place}: intact (full: 2 shards, 6 records")
    assert second.startswith("  source    6 files of photos, ")
    assert errors == ""
    value = json.loads(verify(place, "--against", folder, "--json")[0])
    assert (value["ok"], value["source"]["files"], value["source"]["same"]) == (True, 6, 6)
    assert list(value["manifests"]) == [""]
    assert json.loads(verify(place, "--json")[0])["source"] is None


@for_each(
    ("options", "expected"),
    [
        ({}, "every byte matches"),
        ({"resize": 8}, "every record equals its converted file"),
        ({"resize": 8, "encode": "png"}, "every record equals its converted file"),
        ({"resize": 500}, "every byte matches"),
    ],
)
def test_the_report_states_what_equals_the_source(
    folder: Path, tmp_path: Path, options: dict[str, Any], expected: str
) -> None:
    place = tmp_path / str(options)
    convert(folder, place, to="lmdb", workers=1, **options)
    assert expected in verify(place, "--against", folder)[0]
    fields.replace(place, {"label": [0] * 6})
    (line,) = [
        line for line in verify(place, "--against", folder)[0].splitlines() if "each" in line
    ]
    assert expected in line
    assert line.endswith(" of label")


@pytest.mark.parametrize(("limit", "skipped"), [(None, "1 other was"), (5, "3 others were")])
def test_skipped_files_are_counted(
    folder: Path, tmp_path: Path, limit: int | None, skipped: str
) -> None:
    (folder / "cat/bad.jpg").write_bytes(b"bad")
    place = tmp_path / "made"
    convert(folder, place, to="lmdb", on_error="skip", limit=limit, shuffle=False, workers=1)
    assert f" ({skipped} skipped, " in verify(place, "--against", folder)[0]


def test_the_psnr_is_reported_if_libraries_changed(folder: Path, tmp_path: Path) -> None:
    place = tmp_path / "made"
    size = "8x8"
    convert(folder, place, to="lmdb", resize=size, resize_mode="stretch", encode="raw", workers=1)
    forge(
        place,
        lambda r: [
            with_image(r[0], (np.frombuffer(r[0].fields["raw"], np.uint8) ^ 1).tobytes()),
            *r[1:],
        ],
    )
    verify(place, "--against", folder, code=DAMAGED)
    restate(place, lambda m: replace(m, software={**m.software, "pillow": "1.0"}))
    said, _ = verify(place, "--against", folder)
    assert "5 match exactly, and 1 except" in said
    assert "48.1 dB" in said  # each value differs by 1: 20 log10(255)


def test_no_receipt_is_written_with_findings(place: Path, folder: Path, tmp_path: Path) -> None:
    make_tree(folder, {"cat/new.jpg": jpeg(), "cat/a\n\x1b[31m.jpg": jpeg(seed=1)})
    before = tree(tmp_path)
    how = ("--against", folder, "--write-receipt", tmp_path / "receipt.json")
    said, errors = verify(place, *how, code=DAMAGED)
    assert "  differs: cat/new.jpg: " in errors
    assert r"  differs: cat/a\n\x1b[31m.jpg: " in errors
    assert "\x1b" not in said + errors
    for line in ("  note      ", "  receipt   not written"):
        assert line in said
    assert tree(tmp_path) == before


def test_a_receipt_is_valid_until_something_changes(
    place: Path, folder: Path, receipt: Path
) -> None:
    time = json.loads(receipt.read_bytes())["time"]
    of = f"  receipt   of {time[:10]} {time[11:16]} UTC"
    for level in ("full", "decode"):
        said, _ = verify(place, "--check-receipt", receipt, "--level", level)
        assert f"{of}, against photos: holds" in said
    told = json.loads(verify(place, "--check-receipt", receipt, "--json")[0])
    assert told["receipt"]["holds"] is told["ok"] is True

    make_tree(folder, {"dog/more.jpg": jpeg(seed=9)})
    shutil.rmtree(place)
    convert(folder, place, to="lmdb", workers=1)
    said, errors = verify(place, "--check-receipt", receipt, code=DAMAGED)
    assert f"{of}: does not hold" in said
    assert "made, with 6 images" in errors
    told = json.loads(verify(place, "--check-receipt", receipt, "--json", code=DAMAGED)[0])
    assert told["receipt"]["holds"] is told["ok"] is False
    assert json.loads(verify(place, "--json")[0])["receipt"] is None


def test_one_run_checks_a_receipt_and_writes_another(
    place: Path, folder: Path, tmp_path: Path, receipt: Path
) -> None:
    new = tmp_path / "new.json"
    both = ("--against", folder, "--check-receipt", receipt, "--write-receipt", new)
    said, _ = verify(place, *both)
    assert "against photos: holds" in said
    assert f"written to {new}" in said
    verify(place, "--check-receipt", new)
    assert verify(place, *both[:2], "--write-receipt", tmp_path / "r", "--quiet") == ("", "")
    assert (tmp_path / "r").exists()
    before = (tmp_path / "r").read_bytes()
    verify(place, *both[:2], "--write-receipt", tmp_path / "r")  # it is done
    assert (tmp_path / "r").read_bytes() == before
    for words in (("--level", "decode"), ("--against", folder / "cat")):
        verify(place, *both[:2], "--write-receipt", tmp_path / "r", *words, code=2)
    assert (tmp_path / "r").read_bytes() == before

    (place / "shard-000000.lmdb").write_bytes(b"")
    said, _ = verify(place, "--check-receipt", receipt, code=DAMAGED)
    assert "does not hold" in said


@pytest.mark.parametrize("harm", ["lost", "changed"])
def test_a_split_without_its_manifest_is_a_finding(tmp_path: Path, harm: str) -> None:
    make_folder(tmp_path / "photos/train", each=1)
    make_folder(tmp_path / "photos/val", each=1)
    place, receipt = tmp_path / "made", tmp_path / "receipt.json"
    convert(tmp_path / "photos", place, to="webdataset", workers=1)
    verify(place, "--against", tmp_path / "photos", "--write-receipt", receipt)
    assert receipt.exists()
    (place / "val/shardkit.json").unlink()
    if harm == "changed":
        (place / "val/shardkit.json").write_bytes(b"{}")
    said, errors = verify(place, "--check-receipt", receipt, code=DAMAGED)
    assert "val/shardkit.json" in errors
    assert "does not hold" in said


def test_what_cannot_be_done_is_one_line(
    place: Path, folder: Path, tmp_path: Path, receipt: Path
) -> None:
    content = receipt.read_bytes()
    edited, other = tmp_path / "edited", tmp_path / "x"
    edited.write_bytes(content.replace(b'"photos"', b'"plates"'))
    other.write_bytes(b"{}")
    quick = ("--level", "quick")
    cases: list[tuple[int, tuple[object, ...], tuple[object, ...]]] = [
        (USAGE, ("--against", tmp_path / "missing"), ("/missing",)),
        (USAGE, ("--against", folder, *quick), ("--against", "--level full or decode")),
        (USAGE, ("--against", folder, "--write-receipt", other, *quick), ("--against",)),
        (USAGE, ("--check-receipt", receipt, *quick), ("--check-receipt",)),
        (USAGE, ("--check-receipt", other), ("/x",)),
        (USAGE, ("--check-receipt", tmp_path), ("not a file",)),
        (USAGE, ("--write-receipt", tmp_path / "new"), ("--write-receipt", "--against SRC")),
        (USAGE, ("--against", folder, "--write-receipt", edited), ("/edited",)),
        (DAMAGED, ("--check-receipt", edited), ("/edited",)),
    ]
    for code, options, facts in cases:
        done = refuses(code, "verify", place, *options, facts=facts)
        assert done.stdout == ""
        assert done.stderr.startswith("shardkit: error: ")
        assert done.stderr.count("\n") == 1
    assert receipt.read_bytes() == content


def test_undecodable_names_are_shown(place: Path, folder: Path) -> None:
    make_tree(folder, {"cat/\udcff.jpg": jpeg()})
    assert r"cat/\udcff.jpg: " in verify(place, "--against", folder, code=DAMAGED)[1]
