"""Whole objects are written once, copied with their SHA-256, and never taken for others."""

from __future__ import annotations

from hashlib import sha256
from pathlib import Path

from buckets import BUCKET, Bucket
from refusals import refused

from shardkit import CorruptDataset
from shardkit.remote import objects
from shardkit.remote.process import call

URL = f"s3://{BUCKET}/below"


def test_an_object_is_created_once(bucket: Bucket) -> None:
    assert call(objects.create, URL, "claim", b"ours")
    assert call(objects.create, URL, "claim", b"ours")  # by an earlier attempt
    assert not call(objects.create, URL, "claim", b"theirs")
    assert bucket.ask("GET", "below/claim") == b"ours"


def test_files_are_copied_to_a_store_and_back(bucket: Bucket, tmp_path: Path) -> None:
    names = ["a", "b/c"]
    for name in names:
        (tmp_path / "from" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "from" / name).write_text(name)

    call(objects.send, URL, tmp_path / "from", names)

    assert call(objects.sizes, URL) == {"a": 1, "b/c": 3}
    digests = {name: sha256(name.encode()).hexdigest() for name in names}
    assert call(objects.digests, URL, [*names, "absent"]) == digests
    assert call(objects.receive, URL, tmp_path / "to", [*names, "absent"]) == ["absent"]
    assert [(tmp_path / "to" / name).read_text() for name in names] == names


def test_an_object_that_differs_from_its_digest_is_refused(bucket: Bucket, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"content")
    call(objects.put, URL, "file", tmp_path / "file", "0" * 64)

    with refused(CorruptDataset, "SHA", "-256"):
        call(objects.receive, URL, tmp_path / "to", ["file"])


def test_objects_are_deleted_if_they_exist(bucket: Bucket) -> None:
    call(objects.create, URL, "a", b"")
    call(objects.create, URL, "b", b"")

    call(objects.delete, URL, ["a", "absent"])

    assert bucket.names() == ["below/b"]
