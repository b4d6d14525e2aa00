"""Of datasets in an object store, what no public function shows at once."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from buckets import BUCKET, Bucket, upload_by_hand
from helpers import make_dataset, make_folder

from shardkit.dataset.opened import Fetching
from shardkit.dataset.shardset import open_shards
from shardkit.stores.client import ObjectStore


def test_a_whole_record_is_read_from_a_whole_shard_only(bucket: Bucket, tmp_path: Path) -> None:
    place = make_dataset(make_folder(tmp_path / "photos"), tmp_path / "made", to="webdataset")
    upload_by_hand(bucket, place, "data")
    far = open_shards(f"s3://{BUCKET}/data", fetching=Fetching(tmp_path / "cache", None, "ranges"))
    far.find(np.array([0]))  # fetches blocks

    assert far.record(3) == open_shards(place).record(3)


def test_a_server_that_does_not_answer_is_named(bucket: Bucket) -> None:
    """A connection that is refused is tried again for minutes."""
    store = ObjectStore(f"s3://{BUCKET}/data")
    error = store._error("a", RuntimeError("Generic S3 error - HTTP error: error sending request"))
    assert "AWS_ENDPOINT_URL" in str(error)
