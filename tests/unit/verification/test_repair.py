"""``repair``: damaged and missing files are rebuilt with their original digests."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import shutil
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from helpers import FORMATS, in_fork, jpeg, make_folder, make_tree, tree
from hostile.forging import forge, restate, with_meta
from refusals import refused
from repairing import cut, files_of, flip, healed, make, make_each, make_source
from stated import being_written, stated

from shardkit import open_dataset, repair, verify
from shardkit.errors import ConversionFailed, CorruptDataset, CorruptRecord, DiskFull, UsageError

RECIPES: dict[str, dict[str, Any]] = {
    "copy": {},
    "jpeg": {"encode": "jpeg", "resize": "12x12", "resize_mode": "crop"},
    "raw": {"encode": "raw", "resize": "8x8", "resize_mode": "stretch"},
    "webp": {"encode": "webp", "resize": "9x9", "resize_mode": "stretch"},
}


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A read-only source."""
    return make_source(tmp_path_factory.mktemp("source") / "photos")


@pytest.fixture(scope="module")
def pristine(photos: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The read-only dataset of ``photos`` in each format."""
    return make_each(photos, tmp_path_factory.mktemp("pristine"))


@pytest.fixture
def place(pristine: Path, tmp_path: Path) -> Path:
    """A copy of one dataset to damage."""
    return shutil.copytree(pristine / "lmdb", tmp_path / "made")


def replaced(make: Callable[[Path], object]) -> Callable[[Path], None]:
    def harm(path: Path) -> None:
        path.unlink()
        make(path)

    return harm


HARMS: dict[str, Callable[[Path], object]] = {
    "missing": Path.unlink,
    "cut": cut,
    "flipped": flip,
    "a dead link": replaced(lambda path: path.symlink_to("nowhere")),
    "a FIFO": replaced(os.mkfifo),
    "another file": lambda path: path.write_bytes(jpeg()),
    "a link to a folder": replaced(lambda path: path.symlink_to("..")),
}


@pytest.mark.parametrize(
    ("to", "recipe"),
    [*((to, "copy") for to in FORMATS), *zip(FORMATS, ("jpeg", "raw", "webp"), strict=True)],
)
def test_any_file_is_rebuilt(photos: Path, tmp_path: Path, to: str, recipe: str) -> None:
    place = make(photos, tmp_path / "made", to, **RECIPES[recipe])
    before, names = tree(place), files_of(place)
    assert len(names) == 4 + 5 + 2 or len(names) == 3 + 5 + 2
    for name in names if recipe == "copy" else names[:1]:
        flip(place / name)
        result = healed(place, photos, before)
        assert (result.files, result.intact) == ([name], len(names) - 1)


@pytest.mark.parametrize("harm", HARMS)
def test_any_file_is_rebuilt_whatever_is_in_its_place(photos: Path, place: Path, harm: str) -> None:
    before = tree(place)
    for name in (files_of(place)[1], "index/keys.npy", "skipped.jsonl"):
        HARMS[harm](place / name)
        assert healed(place, photos, before).files == [name]


def test_many_files_are_rebuilt_in_several_processes(photos: Path, place: Path) -> None:
    before, names = tree(place), files_of(place)
    for name in names:
        (place / name).unlink()
    shutil.rmtree(place / "index")

    result = healed(place, photos, before, workers=2)

    assert (result.files, result.intact) == (sorted(names), 0)
    assert verify(place, against=photos).ok is True


def test_intact_files_are_not_touched(photos: Path, place: Path) -> None:
    shard, *others = files_of(place)
    before = {name: (place / name).stat() for name in [*others, "shardkit.json"]}
    flip(place / shard)
    assert repair(place, photos).ok
    for name, status in before.items():
        after = (place / name).stat()
        assert (after.st_ino, after.st_mtime_ns) == (status.st_ino, status.st_mtime_ns), name


def test_an_intact_dataset_needs_no_source(photos: Path, place: Path, tmp_path: Path) -> None:
    before = tree(place)
    for _ in range(2):
        result = repair(place, tmp_path / "no such folder")
        assert (result.files, result.ok, result.intact) == ([], True, len(files_of(place)))
    flip(place / files_of(place)[0])
    assert healed(place, photos, before).files
    assert not healed(place, photos, before).files


@pytest.mark.parametrize("order", ["natural", "file"])
def test_reports_are_rebuilt_in_the_order_of_classes(tmp_path: Path, order: str) -> None:
    source = make_folder(tmp_path / "photos/train", ("c2", "c10"))
    make_tree(source, {"c2/a.txt": b"x", "c10/b.txt": b"x", "z.txt": b"x", "c10/bad.jpg": b"x"})
    make_folder(tmp_path / "photos/val", ("c10",))
    make_tree(tmp_path / "photos", {"LICENCE": b"x", "c10": b"x"})
    (tmp_path / "order").write_text("c2\nc10\n")
    options = {"shuffle": False, "shard_samples": 2}
    class_order = str(tmp_path / "order") if order == "file" else order
    make(tmp_path / "photos", tmp_path / "made", "hdf5", class_order=class_order, **options)
    before = tree(tmp_path / "made")
    for path in (tmp_path / "made").rglob("*.*"):
        if path.is_file() and path.name != "shardkit.json":
            path.unlink()

    result = healed(tmp_path / "made", tmp_path / "photos", before)

    assert {"train/ignored.jsonl", "train/skipped.jsonl", "val/shard-000001.h5"} <= {*result.files}


def test_one_split_is_repaired_alone_and_locks_all(tmp_path: Path) -> None:
    make_folder(tmp_path / "photos/train")
    make_folder(tmp_path / "photos/val")
    place = make(tmp_path / "photos", tmp_path / "made", "webdataset")
    before = tree(place)
    cut(place / "val/shard-000000.tar")
    with being_written(place), refused(UsageError, place.name):
        repair(place / "val", tmp_path / "photos/val")
    shutil.rmtree(place / ".shardkit-work")
    assert repair(place / "val", tmp_path / "photos/val").files == ["shard-000000.tar"]
    assert tree(place) == before


def test_empty_splits_and_empty_shards_are_rebuilt(tmp_path: Path) -> None:
    source = make_tree(
        tmp_path / "photos/train",
        {f"a/{n}.jpg": jpeg(seed=n) if n > 3 else b"bad" for n in range(8)},
    )
    make_tree(tmp_path / "photos/val", {"b": None})
    place = make(source.parent, tmp_path / "made", "lmdb", shuffle=False)
    before = tree(place)
    assert [shard.rows for shard in stated(place / "train").shards] == [0, 4]
    for name in ("train/shard-000000.lmdb", "val/index/rows.npy"):
        (place / name).unlink()
    assert healed(place, source.parent, before).ok


# `repair`: files that cannot be rebuilt are not touched, and interruptions do no harm.


def test_a_changed_file_does_not_affect_other_shards(
    photos: Path, place: Path, tmp_path: Path
) -> None:
    source = shutil.copytree(photos, tmp_path / "photos")
    one, other = files_of(place)[:2]
    path = open_dataset(place).paths[0]
    (source / path).write_bytes(jpeg(20, 18, seed=99))
    flip(place / one)
    flip(place / other)
    before = tree(place)

    result = repair(place, source)

    assert result.files == [other]
    (finding,) = result.findings
    assert finding.file == one
    assert path in finding.reason
    assert "The source has changed" in finding.reason
    assert {name for name, digest in tree(place).items() if digest != before[name]} == {other}


@pytest.mark.parametrize("harm", [Path.unlink, lambda path: path.write_bytes(b"bad")])
def test_a_lost_or_bad_source_file_is_reported(
    photos: Path, place: Path, tmp_path: Path, harm: Callable[[Path], None]
) -> None:
    source = shutil.copytree(photos, tmp_path / "photos")
    name = files_of(place)[0]
    path = open_dataset(place).paths[2]
    harm(source / path)
    flip(place / name)
    before = tree(place)
    (finding,) = repair(place, source).findings
    assert finding.file == name
    assert path in finding.reason
    assert tree(place) == before


def test_source_files_of_intact_shards_may_be_lost(
    photos: Path, place: Path, tmp_path: Path
) -> None:
    source = shutil.copytree(photos, tmp_path / "photos")
    before, names = tree(place), files_of(place)
    paths = open_dataset(place).paths
    (source / paths[len(paths) - 1]).unlink()
    flip(place / names[0])
    flip(place / "index/rows.npy")  # which says nothing of paths
    assert healed(place, source, before).files == ["index/rows.npy", names[0]]


@pytest.mark.parametrize("since", ["gone", "new"])
def test_a_file_that_made_a_key_longer_may_be_gone_or_new(tmp_path: Path, since: str) -> None:
    files = {f"a/{n}.jpg": jpeg(seed=n) for n in range(6)}
    twin = tmp_path / "photos/a/0.png"
    source = make_tree(tmp_path / "photos", {**files, "a/0.png": jpeg(seed=9)})
    if since == "new":
        twin.unlink()
    place = make(source, tmp_path / "made", "webdataset")
    before, paths = tree(place), open_dataset(place).paths
    if since == "new":
        twin.write_bytes(jpeg(seed=9))
    else:
        twin.unlink()
        assert list(paths).index("a/0.png") // 4 != list(paths).index("a/0.jpg") // 4
    (place / f"shard-{list(paths).index('a/0.jpg') // 4:06}.tar").unlink()
    assert healed(place, source, before).ok


def test_without_paths_and_files_rows_cannot_be_matched(
    photos: Path, place: Path, tmp_path: Path
) -> None:
    source = shutil.copytree(photos, tmp_path / "photos")
    make_tree(source, {"ant/new.jpg": jpeg()})
    flip(place / files_of(place)[0])
    column = place / "index/paths.npy"
    column.write_bytes(column.read_bytes()[:-1] + b"x")  # which can be read all the same
    before = tree(place)
    first, second = repair(place, source).findings
    assert first.file == "index/paths.npy"
    assert "cannot be rebuilt yet" in first.reason
    assert "cannot be matched to rows" in second.reason
    assert tree(place) == before


def test_other_libraries_are_reported(photos: Path, place: Path) -> None:
    name = files_of(place)[0]
    forge(place, lambda records: [with_meta(records[0], frames=2), *records[1:]])
    restate(place, lambda m: replace(m, software={**m.software, "lmdb": "0.1"}))
    flip(place / name)
    (finding,) = [f for f in repair(place, photos).findings if f.file == name]
    assert "written with other library versions: lmdb was 0.1 and is now " in finding.reason


@pytest.mark.parametrize("forged", [False, True])
def test_without_index_a_changed_file_is_not_named(
    photos: Path, place: Path, tmp_path: Path, forged: bool
) -> None:
    """Neither a damaged index nor a forged one, whose digest the manifest has."""
    source = shutil.copytree(photos, tmp_path / "photos")
    (source / open_dataset(place).paths[0]).write_bytes(jpeg(20, 18, seed=99))
    rows = place / "index/rows.npy"
    flip(rows)
    if forged:
        rows.write_bytes(b"no array")
        digest = hashlib.sha256(b"no array").hexdigest()
        restate(
            place,
            lambda m: replace(
                m,
                files=tuple(
                    replace(file, bytes=8, sha256=digest) if file.name == "index/rows.npy" else file
                    for file in m.files
                ),
            ),
        )
    name = files_of(place)[0]
    flip(place / name)
    found = {finding.file: finding.reason for finding in repair(place, source).findings}
    assert found[name] == "the rebuilt file differs. The source has changed since the conversion"


def test_a_report_of_a_newer_version_is_left_alone(photos: Path, place: Path) -> None:
    def change(manifest: Any) -> Any:
        report = replace(manifest.files[0], name="later.jsonl", bytes=1, sha256="0" * 64)
        return replace(manifest, files=(*manifest.files, report))

    restate(place, change)
    before = tree(place)
    (finding,) = repair(place, photos).findings
    assert finding.file == "later.jsonl"
    assert finding.reason == "this version of shardkit cannot rebuild it"
    assert tree(place) == before


def test_a_shard_in_the_folder_of_the_index_is_refused(photos: Path, place: Path) -> None:
    """No writer puts a shard there, and rebuilding the index would remove it."""

    def change(manifest: Any) -> Any:
        first, *others = manifest.shards
        return replace(manifest, shards=(replace(first, name=f"index/{first.name}"), *others))

    restate(place, change)
    before = tree(place)
    with refused(CorruptDataset, "'index/shard-000000.lmdb'"):
        repair(place, photos)
    assert tree(place) == before


def test_a_report_of_another_source_is_refused(photos: Path, place: Path, tmp_path: Path) -> None:
    source = shutil.copytree(photos, tmp_path / "photos")
    make_tree(source, {"more.txt": b"x"})
    (place / "ignored.jsonl").unlink()
    (place / "skipped.jsonl").unlink()
    result = repair(place, source)
    assert result.files == ["skipped.jsonl"]
    assert "other files have changed" in result.findings[0].reason


def test_a_folder_in_place_of_a_shard_is_not_removed(photos: Path, place: Path) -> None:
    name = files_of(place)[0]
    (place / name).unlink()
    make_tree(place / name, {"mine": b"x"})
    (finding,) = repair(place, photos).findings
    assert f"remove {place / name}" in finding.reason
    assert (place / name / "mine").exists()


def test_wrong_directories_are_refused(photos: Path, place: Path, tmp_path: Path) -> None:
    flip(place / files_of(place)[0])
    other = make_tree(tmp_path / "other", {"ant/other.jpg": jpeg()})
    (tmp_path / "file").write_bytes(b"x")
    before = tree(place)
    for source in (other, place, tmp_path / "file", tmp_path / "missing"):
        with refused(UsageError, source.name):
            repair(place, source)
    assert tree(place) == before
    for nothing in (photos, tmp_path / "missing"):
        with refused(UsageError, nothing.name):
            repair(nothing, photos)
        assert not (nothing / ".shardkit-work").exists()


@pytest.mark.parametrize("harm", [cut, flip])
def test_a_damaged_manifest_is_refused(
    photos: Path, place: Path, harm: Callable[[Path], None]
) -> None:
    harm(place / "shardkit.json")
    before = tree(place)
    with refused(CorruptDataset, "shardkit.json"):
        repair(place, photos)
    assert tree(place) == before


# --- at the same time, and in the middle ---


def test_the_work_of_an_unfinished_conversion_is_kept(photos: Path, place: Path) -> None:
    before = tree(place)
    files = {".shardkit-work/state/plan.json": b"{}", ".shardkit-work/dataset/shard": b"x"}
    make_tree(place, files)
    flip(place / files_of(place)[0])
    assert repair(place, photos).ok
    after = tree(place)
    assert set(after) - set(before) == {
        ".shardkit-work",
        ".shardkit-work/lock",
        ".shardkit-work/state",
        ".shardkit-work/dataset",
        *files,
    }


def test_a_dataset_replaced_meanwhile_is_not_harmed(
    photos: Path, place: Path, pristine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The new dataset appears just before the lock is acquired."""
    flip(place / files_of(place)[0])

    flock = fcntl.flock

    def replaced(descriptor: int, operation: int) -> None:
        if operation & fcntl.LOCK_EX:
            shutil.rmtree(place)
            shutil.copytree(pristine / "webdataset", place)
            monkeypatch.undo()
        flock(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", replaced)
    assert repair(place, photos).files == []
    assert tree(place) == tree(pristine / "webdataset")


@pytest.mark.parametrize("renames", [0, 1, 5])
def test_repair_resumes_after_a_kill(photos: Path, place: Path, renames: int) -> None:
    before = tree(place)
    for name in files_of(place):
        flip(place / name)

    def killed() -> None:
        _kill_at_rename(renames)
        repair(place, photos)

    assert in_fork(killed) == -signal.SIGKILL
    assert (place / ".shardkit-work" / "scratch").exists()
    healed(place, photos, before)


def _kill_at_rename(number: int) -> None:
    act, left = os.replace, number

    def replace(*paths: Any, **more: Any) -> None:
        nonlocal left
        left -= 1
        if left < 0:
            os.kill(os.getpid(), signal.SIGKILL)
        act(*paths, **more)

    os.replace = replace


@pytest.mark.parametrize(
    "step", ["shardkit.conversion.build.sync", "shardkit.verification.repair.move_into"]
)
@pytest.mark.parametrize(("number", "error"), [(errno.ENOSPC, DiskFull), (errno.EIO, None)])
def test_a_failing_disk_leaves_the_rest_unchanged(
    photos: Path,
    place: Path,
    monkeypatch: pytest.MonkeyPatch,
    *,
    number: int,
    error: type[ConversionFailed] | None,
    step: str,
) -> None:
    before = tree(place)
    for name in files_of(place)[:2]:
        (place / name).unlink()
    harmed = tree(place)

    def fail(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patch:
        patch.setattr(step, fail)
        with refused(error or ConversionFailed, place.name):
            repair(place, photos)
    assert tree(place) == harmed
    healed(place, photos, before)


def test_an_unwritable_dataset_is_reported(
    photos: Path, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flip(place / files_of(place)[0])
    before = tree(place)

    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(Path, "mkdir", refuse)
    with refused(UsageError, place.name, os.strerror(errno.EROFS)):
        repair(place, photos)
    assert tree(place) == before


def test_an_open_reader_continues(photos: Path, place: Path) -> None:
    dataset = open_dataset(place, decode="bytes")
    expected = list(dataset[range(len(dataset))])
    shards = [shard.name for shard in stated(place).shards]
    reader = open_dataset(place, decode="bytes")
    for name in shards:
        data = (place / name).read_bytes()
        (place / name).write_bytes(bytes(len(data)))  # in place: the reader sees it
    for _ in range(2):
        with pytest.raises(CorruptRecord):
            reader[0]
    assert repair(place, photos).files == shards
    for row in range(len(reader)):
        try:
            found = reader[row]
        except CorruptRecord:  # of the file that was open; the next look opens the new one
            found = reader[row]
        assert found == expected[row]
    assert list(open_dataset(place, decode="bytes")[range(len(reader))]) == expected
