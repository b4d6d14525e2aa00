"""Schemes that only fsspec knows can be read: the same bytes as locally, or a named error."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

import forked
import fsspec
import pytest
from helpers import make_dataset, run_main
from refusals import refused
from shelf import FAULTS
from table import for_each

from shardkit import ShardkitError, UsageError, convert, download, open_dataset, upload, verify
from shardkit.errors import CorruptShard
from shardkit.stores.filesystem import FileSystem
from shardkit.stores.urls import as_url

URL = "shelf://host/data"


@pytest.fixture
def shelf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder whose files are ``shelf://host/...``, for this process and its helper."""
    place, plugin = tmp_path / "shelf", tmp_path / "plugin" / "shelf-1.dist-info"
    place.mkdir()
    plugin.mkdir(parents=True)
    (plugin / "METADATA").write_text("Metadata-Version: 2.1\nName: shelf\nVersion: 1\n")
    (plugin / "entry_points.txt").write_text("[fsspec.specs]\nshelf=shelf:Shelf\n")
    monkeypatch.syspath_prepend(str(plugin.parent))
    monkeypatch.setenv("FSSPEC_SHELF_PLACE", str(place))
    monkeypatch.setenv("SHARDKIT_STORE_TIMEOUT", "1")
    # A new Python: fsspec reads the variables and looks for plugins when it is imported.
    monkeypatch.setattr("shardkit.system.helper._launch", forked.launch)
    fsspec.register_implementation("shelf", "shelf.Shelf", clobber=True)
    return place


@pytest.fixture
def dataset(folder: Path, shelf: Path, tmp_path: Path) -> Path:
    """A dataset of two shards, also at the URL."""
    place = make_dataset(folder, tmp_path / "data", to="webdataset")
    shutil.copytree(place, shelf / "data")
    return place


def plan(shelf: Path, *faults: str) -> None:
    (shelf / FAULTS).write_text("".join(f"{fault}\n" for fault in faults))


def test_a_dataset_is_read_despite_faults(dataset: Path, shelf: Path, tmp_path: Path) -> None:
    plan(
        shelf,
        "shardkit.json busy",
        *(f"shard-000000.tar {fault}" for fault in ("busy", "short", "wrong", "stall")),
    )
    near = open_dataset(dataset, decode="bytes")
    for fetch in ("shards", "ranges"):
        far = open_dataset(URL, decode="bytes", cache=tmp_path / fetch, fetch=fetch)
        assert [far[row] for row in range(len(far))] == [near[row] for row in range(len(near))]
    assert not (shelf / FAULTS).read_text()


def test_a_range_that_arrives_in_pieces_has_no_byte_more(
    shelf: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(fsspec.config.conf, "shelf", {"place": str(shelf)})
    (shelf / "data").mkdir()
    (shelf / "data/file").write_bytes(bytes(range(200)))
    plan(shelf, "file short")

    assert FileSystem(URL)._range("file", 10, 50) == bytes(range(10, 50))


def test_other_content_is_refused(dataset: Path, shelf: Path, tmp_path: Path) -> None:
    plan(shelf, *["shard-000000.tar wrong"] * 3)
    os.truncate(shelf / "data" / "shard-000001.tar", 1000)
    far = open_dataset(URL, decode="bytes", cache=tmp_path / "cache")

    with refused(CorruptShard, URL, "/shard-000000"):
        far[0]
    with refused(CorruptShard, "shard-000001.tar", "1000"):
        far[len(far) - 1]


def test_verify_and_info_work(dataset: Path, folder: Path, shelf: Path) -> None:
    assert verify(URL, against=folder).ok
    assert "2 shards" in run_main("info", URL).stdout
    assert run_main("verify", URL, "--level", "quick").returncode == 0

    (shelf / "data" / "shard-000001.tar").unlink()
    assert {each.file for each in verify(URL, "quick").findings} == {"shard-000001.tar"}


def test_sources_are_copied_again_when_they_change(
    dataset: Path, shelf: Path, tmp_path: Path
) -> None:
    found = download(f"{URL}/shard-*.tar", tmp_path / "copies")
    assert sorted(path.name for path in found.parent.iterdir()) == [
        "shard-000000.tar",
        "shard-000001.tar",
    ]
    path = shelf / "data" / "shard-000000.tar"
    path.write_bytes(path.read_bytes()[::-1])
    os.utime(path, ns=(1, 1))
    download(f"{URL}/shard-*.tar", tmp_path / "copies")
    assert (found.parent / path.name).read_bytes() == path.read_bytes()

    with refused(UsageError):
        download("shelf://host/data", tmp_path / "copies")


def test_nothing_is_written(dataset: Path, folder: Path, tmp_path: Path) -> None:
    with refused(UsageError):
        upload(dataset, "shelf://host/new")
    with refused(UsageError):
        convert(folder, "shelf://host/new", to="lmdb", staging=tmp_path / "staging")
    assert not (tmp_path / "staging").exists()


def test_refused_access_is_one_line(dataset: Path, shelf: Path, tmp_path: Path) -> None:
    plan(shelf, "shardkit.json denied")

    with refused(UsageError, "FSSPEC_SHELF_") as error:
        open_dataset(URL, cache=tmp_path / "cache")

    assert "secret" not in str(error.value)
    assert run_main("info", "shelf://host/none").returncode == 2


@for_each(
    "url",
    [
        *("simplecache::s3://b/x", "zip://x::shelf://host/x.zip", "shelf://host/x::s3://b/x"),
        *("local://host/x", "dir://host/x", "s3a://b/x", "ftp://host/x", "nothing://host/x"),
    ],
)
def test_caches_archives_and_local_files_are_refused(url: str) -> None:
    with refused(UsageError):
        as_url(url)


def test_wrong_credentials_are_not_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    from shardkit.stores import filesystem

    class AuthenticationException(Exception):
        pass

    def refuse(*_: object, **__: object) -> None:
        raise AuthenticationException("secret")

    monkeypatch.setattr(filesystem, "url_to_fs", refuse)
    with refused(UsageError):
        filesystem.FileSystem("sftp://host/x").read("a", 0, 1)


def test_missing_packages_name_their_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from shardkit.stores.store import open_store

    monkeypatch.setitem(sys.modules, "paramiko", None)
    monkeypatch.delitem(sys.modules, "fsspec.implementations.sftp", raising=False)
    with refused(UsageError):
        open_store("sftp://host/x").get("shardkit.json", 1)

    monkeypatch.setitem(sys.modules, "fsspec", None)
    with pytest.raises(UsageError, match=r"pip install 'shardkit\[fsspec\]'"):
        as_url("sftp://host/x")


def test_a_server_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    from shardkit.stores.store import open_store

    monkeypatch.setattr("shardkit.stores.store._DEADLINE", 0.0)
    with refused(ShardkitError, "webhdfs://127", "0", "1:1/x/a"):
        open_store("webhdfs://127.0.0.1:1/x").read("a", 0, 1)
