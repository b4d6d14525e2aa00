"""Zip archives as macOS, Windows, 7-Zip, Info-ZIP and Python write them, and hostile ones."""

from __future__ import annotations

import io
import json
import stat
import struct
import unicodedata
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from zipfile import ZIP_BZIP2, ZIP_DEFLATED, ZIP_STORED, ZipFile, ZipInfo

import pytest
from helpers import jpeg, make_tree, png, run_main
from refusals import refused, refuses

from shardkit import attach, convert, diff, open_dataset, open_source, verify
from shardkit.errors import BadImage, UsageError

JPEG = jpeg(24, 16)
PNG = png(24, 16)
NFD = unicodedata.normalize("NFD", "größer")
CLASSES = {"cat/1.jpg": JPEG, "cat/2.png": PNG, "dog/1.jpg": JPEG, "größer/b c.jpg": JPEG}


class _Stream(io.RawIOBase):
    """An output that cannot seek: sizes follow the content, as macOS writes them."""

    def __init__(self, path: Path) -> None:
        self.file = path.open("wb")

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        return self.file.write(data)

    def close(self) -> None:
        self.file.close()


def write_zip(
    path: Path,
    files: Mapping[str, bytes],
    how: int = ZIP_DEFLATED,
    *,
    system: int = 3,
    names: str = "",
    **facts: Any,
) -> Path:
    """Write an archive.

    Args:
        path: The archive.
        files: Content by name; "/" at the end makes a folder.
        how: The compression.
        system: What made it: 0 for Windows, 3 for Unix.
        names: Encoding of names without the flag for UTF-8.
        facts: Attributes of each member.
    """
    with ZipFile(path, "w") as archive:
        for number, (name, data) in enumerate(files.items()):
            info = ZipInfo(_placeholder(number, name.encode(names)) if names else name)
            info.compress_type = ZIP_STORED if name.endswith("/") else how
            info.create_system = system
            for fact, value in facts.items():
                setattr(info, fact, value)
            archive.writestr(info, data)
    content = path.read_bytes()
    for number, name in enumerate(files if names else ()):
        encoded = name.encode(names)
        content = content.replace(_placeholder(number, encoded).encode(), encoded)
    path.write_bytes(content)
    return path


def _placeholder(number: int, encoded: bytes) -> str:
    return f"{number:~>{len(encoded) - 1}}!"


def write_finder(path: Path) -> Path:
    """Write what macOS does: a folder, decomposed names without a flag, and its own files."""
    files = {"pets/": b"", "pets/.DS_Store": b"\0", "__MACOSX/pets/._.DS_Store": b"\0\5\x16\7"}
    for name, data in CLASSES.items():
        plain = unicodedata.normalize("NFD", name)
        files[f"pets/{plain}"] = data
        files[f"__MACOSX/pets/{plain.replace('/', '/._')}"] = b"\0\5\x16\7"
    return write_zip(path, files, names="utf-8")


def write_streamed(path: Path) -> Path:
    with _Stream(path) as out, ZipFile(out, "w", ZIP_DEFLATED) as archive:
        for name, data in CLASSES.items():
            archive.writestr(f"pets/{name}", data)
    return path


def write_zip64(path: Path) -> Path:
    with ZipFile(path, "w", ZIP_DEFLATED) as archive:
        for name, data in CLASSES.items():
            with archive.open(name, "w", force_zip64=True) as member:
                member.write(data)
    return path


WRITERS = {
    "macOS": write_finder,
    "Windows": lambda path: write_zip(path, CLASSES, system=0, names="cp437"),
    "Windows, UTF-8": lambda path: write_zip(path, CLASSES, system=0),
    "old .NET": lambda path: write_zip(
        path, {f"pets\\{n.replace('/', chr(92))}": data for n, data in CLASSES.items()}, system=0
    ),
    "7-Zip": lambda path: write_zip(
        path, {"pets/": b"", "pets/cat/": b"", **{f"pets/{n}": d for n, d in CLASSES.items()}}
    ),
    "relative": lambda path: write_zip(path, {f"./{n}": d for n, d in CLASSES.items()}, ZIP_STORED),
    "streamed": write_streamed,
    "Zip64": write_zip64,
}


