"""Several users of one dataset: permissions to replace, resume and block."""

from __future__ import annotations

import fcntl
import os
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from helpers import make_dataset, make_folder, tree
from refusals import refused

from shardkit import convert, verify
from shardkit.conversion.staging import WORK_NAME, open_staging
from shardkit.errors import UsageError

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="it needs root, to become other users")

OWNER, SECOND, READER, GROUP = 64101, 64102, 64103, 64100


@pytest.fixture
def shared(reachable: Path) -> Path:
    """A folder with photos and a dataset of another user."""
    root = reachable
    make_folder(root / "photos", each=2)
    make_dataset(root / "photos", root / "out")
    for path in (root / "out", *(root / "out").rglob("*")):
        os.chown(path, OWNER, GROUP)
    return root


def as_user(user: int, group: int, work: Callable[[], object]) -> None:
    """Call ``work`` in a child that is that user; it must not raise."""
    child = os.fork()
    if child == 0:
        try:
            os.setgroups([])
            os.setgid(group)
            os.setuid(user)
            os.umask(0o002)
            work()
            os._exit(0)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def replace(root: Path) -> None:
    convert(root / "photos", root / "out", to="hdf5", force=True)


@pytest.mark.parametrize("mode", [0o777, 0o1777])
def test_a_dataset_that_cannot_be_removed_completely_is_not_touched(
    shared: Path, mode: int
) -> None:
    (shared / "out").chmod(mode)
    if mode & 0o1000:
        (shared / "out/index").chmod(0o777)
    before = tree(shared / "out")

    def check_refusal() -> None:
        with refused(UsageError):
            replace(shared)

    as_user(SECOND, SECOND, check_refusal)
    assert tree(shared / "out") == before
    assert verify(shared / "out").ok


def test_a_dataset_of_another_user_that_may_be_removed_is_replaced(shared: Path) -> None:
    for folder in (shared / "out", shared / "out/index"):
        folder.chmod(0o777)
    as_user(SECOND, SECOND, lambda: replace(shared))
    assert verify(shared / "out").ok
    assert (shared / "out/shardkit.json").stat().st_uid == SECOND


def test_a_second_user_of_the_group_resumes_a_conversion(shared: Path) -> None:
    os.chown(shared, 0, GROUP)
    shared.chmod(0o2775)
    options: dict[str, Any] = {"to": "webdataset", "shard_samples": 1}
    target = shared / "new"

    def interrupted() -> None:
        def stop(_: object) -> None:
            if len(list((target / WORK_NAME / "dataset").glob("shard-*"))) > 1:
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            convert(shared / "photos", target, on_progress=stop, **options)

    def resumed() -> None:
        assert convert(shared / "photos", target, **options).reused_shards

    as_user(OWNER, GROUP, interrupted)
    as_user(SECOND, GROUP, resumed)
    assert verify(target).ok


def test_a_user_who_may_only_read_cannot_hold_the_lock(shared: Path) -> None:
    def look() -> None:
        lock = shared / "out" / WORK_NAME / "lock"
        assert lock.stat().st_uid == 0
        for flags in (os.O_RDONLY, os.O_WRONLY, os.O_RDWR):
            with pytest.raises(PermissionError):
                fcntl.flock(os.open(lock, flags), fcntl.LOCK_EX)

    with open_staging(shared / "out", force=True):
        as_user(READER, READER, look)
