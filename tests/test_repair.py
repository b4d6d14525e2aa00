"""``repair``: what is damaged or missing comes back with the digest it had, or is not touched."""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import random
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from forging import forge, restate, with_meta
from helpers import FORMATS, jpeg, make_dataset, make_folder, make_tree, tree

from shardkit import (
    ConvertOptions,
    Recipe,
    Repaired,
    convert,
    open_dataset,
    repair,
    scan_imagefolder,
    verify,
)
from shardkit.conversion.lock import locked
from shardkit.conversion.workplace import WORK_NAME
from shardkit.errors import ConversionFailed, CorruptDataset, CorruptRecord, DiskFull, UsageError
from shardkit.manifest import MANIFEST_NAME, load_manifest
from shardkit.verbs import repair as repair_module

RECIPES = {
    "copy": Recipe(),
    "jpeg": Recipe(encode="jpeg", resize=(12, 12), resize_mode="crop"),
    "raw": Recipe(encode="raw", resize=(8, 8), resize_mode="stretch"),
    "torch": Recipe(encode="webp", resize=(9, 9), resize_mode="stretch", resizer="torch"),
}


def make_source(root: Path) -> Path:
    """Make a source of eleven good images, two bad ones, and things that are none."""
    make_folder(root, ("ant", "bee", "cow"))
    make_tree(root, {"bee/x.jpg": jpeg(seed=5), "bee/y.jpg": jpeg(seed=6)})
    make_tree(root, {"ant/bad.jpg": b"bad", "bee/000.png": b"bad", "cow/list.txt": b"x"})
    return make_tree(root, {"ant/.hidden": b"x", "notes": b"x"})


def make(source: Path, target: Path, to: str, recipe: Recipe | None = None, **options: Any) -> Path:
    chosen = {"on_error": "skip", "recipe": recipe or Recipe(), **options}
    return make_dataset(source, target, to=to, **chosen)


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A source; nobody changes it."""
    return make_source(tmp_path_factory.mktemp("source") / "photos")


@pytest.fixture(scope="module")
def pristine(photos: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The dataset of ``photos`` in each format; nobody changes it."""
    root = tmp_path_factory.mktemp("pristine")
    for to in FORMATS:
        make(photos, root / to, to)
    return root


@pytest.fixture
def place(pristine: Path, tmp_path: Path) -> Path:
    """A copy of one of them, to be damaged."""
    return shutil.copytree(pristine / "lmdb", tmp_path / "made")


def files_of(place: Path) -> list[str]:
    return [entry.name for entry in load_manifest(place).entries]


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-7])


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 0x40
    path.write_bytes(data)


def replace_by_link(path: Path) -> None:
    path.unlink()
    path.symlink_to("nowhere")


def replace_by_fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def replace_by_other(path: Path) -> None:
    path.write_bytes(jpeg())


def replace_by_link_to_folder(path: Path) -> None:
    path.unlink()
    path.symlink_to("..")


HARMS: dict[str, Callable[[Path], None]] = {
    "missing": Path.unlink,
    "cut": cut,
    "flipped": flip,
    "a dead link": replace_by_link,
    "a FIFO": replace_by_fifo,
    "another file": replace_by_other,
    "a link to a folder": replace_by_link_to_folder,
}


def healed(place: Path, source: Path, before: dict[str, str], **options: Any) -> Repaired:
    """Repair all; return what was done."""
    result = repair(place, source, **options)
    assert result.findings == []
    assert tree(place) == before
    return result


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("to", FORMATS)
def test_any_file_comes_back(photos: Path, tmp_path: Path, to: str, recipe: str) -> None:
    place = make(photos, tmp_path / "made", to, RECIPES[recipe])
    before, names = tree(place), files_of(place)
    assert len(names) == 4 + 5 + 2 or len(names) == 3 + 5 + 2
    for name in names if recipe == "copy" else names[:1]:
        flip(place / name)
        result = healed(place, photos, before)
        assert (result.files, result.sound) == ([name], len(names) - 1)


@pytest.mark.parametrize("harm", HARMS)
def test_whatever_stands_in_its_place(photos: Path, place: Path, harm: str) -> None:
    before = tree(place)
    for name in (files_of(place)[1], "index/keys.npy", "skipped.jsonl"):
        HARMS[harm](place / name)
        assert healed(place, photos, before).files == [name]


@pytest.mark.parametrize("to", FORMATS)
def test_many_at_once_come_back_in_several_processes(
    photos: Path, pristine: Path, tmp_path: Path, to: str
) -> None:
    place = shutil.copytree(pristine / to, tmp_path / "made")
    before, names = tree(place), files_of(place)
    for name in names:
        (place / name).unlink()
    shutil.rmtree(place / "index")

    result = healed(place, photos, before, workers=2)

    assert (result.files, result.sound) == (sorted(names), 0)
    assert verify(place, against=photos).ok is True