@pytest.mark.parametrize("writer", WRITERS)
def test_an_archive_of_each_program_is_its_folder(tmp_path: Path, writer: str) -> None:
    path = WRITERS[writer](tmp_path / "pets.zip")
    (images,) = open_source("zip", path).scan().splits.values()
    records = images.read(range(len(images)))
    found = {
        unicodedata.normalize("NFC", str(record.meta["path"])): (
            record.label,
            record.fields.get("jpg") or record.fields["png"],
        )
        for record in records
    }
    labels = {"cat": 0, "dog": 1, "größer": 2}
    assert found == {n: (labels[n.partition("/")[0]], data) for n, data in CLASSES.items()}


def test_an_archive_gives_the_dataset_of_its_folder(tmp_path: Path) -> None:
    folder = make_tree(tmp_path / "pets", CLASSES)
    path = write_zip(tmp_path / "pets.zip", {f"pets/{n}": data for n, data in CLASSES.items()})
    convert(folder, tmp_path / "one", to="lmdb", workers=1)
    done = run_main("convert", path, tmp_path / "two", "--to", "lmdb", "--workers", "1", "--json")
    assert json.loads(done.stdout)["read_as"] == "zip: a .zip file"
    assert diff(tmp_path / "one", tmp_path / "two").equal
    assert verify(tmp_path / "two", against=path).ok


def test_what_is_no_data_is_ignored_by_name(tmp_path: Path) -> None:
    path = write_finder(tmp_path / "pets.zip")
    with ZipFile(path, "a") as archive:
        archive.writestr("license.txt", "free")
        archive.writestr("pets/loose.jpg", JPEG)
        archive.writestr("pets/cat/notes.txt", "a cat")
        archive.writestr("pets/cat/image", JPEG)
    scan = open_source("zip", path).scan()
    ignored = {problem.path: problem.reason for problem in scan.ignored[""]}
    assert ignored["__MACOSX"] == "of the system"
    assert ignored[".DS_Store"] == "hidden"
    others = {"license.txt", "cat/notes.txt", "loose.jpg"}
    assert ignored.keys() == {"__MACOSX", ".DS_Store", *others}
    assert "class" in ignored["loose.jpg"]
    assert "cat/image" in scan.splits[""].paths()


SHAPES: dict[str, tuple[list[str], dict[str, tuple[str, ...]]]] = {
    "images alone": (["1.jpg", "2.jpg"], {"": ("-1 1.jpg", "-1 2.jpg")}),
    "one class": (["cat/1.jpg"], {"": ("0 cat/1.jpg",)}),
    "splits in two folders": (
        ["a/b/train/cat/1.jpg", "a/b/val/cat/2.jpg"],
        {"train": ("0 cat/1.jpg",), "val": ("0 cat/2.jpg",)},
    ),
    "one split": (
        ["train/cat/1.jpg", "train/dog/2.jpg"],
        {"train": ("0 cat/1.jpg", "1 dog/2.jpg")},
    ),
    "flat splits": (
        ["x/train/1.jpg", "x/test/2.jpg"],
        {"test": ("-1 2.jpg",), "train": ("-1 1.jpg",)},
    ),
    "deep": (
        ["cat/b/2.jpg", "cat/a.jpg", "dog/1.jpg"],
        {"": ("0 cat/a.jpg", "0 cat/b/2.jpg", "1 dog/1.jpg")},
    ),
}


@pytest.mark.parametrize("shape", SHAPES)
def test_folders_in_an_archive_mean_what_folders_mean(tmp_path: Path, shape: str) -> None:
    names, expected = SHAPES[shape]
    path = write_zip(tmp_path / "x.zip", dict.fromkeys(names, JPEG))
    found = {
        split: tuple(f"{entry.label} {entry.path}" for entry in images.entries)
        for split, images in open_source("zip", path).scan().splits.items()
    }
    assert found == expected


def test_another_layout_in_an_archive_is_refused_with_its_command(tmp_path: Path) -> None:
    files = {"ds/images/1.jpg": JPEG, "ds/labels/1.txt": b"0 0.5 0.5 0.2 0.2\n"}
    path = write_zip(tmp_path / "ds.zip", {**files, "ds/data.yaml": b"names: [a]\nnc: 1"})
    command = "shardkit convert yolo FOLDER/ds DST"
    refuses(2, "convert", path, tmp_path / "out", "--to", "lmdb", facts=(command, "--classes"))
    assert open_source("zip", path, classes=True).scan().classes == ("images", "labels")


def test_a_list_of_labels_in_an_archive_is_never_left_out(tmp_path: Path) -> None:
    files = {"val/1.jpg": JPEG, "val/2.jpg": JPEG, "ground_truth.txt": b"490\n361\n"}
    path = write_zip(tmp_path / "a.zip", files)
    with refused(UsageError, path, "ground_truth.txt", "FOLDER/val", "classes=True"):
        open_source("zip", path).scan()
    (tmp_path / "a.7z").write_bytes(b"7z")
    refuses(2, "convert", tmp_path / "a.7z", tmp_path / "out", "--to", "lmdb", facts=("a.7z",))


