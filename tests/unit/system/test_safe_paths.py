"""Files below a folder: no link is followed, and nothing but files and folders is touched."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from helpers import make_tree
from interrupting import interrupt_everywhere
from refusals import refused

from shardkit.system import safe_paths
from shardkit.system.safe_paths import (
    LinkRefused,
    make_folder,
    open_plain,
    opened,
    remove_tree,
    require_removable,
    status_of,
    walk,
)


def test_a_walk_yields_files_and_folders_in_order(tmp_path: Path) -> None:
    make_tree(tmp_path, {"b/c/file": b"", "a": b""})
    assert list(walk(tmp_path)) == [
        ("a", False),
        ("b", True),
        ("b/c", True),
        ("b/c/file", False),
    ]


def test_a_walk_refuses_links_and_what_is_neither_file_nor_folder(tmp_path: Path) -> None:
    make_tree(tmp_path, {"links/file": b"", "pipes/file": b""})
    (tmp_path / "links/link").symlink_to("file")
    os.mkfifo(tmp_path / "pipes/pipe")
    with pytest.raises(LinkRefused, match="links/link"):
        list(walk(tmp_path, "links"))
    with refused(OSError, "pipes/pipe"):
        list(walk(tmp_path, "pipes"))


def test_folders_that_are_nested_too_deeply_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shardkit.system.safe_paths._DEEPEST", 2)
    make_tree(tmp_path, {"a/b/c/d/file": b""})
    with refused(OSError):
        list(walk(tmp_path))
    with refused(OSError):
        remove_tree(tmp_path, "a")
    assert (tmp_path / "a/b/c/d/file").exists()


def test_a_removed_link_leaves_what_it_names(tmp_path: Path) -> None:
    make_tree(tmp_path, {"kept/file": b"", "gone/file": b""})
    (tmp_path / "gone/link").symlink_to(tmp_path / "kept")
    remove_tree(tmp_path, "gone")
    remove_tree(tmp_path, "gone")  # which need not exist
    assert (tmp_path / "kept/file").exists()
    assert not (tmp_path / "gone").exists()


@pytest.mark.parametrize("name", ["link", "link/file"])
def test_no_link_is_followed(tmp_path: Path, name: str) -> None:
    make_tree(tmp_path, {"folder/file": b""})
    (tmp_path / "link").symlink_to("folder")
    with pytest.raises(LinkRefused):
        status_of(tmp_path, name)
    with pytest.raises(LinkRefused):
        require_removable(tmp_path, [name])
    with pytest.raises(LinkRefused):
        make_folder(tmp_path, f"{name}/new")
    with pytest.raises(LinkRefused):
        os.close(open_plain(tmp_path / "link", os.O_RDONLY))


def test_a_folder_cannot_be_removed_as_a_file(tmp_path: Path) -> None:
    make_tree(tmp_path, {"folder/below/file": b"", "folder/file": b""})
    require_removable(tmp_path, ["folder/file", "folder/missing", "missing/file"])
    with pytest.raises(IsADirectoryError, match="folder/below"):
        require_removable(tmp_path, ["folder/file", "folder/below"])


def test_files_in_a_folder_without_permission_cannot_be_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_tree(tmp_path, {"file": b""})
    monkeypatch.setattr(os, "access", lambda *_, **__: False)
    with pytest.raises(PermissionError):
        require_removable(tmp_path, ["file"])


def test_files_of_others_in_a_sticky_folder_cannot_be_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_tree(tmp_path, {"folder/file": b""})
    (tmp_path / "folder").chmod(0o1777)
    own = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: own + 1)
    with pytest.raises(PermissionError, match="another user"):
        require_removable(tmp_path, ["folder/file"])


def test_an_interruption_closes_no_file_twice(tmp_path: Path) -> None:
    """A second time would fail, or close a file that another thread opened."""
    make_tree(tmp_path, {"a/b/file": b""})

    def open_folder() -> None:
        with opened(tmp_path, "a/b"):
            pass

    assert interrupt_everywhere(open_folder, safe_paths) > 10
