"""Whole objects of a store: their list, and their contents, which are read ahead."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from buckets import BUCKET, Bucket
from refusals import refused

from shardkit import ShardkitError
from shardkit.remote import client, whole
from shardkit.remote.client import ObjectStore
from shardkit.remote.store import Listed, Missing

URL = f"s3://{BUCKET}/photos"


class _Endless:
    """A store that repeats a page of its listing."""

    url = URL

    def listing(self, folder: str, *, deep: bool) -> Iterator[list[Listed]]:
        while True:
            yield [Listed("cat/1.png", 1, 1), Listed("cat/2.png", 1, 1)]


def test_a_listing_that_repeats_itself_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(whole, "open_store", lambda _: _Endless())

    with refused(ShardkitError):
        whole.listing(URL, "", True, tmp_path / "list")


def test_folders_without_an_end_are_refused(
    bucket: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    bucket.put("photos/cat/1.png", b"x")
    more = b"<NextContinuationToken>1</NextContinuationToken><IsTruncated>true"
    bucket.edit = lambda listing: listing.replace(b"<IsTruncated>false", more)
    monkeypatch.setattr(client, "_LEVEL_SECONDS", 0)

    with refused(ShardkitError):
        ObjectStore(URL).folders("")


def test_a_listing_of_another_folder_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(whole, "open_store", lambda _: _Other())

    with refused(ShardkitError, "'dog/1.png'"):
        whole.listing(URL, "cat", True, tmp_path / "list")


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
    whole.ahead(URL, planned)

    assert whole.take(URL, planned) == b"ab"
    assert whole.take(URL, objects("gone")) == whole.GONE
    assert whole.take(URL, objects("c", "changed")) == b"c"
    assert whole.take(URL, objects("changed")) == whole.CHANGED
    assert sorted(shelf.asked) == ["a", "b", "c", "changed", "changed", "gone", "gone"]


def test_an_object_may_be_left_out_or_read_without_a_plan(shelf: _Shelf) -> None:
    whole.ahead(URL, objects("a", "b", "c", "d"))

    assert whole.take(URL, objects("other")) == b"other"
    assert whole.take(URL, objects("c")) == b"c"
    assert whole.take(URL, objects("d")) == b"d"
    assert shelf.asked.count("c") == shelf.asked.count("d") == 1


def test_large_objects_are_not_all_read_ahead(shelf: _Shelf) -> None:
    planned = objects("a", "b", "c", "d", size=9 << 20)
    whole.ahead(URL, planned)

    assert whole.take(URL, planned[3:]) == b"d"  # those before it were not wanted
    assert "b" not in shelf.asked