def test_convert_imagefolder_names_the_command_for_an_archive(tmp_path: Path) -> None:
    path = write_zip(tmp_path / "x.zip", CLASSES)
    command = f"shardkit convert zip {path}"
    refuses(2, "convert", "imagefolder", path, tmp_path / "out", "--to", "lmdb", facts=(command,))
    with refused(UsageError, command):
        convert(path, tmp_path / "out", to="lmdb")
    with refused(UsageError, command):
        open_source("imagefolder", tmp_path).scan()


def test_stored_images_are_attached_and_compressed_ones_refused(tmp_path: Path) -> None:
    packed = write_zip(tmp_path / "packed.zip", CLASSES)
    stored = write_zip(tmp_path / "stored.zip", CLASSES, ZIP_STORED)
    refuses(2, "attach", "zip", packed, tmp_path / "no", facts=(packed, "4", "zip -0"))
    done = run_main("attach", "zip", stored, tmp_path / "index")
    assert done.returncode == 0, done.stderr
    dataset = open_dataset(tmp_path / "index", decode="bytes")
    assert [dataset[row][0] for row in range(len(dataset))] == [*CLASSES.values()]


def test_splits_are_converted_not_attached(tmp_path: Path) -> None:
    files = {"train/a/1.jpg": JPEG, "val/a/1.jpg": JPEG}
    path = write_zip(tmp_path / "x.zip", files, ZIP_STORED)
    with refused(UsageError, path, "train, val"):
        attach(open_source("zip", path), tmp_path / "index")


# Hostile and damaged archives


def problem_of(path: Path, name: str = "cat/1.jpg") -> str:
    """Return why an image cannot be listed, or else why it cannot be read."""
    scan = open_source("zip", path).scan()
    images = scan.splits[""]
    reasons = {problem.path: problem.reason for problem in scan.problems[""]}
    if name in images.paths():
        with pytest.raises(BadImage) as caught:
            images.read([images.paths().index(name)])
        reasons[name] = str(caught.value)
    return reasons[name]


def patched(path: Path, at: int, value: bytes, sign: bytes = b"PK\1\2") -> Path:
    """Change bytes after the first sign, that of an entry of the directory by default."""
    content = bytearray(path.read_bytes())
    start = content.index(sign) + at
    content[start : start + len(value)] = value
    path.write_bytes(content)
    return path


def plain(tmp_path: Path, **options: Any) -> Path:
    return write_zip(tmp_path / "x.zip", CLASSES, **options)


def test_members_that_cannot_be_read_are_bad_images(tmp_path: Path) -> None:
    link = plain(tmp_path, external_attr=(stat.S_IFLNK | 0o777) << 16)
    assert "link" in problem_of(link)
    assert "bzip2" in problem_of(plain(tmp_path, how=ZIP_BZIP2))
    assert "method 97" in problem_of(patched(plain(tmp_path), 10, struct.pack("<H", 97)))
    assert "encrypted" in problem_of(patched(plain(tmp_path), 8, b"\1"))


def test_wrong_sizes_checksums_and_places_are_bad_images(tmp_path: Path) -> None:
    size = len(JPEG)
    bomb = patched(plain(tmp_path), 24, struct.pack("<I", 1 << 30))
    assert f"{1 << 30:,}" in problem_of(bomb)  # before anything is read
    for at, value in ((24, size - 1), (24, size + 1), (20, 50), (16, 0), (42, 7)):
        for how in (ZIP_DEFLATED, ZIP_STORED):
            wrong = patched(plain(tmp_path, how=how), at, struct.pack("<I", value))
            assert problem_of(wrong), (at, value, how)


def test_a_large_member_that_is_no_image_is_not_unpacked(tmp_path: Path) -> None:
    path = write_zip(tmp_path / "x.zip", {"cat/1.jpg": bytes(2 << 20), "cat/2.jpg": JPEG})
    assert "not an image" in problem_of(path)


def test_a_member_that_unpacks_to_more_than_it_states_is_bad(tmp_path: Path) -> None:
    data = JPEG + bytes(1 << 20)
    path = patched(write_zip(tmp_path / "x.zip", {"cat/1.jpg": data}), 24, struct.pack("<I", 99))
    assert "checksum" in problem_of(path)


