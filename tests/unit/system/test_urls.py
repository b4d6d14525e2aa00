"""URLs and local paths are told apart, and credentials in a URL are refused unseen."""

from __future__ import annotations

from pathlib import Path

import pytest
from table import for_each

from shardkit import UsageError
from shardkit.system.urls import as_local, as_url


@for_each(
    ("path", "url"),
    [
        ("s3://bucket/data/", "s3://bucket/data"),
        (Path("s3://bucket/data"), "s3://bucket/data"),
        ("GS://bucket", "gs://bucket"),
        ("https://host/data", "https://host/data"),
        ("http://127.0.0.1:80/data", "http://127.0.0.1:80/data"),
        ("file:///data", None),
        ("data", None),
        ("/data/s3:/x", None),
    ],
)
def test_urls_are_recognized(path: str | Path, url: str | None) -> None:
    assert as_url(path) == url


@for_each("url", ["ftp://host/x", "http://host/x", "s3://", "https://[1/x", "hf://datasets/x"])
def test_other_urls_are_refused(url: str) -> None:
    with pytest.raises(UsageError):
        as_url(url)


@for_each("rest", ["me:word@host/x", "host/x?signature=word", "host/x#word"])
def test_a_url_with_credentials_is_refused_without_repeating_it(rest: str) -> None:
    with pytest.raises(UsageError, match="credentials") as refused:
        as_url(f"https://{rest}")

    assert "word" not in str(refused.value)


def test_file_urls_are_local_paths() -> None:
    assert as_local("file:///a%20b/c") == "/a b/c"
    assert as_local("file:/data") == "/data"
    assert as_local("file:name") == "file:name"
