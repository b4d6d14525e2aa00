"""Folders of images, also of a million files, read in place."""

from __future__ import annotations

import errno
import hashlib
import os
import pickle
import shutil
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import encoded, exif, invoke, jpeg, make_tree, picture, png, python, run_main
from PIL import Image
from refusals import refused, refuses
from stated import restate_json

from shardkit import CenterCrop, attach, convert, open_dataset, open_source, repair, verify
from shardkit.conversion.assemble import Assembly, ShardGroup, save_manifests
from shardkit.dataset.index import TIMES, IndexSegment, as_rows, pack_row
from shardkit.dataset.manifest import AttachedShard
from shardkit.errors import BadImages, CorruptDataset, CorruptRecord, UsageError
from shardkit.kinds.field import default_schema
from shardkit.recipe import Recipe
from shardkit.system.npy import save_npy
from shardkit.verification.reindex import reindex

pytestmark = pytest.mark.usefixtures("state")

FILES = {
    "cat/a b.jpg": jpeg(40, 30, 1),
    "cat/deep/größer.png": png(24, 16, 2),
    "cat/turned.jpg": jpeg(31, 20, 3, exif=exif(6)),
    "dog/1.webp": encoded(picture(20, 20, 4), "WEBP"),
    "dog/2.jpg": jpeg(64, 48, 5),
    "dog/10.bmp": encoded(picture(12, 12, 6), "BMP"),
    "dog/gray.png": png(16, 16, 7, "L"),
}


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    return make_tree(tmp_path / "photos", FILES)


@pytest.fixture
def index(photos: Path, tmp_path: Path) -> Path:
    attached(photos, tmp_path / "index")
    return tmp_path / "index"


def attached(photos: Path, target: Path, **options: Any) -> Any:
    return attach(open_source("imagefolder", photos), target, **options)


def converted(photos: Path, target: Path) -> Path:
    convert(photos, target, to="lmdb", shuffle=False, workers=1)
    return target


def by_pillow(path: Path) -> np.ndarray[Any, Any]:
    with Image.open(path) as image:
        return np.asarray(image.convert("RGB"))


def findings(index: Path, **options: Any) -> dict[str, str]:
    return {each.file: each.reason for each in verify(index, **options).findings}


def test_equals_the_converted_dataset(index: Path, photos: Path, tmp_path: Path) -> None:
    made = open_dataset(converted(photos, tmp_path / "made"), decode="bytes")
    dataset = open_dataset(index, decode="bytes")
    assert [*dataset[:]] == [*made[:]]
    assert [*dataset.keys] == [*made.keys]
    assert dataset.manifest.content_digest == made.manifest.content_digest
    assert dataset.manifest.notes == made.manifest.notes


def test_splits_and_images_without_labels(tmp_path: Path) -> None:
    files = {"train/b/1.png": png(seed=1), "train/a/2.png": png(seed=2), "test/3.png": png(seed=3)}
    photos = make_tree(tmp_path / "photos", files)
    assert set(attached(photos, tmp_path / "index").manifests) == {"train", "test"}
    train = open_dataset(tmp_path / "index", split="train", decode="numpy")
    assert [*train.paths] == ["a/2.png", "b/1.png"]
    assert [label for _, label in train[:]] == [0, 1]
    test = open_dataset(tmp_path / "index", split="test", decode="numpy")
    assert np.array_equal(test[0][0], by_pillow(photos / "test/3.png"))
    assert test[0][1] == -1
    assert verify(tmp_path / "index").ok
    copied = shutil.copytree(tmp_path / "index", tmp_path / "copied")
    assert verify(copied, root=photos).ok
    assert len(open_dataset(copied, split="test", root=photos)[:]) == 1
    (photos / "train/a/2.png").unlink()
    assert findings(tmp_path / "index") == {"train/a/2.png": "it is missing"}


