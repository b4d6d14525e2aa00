"""Datasets and lists in an object store: the same samples and contents, or a named error."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import forked
import numpy as np
import pytest
from buckets import BUCKET, SECRET, Bucket, upload_by_hand
from helpers import DEADLINE, encoded, make_dataset, make_folder, wait_until
from PIL import Image
from refusals import refused

from shardkit import ShardDataset, ShardkitError, convert, make_loader, open_dataset
from shardkit.errors import CorruptShard, UsageError
from shardkit.remote import client, whole
from shardkit.remote.client import ObjectStore
from shardkit.remote.store import Listed, Missing

URL = f"s3://{BUCKET}/data"

FORKS = multiprocessing.get_context("forkserver")


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dataset of five shards."""
    root = tmp_path_factory.mktemp("remote")
    return make_dataset(make_folder(root / "photos", each=10), root / "data")


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dataset of one shard of 10 MB: three blocks."""
    noise = np.random.default_rng(0).integers(0, 256, (13, 500, 500, 3), np.uint8)
    images = [encoded(Image.fromarray(each), "PNG", compress_level=0) for each in noise]
    samples = [{"image": image} for image in images]
    place = tmp_path_factory.mktemp("large") / "data"
    convert(samples, place, to="webdataset", workers=1)
    return place


def local(place: Path) -> ShardDataset:
    return open_dataset(place, decode="bytes")


def remote(cache: Path, **options: Any) -> ShardDataset:
    return open_dataset(URL, decode="bytes", cache=cache, **options)


def all_of(dataset: ShardDataset) -> list[tuple[bytes, int]]:
    return list(dataset[:])


def read_in_process(environment: dict[str, str], cache: Path, found: Any) -> None:
    """Read the remote dataset in a process of its own."""
    os.environ.clear()
    os.environ.update(environment)
    found.put(sum(len(data) for data, _ in all_of(remote(cache))))


def reader_of(cache: Path, found: Any) -> Any:
    """Start a process that reads the dataset through a cache."""
    process = FORKS.Process(target=read_in_process, args=(dict(os.environ), cache, found))
    process.start()
    return process


def shards_in(cache: Path) -> list[Path]:
    return sorted((cache / "shards").iterdir())


def test_each_file_is_fetched_once(bucket: Bucket, dataset: Path, tmp_path: Path) -> None:
    upload_by_hand(bucket, dataset, "data")
    bucket.requests.clear()
    near, found = local(dataset), remote(tmp_path / "cache")

    assert all_of(found) == all_of(near)
    assert all_of(pickle.loads(pickle.dumps(remote(tmp_path / "cache")))) == all_of(near)
    assert list(found.keys) == list(near.keys)

    gets = bucket.count("GET")
    assert gets.pop("shardkit.json") == 2  # of two openings
    assert set(gets.values()) == {1}
    assert len(shards_in(tmp_path / "cache")) == 5


def test_a_planted_cache_gives_the_right_samples(
    bucket: Bucket, dataset: Path, tmp_path: Path
) -> None:
    upload_by_hand(bucket, dataset, "data")
    right = all_of(remote(tmp_path / "cache"))
    for path in (tmp_path / "cache").rglob("*"):
        if path.is_file() and len(path.name) != len("lock") and path.suffix != ".TAG":
            content = bytearray(path.read_bytes())
            content[len(content) // 2] ^= 1  # of the same size, as if unpacked from an archive
            path.unlink()
            path.write_bytes(content)

    assert all_of(remote(tmp_path / "cache")) == right

    (folder,) = (tmp_path / "cache" / "datasets").iterdir()
    folder.rename(tmp_path / "elsewhere")
    folder.symlink_to(tmp_path / "elsewhere")
    with refused(ShardkitError, tmp_path / "cache", "symbolic link"):
        remote(tmp_path / "cache")


def test_processes_share_a_cache(bucket: Bucket, dataset: Path, tmp_path: Path) -> None:
    upload_by_hand(bucket, dataset, "data")
    bucket.requests.clear()
    found = FORKS.Queue()
    readers = [reader_of(tmp_path / "cache", found) for _ in range(3)]

    sizes = {found.get(timeout=DEADLINE) for _ in readers}

    for reader in readers:
        reader.join(DEADLINE)
    assert sizes == {sum(len(data) for data, _ in all_of(local(dataset)))}
    gets = bucket.count("GET")
    assert gets.pop("shardkit.json") == 3
    assert set(gets.values()) == {1}, gets


def test_a_small_cache_is_enough(bucket: Bucket, dataset: Path, tmp_path: Path) -> None:
    upload_by_hand(bucket, dataset, "data")
    found, near = remote(tmp_path / "cache", cache_limit=0), local(dataset)

    assert all_of(found) == all_of(near)
    assert found.targets.tolist() == near.targets.tolist()

    assert found[0] == near[0]
    assert len(shards_in(tmp_path / "cache")) == 1


def test_shards_are_fetched_ahead_in_order(bucket: Bucket, dataset: Path, tmp_path: Path) -> None:
    upload_by_hand(bucket, dataset, "data")
    far = remote(tmp_path / "cache")
    batches = iter(make_loader(far, 2, num_workers=0, collate_fn=list))

    next(batches)

    wait_until(lambda: len(shards_in(tmp_path / "cache")) == 3, "two shards fetched ahead")
    list(batches)
    gets = bucket.count("GET")
    assert [gets[f"shard-{number:06d}.lmdb"] for number in range(5)] == [1] * 5


@pytest.mark.parametrize("fault", ["busy", "reset", "short", "wrong"])
def test_faults_are_repaired(fault: str, bucket: Bucket, dataset: Path, tmp_path: Path) -> None:
    upload_by_hand(bucket, dataset, "data")
    bucket.rates = {fault: 0.2}

    assert all_of(remote(tmp_path / "cache")) == all_of(local(dataset))


def test_a_truncated_shard_is_named(bucket: Bucket, dataset: Path, tmp_path: Path) -> None:
    upload_by_hand(bucket, dataset, "data")
    bucket.put("data/shard-000001.lmdb", b"short")

    with pytest.raises(CorruptShard, match=f"{URL}/shard-000001.lmdb .*byte 5"):
        all_of(remote(tmp_path / "cache"))


def test_a_kill_leaves_no_bad_file(bucket: Bucket, dataset: Path, tmp_path: Path) -> None:
    upload_by_hand(bucket, dataset, "data")
    found = remote(tmp_path / "cache")
    bucket.rates, bucket.stalled = {"stall": 1.0}, 0.5
    queue = FORKS.Queue()
    reader = reader_of(tmp_path / "cache", queue)
    wait_until(lambda: shards_in(tmp_path / "cache"), "the first fetch")
    os.kill(reader.pid, signal.SIGKILL)
    reader.join(DEADLINE)
    bucket.rates = {}

    assert all_of(found) == all_of(local(dataset))
    wait_until(lambda: len(shards_in(tmp_path / "cache")) == 5, "the end of the helper")
    assert not list((tmp_path / "cache" / "shards").glob("*.part"))


def test_errors_name_the_remedy_and_no_secret(
    bucket: Bucket, dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*facts: object, url: str = URL) -> None:
        with refused(ShardkitError, url, *facts) as error:
            open_dataset(url, cache=tmp_path / "cache")
        assert SECRET not in str(error.value)
        assert "\n" not in str(error.value)

    fails("shardkit.json")
    fails("does not exist", url="s3://other-bucket/data")
    upload_by_hand(bucket, dataset, "data")
    for fault, remedy in (
        ("expired", "have expired"),
        ("denied", "permission"),
        ("region", "AWS_REGION=eu-west-1"),
        ("unsigned", "are wrong"),
    ):
        bucket.rates = {fault: 1.0}
        fails(remedy)
    bucket.rates = {"denied": 1.0}
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    fails("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    monkeypatch.setenv("AWS_SKIP_SIGNATURE", "true")
    fails("permission")


@pytest.mark.slow
def test_credentials_of_boto3_are_used(
    bucket: Bucket, dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    upload_by_hand(bucket, dataset, "data")
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    with pytest.raises(UsageError, match="AWS_ACCESS_KEY_ID"):
        remote(tmp_path / "cache")
    (tmp_path / "credentials").write_text(
        f"[work]\naws_access_key_id = key\naws_secret_access_key = {SECRET}\n"
    )
    monkeypatch.setenv("AWS_PROFILE", "work")

    assert len(remote(tmp_path / "cache")) == 20
    monkeypatch.setenv("AWS_PROFILE", "other")
    with pytest.raises(UsageError, match="ProfileNotFound"):
        remote(tmp_path / "cache")


def test_the_missing_extra_is_named(
    bucket: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "obstore.py").write_text("raise ModuleNotFoundError(name='obstore')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("SHARDKIT_STORE_TIMEOUT", "3")  # a new helper
    monkeypatch.setattr("shardkit.system.helper._launch", forked.launch)  # in a new Python

    with refused(UsageError, "pip install 'shardkit[s3]'"):
        remote(tmp_path / "cache")


def test_wrong_uses_are_refused(bucket: Bucket, dataset: Path, tmp_path: Path) -> None:
    upload_by_hand(bucket, dataset, "data")
    cache = {"cache": tmp_path / "cache"}
    wrong: list[tuple[dict[str, Any], tuple[object, ...]]] = [
        ({}, ("cache=",)),
        ({**cache, "cache_limit": "much"}, ("cache_limit='much'",)),
        ({**cache, "cache_limit": 50}, ("cache_limit=50", "50MiB")),
    ]
    for options, facts in wrong:
        with refused(UsageError, *facts):
            open_dataset(URL, **options)
    with refused(UsageError, tmp_path, "cache="):
        open_dataset(tmp_path, cache=tmp_path)


def test_splits_and_https(bucket: Bucket, tmp_path: Path) -> None:
    make_folder(tmp_path / "photos" / "train")
    make_folder(tmp_path / "photos" / "val")
    make_dataset(tmp_path / "photos", tmp_path / "data", to="webdataset")
    upload_by_hand(bucket, tmp_path / "data", "data")

    with pytest.raises(UsageError, match="split='train'"):
        open_dataset(URL, cache=tmp_path / "cache")
    dataset = open_dataset(URL, split="val", cache=tmp_path / "cache")
    assert len(dataset) == 6
    assert f"'{URL}/val'" in repr(dataset)
    with refused(IndexError, "6", URL, "/val"):
        dataset[6]
    plain = f"http://{bucket.address}/{BUCKET}/data/train"
    shutil.rmtree(tmp_path / "cache")
    assert open_dataset(plain, cache=tmp_path / "cache", decode="bytes")[0]


# Whole objects of a store: their list, and their contents, which are read ahead.

FILE_URL = f"s3://{BUCKET}/photos"


class _Endless:
    """A store that repeats a page of its listing."""

    url = FILE_URL

    def listing(self, folder: str, *, deep: bool) -> Iterator[list[Listed]]:
        while True:
            yield [Listed("cat/1.png", 1, 1), Listed("cat/2.png", 1, 1)]


def test_a_listing_that_repeats_itself_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(whole, "open_store", lambda _: _Endless())

    with refused(ShardkitError):
        whole.listing(FILE_URL, "", True, tmp_path / "list")


def test_folders_without_an_end_are_refused(
    bucket: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    bucket.put("photos/cat/1.png", b"x")
    more = b"<NextContinuationToken>1</NextContinuationToken><IsTruncated>true"
    bucket.edit = lambda listing: listing.replace(b"<IsTruncated>false", more)
    monkeypatch.setattr(client, "_LEVEL_SECONDS", 0)

    with refused(ShardkitError):
        ObjectStore(FILE_URL).folders("")


def test_a_listing_of_another_folder_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(whole, "open_store", lambda _: _Other())

    with refused(ShardkitError, "'dog/1.png'"):
        whole.listing(FILE_URL, "cat", True, tmp_path / "list")


class _Other:
    """A store that lists an object of another folder."""

    def listing(self, folder: str, *, deep: bool) -> Iterator[list[Listed]]:
        yield [Listed("cat/1.png", 1, 1), Listed("dog/1.png", 1, 1)]


class _Shelf:
    """A store whose objects contain their names, but for those that are missing or changed."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def whole(self, name: str, size: int, stamp: int) -> bytes | None:
        self.asked.append(name)
        if name == "gone":
            raise Missing(name)
        return None if name == "changed" else name.encode()


