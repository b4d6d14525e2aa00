"""Requests to a store: by several readers, of an object that changes, and with faults."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from buckets import BUCKET, Bucket
from helpers import tree
from refusals import refused

from shardkit import ShardkitError
from shardkit.remote import client, fetch


def test_several_readers_copy_each_file_once(bucket: Bucket, tmp_path: Path) -> None:
    content = os.urandom(5000)
    bucket.put("in/x-00.tar", content)

    def copy(_: int) -> int:
        return fetch.copy(f"s3://{BUCKET}/in", "x-00.tar", tmp_path / "x-00.tar")

    with ThreadPoolExecutor(4) as readers:
        sizes = sorted(readers.map(copy, range(4)))

    assert sizes == [0, 0, 0, 5000]
    assert (tmp_path / "x-00.tar").read_bytes() == content
    assert bucket.count("GET")["x-00.tar"] == 1


def test_a_file_that_changes_meanwhile_is_not_kept(
    bucket: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bucket.put("in/x-00.tar", os.urandom(999))

    def overwritten(*_: object) -> None:
        bucket.put("in/x-00.tar", os.urandom(999))

    monkeypatch.setattr(fetch, "_fill", overwritten)

    with refused(ShardkitError, "in/x-00.tar"):
        fetch.copy(f"s3://{BUCKET}/in", "x-00.tar", tmp_path / "x-00.tar")

    assert tree(tmp_path) == {}


@pytest.mark.parametrize("fault", ["busy", "reset"])
def test_writes_and_lists_are_repeated_as_long_as_reads(
    fault: str, bucket: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client, "_RETRIES", 0)  # as after those of obstore, of a few seconds
    store = client.ObjectStore(f"s3://{BUCKET}/slow")
    (tmp_path / "file").write_bytes(b"content")
    bucket.rates = {fault: 0.6}

    store.create("new", b"content")
    store.put("file", tmp_path / "file", "0" * 64)
    assert store.sizes() == {"new": 7, "file": 7}
    assert sorted(store.names()) == ["file", "new"]
    store.delete("file")

    bucket.rates = {}
    assert bucket.names() == ["slow/new"]
