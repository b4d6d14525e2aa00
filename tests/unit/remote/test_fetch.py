"""Requests and whole objects of S3, Google and Azure: ranges, faults, uploads and conditions."""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from hashlib import sha256
from pathlib import Path

import azurite
import pytest
from buckets import BUCKET, Bucket
from helpers import DEADLINE, make_dataset, tree, wait_until
from refusals import refused

from shardkit import ShardkitError, download, open_dataset, upload, verify
from shardkit.cluster.jobs import open_jobs
from shardkit.cluster.work import commit, plan_jobs
from shardkit.errors import CorruptDataset, UsageError
from shardkit.remote import client, fetch, objects
from shardkit.remote.cache import BLOCK, Cache, RemoteFile, open_cache
from shardkit.remote.process import call

SIZE = 12 * BLOCK


class Gate:
    """A store whose reads wait until the gate opens."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, int]] = []
        self.open = threading.Event()

    def read(self, name: str, start: int, end: int) -> memoryview:
        self.asked.append((name, start // BLOCK))
        assert self.open.wait(DEADLINE)
        return memoryview(bytes(end - start))


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Gate:
    made = Gate()
    monkeypatch.setattr(fetch, "open_store", lambda _: made)
    return made


@pytest.fixture
def cache(tmp_path: Path) -> Cache:
    return open_cache(tmp_path / "cache", None)


def test_one_file_after_another_is_requested(gate: Gate, cache: Cache) -> None:
    digest = hashlib.sha256(bytes(SIZE)).hexdigest()
    files = [RemoteFile("s3://bucket", name, SIZE, digest) for name in "ab"]
    with ThreadPoolExecutor(2) as threads:
        done = [
            threads.submit(fetch.fetch_file, cache, file, cache.folder / "shards" / file.name)
            for file in files
        ]
        wait_until(lambda: len(gate.asked) == 8, "requests")
        gate.open.set()
        for each in done:
            each.result(DEADLINE)

    names = "".join(name for name, _ in gate.asked)
    assert names in (12 * "a" + 12 * "b", 12 * "b" + 12 * "a")


# Requests to a store: by several readers, of an object that changes, and with faults.


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


# Whole objects are written once, copied with their SHA-256, and never taken for others.

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


# Google's and Azure's stores work like S3: uploads, conditions, ranges, lists and errors.

AZURITE = pytest.mark.skipif(not azurite.PROGRAM, reason="needs azurite: npm install -g azurite")


@pytest.fixture(params=["gs", pytest.param("az", marks=[pytest.mark.slow, AZURITE])])
def scheme(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A scheme whose server runs and has an empty bucket."""
    if request.param == "gs":
        request.getfixturevalue("bucket")
        yield "gs"
        return
    with azurite.running(BUCKET) as environment:
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        yield "az"


def test_a_dataset_is_written_read_and_verified(scheme: str, folder: Path, tmp_path: Path) -> None:
    url, dataset = f"{scheme}://{BUCKET}/data", make_dataset(folder, tmp_path / "data", to="hdf5")

    assert upload(dataset, url)
    assert not upload(dataset, url)
    with refused(UsageError):
        upload(make_dataset(folder, tmp_path / "other", to="lmdb"), url)
    assert not [name for name in call(objects.sizes, url) if name.startswith(".")]
    assert verify(url, against=folder).ok
    near = open_dataset(dataset, decode="bytes")
    far = open_dataset(url, decode="bytes", cache=tmp_path / "cache")
    assert [far[row] for row in range(len(far))] == [near[row] for row in range(len(near))]
    copies = download(f"{url}/shard-*.h5", tmp_path / "copies")
    assert {path.read_bytes() for path in copies.parent.iterdir()} == {
        path.read_bytes() for path in dataset.glob("shard-*")
    }
    fake = tmp_path / "fake"
    fake.write_bytes(bytes((dataset / "shard-000001.h5").stat().st_size))
    call(objects.put, url, "shard-000001.h5", fake, "0" * 64)
    assert [finding.file for finding in verify(url, "quick").findings] == ["shard-000001.h5"]


@pytest.mark.slow
def test_jobs_share_a_bucket(scheme: str, folder: Path, tmp_path: Path) -> None:
    url = f"{scheme}://{BUCKET}/jobs"
    plan_jobs(folder, url, to="lmdb", shard_samples=4)
    with refused(UsageError):
        plan_jobs(folder, url, to="lmdb", shard_samples=2)
    with open_jobs(url) as jobs:
        for number in jobs.claimed():
            jobs.build(number)

    commit(url)

    made = make_dataset(folder, tmp_path / "made")
    files = {str(path.relative_to(made)) for path in made.rglob("*") if path.is_file()}
    assert call(objects.sizes, url).keys() == files
    assert verify(url, against=folder).ok


@pytest.mark.slow
def test_large_files_are_sent_in_parts(scheme: str, tmp_path: Path) -> None:
    url, content, file = f"{scheme}://{BUCKET}/x", bytes(range(256)) * 80_000, tmp_path / "x"
    file.write_bytes(content)

    call(objects.put, url, "x.tar", file, "1" * 64)
    call(objects.put, url, "x.tar", file, "2" * 64)  # replaces it

    assert call(objects.digests, url, ["x.tar"]) == {"x.tar": "2" * 64}
    assert download(f"{url}/x.tar", tmp_path).read_bytes() == content


def test_errors_are_one_line(scheme: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with refused(UsageError, "://nobucket/x"):
        open_dataset(f"{scheme}://nobucket/x", cache=tmp_path / "cache")
    with refused(UsageError):
        open_dataset(f"{scheme}://{BUCKET}/x", cache=tmp_path / "cache")
    if scheme == "az":
        monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_KEY", "d3Jvbmc=")
        with refused(UsageError, "403"):
            open_dataset(f"{scheme}://{BUCKET}/x", cache=tmp_path / "cache")


def test_missing_credentials_name_the_variables(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("AZURE_STORAGE_ACCOUNT_NAME", raising=False)
    with pytest.raises(UsageError, match="AZURE_STORAGE_ACCOUNT_NAME"):
        open_dataset("az://nobody/x", cache=tmp_path / "cache")


def test_a_time_limit_is_a_number(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHARDKIT_STORE_TIMEOUT", "soon")
    with refused(UsageError, "SHARDKIT_STORE_TIMEOUT", "'soon'"):
        open_dataset("s3://nobody/x", cache=tmp_path / "cache")