@pytest.fixture
def shelf(monkeypatch: pytest.MonkeyPatch) -> _Shelf:
    store = _Shelf()
    monkeypatch.setattr(whole, "open_store", lambda _: store)
    monkeypatch.setattr(whole, "_ahead", whole._Ahead())
    return store


def objects(*names: str, size: int = 1) -> list[whole.Object]:
    return [(name, size, 0) for name in names]


def test_contents_are_joined_up_to_the_first_that_is_not_as_listed(shelf: _Shelf) -> None:
    planned = objects("a", "b", "gone", "c", "changed")
    whole.ahead(FILE_URL, planned)

    assert whole.take(FILE_URL, planned) == b"ab"
    assert whole.take(FILE_URL, objects("gone")) == whole.GONE
    assert whole.take(FILE_URL, objects("c", "changed")) == b"c"
    assert whole.take(FILE_URL, objects("changed")) == whole.CHANGED
    assert sorted(shelf.asked) == ["a", "b", "c", "changed", "changed", "gone", "gone"]


def test_an_object_may_be_left_out_or_read_without_a_plan(shelf: _Shelf) -> None:
    whole.ahead(FILE_URL, objects("a", "b", "c", "d"))

    assert whole.take(FILE_URL, objects("other")) == b"other"
    assert whole.take(FILE_URL, objects("c")) == b"c"
    assert whole.take(FILE_URL, objects("d")) == b"d"
    assert shelf.asked.count("c") == shelf.asked.count("d") == 1


def test_large_objects_are_not_all_read_ahead(shelf: _Shelf) -> None:
    planned = objects("a", "b", "c", "d", size=9 << 20)
    whole.ahead(FILE_URL, planned)

    assert whole.take(FILE_URL, planned[3:]) == b"d"  # those before it were not wanted
    assert "b" not in shelf.asked
