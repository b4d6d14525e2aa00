"""A dataset in an object store is read through the cache: the same samples, or a named error."""

from __future__ import annotations

import os
import pickle
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from buckets import BUCKET, SECRET, Bucket, upload_by_hand
from helpers import DEADLINE, invoke, make_dataset, make_folder, wait_until
from PIL import Image

from shardkit.conversion.convert import convert
from shardkit.dataset.opened import Fetching, open_remote
from shardkit.dataset.shardset import ShardSet, open_shards
from shardkit.errors import CorruptRecord, CorruptShard, ShardkitError, UsageError
from shardkit.stores.client import ObjectStore
from shardkit.torch.data.datasets import open_dataset
from shardkit.torch.loader import make_loader

URL = f"s3://{BUCKET}/data"

READ = """
import sys; sys.path[:0] = sys.argv[1:2]
import numpy as np
from shardkit.dataset.opened import Fetching; from shardkit.dataset.shardset import open_shards
shards = open_shards(sys.argv[2], fetching=Fetching(sys.argv[3]))
found = shards.find(np.arange(len(shards)))
buffer = memoryview(bytearray(found.longest))
print(sum(len(found.read(number, buffer).data) for number in range(len(found))))
"""


@pytest.fixture
def dataset(tmp_path: Path) -> Path:
    """A dataset of five shards."""
    return make_dataset(make_folder(tmp_path / "photos", each=10), tmp_path / "data", to="lmdb")


def read_all(shards: ShardSet) -> list[bytes]:
    found = shards.find(np.arange(len(shards)))
    buffer = memoryview(bytearray(found.longest))
    return [bytes(found.read(number, buffer).data) for number in range(len(found))]


def remote(cache: Path, limit: int | None = None) -> ShardSet:
    return open_shards(URL, fetching=Fetching(cache, limit))


def shards_in(cache: Path) -> list[Path]:
    return sorted((cache / "shards").iterdir())


def test_each_file_is_fetched_once(bucket: Bucket, dataset: Path, tmp_path: Path) -> None:
    upload_by_hand(bucket, dataset, "data")
    bucket.requests.clear()
    local, found = open_shards(dataset), remote(tmp_path / "cache")

    assert read_all(found) == read_all(local)
    assert read_all(pickle.loads(pickle.dumps(remote(tmp_path / "cache")))) == read_all(local)
    assert list(found.keys) == list(local.keys)

    gets = bucket.count("GET")
    assert gets.pop("shardkit.json") == 2  # of two openings
    assert set(gets.values()) == {1}
    assert len(shards_in(tmp_path / "cache")) == 5


def test_a_planted_cache_gives_the_right_samples(
    bucket: Bucket, dataset: Path, tmp_path: Path
) -> None:
    upload_by_hand(bucket, dataset, "data")
    right = read_all(remote(tmp_path / "cache"))
    for path in (tmp_path / "cache").rglob("*"):
        if path.is_file() and len(path.name) != len("lock") and path.suffix != ".TAG":
            content = bytearray(path.read_bytes())
            content[len(content) // 2] ^= 1  # of the same size, as if unpacked from an archive
            path.unlink()
            path.write_bytes(content)

    assert read_all(remote(tmp_path / "cache")) == right

    (folder,) = (tmp_path / "cache" / "datasets").iterdir()
    folder.rename(tmp_path / "elsewhere")
    folder.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ShardkitError, match=r"^the cache .* cannot be used: .*symbolic link"):
        remote(tmp_path / "cache")


def test_processes_share_a_cache(bucket: Bucket, dataset: Path, tmp_path: Path) -> None:
    upload_by_hand(bucket, dataset, "data")
    bucket.requests.clear()
    package = Path(__file__).parents[3]
    command = [sys.executable, "-c", READ, str(package), URL, str(tmp_path / "cache")]
    readers = [subprocess.Popen(command, stdout=subprocess.PIPE) for _ in range(4)]

    printed = {reader.communicate(timeout=DEADLINE)[0] for reader in readers}

    assert printed == {b"%d\n" % sum(map(len, read_all(open_shards(dataset))))}
    gets = bucket.count("GET")
    assert gets.pop("shardkit.json") == 4
    assert set(gets.values()) == {1}, gets


