"""Of datasets in an object store, what no public function shows at once."""

from __future__ import annotations

from buckets import BUCKET, Bucket

from shardkit.remote.client import ObjectStore


def test_a_server_that_does_not_answer_is_named(bucket: Bucket) -> None:
    """A connection that is refused is tried again for minutes."""
    store = ObjectStore(f"s3://{BUCKET}/data")
    error = store._error("a", RuntimeError("Generic S3 error - HTTP error: error sending request"))
    assert "AWS_ENDPOINT_URL" in str(error)
