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
from helpers import FORMATS, invoke, jpeg, make_dataset, make_folder, make_tree, tree
from hostile.forging import restate
from refusals import refuses
from stated import done, stated

import shardkit


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A source, its dataset and the receipt, which no test changes."""
    root = tmp_path_factory.mktemp("base")
    make_dataset(make_folder(root / "photos"), root / "made")
    written(root / "made", root / "photos", root / "receipt.json")
    return root


@pytest.fixture
def folder(base: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(base / "photos", tmp_path / "photos"))


@pytest.fixture
def place(base: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(base / "made", tmp_path / "made"))


@pytest.fixture
def receipt(base: Path, tmp_path: Path) -> Path:
    """The receipt of ``place``."""
    return Path(shutil.copy(base / "receipt.json", tmp_path / "receipt.json"))


def written(place: Path, source: Path, path: Path) -> Path:
    done("verify", place, "--against", source, "--write-receipt", path, "--workers", 1)
    return path


def checked(place: Path, receipt: Path) -> dict[str, str]:
    """Return the files that a receipt blames, and why."""
    words = ("verify", place, "--check-receipt", receipt, "--json", "--workers", 1)
    result = invoke(*words)
    findings = json.loads(result.stdout)["findings"]
    assert (result.exit_code == 0) == (not findings)
    return {found["file"]: found["reason"] for found in findings if found["receipt"]}


def canonical(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()


def sealed(value: dict[str, Any]) -> bytes:
    """Return the text of a receipt with any content and its correct digest."""
    body = {name: part for name, part in value.items() if name != "digest"}
    return json.dumps({**body, "digest": hashlib.sha256(canonical(body)).hexdigest()}).encode()


def test_a_receipt_states_what_was_verified(place: Path, folder: Path, receipt: Path) -> None:
    assert str(place.parent) not in receipt.read_text()
    value = json.loads(receipt.read_bytes())
    assert receipt.read_bytes() == json.dumps(value, indent=1).encode() + b"\n"
    names = ("kind", "version", "time", "level", "software", "dataset", "source", "digest")
    assert tuple(value) == names
    assert (value["kind"], value["version"], value["level"]) == ("shardkit receipt", 1, "full")
    age = datetime.now(UTC) - datetime.fromisoformat(value["time"])
    assert 0 <= age.total_seconds() < 3600
    assert value["software"]["shardkit"] == shardkit.__version__
    assert {"python", "numpy", "pillow", "lmdb", "h5py", "torch"} <= set(value["software"])
    manifest = stated(place)
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


def test_a_receipt_is_valid_for_the_same_data_converted_again(folder: Path, tmp_path: Path) -> None:
    for to in FORMATS:
        one = make_dataset(folder, tmp_path / f"one {to}", to=to)
        path = written(one, folder, tmp_path / f"{to}.json")
        assert checked(make_dataset(folder, tmp_path / f"two {to}", to=to), path) == {}


def test_another_dataset_fails_the_receipt(folder: Path, receipt: Path, tmp_path: Path) -> None:
    make_tree(folder, {"cat/more.jpg": jpeg(seed=77), "cat/list.txt": b"x"})
    reasons = checked(make_dataset(folder, tmp_path / "other"), receipt)
    assert reasons.keys() == {"shardkit.json"}
    assert "made, with 6 images" in reasons["shardkit.json"]


def test_a_file_that_was_removed_is_named(folder: Path, tmp_path: Path) -> None:
    make_tree(folder, {"cat/list.txt": b"x"})
    place = make_dataset(folder, tmp_path / "made")
    path = written(place, folder, tmp_path / "receipt.json")
    time = json.loads(path.read_bytes())["time"]
    shutil.rmtree(place)
    (folder / "cat/list.txt").unlink()
    make_dataset(folder, place)
    reasons = checked(place, path)
    assert reasons["ignored.jsonl"] == "it was removed since the receipt"
    assert reasons["shardkit.json"] == f"it was changed since the receipt of {time}"
    shown = refuses(1, "verify", place, "--check-receipt", path, "--workers", 1)
    assert "differs: ignored.jsonl" in shown.stderr
    assert "next" not in shown.stdout  # a repair cannot help


def test_changed_files_are_listed(place: Path, receipt: Path) -> None:
    def change(manifest: Any) -> Any:
        first, *others = manifest.shards
        more = replace(others[-1], name="shard-000009.lmdb", rows=0)
        return replace(manifest, shards=(replace(first, sha256="0" * 64), *others, more))

    restate(place, change)
    time = json.loads(receipt.read_bytes())["time"]
    assert checked(place, receipt) == {
        "shardkit.json": f"it was changed since the receipt of {time}",
        "shard-000000.lmdb": "it was changed since the receipt",
        "shard-000009.lmdb": "it was added since the receipt",
    }


def test_a_receipt_of_splits_covers_all(tmp_path: Path) -> None:
    make_folder(tmp_path / "photos/train")
    make_folder(tmp_path / "photos/val", each=1)
    place = make_dataset(tmp_path / "photos", tmp_path / "made", to="webdataset")
    path = written(place, tmp_path / "photos", tmp_path / "receipt.json")
    value = json.loads(path.read_bytes())
    assert value["dataset"]["rows"] == {"train": 6, "val": 2}
    assert value["dataset"]["digest"] == stated(place).digest
    assert "val/shard-000000.tar" in value["dataset"]["files"]
    assert checked(place, path) == {}
    restate(place / "val", lambda manifest: replace(manifest, notes={"small": 1}))
    assert checked(place, path).keys() == {"shardkit.json"}


def test_a_receipt_omits_libraries_without_metadata(
    place: Path, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    libraries = ("numpy", "no-such-library")
    monkeypatch.setattr("shardkit.verification.receipt._LIBRARIES", libraries)
    path = written(place, folder, tmp_path / "receipt.json")
    assert set(json.loads(path.read_bytes())["software"]) == {"shardkit", "python", "numpy"}


def test_a_place_that_is_taken_or_cannot_be_written_is_refused_before_the_work(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_tree(tmp_path, {"file": b"mine", "folder": None})
    (tmp_path / "link").symlink_to("nowhere")
    words = ("verify", base / "made", "--against", base / "photos", "--write-receipt")
    for name in ("file", "folder", "link", "missing/receipt", "file/receipt"):
        assert refuses(2, *words, tmp_path / name, facts=(tmp_path / name,)).stdout == ""
    assert (tmp_path / "file").read_bytes() == b"mine"
    assert not (tmp_path / "nowhere").exists()

    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(13, os.strerror(13))

    monkeypatch.setattr(os, "open", refuse)
    refuses(2, *words, tmp_path / "receipt", facts=(os.strerror(13),))


def test_a_full_disk_leaves_no_partial_receipt(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr("shardkit.system.files.sync", full)
    words = ("verify", base / "made", "--against", base / "photos", "--workers", 1)
    refuses(1, *words, "--write-receipt", tmp_path / "receipt.json", facts=(os.strerror(28),))
    assert tree(tmp_path) == {}


# --- receipts that are none ---


NONE_OF_OURS: dict[str, tuple[bytes, int, str]] = {
    "empty": (b"", 2, "receipt"),
    "text": (b"hello", 2, "receipt"),
    "binary": (bytes(range(256)), 2, "receipt"),
    "an image": (jpeg(), 2, "receipt"),
    "a list": (b"[]", 2, "object"),
    "a number": (b"7", 2, "object"),
    "other JSON": (b"{}", 2, "receipt"),
    "deep": (b'{"a":' * 30000 + b"1" + b"}" * 30000, 2, "nested"),
    "long": (b'{"a":' + b"9" * 9999 + b"}", 2, "receipt"),
    "no version": (b'{"kind":"shardkit receipt"}', 2, "None"),
    "newer": (sealed({"kind": "shardkit receipt", "version": 2}), 2, "2"),
    "true": (sealed({"kind": "shardkit receipt", "version": True}), 2, "True"),
    "an escape": (
        sealed({"kind": "shardkit receipt", "version": "\x1b]0;x\n"}),
        2,
        r"'\x1b]0;x\n'",
    ),
    "no digest": (b'{"kind":"shardkit receipt","version":1}', 1, "receipt"),
    "no more": (sealed({"kind": "shardkit receipt", "version": 1}), 1, "lacks"),
}


def test_other_files_are_refused_as_receipts(base: Path, tmp_path: Path) -> None:
    for name, (content, code, fact) in NONE_OF_OURS.items():
        path = tmp_path / name
        path.write_bytes(content)
        refuses(code, "verify", base / "made", "--check-receipt", path, facts=(path, fact))
    for path in (base / "made/shardkit.json", base / "made", tmp_path / "missing"):
        refuses(2, "verify", base / "made", "--check-receipt", path, facts=(path,))


def test_deep_nesting_is_a_shardkit_error(base: Path, tmp_path: Path) -> None:
    """Reading and writing JSON give up at different depths."""
    for depth in (300, 700, 900, 1200, 3000):
        inner = b"[" * depth + b"]" * depth
        text = b'{"kind":"shardkit receipt","version":1,"digest":"x","deep":%b}' % inner
        (tmp_path / "receipt").write_bytes(text)
        found = invoke("verify", base / "made", "--check-receipt", tmp_path / "receipt")
        assert isinstance(found.exception, shardkit.ShardkitError)


def test_any_changed_byte_is_noticed_unless_equivalent(place: Path, receipt: Path) -> None:
    content = receipt.read_bytes()
    noticed = 0
    for position in range(0, len(content), 11):
        changed = bytearray(content)
        changed[position] ^= 1
        receipt.write_bytes(changed)
        words = ("verify", place, "--check-receipt", receipt, "--workers", 1)
        if invoke(*words).exit_code:
            noticed += 1
        else:  # a blank that became another
            assert json.loads(changed) == json.loads(content)
    assert noticed > 100


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


def test_an_incomplete_forged_receipt_is_refused(place: Path, receipt: Path) -> None:
    content = receipt.read_bytes()
    for change in WRONG.values():
        value = json.loads(content)
        change(value)
        receipt.write_bytes(sealed(value))
        refuses(1, "verify", place, "--check-receipt", receipt, facts=(receipt,))
    receipt.write_bytes(sealed(json.loads(content)))
    assert checked(place, receipt) == {}


def test_only_small_receipts_are_read(base: Path, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with (tmp_path / "huge").open("wb") as file:
        file.truncate(1 << 40)
    for path in (tmp_path / "pipe", Path("/dev/zero"), tmp_path / "huge"):
        refuses(2, "verify", base / "made", "--check-receipt", path, facts=(path,))