def test_unsafe_names_are_reported_and_lead_nowhere(tmp_path: Path) -> None:
    for name in ("../1.jpg", "cat/../../1.jpg", "/etc/1.jpg", "C:/1.jpg", "a/" * 101 + "1.jpg"):
        path = write_zip(tmp_path / "x.zip", {"cat/1.jpg": JPEG, name: JPEG})
        assert problem_of(path, name)
    windows = write_zip(tmp_path / "x.zip", {"cat/1.jpg": JPEG, "..\\2.jpg": JPEG}, system=0)
    assert problem_of(windows, "../2.jpg")


@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_members_of_one_name_are_bad(tmp_path: Path) -> None:
    with ZipFile(tmp_path / "x.zip", "w") as archive:
        for name in ("cat/1.jpg", "cat/2.jpg", "cat/1.jpg"):
            archive.writestr(name, JPEG)
    assert "two" in problem_of(tmp_path / "x.zip")
    for names in (["cat/1.jpg", "cat/1.jpg/2.jpg"], ["cat/1.jpg/2.jpg", "cat/1.jpg"]):
        both = write_zip(tmp_path / "x.zip", dict.fromkeys(names, JPEG))
        assert "name" in problem_of(both, names[1])


def test_skipped_members_stay_known(tmp_path: Path) -> None:
    path = patched(plain(tmp_path), 8, b"\1")
    source = open_source("zip", path)
    convert(source, tmp_path / "out", to="lmdb", workers=1, on_error="skip")
    assert sorted(open_dataset(tmp_path / "out").paths) == sorted({*CLASSES} - {"cat/1.jpg"})
    assert verify(tmp_path / "out", against=path).findings == []


def test_what_is_no_whole_archive_is_refused(tmp_path: Path) -> None:
    whole = plain(tmp_path).read_bytes()
    for name, content, fact in (
        ("empty", b"", "zip"),
        ("other", JPEG, "zip"),
        ("cut", whole[:-40], "truncated"),
        ("shifted", whole[: len(whole) // 2] + whole[-300:], "truncated"),
    ):
        path = tmp_path / f"{name}.zip"
        path.write_bytes(content)
        with refused(UsageError, path, fact):
            open_source("zip", path).scan()
    with refused(UsageError, tmp_path, "file"):
        open_source("zip", tmp_path)
    with refused(UsageError, tmp_path / "none.zip"):
        open_source("zip", tmp_path / "none.zip")


def test_parts_of_a_split_archive_and_overlaps_are_refused(tmp_path: Path) -> None:
    part = patched(plain(tmp_path), 34, struct.pack("<H", 1))
    with refused(UsageError, part, "zip -s 0"):
        open_source("zip", part)
    overlapping = patched(plain(tmp_path), 20, struct.pack("<I", 1 << 20))
    with refused(UsageError, overlapping, "overlap"):
        open_source("zip", overlapping)


def test_an_archive_that_changes_gives_no_image(tmp_path: Path) -> None:
    path = plain(tmp_path)
    (images,) = open_source("zip", path).scan().splits.values()
    write_zip(path, {name: png(24, 16, 9) for name in CLASSES})
    with pytest.raises(BadImage):
        images.read([0])


def test_backslashes_of_an_archive_without_folders_are_folders(tmp_path: Path) -> None:
    """As old .NET writes, and other programs copy; a Unix name may have one next to folders."""
    path = write_zip(tmp_path / "a.zip", {"cat\\1.jpg": JPEG, "dog\\2.jpg": JPEG})
    found = open_source("zip", path).scan()
    assert found.classes == ("cat", "dog")
    path = write_zip(tmp_path / "b.zip", {"cat/1\\2.jpg": JPEG, "dog/2.jpg": JPEG})
    entries = open_source("zip", path).scan().splits[""].entries
    assert [entry.path for entry in entries] == ["cat/1\\2.jpg", "dog/2.jpg"]


def test_folders_that_only_look_like_classes_are_refused(tmp_path: Path) -> None:
    files = {
        f"{of}/{kind}/{n}.png": PNG
        for of in ("COVID", "Normal")
        for kind in ("images", "masks")
        for n in range(2)
    }
    path = write_zip(tmp_path / "a.zip", files)
    with refused(UsageError, "COVID/ and Normal/", "images, masks", "FOLDER/COVID", "classes=True"):
        open_source("zip", path).scan()
    assert open_source("zip", path, classes=True).scan().classes == ("COVID", "Normal")
