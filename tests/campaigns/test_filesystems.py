"""Unusual file systems: read-only, without locks, with partial reads, stale; copied datasets."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import subprocess
import tempfile
import unicodedata
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from campaign import cases
from helpers import DEADLINE, FORMATS, make_dataset, make_folder, python, tree
from no_locks import can_refuse_locks, refuse_locks

from shardkit import append, describe, fields, make_loader, open_dataset, report, verify
from shardkit.dataset import handles
from shardkit.errors import CorruptDataset, UsageError
from shardkit.testing.tools import call_in
from shardkit.verification.reindex import reindex

READ_ALL = """
import os, sys
writing = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
def hook(event, arguments):
    if event == "open" and isinstance(arguments[0], str) and arguments[2] & writing:
        if os.path.abspath(arguments[0]).startswith(sys.argv[1]):
            os.write(2, f"{arguments}\\n".encode())
            os._exit(3)
    if event in ("os.mkdir", "os.rename", "os.remove", "os.truncate", "os.chmod", "os.utime"):
        if sys.argv[1] in str(arguments):
            os._exit(4)
sys.addaudithook(hook)
import shardkit
from shardkit.__main__ import main
dataset = shardkit.open_dataset(sys.argv[1], decode="numpy", verify=True)
samples = [label for _, label in dataset[:]]
for engine in ("thread", "process"):
    options = dict(engine=engine, num_workers=2, start_method="auto")
    given = shardkit.make_loader(dataset, 1, **options)
    assert sum(len(labels) for _, labels in given) == len(samples)
    given.close()