def test_any_damage_by_chance_comes_back(photos: Path, place: Path) -> None:
    before, names = tree(place), files_of(place)
    rng = random.Random(5)
    for _ in range(15):
        chosen = rng.sample(names, rng.randint(1, len(names)))
        for name in chosen:
            HARMS[rng.choice([*HARMS][:3])](place / name)
        assert healed(place, photos, before).files == sorted(chosen)


def test_a_dataset_of_the_first_release_comes_back(tmp_path: Path) -> None:
    golden = Path(__file__).parent / "golden"
    place = shutil.copytree(golden / "webdataset/labelled", tmp_path / "made")
    before = tree(place)
    for name in files_of(place):
        (place / name).unlink()
    assert healed(place, golden / "source", before).sound == 0


def test_what_is_sound_is_not_touched(photos: Path, place: Path) -> None:
    shard, *others = files_of(place)
    before = {name: (place / name).stat() for name in [*others, MANIFEST_NAME]}
    flip(place / shard)
    assert repair(place, photos).ok
    for name, status in before.items():
        after = (place / name).stat()
        assert (after.st_ino, after.st_mtime_ns) == (status.st_ino, status.st_mtime_ns), name


def test_nothing_to_do_needs_no_source(photos: Path, place: Path, tmp_path: Path) -> None:
    before = tree(place)
    for _ in range(2):
        result = repair(place, tmp_path / "no such folder")
        assert (result.files, result.ok, result.sound) == ([], True, len(files_of(place)))
    flip(place / files_of(place)[0])
    assert healed(place, photos, before).files
    assert not healed(place, photos, before).files


@pytest.mark.parametrize("order", ["natural", "file"])
def test_reports_come_back_in_the_order_of_classes(tmp_path: Path, order: str) -> None:
    source = make_folder(tmp_path / "photos/train", ("c2", "c10"))
    make_tree(source, {"c2/a.txt": b"x", "c10/b.txt": b"x", "z.txt": b"x", "c10/bad.jpg": b"x"})
    make_folder(tmp_path / "photos/val", ("c10",))
    make_tree(tmp_path / "photos", {"LICENCE": b"x", "c10": b"x"})
    (tmp_path / "order").write_text("c2\nc10\n")
    options = ConvertOptions(to="hdf5", on_error="skip", shuffle=False, shard_samples=2)
    class_order = str(tmp_path / "order") if order == "file" else order
    scan = scan_imagefolder(tmp_path / "photos", class_order=class_order)
    convert(scan, tmp_path / "made", options)
    before = tree(tmp_path / "made")
    for path in (tmp_path / "made").rglob("*.*"):
        if path.is_file() and path.name != MANIFEST_NAME:
            path.unlink()

    result = healed(tmp_path / "made", tmp_path / "photos", before)

    assert {"train/ignored.jsonl", "train/skipped.jsonl", "val/shard-000001.h5"} <= {*result.files}


def test_one_split_is_repaired_alone_and_locks_all(tmp_path: Path) -> None:
    make_folder(tmp_path / "photos/train")
    make_folder(tmp_path / "photos/val")
    place = make(tmp_path / "photos", tmp_path / "made", "webdataset")
    before = tree(place)
    cut(place / "val/shard-000000.tar")
    with (
        locked(place / WORK_NAME, lambda: None),
        pytest.raises(UsageError, match="another conversion is writing"),
    ):
        repair(place / "val", tmp_path / "photos/val")
    shutil.rmtree(place / WORK_NAME)
    assert repair(place / "val", tmp_path / "photos/val").files == ["shard-000000.tar"]
    assert tree(place) == before


def test_empty_splits_and_shards_of_bad_images_alone_come_back(tmp_path: Path) -> None:
    source = make_tree(
        tmp_path / "photos/train",
        {f"a/{n}.jpg": jpeg(seed=n) if n > 3 else b"bad" for n in range(8)},
    )
    make_tree(tmp_path / "photos/val", {"b": None})
    place = make(source.parent, tmp_path / "made", "lmdb", shuffle=False)
    before = tree(place)
    assert [shard.rows for shard in load_manifest(place / "train").shards] == [0, 4]
    for name in ("train/shard-000000.lmdb", "val/index/rows.npy"):
        (place / name).unlink()
    assert healed(place, source.parent, before).ok


# --- what cannot be repaired ---