def test_a_small_cache_is_enough(bucket: Bucket, dataset: Path, tmp_path: Path) -> None:
    upload_by_hand(bucket, dataset, "data")
    found = remote(tmp_path / "cache", limit=0)

    assert read_all(found) == read_all(open_shards(dataset))
    assert [int(row) for row in found.labels_of(np.arange(3))]

    found.find(np.arange(1))
    assert len(shards_in(tmp_path / "cache")) == 1


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["thread", "helper", "process"])
def test_a_loader_gives_the_same_epoch(
    engine: str, bucket: Bucket, dataset: Path, tmp_path: Path
) -> None:
    upload_by_hand(bucket, dataset, "data")
    # spawn: a server of forks from an earlier test has no credentials
    start = "auto" if engine == "thread" else "spawn"
    options: dict[str, Any] = {
        "engine": engine,
        "num_workers": 2,
        "collate_fn": list,
        "start_method": start,
    }
    near = open_dataset(dataset, decode="bytes")
    far = open_dataset(URL, decode="bytes", cache=tmp_path / "cache", cache_limit="1GB")
    far[0]  # the helper of this process is not for forked workers

    batches = [list(make_loader(each, 4, shuffle=True, **options)) for each in (near, far)]

    assert batches[0] == batches[1]


def test_shards_are_fetched_ahead_in_order(bucket: Bucket, dataset: Path, tmp_path: Path) -> None:
    upload_by_hand(bucket, dataset, "data")
    far = open_dataset(URL, decode="bytes", cache=tmp_path / "cache")
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

    assert read_all(remote(tmp_path / "cache")) == read_all(open_shards(dataset))


@pytest.fixture
def large(tmp_path: Path) -> Path:
    """A dataset of one shard of 10 MB: three blocks."""
    noise = np.random.default_rng(0).integers(0, 256, (13, 500, 500, 3), np.uint8)
    images = [{"image": Image.fromarray(pixels)} for pixels in noise]
    convert(images, tmp_path / "large", to="webdataset", encode="png")
    return tmp_path / "large"


def test_ranges_fetch_only_what_is_read(bucket: Bucket, large: Path, tmp_path: Path) -> None:
    upload_by_hand(bucket, large, "data")
    bucket.requests.clear()
    near = open_dataset(large, decode="bytes")
    far = open_dataset(URL, decode="bytes", cache=tmp_path / "cache", fetch="ranges")

    assert far[0] == near[0]
    assert bucket.count("GET")["shard-000000.tar"] == 1
    (blocks,) = shards_in(tmp_path / "cache")
    assert blocks.stat().st_blocks * 512 < 5 << 20
    rows = [11, 5, 0, 11]
    assert list(far[rows]) == list(near[rows])
    assert list(far[:]) == list(near[:])
    assert bucket.count("GET")["shard-000000.tar"] <= 3
    other = open_dataset(URL, decode="bytes", cache=tmp_path / "cache", fetch="ranges")
    assert list(other[:]) == list(near[:])
    assert bucket.count("GET")["shard-000000.tar"] <= 3


def test_a_whole_record_is_read_from_a_whole_shard_only(
    bucket: Bucket, large: Path, tmp_path: Path
) -> None:
    upload_by_hand(bucket, large, "data")
    far = open_shards(URL, fetching=Fetching(tmp_path / "cache", None, "ranges"))
    far.find(np.array([0]))  # fetches blocks

    assert far.record(11) == open_shards(large).record(11)


def test_wrong_bytes_of_a_range_are_fetched_again(
    bucket: Bucket, large: Path, tmp_path: Path
) -> None:
    upload_by_hand(bucket, large, "data")
    near = open_dataset(large, decode="bytes")
    far = open_dataset(URL, decode="bytes", cache=tmp_path / "cache", fetch="ranges", cache_limit=0)
    bucket.planned = {"shard-000000.tar": ["wrong"]}

    with pytest.raises(CorruptRecord, match="It was removed from the cache; read it again"):
        list(far[:])

    assert list(far[:]) == list(near[:])
    small = open_dataset(
        URL, decode="bytes", cache=tmp_path / "small", fetch="ranges", cache_limit=1
    )
    assert [small[row] for row in (0, 6, 12)] == [near[row] for row in (0, 6, 12)]
    with pytest.raises(UsageError, match="fetch='parts' is unknown"):
        open_dataset(URL, cache=tmp_path / "cache", fetch="parts")
    with pytest.raises(UsageError, match="leave verify= out"):
        open_dataset(URL, cache=tmp_path / "cache", fetch="ranges", verify=False)


def test_a_truncated_shard_is_named(bucket: Bucket, dataset: Path, tmp_path: Path) -> None:
    upload_by_hand(bucket, dataset, "data")
    bucket.put("data/shard-000001.lmdb", b"short")

    with pytest.raises(CorruptShard, match=f"{URL}/shard-000001.lmdb ends at byte 5, too early"):
        read_all(remote(tmp_path / "cache"))


