"""The lock of a work folder: races with another process, links, and disks that fail."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
import socket
from pathlib import Path
from typing import Any

import pytest
from helpers import make_tree, tree
from refusals import refused

from shardkit.conversion.lock import locked, require_dead
from shardkit.errors import ConversionFailed, UsageError


@pytest.fixture
def work(tmp_path: Path) -> Path:
    return tmp_path / "out/work"


def test_a_work_folder_that_is_a_link_is_refused(work: Path, tmp_path: Path) -> None:
    elsewhere = make_tree(tmp_path / "elsewhere", {"mine": b"x"})
    work.parent.mkdir()
    work.symlink_to(elsewhere)
    with (
        refused(UsageError),
        locked(work, lambda: None),
    ):
        pass
    assert os.listdir(elsewhere) == ["mine"]


def test_a_link_in_the_work_folder_is_refused_and_the_lock_is_released(work: Path) -> None:
    make_tree(work, {})
    (work / "state").symlink_to("/")
    with (
        refused(UsageError, "work/state"),
        locked(work, lambda: None),
    ):
        pass
    (work / "state").unlink()
    with locked(work, lambda: None):
        pass


def test_a_disk_that_fails_is_no_refusal(work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(fcntl, "flock", fail)
    with (
        pytest.raises(ConversionFailed, match=os.strerror(errno.EIO)),
        locked(work, lambda: None),
    ):
        pass


def test_a_work_folder_removed_before_its_lock_is_opened_is_created_again(
    work: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mkdir, checks = os.mkdir, 0

    def late(path: Path, *more: Any) -> None:
        mkdir(path, *more)
        if path == work and checks == 1:
            os.rmdir(path)

    def check() -> None:
        nonlocal checks
        checks += 1

    monkeypatch.setattr(os, "mkdir", late)
    with locked(work, check):
        assert os.listdir(work) == ["lock"]
    assert checks == 2


def test_a_lock_in_a_work_folder_that_was_replaced_does_not_count(
    work: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flock, checks = fcntl.flock, 0

    def late(descriptor: int, operation: int) -> None:
        if checks == 1:
            shutil.rmtree(work)
            make_tree(work, {"lock": b""})
        flock(descriptor, operation)

    def check() -> None:
        nonlocal checks
        checks += 1

    monkeypatch.setattr(fcntl, "flock", late)
    with (
        locked(work, check),
        (work / "lock").open("w") as other,
        pytest.raises(BlockingIOError),
    ):
        flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
    assert checks == 2


@pytest.mark.parametrize("process", [1, 2**70])
def test_a_process_that_cannot_be_asked_counts_as_running(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, process: int
) -> None:
    def refuse(number: int, _: int) -> None:
        error = PermissionError if number == 1 else OverflowError
        raise error

    monkeypatch.setattr(os, "kill", refuse)
    owner = json.dumps({"machine": socket.gethostname(), "process": process}).encode()
    make_tree(tmp_path, {"work/owner": owner})
    before = tree(tmp_path)
    with pytest.raises(UsageError, match=rf"process {process} on .*remove .*owner"):
        require_dead(tmp_path, "work/owner")
    assert tree(tmp_path) == before