def test_a_changed_file_spares_the_other_shards(photos: Path, place: Path, tmp_path: Path) -> None:
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
def test_a_lost_or_bad_file_is_named(
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


def test_files_of_sound_shards_may_be_lost(photos: Path, place: Path, tmp_path: Path) -> None:
    source = shutil.copytree(photos, tmp_path / "photos")
    before, names = tree(place), files_of(place)
    paths = open_dataset(place).paths
    (source / paths[len(paths) - 1]).unlink()
    flip(place / names[0])
    flip(place / "index/rows.npy")  # which says nothing of paths
    assert healed(place, source, before).files == ["index/rows.npy", names[0]]


def test_without_the_paths_and_the_files_nobody_knows(
    photos: Path, place: Path, tmp_path: Path
) -> None:
    source = shutil.copytree(photos, tmp_path / "photos")
    make_tree(source, {"ant/new.jpg": jpeg()})
    flip(place / files_of(place)[0])
    flip(place / "index/paths.npy")
    before = tree(place)
    first, second = repair(place, source).findings
    assert first.file == "index/paths.npy"
    assert "cannot be made anew yet" in first.reason
    assert "which file belongs to which row is not known" in second.reason
    assert tree(place) == before


def test_other_libraries_are_named(photos: Path, place: Path) -> None:
    name = files_of(place)[0]
    forge(place, lambda records: [with_meta(records[0], frames=2), *records[1:]])
    restate(place, lambda m: replace(m, software={**m.software, "lmdb": "0.1"}))
    flip(place / name)
    (finding,) = [f for f in repair(place, photos).findings if f.file == name]
    assert "written with other libraries: lmdb was 0.1 and is " in finding.reason


def test_a_report_of_another_source_is_refused(photos: Path, place: Path, tmp_path: Path) -> None:
    source = shutil.copytree(photos, tmp_path / "photos")
    make_tree(source, {"more.txt": b"x"})
    (place / "ignored.jsonl").unlink()
    (place / "skipped.jsonl").unlink()
    result = repair(place, source)
    assert result.files == ["skipped.jsonl"]
    assert "not an image in the source has changed" in result.findings[0].reason


def test_a_folder_in_the_place_of_a_shard_is_not_removed(photos: Path, place: Path) -> None:
    name = files_of(place)[0]
    (place / name).unlink()
    make_tree(place / name, {"mine": b"x"})
    (finding,) = repair(place, photos).findings
    assert f"remove {place / name}" in finding.reason
    assert (place / name / "mine").exists()


def test_wrong_places_are_refused(photos: Path, place: Path, tmp_path: Path) -> None:
    flip(place / files_of(place)[0])
    other = make_tree(tmp_path / "other", {"ant/other.jpg": jpeg()})
    (tmp_path / "file").write_bytes(b"x")
    before = tree(place)
    for source, said in {
        other: "is it the right folder",
        place: "there are no images",
        tmp_path / "file": "is a file",
        tmp_path / "missing": "does not exist",
    }.items():
        with pytest.raises(UsageError, match=said):
            repair(place, source)
    assert tree(place) == before
    for nothing in (photos, tmp_path / "missing"):
        with pytest.raises(UsageError, match="not a shardkit dataset"):
            repair(nothing, photos)
        assert not (nothing / WORK_NAME).exists()


@pytest.mark.parametrize("harm", [cut, flip])
def test_a_damaged_manifest_is_refused(
    photos: Path, place: Path, harm: Callable[[Path], None]
) -> None:
    harm(place / MANIFEST_NAME)
    before = tree(place)
    with pytest.raises(CorruptDataset, match=r"not a manifest of shardkit|Restore the"):
        repair(place, photos)
    assert tree(place) == before


def test_the_manifest_of_another_split_is_refused(tmp_path: Path) -> None:
    make_folder(tmp_path / "photos/train")
    make_folder(tmp_path / "photos/val", each=5)
    place = make(tmp_path / "photos", tmp_path / "made", "hdf5")
    shutil.copy(place / "val" / MANIFEST_NAME, place / "train")
    before = tree(place)
    with pytest.raises(CorruptDataset, match="written with the other splits"):
        repair(place, tmp_path / "photos")
    assert tree(place) == before


# --- at the same time, and in the middle ---


def test_a_running_conversion_is_not_disturbed(photos: Path, place: Path) -> None:
    flip(place / files_of(place)[0])
    with locked(place / WORK_NAME, lambda: None):
        before = tree(place)
        with pytest.raises(UsageError, match="another conversion is writing"):
            repair(place, photos)
        assert tree(place) == before


def test_the_work_of_an_unfinished_conversion_stays(photos: Path, place: Path) -> None:
    before = tree(place)
    files = {f"{WORK_NAME}/state/plan.json": b"{}", f"{WORK_NAME}/dataset/shard": b"x"}
    make_tree(place, files)
    flip(place / files_of(place)[0])
    assert repair(place, photos).ok
    after = tree(place)
    assert set(after) - set(before) == {
        WORK_NAME,
        f"{WORK_NAME}/lock",
        f"{WORK_NAME}/state",
        f"{WORK_NAME}/dataset",
        *files,
    }


def test_a_dataset_that_was_replaced_meanwhile_is_not_harmed(
    photos: Path, place: Path, pristine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The new dataset comes just before the lock is had."""
    flip(place / files_of(place)[0])

    def replaced(folder: Path, look: Callable[[], None]) -> Any:
        look()
        shutil.rmtree(place)
        shutil.copytree(pristine / "webdataset", place)
        return locked(folder, look)

    monkeypatch.setattr(repair_module, "locked", replaced)
    assert repair(place, photos).files == []
    assert tree(place) == tree(pristine / "webdataset")


class Renames:
    """Counts renames, and interrupts instead of one."""

    def __init__(self, patch: pytest.MonkeyPatch, last: float) -> None:
        self.count = 0
        self._last = last
        for name in ("rename", "replace"):
            patch.setattr(os, name, functools.partial(self._act, getattr(os, name)))

    def _act(self, function: Callable[..., None], *paths: Path) -> None:
        if self.count >= self._last:
            raise KeyboardInterrupt
        self.count += 1
        function(*paths)


def test_an_interruption_at_any_rename_is_made_good(
    photos: Path, pristine: Path, tmp_path: Path
) -> None:
    before, names = tree(pristine / "webdataset"), files_of(pristine / "webdataset")
    total = 1
    for done in (float("inf"), *range(40)):
        if done != float("inf") and done >= total:
            break
        place = shutil.copytree(pristine / "webdataset", tmp_path / "made")
        for name in names:
            flip(place / name)
        with pytest.MonkeyPatch.context() as patch:
            renames = Renames(patch, done)
            if done == float("inf"):
                assert repair(place, photos).ok
                total = renames.count
                assert total > 3 * 4
            else:
                with pytest.raises(KeyboardInterrupt):
                    repair(place, photos)
        assert not [path for path in place.iterdir() if path.name.startswith(".")]
        assert healed(place, photos, before).ok
        shutil.rmtree(place)
    assert done == total


def test_what_a_kill_leaves_is_cleared_away(photos: Path, place: Path) -> None:
    before = tree(place)
    flip(place / files_of(place)[0])
    part = f"{WORK_NAME}/repair/parts/000000"
    make_tree(place, {f"{WORK_NAME}/repair/shard-000000.lmdb": b"x", f"{part}/result.json": b"{}"})
    make_tree(place, {f"{WORK_NAME}/lock": b""})
    healed(place, photos, before)


@pytest.mark.parametrize(("number", "error"), [(errno.ENOSPC, DiskFull), (errno.EIO, None)])
def test_a_failing_disk_leaves_the_rest_as_it_was(
    photos: Path,
    place: Path,
    monkeypatch: pytest.MonkeyPatch,
    number: int,
    error: type[ConversionFailed] | None,
) -> None:
    before = tree(place)
    for name in files_of(place)[:2]:
        (place / name).unlink()
    harmed = tree(place)

    def fail(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patch:
        patch.setattr("shardkit.conversion.build.sync", fail)
        with pytest.raises(error or ConversionFailed, match="made"):
            repair(place, photos)
    assert tree(place) == harmed
    healed(place, photos, before)


def test_a_place_that_cannot_be_written_is_said(
    photos: Path, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flip(place / files_of(place)[0])
    before = tree(place)

    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(Path, "mkdir", refuse)
    with pytest.raises(UsageError, match="cannot be written: Read-only file system"):
        repair(place, photos)
    assert tree(place) == before


def test_a_reader_that_has_it_open_goes_on(photos: Path, place: Path) -> None:
    dataset = open_dataset(place, decode="bytes")
    expected = list(dataset[range(len(dataset))])
    shards: Sequence[str] = [shard.name for shard in load_manifest(place).shards]
    reader = open_dataset(place, decode="bytes")
    for name in shards:
        data = (place / name).read_bytes()
        (place / name).write_bytes(bytes(len(data)))  # in place: the reader sees it
    for _ in range(2):
        with pytest.raises(CorruptRecord):
            reader[0]
    assert repair(place, photos).files == list(shards)
    for row in range(len(reader)):  # the first look at each shard may still meet the old file
        with contextlib.suppress(CorruptRecord):
            reader[row]
        assert reader[row] == expected[row]
    assert list(open_dataset(place, decode="bytes")[range(len(reader))]) == expected