def test_a_kill_leaves_no_bad_file(bucket: Bucket, dataset: Path, tmp_path: Path) -> None:
    upload_by_hand(bucket, dataset, "data")
    found = remote(tmp_path / "cache")
    bucket.rates, bucket.stalled = {"stall": 1.0}, 0.5
    package = Path(__file__).parents[3]
    command = [sys.executable, "-c", READ, str(package), URL, str(tmp_path / "cache")]
    reader = subprocess.Popen(command, stdout=subprocess.PIPE)
    wait_until(lambda: shards_in(tmp_path / "cache"), "the first fetch")
    os.kill(reader.pid, signal.SIGKILL)
    reader.communicate(timeout=DEADLINE)
    bucket.rates = {}

    assert read_all(found) == read_all(open_shards(dataset))
    wait_until(lambda: len(shards_in(tmp_path / "cache")) == 5, "the end of the helper")
    assert not list((tmp_path / "cache" / "shards").glob("*.part"))


def test_errors_name_the_remedy_and_no_secret(
    bucket: Bucket, dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(url: str = URL) -> str:
        with pytest.raises(ShardkitError) as error:
            open_remote(url, Fetching(tmp_path / "cache"))
        text = str(error.value)
        assert SECRET not in text
        assert "\n" not in text
        return text

    assert refused() == f"{URL} is not a shardkit dataset: it contains no shardkit.json"
    assert "no such bucket; check its name" in refused("s3://other-bucket/data")
    upload_by_hand(bucket, dataset, "data")
    for fault, remedy in (
        ("expired", "the credentials have expired; renew them"),
        ("denied", "ask the owner of the bucket for permission"),
        ("region", "set AWS_REGION=eu-west-1"),
        ("unsigned", "the credentials are wrong"),
    ):
        bucket.rates = {fault: 1.0}
        assert remedy in refused()
    bucket.rates = {"denied": 1.0}
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    assert "there are no credentials; set AWS_ACCESS_KEY_ID" in refused()
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    monkeypatch.setenv("AWS_SKIP_SIGNATURE", "true")
    assert "ask the owner of the bucket for permission" in refused()


def test_a_server_that_does_not_answer_is_named(bucket: Bucket) -> None:
    store = ObjectStore(URL)
    error = store._error("a", RuntimeError("Generic S3 error - HTTP error: error sending request"))
    assert str(error).endswith("does not answer; check the network and AWS_ENDPOINT_URL")


def test_credentials_of_boto3_are_used(
    bucket: Bucket, dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    upload_by_hand(bucket, dataset, "data")
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    with pytest.raises(UsageError, match="there are no credentials; set AWS_ACCESS_KEY_ID"):
        remote(tmp_path / "cache")
    (tmp_path / "credentials").write_text(
        f"[work]\naws_access_key_id = key\naws_secret_access_key = {SECRET}\n"
    )
    monkeypatch.setenv("AWS_PROFILE", "work")

    assert len(remote(tmp_path / "cache")) == 20
    monkeypatch.setenv("AWS_PROFILE", "other")
    with pytest.raises(UsageError, match=r"~/.aws cannot be used \(ProfileNotFound\)"):
        remote(tmp_path / "cache")


def test_the_missing_extra_is_named(
    bucket: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "obstore.py").write_text("raise ModuleNotFoundError(name='obstore')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("SHARDKIT_STORE_TIMEOUT", "3")  # a new helper

    with pytest.raises(UsageError, match=r"pip install 'shardkit\[s3\]'"):
        open_remote(URL, Fetching(tmp_path / "cache"))


def test_wrong_uses_are_refused(bucket: Bucket, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="read through a local cache"):
        open_dataset(URL)
    with pytest.raises(UsageError, match="is local; cache=, cache_limit= and fetch="):
        open_dataset(tmp_path, cache=tmp_path)
    with pytest.raises(UsageError, match="cache_limit='much' is not a size"):
        open_dataset(URL, cache=tmp_path / "cache", cache_limit="much")


def test_splits_and_https(bucket: Bucket, tmp_path: Path) -> None:
    make_folder(tmp_path / "photos" / "train")
    make_folder(tmp_path / "photos" / "val")
    assert not invoke(
        "convert", "imagefolder", tmp_path / "photos", tmp_path / "data", "--to", "webdataset"
    ).exit_code
    upload_by_hand(bucket, tmp_path / "data", "data")

    with pytest.raises(UsageError, match="split='train'"):
        open_dataset(URL, cache=tmp_path / "cache")
    dataset = open_dataset(URL, split="val", cache=tmp_path / "cache")
    assert len(dataset) == 6
    assert f"'{URL}/val'" in repr(dataset)
    with pytest.raises(IndexError, match=f"row 6 is not in {URL}/val"):
        dataset[6]
    plain = f"http://{bucket.address}/{BUCKET}/data/train"
    shutil.rmtree(tmp_path / "cache")
    assert open_dataset(plain, cache=tmp_path / "cache", decode="bytes")[0]