assert shardkit.verify(sys.argv[1], "decode").ok
shardkit.describe(sys.argv[1])
assert len(list(dataset.keys)) == len(list(dataset.paths)) == len(dataset.targets)
print("read", len(samples))
"""
"""Reads a dataset by all ways, and ends at the first attempt to change anything in it."""


@pytest.fixture(scope="module", params=cases(FORMATS, 1))
def pristine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp(str(request.param))
    make_folder(root / "photos")
    return make_dataset(root / "photos", root / "made", to=str(request.param))


@pytest.fixture
def place(pristine: Path, tmp_path: Path) -> Path:
    """A copy, in a folder of its own."""
    shutil.copytree(pristine, tmp_path / "made")
    return tmp_path / "made"


def samples_of(place: Path) -> list[Any]:
    return list(open_dataset(place, decode="bytes", verify=True)[:])


# Read-only.


def test_nothing_is_written_by_whatever_reads(place: Path) -> None:
    before = {**tree(place), "times": str([p.stat().st_mtime_ns for p in sorted(place.rglob("*"))])}
    done = python(READ_ALL, place)
    assert (done.returncode, done.stdout) == (0, "read 6\n"), done.stderr
    after = {**tree(place), "times": str([p.stat().st_mtime_ns for p in sorted(place.rglob("*"))])}
    assert after == before


def as_nobody(work: Callable[[Path], Any], place: Path) -> Any:
    """Return what ``work`` returns for a user who owns nothing."""
    os.setgid(65534)
    os.setuid(65534)
    return work(place)


def _verified(place: Path) -> list[str]:
    return [finding.file for finding in verify(place, "decode").findings]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may become somebody else")
def test_a_dataset_of_another_user_is_read_without_permission_to_write(
    pristine: Path, reachable: Path
) -> None:
    place = shutil.copytree(pristine, reachable / "made")
    for path in [place, *place.rglob("*")]:
        path.chmod(0o555 if path.is_dir() else 0o444)
    assert call_in("fork", as_nobody, samples_of, place) == samples_of(place)
    assert call_in("fork", as_nobody, _verified, place) == []


def _refused(place: Path) -> str:
    try:
        samples_of(place)
    except (CorruptDataset, UsageError, OSError) as error:
        return f"{type(error).__name__}: {error}"
    return "read"


def _unread(place: Path) -> list[str]:
    """Return what verify finds, or the error of a folder that it may not look into."""
    try:
        return _verified(place)
    except OSError as error:
        return [str(error)]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may become somebody else")
@pytest.mark.parametrize("name", ["shard", "index/rows.npy", "index"])
def test_a_file_that_may_not_be_read_is_named(pristine: Path, reachable: Path, name: str) -> None:
    place = shutil.copytree(pristine, reachable / "made")
    name = open_dataset(place).manifest.shards[0].name if name == "shard" else name
    (place / name).chmod(0)
    found = call_in("fork", as_nobody, _refused, place)
    assert found.startswith("PermissionError")  # an error of the machine is not damage
    assert f"{place}/{name}" in found
    assert "ermission denied" in found
    assert call_in("fork", as_nobody, _unread, place)


# Without locks.


def test_readers_ask_for_no_lock(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """HDF5 would take one: another process that holds it does not matter."""
    monkeypatch.delenv("HDF5_USE_FILE_LOCKING", raising=False)
    expected = samples_of(place)
    shards = [place / shard.name for shard in open_dataset(place).manifest.shards]
    held = [shard.open("r+b") for shard in shards]
    for file in held:
        fcntl.flock(file, fcntl.LOCK_EX)
    assert call_in("fork", samples_of, place) == expected
    assert call_in("fork", _verified, place) == []
    for file in held:
        file.close()


def _written_without_locks(code: int, folder: Path, place: Path, to: str) -> dict[str, str]:
    """Let the kernel refuse locks, also those of HDF5's and LMDB's libraries, and use each verb."""
    refuse_locks(code)
    # Elsewhere, processes that have locks would take its folder for abandoned.
    tempfile.tempdir = str(place.parent)
    make_dataset(folder, place, to=to)
    append(place, make_folder(place.parent / "more", ["cow"]))
    fields.add(place, {"score": list(range(9))})
    report(place)
    reindex(place)
    return tree(place)


@pytest.mark.skipif(not can_refuse_locks(), reason="it needs Linux")
@pytest.mark.parametrize("to", FORMATS)
@pytest.mark.parametrize("code", [errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL])
def test_writers_need_no_locks(folder: Path, tmp_path: Path, to: str, code: int) -> None:
    found = call_in("fork", _written_without_locks, code, folder, tmp_path / "made", to)
    assert verify(tmp_path / "made").ok
    assert {name for name in found if name.endswith("owner")} == set()
    assert len(open_dataset(tmp_path / "made")) == 9


# A network that gives less, later, or nothing.


class Network:
    """Stands before the calls that read, as a network filesystem may do them."""

    def __init__(self, patch: pytest.MonkeyPatch, how: str) -> None:
        self._preadv, self._pread = os.preadv, os.pread
        self._how = how
        patch.setattr(os, "preadv", self.preadv)
        patch.setattr(os, "pread", self.pread)

    def _fail(self, *, nowait: bool) -> None:
        if self._how in errno.errorcode.values():
            code = getattr(errno, self._how)
            raise OSError(code, os.strerror(code))
        if nowait and self._how == "no RWF_NOWAIT":
            raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))

    def preadv(self, file: int, buffers: list[memoryview], at: int, flags: int = 0) -> int:
        self._fail(nowait=bool(flags))
        (buffer,) = buffers
        if self._how == "short":
            buffer = memoryview(buffer)[: max(1, len(buffer) // 3)]
        return self._preadv(file, [buffer], at, flags)

    def pread(self, file: int, length: int, at: int) -> bytes:
        self._fail(nowait=False)
        return self._pread(file, max(1, length // 3) if self._how == "short" else length, at)


@pytest.mark.usefixtures("without_native")
@pytest.mark.parametrize("how", ["ESTALE", "EIO", "EINTR", "ETIMEDOUT", "short", "no RWF_NOWAIT"])
def test_a_network_gives_right_samples_or_errors_that_name_them(
    place: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    dataset = open_dataset(place, decode="bytes")
    expected = list(dataset[:])
    with monkeypatch.context() as patch:
        Network(patch, how)
        try:
            found = list(dataset[:])
        except (CorruptDataset, OSError) as error:
            assert how != "no RWF_NOWAIT"
            assert isinstance(error, CorruptDataset) == (how == "short")  # noqa: PT017
            assert str(place) in str(error)  # noqa: PT017 - short reads may also be continued
        else:
            assert found == expected
            assert how in ("short", "no RWF_NOWAIT")
    assert list(dataset[:]) == expected, "it does not recover"


@pytest.mark.usefixtures("without_native")
@pytest.mark.parametrize("how", ["ESTALE", "EIO", "short"])
def test_an_image_that_a_network_does_not_give_names_its_shard(
    place: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    dataset = open_dataset(place, decode="bytes")
    expected = list(dataset[:])
    with monkeypatch.context() as patch:
        network = Network(patch, how)
        patch.setattr(os, "pread", network._pread)

        def preadv(file: int, *rest: Any) -> int:  # only shards are on the network
            there = "shard-" in os.readlink(f"/proc/self/fd/{file}")
            return (network.preadv if there else network._preadv)(file, *rest)

        patch.setattr(os, "preadv", preadv)
        if how == "short":
            assert list(dataset[:]) == expected
            return
        with pytest.raises(OSError, match=os.strerror(getattr(errno, how))) as caught:
            dataset[4]
    assert str(place / "shard-") in str(caught.value)
    assert dataset[4] == expected[4]


def test_a_filesystem_that_takes_no_advice_is_read(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ESPIPE, "Illegal seek")

    expected = samples_of(place)
    monkeypatch.setattr(os, "posix_fadvise", refuse)
    monkeypatch.setattr(handles, "_NOWAIT", 0)
    assert samples_of(place) == expected
    options: dict[str, Any] = {"engine": "thread", "num_workers": 2}
    loader = make_loader(open_dataset(place, decode="numpy"), 1, shuffle=True, **options)
    assert sum(len(labels) for _, labels in loader) == 6
    loader.close()


# Copies.

COPIES: dict[str, str] = {
    "cp -r": "cp -r $1 $2",
    "cp -a": "cp -a $1 $2",
    "sparse": "cp -r --sparse=always $1 $2",
    "rsync": "rsync -a $1/ $2",
    "tar": "tar -C $1 -c . | (mkdir $2 && tar -C $2 -x)",
    "cat": "cp -r $1 $2 && for f in $(find $2 -type f); do cat $f > $f.x && mv $f.x $f; done",
    "hard links": "cp -rl $1 $2",
    "touch and chmod": "cp -r $1 $2 && touch -d 2001-01-01 $2 $2/* $2/*/* && chmod -R 555 $2",
}


@pytest.mark.parametrize("how", COPIES)
def test_a_copy_verifies_and_reads_the_same(pristine: Path, tmp_path: Path, how: str) -> None:
    if how == "rsync" and shutil.which(how) is None:
        pytest.skip("there is no rsync")
    target = tmp_path / "a place with blanks" / "copy"
    target.parent.mkdir()
    target = target if how != "cat" else tmp_path / "copy"
    script = COPIES[how].replace("$1", '"$1"').replace("$2", '"$2"' if how != "cat" else "$2")
    command = ["sh", "-ec", script, "sh", str(pristine), str(target)]
    subprocess.run(command, check=True, timeout=DEADLINE)
    assert verify(target, "decode").findings == []
    assert samples_of(target) == samples_of(pristine)
    assert describe(target) == describe(pristine)


def test_a_dataset_is_read_by_any_name_of_its_directory(pristine: Path, tmp_path: Path) -> None:
    """Composed and decomposed letters, as filesystems may change them; blanks; no UTF-8 at all."""
    expected = samples_of(pristine)
    names = [unicodedata.normalize(form, "größer") for form in ("NFC", "NFD")]
    for name in [*names, " ", "a\nb", "*?[x]", os.fsdecode(b"\xff\xfe")]:
        target = tmp_path / "in" / name
        shutil.copytree(pristine, target)
        assert samples_of(target) == expected
        assert verify(target).ok
        (tmp_path / "link").symlink_to(target, target_is_directory=True)
        assert samples_of(tmp_path / "link") == expected
        assert verify(tmp_path / "link").ok
        (tmp_path / "link").unlink()


def test_names_in_a_dataset_survive_a_filesystem_that_ignores_case(pristine: Path) -> None:
    """It could not tell names apart that differ in case alone; nor may one change on the way."""
    names = [str(path.relative_to(pristine)) for path in pristine.rglob("*")]
    assert len({name.casefold() for name in names}) == len(names)
    assert all(name.isascii() and name == name.lower() for name in names)
