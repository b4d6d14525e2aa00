"""`verify` finds damage in an object store, and does not take a fault on the way for damage."""

from __future__ import annotations

import errno
import os
import tempfile
from pathlib import Path
from typing import Any

import pytest
from buckets import BUCKET, Bucket
from helpers import copy_dataset, make_folder, make_tree, run_main
from refusals import refused

from shardkit import ShardkitError, attach, convert, open_dataset, upload, verify
from shardkit.errors import UsageError
from shardkit.remote import objects
from shardkit.remote import verification as remote
from shardkit.remote.process import call

URL = f"s3://{BUCKET}/data"


@pytest.fixture
def dataset(folder: Path, tmp_path: Path, bucket: Bucket) -> Path:
    """A dataset of two shards, uploaded."""
    place = copy_dataset(folder, tmp_path / "data", to="webdataset")
    upload(place, URL)
    return place


def places(result: Any) -> set[tuple[str, int | None]]:
    return {(finding.file, finding.row) for finding in result.findings}


def test_an_intact_dataset_is_read_completely(
    dataset: Path, bucket: Bucket, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, folder: Path
) -> None:
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))

    result = verify(URL, against=folder)

    assert result.ok
    assert (result.shards, result.records) == (2, 6)
    assert result.manifests == verify(dataset).manifests
    assert not list(temporary.iterdir())
    done = run_main("verify", URL, "--level", "quick")
    assert (done.returncode, f"{URL}: intact" in done.stdout) == (0, True)


def test_damage_is_found(dataset: Path, bucket: Bucket) -> None:
    damaged = bytearray((dataset / "shard-000000.tar").read_bytes())
    damaged[2000] ^= 1
    bucket.put("data/shard-000000.tar", bytes(damaged))
    bucket.put("data/shard-000001.tar", b"short")
    bucket.put("data/index/rows.npy", bytes((dataset / "index" / "rows.npy").stat().st_size))
    bucket.put("data/extra/x", b"")

    quick, full = verify(URL, "quick"), verify(URL)

    assert places(quick) == {("shard-000001.tar", None), ("index/rows.npy", None)}
    assert places(full) >= places(quick) | {("shard-000000.tar", None)}
    assert full.extras == ["extra/x"]
    assert not any("/tmp" in finding.reason for finding in full.findings)
    assert run_main("verify", URL).returncode == 1


def test_a_replaced_shard_of_the_same_size_is_found_quickly(
    dataset: Path, bucket: Bucket, tmp_path: Path
) -> None:
    size = (dataset / "shard-000000.tar").stat().st_size
    fake = tmp_path / "fake"
    fake.write_bytes(bytes(size))
    call(objects.put, URL, "shard-000000.tar", fake, "0" * 64)

    assert places(verify(URL, "quick")) == {("shard-000000.tar", None)}


def test_a_missing_file_and_a_damaged_manifest_are_found(dataset: Path, bucket: Bucket) -> None:
    bucket.ask("DELETE", "data/shard-000000.tar")
    assert ("shard-000000.tar", None) in places(verify(URL, "quick"))

    bucket.put("data/shardkit.json", b"{}")

    assert places(verify(URL)) == {("shardkit.json", None)}


def test_faults_on_the_way_are_no_damage(dataset: Path, bucket: Bucket) -> None:
    names = ("shardkit.json", "rows.npy", "shard-000000.tar", "shard-000001.tar")
    bucket.planned = {name: ["busy", "reset", "short", "wrong"] for name in names}

    assert verify(URL).ok

    assert not any(bucket.planned.values())


def test_an_attached_dataset_is_not_followed(bucket: Bucket, dataset: Path, tmp_path: Path) -> None:
    tars = make_tree(tmp_path / "tars", {p.name: p.read_bytes() for p in dataset.glob("*.tar")})
    attach(tars, tmp_path / "attached")
    manifest = (tmp_path / "attached" / "shardkit.json").read_bytes()
    bucket.put("data/shardkit.json", manifest)

    with refused(UsageError, URL):
        verify(URL)
    with refused(UsageError, URL):
        open_dataset(URL, cache=tmp_path / "cache")
    with refused(UsageError, tmp_path / "attached"):
        upload(tmp_path / "attached", URL)


def test_splits_are_verified(bucket: Bucket, tmp_path: Path) -> None:
    make_folder(tmp_path / "photos" / "train")
    make_folder(tmp_path / "photos" / "val")
    convert(tmp_path / "photos", URL, to="lmdb", staging=tmp_path / "staging")

    assert verify(URL).ok
    bucket.put("data/val/shardkit.json", b"")
    assert places(verify(URL)) == {("val/shardkit.json", None)}


def test_what_cannot_be_verified_is_refused(bucket: Bucket) -> None:
    with refused(UsageError, URL, "shardkit.json"):
        verify(URL)
    with refused(UsageError, URL, "root="):
        verify(URL, root="photos")
    with refused(UsageError, "https://host/data"):
        verify("https://host/data")


def test_a_full_disk_is_not_taken_for_missing_files(
    dataset: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in (errno.ENOSPC, errno.EDQUOT, errno.EMFILE, errno.EIO):

        def failing(*_: object, number: int = number) -> None:
            raise OSError(number, os.strerror(number))

        monkeypatch.setattr(remote, "make_folder", failing)
        with refused(ShardkitError, os.strerror(number)):
            verify(URL, "quick")


def test_names_that_no_dataset_has_change_nothing(
    dataset: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server may list anything; `a` is both a file and a folder."""
    sizes = call(objects.sizes, URL)
    names = ("a", "a/b", "x" * 300, "b//c", "../d", "e/../f", "g/.", "h/")
    for listed in (dict.fromkeys(names, 1 << 70), {"a": 1, "a/b": 1}):
        monkeypatch.setattr(
            remote,
            "call",
            lambda what, *more, listed=listed: (
                {**sizes, **listed} if what is objects.sizes else call(what, *more)
            ),
        )
        assert verify(URL, "quick").ok