def test_a_batch_may_have_more_files_than_a_process_may_open(
    index: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [*range(len(FILES))] * 20
    dataset = open_dataset(index, decode=CenterCrop(8))
    expected = dataset[: len(FILES)]
    opened = []
    open_it = os.open

    def count(*words: Any, **options: Any) -> int:
        opened.append(len(os.listdir("/proc/self/fd")))
        return open_it(*words, **options)

    monkeypatch.setattr(os, "open", count)
    before = len(os.listdir("/proc/self/fd"))
    found = dataset[rows]
    assert max(opened) < before + 50
    assert all(np.array_equal(found[n][0], expected[n % len(FILES)][0]) for n in range(len(rows)))


def touch(path: Path) -> None:
    os.utime(path, ns=(0, 1))


def flip(path: Path) -> None:
    """Change a byte, but neither size nor time."""
    status = path.stat()
    content = path.read_bytes()
    path.write_bytes(content[:-20] + bytes([content[-20] ^ 1]) + content[-19:])
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


def link(path: Path) -> None:
    secret = path.parents[2] / "secret.jpg"
    path.rename(secret)
    path.symlink_to(secret)


def link_folder(path: Path) -> None:
    secret = path.parents[2] / "secret"
    path.parent.rename(secret)
    path.parent.symlink_to(secret)


def as_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


CHANGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "missing": (Path.unlink, "is missing"),
    "grown": (lambda path: path.write_bytes(path.read_bytes() + b"1"), "bytes"),
    "touched": (touch, "time"),
    "another content": (flip, "checksum"),
    "a link": (link, "link"),
    "in a link": (link_folder, "link"),
    "a folder": (as_folder, ""),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_file_that_changed_is_named(change: str, index: Path, photos: Path) -> None:
    dataset = open_dataset(index, decode="numpy")
    row = [*dataset.paths].index("dog/2.jpg")
    make, fact = CHANGES[change]
    make(photos / "dog/2.jpg")
    for rows in ([row], [0, row, 1]):
        with refused(CorruptRecord, "dog/2.jpg", fact, "`shardkit "):
            dataset[rows]
    assert fact in findings(index)["dog/2.jpg"]
    assert dataset[0][1] == 0  # the other files are as they were


def test_an_error_of_the_disk_is_not_damage(
    index: Path, photos: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    open_it = os.open

    def fail(path: Any, *words: Any, **options: Any) -> int:
        if path == "2.jpg":
            raise OSError(errno.EIO, os.strerror(errno.EIO), path)
        return open_it(path, *words, **options)

    monkeypatch.setattr(os, "open", fail)
    with pytest.raises(OSError, match="2\\.jpg") as caught:
        open_dataset(index)[[*range(len(FILES))]]
    assert not isinstance(caught.value, CorruptDataset)
    (finding,) = verify(index).findings
    assert (finding.file, finding.unread) == ("dog/2.jpg", True)


def test_verify_names_changed_missing_and_new_files(index: Path, photos: Path) -> None:
    assert verify(index, "decode").ok
    touch(photos / "cat/a b.jpg")
    (photos / "dog/1.webp").unlink()
    make_tree(photos, {"dog/new.png": png(), "bird/1.png": png(), "dog/notes.txt": b"text"})
    expected = {"cat/a b.jpg", "dog/1.webp", "dog/new.png", "bird/1.png"}
    for level in ("quick", "full"):
        assert findings(index, level=level).keys() == expected
    for fact in ("cat/a b.jpg", "dog/1.webp", "dog/new.png", "bird/1.png"):
        assert fact in refuses(1, "verify", index, "--workers", 1).stderr
    attached(photos, index)
    assert verify(index).ok
    assert open_dataset(index).classes == ["bird", "cat", "dog"]


def test_only_changed_class_folders_are_read_again(index: Path, photos: Path) -> None:
    assert attached(photos, index).unchanged
    touch(photos / "dog/2.jpg")
    again = attached(photos, index)
    assert (again.kept, again.unchanged) == (1, False)
    assert again.manifests == attached(photos, index, force=True).manifests
    shutil.rmtree(photos / "cat")
    assert attached(photos, index).manifests[""].classes == ("dog",)


def test_bad_files_are_findings(photos: Path, tmp_path: Path) -> None:
    make_tree(photos, {"dog/bad.jpg": b"no image"})
    (photos / "dog/link.jpg").symlink_to("2.jpg")
    with refused(BadImages, "2 findings") as caught:
        attached(photos, tmp_path / "index")
    problems = [problem.path for problem in caught.value.problems]
    assert problems == ["dog/bad.jpg", "dog/link.jpg"]
    attached(photos, tmp_path / "index", on_error="skip")
    dataset = open_dataset(tmp_path / "index", decode="numpy")
    assert set(dataset.paths) == set(FILES)
    for row, path in enumerate(dataset.paths):
        assert np.array_equal(dataset[row][0], by_pillow(photos / path))
    assert verify(tmp_path / "index").ok
    (photos / "dog/bad.jpg").write_bytes(jpeg())
    attached(photos, tmp_path / "index", on_error="skip")
    assert len(open_dataset(tmp_path / "index")) == len(FILES) + 1


def test_follows_only_manifests_whose_folder_the_user_named(
    index: Path, photos: Path, tmp_path: Path, state: Path
) -> None:
    copied = shutil.copytree(index, tmp_path / "copied")
    with refused(UsageError, copied, "--root"):
        open_dataset(copied)
    dataset = pickle.loads(pickle.dumps(open_dataset(copied, root=photos)))
    assert [label for _, label in dataset[:]] == [0] * 3 + [1] * 4
    shutil.rmtree(state)
    with refused(UsageError, index, "--root"):
        open_dataset(index)


def restate_path(index: Path, path: str) -> None:
    """Replace the path of the first row by one of the same length."""
    file = index / "index/paths.npy"
    content = file.read_bytes()
    start = content.index(b"cat/a b.jpg")
    assert len(path) == 11
    file.write_bytes(content[:start] + path.encode() + content[start + 11 :])
    rehash(index)


def restate_rows(index: Path, **values: int) -> None:
    """Change the first row of the index."""
    rows = np.load(index / "index/rows.npy")
    for name, value in values.items():
        rows[0][name] = value
    check = zlib.crc32(rows[0].tobytes()[:29]).to_bytes(4, "little")[:3]
    rows[0]["check"] = [*check]
    np.save(index / "index/rows.npy", rows)
    rehash(index)


def rehash(index: Path) -> None:
    def change(value: dict[str, Any]) -> None:
        for entry in value["files"]:
            content = (index / entry["name"]).read_bytes()
            entry |= {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}

    restate_json(index, change)


@pytest.mark.parametrize("path", ["../x/y/z.jp", "/etc/passwd", "cat/../.jpg", "cat//a.jpeg"])
def test_no_name_leads_out_of_the_folder(path: str, index: Path, photos: Path) -> None:
    restate_path(index, path)
    with refused(CorruptRecord, path):
        open_dataset(index, root=photos)[0]
    assert path in findings(index, root=photos)


def test_a_stated_size_is_compared_before_memory_is_reserved(
    index: Path, photos: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    restate_rows(index, length=0xFFFFFFF0)

    def refuse(*words: Any, **options: Any) -> Any:
        raise AssertionError("memory was reserved")

    monkeypatch.setattr("shardkit.torch.data.images.scratch", refuse)
    with refused(CorruptRecord, "cat/a b.jpg", "4,294,967,280"):
        open_dataset(index, root=photos)[0]


@pytest.mark.parametrize("offset", [-1, 4])
def test_a_forged_offset_is_damage(offset: int, index: Path, photos: Path) -> None:
    restate_rows(index, offset=offset)
    with pytest.raises(CorruptDataset):
        open_dataset(index, root=photos)[0]
    assert not verify(index, root=photos).ok


def test_a_dataset_with_shards_has_no_times_of_files(index: Path, photos: Path) -> None:
    made = converted(photos, photos.parent / "made")
    shutil.copy(index / "index/times.npy", made / "index")

    def change(value: dict[str, Any]) -> None:
        value["files"].append({"name": "index/times.npy", "bytes": 1, "sha256": ""})

    restate_json(made, change)
    with refused(CorruptDataset, "index/times.npy"):
        open_dataset(made)


def test_wrong_uses(index: Path, photos: Path, tmp_path: Path) -> None:
    with refused(UsageError, "against="):
        verify(index, against=photos)
    with refused(UsageError, "--force"):
        reindex(index)
    with refused(UsageError, index):
        repair(index, photos)
    with refused(UsageError, "quick=True"):
        attached(photos, index, quick=True)
    with refused(UsageError, photos):
        attached(photos, photos / "index")
    with refused(UsageError, "s3://bucket"):
        attached("s3://bucket/photos", tmp_path / "other")  # type: ignore[arg-type]


def test_a_folder_is_opened_in_place(
    photos: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def check(classes: list[str]) -> None:
        dataset = pickle.loads(pickle.dumps(open_dataset(photos, decode="numpy")))
        assert dataset.classes == classes
        assert len(dataset) == len([*photos.rglob("*.*")])
        for row, path in enumerate(dataset.paths):
            pixels, label = dataset[row]
            assert np.array_equal(pixels, by_pillow(photos / path))
            assert dataset.classes[label] == path.split("/")[0]

    check(["cat", "dog"])
    assert str(photos) in caplog.text
    caplog.clear()
    check(["cat", "dog"])
    assert not caplog.records  # it says so once
    changes: list[Callable[[Path], object]] = [
        touch,
        lambda path: path.write_bytes(png()),
        Path.unlink,
    ]
    for change in changes:
        change(photos / "dog/2.jpg")
        caplog.clear()
        check(["cat", "dog"])
        assert caplog.records
    make_tree(photos, {"ant/new.png": png()})
    check(["ant", "cat", "dog"])
    assert open_dataset(str(photos)).reopened(decode="numpy")[0][0].shape == (16, 24, 3)


def test_folders_that_are_not_opened_in_place(
    photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    splits = make_tree(tmp_path / "splits", {"train/a/1.png": png(), "val/a/2.png": png()})
    assert len(open_dataset(splits, split="val")) == 1
    with refused(UsageError, splits, "'train'"):
        open_dataset(splits)
    with refused(UsageError, splits, "'tran'", "train"):
        open_dataset(splits, split="tran")
    made = converted(photos, tmp_path / "made")
    (made / "shardkit.json").unlink()
    for folder in (made, make_tree(tmp_path / "empty", {}), tmp_path / "missing"):
        with refused(UsageError, folder):
            open_dataset(folder)
    with refused(UsageError, photos):
        open_dataset(photos, root=photos)
    make_tree(photos, {"cat/bad.jpg": b"no image"})
    with refused(BadImages, "cat/bad.jpg", "--on-error skip"):
        open_dataset(photos)
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with refused(UsageError, "XDG_CACHE_HOME"):
        open_dataset(splits, split="val")


def test_the_command(photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    done = invoke("attach", "imagefolder", "photos", "index", "--workers", 1)
    assert done.exit_code == 0, done.output
    assert "7 images in 2 class folders" in done.output
    assert "../photos" in invoke("info", "index").output
    assert "cat/a b.jpg" in invoke("show", "index", 0).output
    refuses(2, "attach", "imagefolder", "nothing", "other", facts=("nothing",))


def test_attach_recognizes_what_is_there(photos: Path, tmp_path: Path) -> None:
    assert run_main("attach", photos, tmp_path / "index").returncode == 0
    dataset = open_dataset(tmp_path / "index", decode="bytes")
    assert {dataset.paths[row]: dataset[row][0] for row in range(len(dataset))} == FILES
    yolo = {"images/train/a.png": png(), "labels/train/a.txt": b"0 0.5 0.5 0.1 0.1"}
    boxes = make_tree(tmp_path / "boxes", yolo)
    refuses(2, "attach", boxes, tmp_path / "other", facts=(boxes, "convert yolo"))


# A million files: how long their index takes to open, and how much memory.

ROWS = 1_000_000
EACH = 1_000
"""Rows of a class, whose names are as long as those of ImageNet."""

OPEN = """
import os, resource, sys, time
from shardkit import open_dataset

def held():
    with open("/proc/self/statm") as file:
        shown, shared = (int(word) for word in file.read().split()[1:3])
    return (shown - shared) * os.sysconf("SC_PAGE_SIZE")

def read(index, root, rows):
    start = time.perf_counter()
    dataset = open_dataset(index, root=root, decode="numpy")
    count = len(dataset)
    images = dataset[list(rows)]
    return dataset, time.perf_counter() - start

small, large, root = sys.argv[1:]
kept = [read(small, root, range(8))]  # loads all modules
before = held()
kept.append(read(large, root, range(8)))
print(kept[-1][1], held() - before)
"""


def make_index(folder: Path, photos: Path, rows: int) -> Path:
    """Write the index of many files, of which the first few exist."""
    image = jpeg(24, 16)
    names = [f"n{n // EACH:08d}/n{n // EACH:08d}_{n % EACH:05d}.JPEG" for n in range(rows)]
    make_tree(photos, dict.fromkeys(names[:8], image))
    for name in names[:8]:
        os.utime(photos / name, ns=(0, 1))
    classes = tuple(f"n{n:08d}" for n in range(-(-rows // EACH)))

    def parts() -> list[IndexSegment]:
        found = []
        for label in range(len(classes)):
            some = names[label * EACH : (label + 1) * EACH]
            row = pack_row(offset=0, image=image, label=label, size=(24, 16), field="jpg")
            found.append(IndexSegment(as_rows([row] * len(some)), [n[:-5] for n in some], some))
        return found

    (folder / "index").mkdir(parents=True)
    save_npy(folder / TIMES, np.ones(rows, np.int64))
    shards = [
        AttachedShard(name=name, bytes=1, sha256="", rows=min(EACH, rows), modified=0, notes={})
        for name in classes
    ]
    manifest = Assembly(
        folder=folder,
        format="imagefolder",
        schema=default_schema(classes),
        raw_shape=None,
        recipe=Recipe().describe(),
        source={"kind": "imagefolder", "name": "photos", "images": rows},
        software={},
        archives=str(photos),
        others=[TIMES],
    ).finish([ShardGroup(shards=shards, index=parts(), notes={}, skipped=(), ignored=())])
    save_manifests({"": manifest}, folder)
    return folder


@pytest.mark.slow
@pytest.mark.measures
def test_a_million_files_open_at_once_and_take_little_memory(tmp_path: Path) -> None:
    photos = tmp_path / "photos"
    small = make_index(tmp_path / "small", photos, EACH)
    large = make_index(tmp_path / "large", photos, ROWS)
    done = python(OPEN, small, large, photos, check=True)
    seconds, held = map(float, done.stdout.split())
    assert seconds < 1, f"{seconds:.2f} s"
    assert held < 100 * ROWS, f"{held / ROWS:.1f} bytes each"
