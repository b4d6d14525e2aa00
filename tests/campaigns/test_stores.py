"""An object store with every fault, readers that are killed, and readers that share."""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from buckets import BUCKET, FAULTS, SECRET, Bucket, upload_by_hand
from campaign import draw, points
from helpers import DEADLINE, make_dataset, make_folder

ROUNDS = range(points(1, 5))
PACKAGE = Path(__file__).parents[2]
URL = f"s3://{BUCKET}/data"

READ = """
import sys; sys.path[:0] = sys.argv[1:2]
import hashlib; import numpy as np
from shardkit.dataset.opened import Fetching; from shardkit.dataset.shardset import open_shards
from shardkit.errors import ShardkitError
try:
    fetching = Fetching(*sys.argv[3:])
    shards = open_shards(sys.argv[2], fetching=fetching)
    digest = hashlib.sha256()
    for row in range(len(shards)):
        found = shards.find(np.array([row]))
        digest.update(found.read(0, memoryview(bytearray(found.longest))).data)
    print(digest.hexdigest())
except ShardkitError as error:
    print("error:", error)
"""


@pytest.fixture
def dataset(tmp_path: Path, bucket: Bucket) -> Path:
    """A dataset of ten shards, in the bucket too."""
    place = make_dataset(make_folder(tmp_path / "photos", each=20), tmp_path / "data")
    upload_by_hand(bucket, place, "data")
    return place


def start(cache: Path, limit: int) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", READ, str(PACKAGE), URL, str(cache), f"{limit}B"]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def read(cache: Path, limit: int = 1 << 40) -> str:
    return start(cache, limit).communicate(timeout=4 * DEADLINE)[0].strip()


def require_good(cache: Path) -> None:
    """Check that every complete shard in the cache has the content that its name states."""
    for path in (cache / "shards").iterdir():
        if re.fullmatch("[0-9a-f]{64}", path.name):
            assert hashlib.sha256(path.read_bytes()).hexdigest() == path.name


@pytest.mark.parametrize("number", ROUNDS)
def test_faults_give_the_same_bytes_or_a_named_error(
    number: int, bucket: Bucket, dataset: Path, tmp_path: Path
) -> None:
    right = read(tmp_path / "intact")
    assert re.fullmatch("[0-9a-f]{64}", right)
    bucket.random.seed(draw(number).random())
    # Expired credentials end a command; the other faults are repaired.
    bucket.rates = dict.fromkeys(FAULTS, 0.05) | {"expired": 0.0025}
    outcomes = []
    for each in range(points(3, 8)):
        outcomes.append(read(tmp_path / f"cache-{each}"))
        require_good(tmp_path / f"cache-{each}")

    named = rf"error: {URL}\S*: the credentials have expired; renew them \(.*\)"
    for outcome in outcomes:
        assert outcome == right or re.fullmatch(named, outcome), outcome
        assert SECRET not in outcome
    assert right in outcomes
    bucket.rates = {}
    assert read(tmp_path / "cache-0") == right


@pytest.mark.parametrize("number", ROUNDS)
def test_kills_at_any_moment_leave_no_bad_file(
    number: int, bucket: Bucket, dataset: Path, tmp_path: Path
) -> None:
    cache, chance = tmp_path / "cache", draw(number)
    right = read(tmp_path / "intact")
    bucket.rates, bucket.stalled = {"stall": 0.5}, 0.05
    for _ in range(points(3, 12)):
        reader = start(cache, limit=30_000)
        time.sleep(chance.uniform(0.2, 1.5))
        victims = [*_children(reader.pid), reader.pid]
        for victim in victims if chance.random() < 0.5 else victims[:1]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(victim, signal.SIGKILL)
        reader.communicate(timeout=DEADLINE)
        if (cache / "shards").exists():
            require_good(cache)
    bucket.rates = {}

    assert read(cache, limit=30_000) == right
    require_good(cache)


def test_readers_that_share_a_small_cache_all_finish(
    bucket: Bucket, dataset: Path, tmp_path: Path
) -> None:
    size = max(path.stat().st_size for path in dataset.glob("shard-*"))
    cache = tmp_path / "cache"
    right = read(tmp_path / "intact")
    readers = [start(cache, 2 * size) for _ in range(4)]
    most = 0
    while any(reader.poll() is None for reader in readers):
        if (cache / "shards").exists():
            sizes = []
            for entry in os.scandir(cache / "shards"):
                try:
                    sizes.append(entry.stat().st_size)
                except FileNotFoundError:
                    continue
            most = max(most, sum(sizes))
        time.sleep(0.005)

    assert {reader.communicate(timeout=DEADLINE)[0].strip() for reader in readers} == {right}
    assert 0 < most <= 3 * size


def _children(process: int) -> list[int]:
    try:
        text = Path(f"/proc/{process}/task/{process}/children").read_text()
    except OSError:
        return []
    return [int(each) for each in text.split()]
