"""Receipts: proof of a comparison with the source, checked later."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from forging import restate
from helpers import FORMATS, invoke, jpeg, make_dataset, make_folder, make_tree, tree

import shardkit
from shardkit import verify
from shardkit.conversion.convert import convert
from shardkit.dataset.manifest import MANIFEST_NAME, Manifest, load_any_manifest, load_manifest
from shardkit.errors import CorruptDataset, ShardkitError, UsageError
from shardkit.record import dump_json
from shardkit.verification import receipt as receipt_module
from shardkit.verification.receipt import check_receipt, load_receipt, require_new, save_receipt


@pytest.fixture
def place(folder: Path, tmp_path: Path) -> Path:
    return make_dataset(folder, tmp_path / "made")


@pytest.fixture
def receipt(place: Path, folder: Path, tmp_path: Path) -> Path:
    """The receipt of ``place``."""
    return written(place, folder, tmp_path / "receipt.json")


def written(place: Path, source: Path, path: Path) -> Path:
    save_receipt(path, place, verify(place, against=source))
    return path


def sealed(value: dict[str, Any]) -> bytes:
    """Return the text of a receipt with any content and its correct digest."""
    body = {name: part for name, part in value.items() if name != "digest"}
    return json.dumps({**body, "digest": hashlib.sha256(dump_json(body)).hexdigest()}).encode()


def test_a_receipt_states_what_was_verified(place: Path, folder: Path, receipt: Path) -> None:
    value = json.loads(receipt.read_bytes())
    assert receipt.read_bytes() == json.dumps(value, indent=1).encode() + b"\n"
    names = ("kind", "version", "time", "level", "software", "dataset", "source", "digest")
    assert tuple(value) == names
    assert (value["kind"], value["version"], value["level"]) == ("shardkit receipt", 1, "full")
    age = datetime.now(UTC) - datetime.fromisoformat(value["time"])
    assert 0 <= age.total_seconds() < 3600
    assert value["software"]["shardkit"] == shardkit.__version__
    assert {"python", "numpy", "pillow", "lmdb", "h5py", "torch"} <= set(value["software"])
    manifest = load_manifest(place)
    assert value["dataset"] == {
        "name": "made",
        "digest": manifest.digest,
        "manifests": {"": manifest.digest},
        "rows": {"": 6},
        "content": {"": manifest.content_digest},
        "files": {entry.name: entry.sha256 for entry in manifest.entries},
    }
    contents = {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*.*")}
    lines = "".join(
        f"{hashlib.sha256(contents[name]).hexdigest()}  {name}\n" for name in sorted(contents)
    )
    assert value["source"] == {
        "name": "photos",
        "files": 6,
        "bytes": sum(map(len, contents.values())),
        "left_out": 0,
        "same": 6,
        "alike": 0,
        "least_psnr": None,
        "sha256": hashlib.sha256(lines.encode()).hexdigest(),
    }
    assert sealed(value) == json.dumps(value).encode()


def test_a_receipt_contains_nothing_about_this_machine(receipt: Path, tmp_path: Path) -> None:
    assert str(tmp_path) not in receipt.read_text()


@pytest.mark.parametrize("to", FORMATS)
def test_a_receipt_is_valid_for_the_same_data_converted_again(
    folder: Path, tmp_path: Path, to: str
) -> None:
    path = written(make_dataset(folder, tmp_path / "one", to=to), folder, tmp_path / "receipt.json")
    again = make_dataset(folder, tmp_path / "two", to=to)
    assert check_receipt(load_receipt(path), again, verify(again).manifests) == []


def test_another_dataset_fails_the_receipt(folder: Path, receipt: Path, tmp_path: Path) -> None:
    make_tree(folder, {"cat/more.jpg": jpeg(seed=77), "cat/list.txt": b"x"})
    convert(
        folder,
        tmp_path / "made",
        to="lmdb",
        shard_samples=3,
        force=True,
    )
    reasons = {
        f.file: f.reason
        for f in check_receipt(
            load_receipt(receipt), tmp_path / "made", verify(tmp_path / "made").manifests
        )
    }
    assert reasons == {MANIFEST_NAME: "the receipt is of another dataset: made, with 6 images"}


def test_a_file_that_was_removed_is_named(folder: Path, tmp_path: Path) -> None:
    make_tree(folder, {"cat/list.txt": b"x"})
    place = make_dataset(folder, tmp_path / "made")
    known = load_receipt(written(place, folder, tmp_path / "receipt.json"))
    shutil.rmtree(place)
    (folder / "cat/list.txt").unlink()
    make_dataset(folder, place)
    reasons = {f.file: f.reason for f in check_receipt(known, place, verify(place).manifests)}
    assert reasons["ignored.jsonl"] == "it was removed since the receipt"
    assert reasons[MANIFEST_NAME] == f"it was changed since the receipt of {known['time']}"
    shown = invoke("verify", place, "--check-receipt", tmp_path / "receipt.json", "--workers", 1)
    assert shown.exit_code == 1
    assert "differs: ignored.jsonl: it was removed" in shown.stderr
    assert "next" not in shown.stdout  # a repair cannot help


def test_a_dataset_with_other_shards_is_another_one(
    folder: Path, receipt: Path, tmp_path: Path
) -> None:
    """Its index files may be the same."""
    for path in folder.rglob("*.jpg"):
        path.write_bytes(jpeg(seed=len(path.name) + 50))
    other = make_dataset(folder, tmp_path / "other")
    files = load_receipt(receipt)["dataset"]["files"]
    assert (
        files.items() & {entry.name: entry.sha256 for entry in load_manifest(other).files}.items()
    )
    (finding,) = check_receipt(load_receipt(receipt), other, verify(other).manifests)
    assert finding.reason == "the receipt is of another dataset: made, with 6 images"
    shown = invoke("verify", other, "--check-receipt", receipt, "--workers", 1)
    assert shown.exit_code == 1
    assert "next" not in shown.stdout
    (said,) = shown.stderr.splitlines()
    assert said.startswith(f"  differs: {MANIFEST_NAME}: the receipt is of another dataset: made")


def test_changed_files_are_listed(place: Path, receipt: Path) -> None:
    def change(manifest: Manifest) -> Manifest:
        first, *others = manifest.shards
        more = replace(others[-1], name="shard-more.lmdb", rows=0)
        return replace(manifest, shards=(replace(first, sha256="0" * 64), *others, more))

    restate(place, change)
    known = load_receipt(receipt)
    found = {f.file: f.reason for f in check_receipt(known, place, verify(place).manifests)}
    assert found == {
        MANIFEST_NAME: f"it was changed since the receipt of {known['time']}",
        "shard-000000.lmdb": "it was changed since the receipt",
        "shard-more.lmdb": "it was added since the receipt",
    }


def test_a_dataset_replaced_after_verification_fails(place: Path, receipt: Path) -> None:
    (finding,) = check_receipt(load_receipt(receipt), place, {"": "another digest"})
    assert finding.file == MANIFEST_NAME


def test_one_changed_manifest_entry_makes_another_dataset(place: Path, receipt: Path) -> None:
    restate(place, lambda manifest: replace(manifest, notes={"small": 1}))
    (finding,) = check_receipt(load_receipt(receipt), place, verify(place).manifests)
    assert finding.file == MANIFEST_NAME


def test_a_receipt_of_splits_covers_all(tmp_path: Path) -> None:
    make_folder(tmp_path / "photos/train")
    make_folder(tmp_path / "photos/val", each=1)
    place = make_dataset(tmp_path / "photos", tmp_path / "made", to="webdataset")
    path = written(place, tmp_path / "photos", tmp_path / "receipt.json")
    value = load_receipt(path)
    assert value["dataset"]["rows"] == {"train": 6, "val": 2}
    assert value["dataset"]["digest"] == load_any_manifest(place).digest
    assert "val/shard-000000.tar" in value["dataset"]["files"]
    assert check_receipt(value, place, verify(place).manifests) == []
    restate(place / "val", lambda manifest: replace(manifest, notes={"small": 1}))
    assert [finding.file for finding in check_receipt(value, place, verify(place).manifests)] == [
        MANIFEST_NAME
    ]


def test_a_dataset_replaced_during_verification_gets_no_receipt(
    place: Path, folder: Path, tmp_path: Path
) -> None:
    result = verify(place, against=folder)
    restate(place, lambda manifest: replace(manifest, notes={"small": 1}))
    with pytest.raises(CorruptDataset, match="during the verification"):
        save_receipt(tmp_path / "receipt.json", place, result)
    assert not (tmp_path / "receipt.json").exists()


def test_a_verification_without_source_or_with_findings_gets_no_receipt(
    place: Path, folder: Path, tmp_path: Path
) -> None:
    alone = verify(place)
    (folder / "cat/000.jpg").write_bytes(jpeg(seed=99))
    other = verify(place, against=folder)
    assert alone.ok
    assert not other.ok
    for result in (alone, other):
        with pytest.raises(UsageError, match="against a source, without findings"):
            save_receipt(tmp_path / "receipt.json", place, result)
    assert not (tmp_path / "receipt.json").exists()


def test_a_receipt_omits_libraries_without_metadata(
    place: Path, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(receipt_module, "_LIBRARIES", ("numpy", "no-such-library"))
    value = load_receipt(written(place, folder, tmp_path / "receipt.json"))
    assert set(value["software"]) == {"shardkit", "python", "numpy"}


@pytest.mark.parametrize("stands", ["file", "folder", "link"])
def test_an_existing_file_is_never_overwritten(
    place: Path, folder: Path, tmp_path: Path, stands: str
) -> None:
    path = tmp_path / "there"
    result = verify(place, against=folder)
    require_new(path)
    if stands == "file":
        path.write_bytes(b"mine")
    elif stands == "folder":
        path.mkdir()
    else:
        path.symlink_to("nowhere")
    for act in (require_new, lambda path: save_receipt(path, place, result)):
        with pytest.raises(UsageError, match="exists already"):
            act(path)
    assert stands != "file" or path.read_bytes() == b"mine"
    assert not (tmp_path / "nowhere").exists()


def test_an_unwritable_receipt_is_refused_before_verifying(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_bytes(b"")
    for path in (tmp_path / "missing/receipt", tmp_path / "file/receipt"):
        with pytest.raises(UsageError, match="cannot be written"):
            require_new(path)

    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(UsageError, match="cannot be written: Permission denied"):
        require_new(tmp_path / "receipt")


def test_a_full_disk_leaves_no_partial_receipt(
    place: Path, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    result, before = verify(place, against=folder), tree(tmp_path)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("shardkit.system.files.sync", full)
    with pytest.raises(ShardkitError, match="No space left on device"):
        save_receipt(tmp_path / "receipt.json", place, result)
    assert tree(tmp_path) == before


# --- receipts that are none ---


NONE_OF_OURS: dict[str, tuple[bytes, type[Exception], str]] = {
    "empty": (b"", UsageError, "is not a receipt"),
    "text": (b"hello", UsageError, "is not a receipt"),
    "binary": (bytes(range(256)), UsageError, "is not a receipt"),
    "an image": (jpeg(), UsageError, "is not a receipt"),
    "a list": (b"[]", UsageError, "is not an object"),
    "a number": (b"7", UsageError, "is not an object"),
    "other JSON": (b"{}", UsageError, "is not a receipt of shardkit"),
    "deep": (b'{"a":' * 30000 + b"1" + b"}" * 30000, UsageError, "nested too deep"),
    "long": (b'{"a":' + b"9" * 9999 + b"}", UsageError, "is not a receipt"),
    "no version": (b'{"kind":"shardkit receipt"}', UsageError, "of version None"),
    "newer": (sealed({"kind": "shardkit receipt", "version": 2}), UsageError, "version 2"),
    "true": (sealed({"kind": "shardkit receipt", "version": True}), UsageError, "version True"),
    "an escape": (
        sealed({"kind": "shardkit receipt", "version": "\x1b]0;x\n"}),
        UsageError,
        r"version '\\x1b\]0;x\\n'",
    ),
    "no digest": (b'{"kind":"shardkit receipt","version":1}', CorruptDataset, "was changed"),
    "no more": (sealed({"kind": "shardkit receipt", "version": 1}), CorruptDataset, "lacks \\["),
}


@pytest.mark.parametrize("name", NONE_OF_OURS)
def test_other_files_are_refused_as_receipts(tmp_path: Path, name: str) -> None:
    content, error, said = NONE_OF_OURS[name]
    (tmp_path / "receipt").write_bytes(content)
    with pytest.raises(error, match=said):
        load_receipt(tmp_path / "receipt")


@pytest.mark.parametrize("depth", [300, 700, 900, 1200, 3000])
def test_deep_nesting_is_a_shardkit_error(tmp_path: Path, depth: int) -> None:
    """Reading and writing JSON give up at different depths."""
    inner = b"[" * depth + b"]" * depth
    text = b'{"kind":"shardkit receipt","version":1,"digest":"x","deep":%b}' % inner
    (tmp_path / "receipt").write_bytes(text)
    with pytest.raises((UsageError, CorruptDataset)):
        load_receipt(tmp_path / "receipt")


def test_a_manifest_a_folder_and_a_missing_file_are_refused(place: Path, tmp_path: Path) -> None:
    for path, said in {
        place / MANIFEST_NAME: "is not a receipt of shardkit",
        place: "it is not a file",
        tmp_path / "missing": "Write one with --against SRC",
    }.items():
        with pytest.raises(UsageError, match=said):
            load_receipt(path)


def test_any_changed_byte_is_noticed_unless_equivalent(receipt: Path) -> None:
    content = receipt.read_bytes()
    said = load_receipt(receipt)
    for position in range(0, len(content), 7):
        changed = bytearray(content)
        changed[position] ^= 1
        receipt.write_bytes(changed)
        try:
            assert load_receipt(receipt) == said  # a blank that became another
        except (UsageError, CorruptDataset):
            continue


WRONG: dict[str, Callable[[dict[str, Any]], Any]] = {
    "no dataset": lambda value: value.pop("dataset"),
    "no source": lambda value: value.pop("source"),
    "no time": lambda value: value.pop("time"),
    "a time that is none": lambda value: value.update(time=5),
    "a dataset that is a list": lambda value: value.update(dataset=[]),
    "a source that is a text": lambda value: value.update(source="photos"),
    "no digest of the dataset": lambda value: value["dataset"].pop("digest"),
    "no files": lambda value: value["dataset"].pop("files"),
    "files that are a list": lambda value: value["dataset"].update(files=["shard"]),
    "a file without a digest": lambda value: value["dataset"]["files"].update(x=None),
    "manifests that are none": lambda value: value["dataset"].update(manifests=7),
    "rows that are texts": lambda value: value["dataset"].update(rows={"": "6"}),
    "rows that are true": lambda value: value["dataset"].update(rows={"": True}),
    "no rows": lambda value: value["dataset"].pop("rows"),
    "no content digest": lambda value: value["dataset"].pop("content"),
    "a dataset without a name": lambda value: value["dataset"].update(name=None),
    "software that is a list": lambda value: value.update(software=[]),
    "a level that is a number": lambda value: value.update(level=1),
    "something else": lambda value: value.update(more=1),
    "a source without a name": lambda value: value["source"].pop("name"),
}


@pytest.mark.parametrize("name", WRONG)
def test_an_incomplete_forged_receipt_is_refused(receipt: Path, name: str) -> None:
    value = json.loads(receipt.read_bytes())
    WRONG[name](value)
    receipt.write_bytes(sealed(value))
    with pytest.raises(CorruptDataset, match="is not a valid receipt"):
        load_receipt(receipt)


@pytest.mark.timeout(120)
def test_only_small_receipts_are_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with (tmp_path / "huge").open("wb") as file:
        file.truncate(1 << 40)
    for path, said in (
        (tmp_path / "pipe", "it is not a file"),
        (Path("/dev/zero"), "it is not a file"),
        (tmp_path / "huge", "it is larger than"),
    ):
        with pytest.raises(UsageError, match=said):
            load_receipt(path)
