from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import numpy as np
import pytest
from helpers import encoded, exif, jpeg, make_tree, picture, png
from PIL import Image, ImageOps
from refusals import refused

from shardkit import convert, open_dataset, open_source
from shardkit.errors import BadImage, UsageError

JPEG = jpeg()
PNG = png()

SUFFIXES = (
    *("jpg", "jpeg", "jpe", "jfif", "png", "webp", "bmp", "gif", "tif", "tiff", "ppm", "pgm"),
    *("pbm", "pnm", "avif", "jp2", "j2k", "tga", "dds", "psd", "qoi"),
)

not_root = pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")


def scanned(path: Path, **options: Any) -> Any:
    return open_source("imagefolder", path, **options).scan()


def found(scan: Any, split: str = "") -> dict[str, int]:
    return {entry.path: entry.label for entry in scan.splits[split].entries}


def ignored(scan: Any, split: str = "") -> dict[str, str]:
    return {problem.path: problem.reason for problem in scan.ignored[split]}


def problems(scan: Any, split: str = "") -> dict[str, str]:
    return {problem.path: problem.reason for problem in scan.problems[split]}


def test_each_folder_is_a_class_and_labels_follow_the_sorted_names(tmp_path: Path) -> None:
    names = ["dog/1.jpg", "Zebra/2.jpg", "Zebra/10.jpg", "Zebra/1.jpg"]
    names += ["cat/x/y/1.jpg", "cat/2.jpg", "cat/x.jpg/3.jpg"]
    make_tree(tmp_path, dict.fromkeys(names, JPEG))
    scan = scanned(tmp_path)
    assert scan.classes == ("Zebra", "cat", "dog")
    assert list(found(scan))[:3] == ["Zebra/1.jpg", "Zebra/10.jpg", "Zebra/2.jpg"]
    assert found(scan) == {name: "Zcd".index(name[0]) for name in names}
    assert ignored(scan) == problems(scan) == {}


def test_a_record_has_image_label_and_path(tmp_path: Path) -> None:
    make_tree(tmp_path, {"cat/a.jpg": JPEG, "dog/b.jpg": PNG})
    source = scanned(tmp_path).splits[""]
    second, first, again = source.read([1, 0, 1])
    assert first.key == "cat/a"
    assert dict(first.fields) == {"jpg": JPEG, "json": b'{"path":"cat/a.jpg"}', "cls": b"0"}
    assert second == again
    assert second.fields["png"] == PNG


def test_images_without_folders_are_unlabeled(tmp_path: Path) -> None:
    make_tree(tmp_path, {"a.jpg": JPEG, "b.png": PNG})
    scan = scanned(tmp_path)
    assert scan.classes is None
    assert found(scan) == {"a.jpg": -1, "b.png": -1}
    (record,) = scan.splits[""].read([0])
    assert "cls" not in record.fields


def test_images_next_to_class_folders_are_reported(tmp_path: Path) -> None:
    make_tree(tmp_path, {"cat/a.jpg": JPEG, "b.jpg": JPEG, "readme.txt": b"text"})
    (tmp_path / "z.jpg").symlink_to("nowhere")
    scan = scanned(tmp_path)
    assert (found(scan), problems(scan)) == ({"cat/a.jpg": 0}, {})
    assert ignored(scan) == {
        "b.jpg": "outside any class folder",
        "readme.txt": "not an image",
        "z.jpg": "a broken link",
    }


def test_hidden_and_other_files_are_reported_and_left_out(tmp_path: Path) -> None:
    make_tree(
        tmp_path,
        {
            "cat/a.jpg": JPEG,
            "cat/.hidden.jpg": JPEG,
            "cat/.thumbs/b.jpg": JPEG,
            "cat/notes.txt": b"BM is no bitmap, and this is a text",
            "cat/empty": b"",
            ".git/c.jpg": JPEG,
            ".DS_Store": b"x",
        },
    )
    scan = scanned(tmp_path)
    assert scan.classes == ("cat",)
    assert found(scan) == {"cat/a.jpg": 0}
    assert ignored(scan) == {
        ".DS_Store": "hidden",
        ".git": "hidden",
        "cat/.hidden.jpg": "hidden",
        "cat/.thumbs": "hidden",
        "cat/empty": "not an image",
        "cat/notes.txt": "not an image",
    }


def test_suffixes_count_in_upper_and_lower_case(tmp_path: Path) -> None:
    names = [f"cat/a.{suffix}" for suffix in SUFFIXES]
    names += [f"cat/b.{suffix.upper()}" for suffix in SUFFIXES]
    make_tree(tmp_path, dict.fromkeys(names, b"no image"))
    assert list(found(scanned(tmp_path))) == sorted(names)


def test_content_determines_the_type_not_the_suffix(tmp_path: Path) -> None:
    bmp = encoded(picture(), "BMP")
    make_tree(tmp_path, {"cat/a.jpg": PNG, "cat/b": JPEG, "cat/c.dat": bmp, "cat/d.png": JPEG})
    source = scanned(tmp_path).splits[""]
    names = ["cat/a.jpg", "cat/b", "cat/c.dat", "cat/d.png"]
    assert [entry.path for entry in source.entries] == names
    assert [record.image_field for record in source.read(range(4))] == ["png", "jpg", "bmp", "jpg"]


def test_a_file_with_an_image_suffix_must_be_an_image(tmp_path: Path) -> None:
    make_tree(tmp_path, {"cat/a.jpg": b"", "cat/b.jpg": b"text"})
    for row in (0, 1):
        with refused(BadImage):
            scanned(tmp_path).splits[""].read([row])


def test_a_file_that_changes_after_the_scan_is_bad(tmp_path: Path) -> None:
    make_tree(tmp_path, {"cat/a.jpg": JPEG, "cat/b.jpg": JPEG, "cat/c.jpg": JPEG})
    source = scanned(tmp_path).splits[""]
    (tmp_path / "cat/a.jpg").write_bytes(JPEG + b"x")
    (tmp_path / "cat/b.jpg").unlink()
    os.utime(tmp_path / "cat/c.jpg", ns=(0, 0))  # as after an edit that keeps the size
    for row in (2, 0, 1):
        with refused(BadImage):
            source.read([row])


def test_empty_class_folders_are_classes(tmp_path: Path) -> None:
    make_tree(tmp_path, {"cat/a.jpg": JPEG, "bird": None, "dog": None})
    scan = scanned(tmp_path)
    assert scan.classes == ("bird", "cat", "dog")
    assert found(scan) == {"cat/a.jpg": 1}


def test_links_to_files_and_folders_are_followed(tmp_path: Path) -> None:
    make_tree(tmp_path / "store", {"a.jpg": JPEG, "more/b.jpg": JPEG})
    root = make_tree(tmp_path / "root", {"cat": None})
    (root / "cat/x.jpg").symlink_to(tmp_path / "store/a.jpg")
    (root / "cat/more").symlink_to(tmp_path / "store/more")
    (root / "dog").symlink_to(tmp_path / "store")
    (root / "hound").symlink_to("dog")  # two classes may be the same folder
    files = {"cat/x.jpg": 0, "cat/more/b.jpg": 0, "dog/a.jpg": 1, "dog/more/b.jpg": 1}
    assert found(scanned(root)) == {**files, "hound/a.jpg": 2, "hound/more/b.jpg": 2}


def test_loops_of_links_end(tmp_path: Path) -> None:
    make_tree(tmp_path, {"cat/deep/a.jpg": JPEG})
    (tmp_path / "cat/deep/up").symlink_to("..")
    (tmp_path / "cat/self").symlink_to("self")
    (tmp_path / "cat/twin").symlink_to("deep")
    scan = scanned(tmp_path, classes=True)
    assert found(scan) == {"cat/deep/a.jpg": 0}
    assert set(ignored(scan)) == {"cat/deep/up", "cat/self", "cat/twin"}


def test_broken_links_with_image_suffixes_are_errors(tmp_path: Path) -> None:
    make_tree(tmp_path, {"cat/a.jpg": JPEG})
    for name in ("b.jpg", "c.txt", "d"):
        (tmp_path / "cat" / name).symlink_to("nowhere")
    scan = scanned(tmp_path)
    assert problems(scan) == {"cat/b.jpg": "a broken link"}
    assert set(ignored(scan)) == {"cat/c.txt", "cat/d"}


def test_pipes_and_sockets_are_never_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_tree(tmp_path, {"cat/a.jpg": JPEG})
    os.mkfifo(tmp_path / "cat/pipe.jpg")
    os.mkfifo(tmp_path / "cat/pipe")
    monkeypatch.chdir(tmp_path)  # the path of a socket must be short
    with socket.socket(socket.AF_UNIX) as server:
        server.bind("cat/socket.png")
        scan = scanned(tmp_path)
    assert found(scan) == {"cat/a.jpg": 0}
    reason = "neither a file nor a folder"
    assert ignored(scan) == {"cat/pipe": reason}
    assert problems(scan) == {"cat/pipe.jpg": reason, "cat/socket.png": reason}


@not_root
def test_an_unreadable_file_is_an_error(tmp_path: Path) -> None:
    make_tree(tmp_path, {"cat/a.jpg": JPEG, "cat/b.jpg": JPEG, "cat/inner/c.jpg": JPEG})
    (tmp_path / "cat/b.jpg").chmod(0)
    (tmp_path / "cat/inner").chmod(0)
    try:
        scan = scanned(tmp_path)
    finally:
        (tmp_path / "cat/inner").chmod(0o700)
    assert list(problems(scan)) == ["cat/inner"]
    with pytest.raises(BadImage, match="Permission denied"):
        scan.splits[""].read([1])


def test_a_folder_that_cannot_be_read_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_tree(tmp_path, {"cat/a.jpg": JPEG, "cat/inner/b.jpg": JPEG})
    listed = os.listdir

    def refuse(path: str | Path) -> list[str]:
        if Path(path).name == "inner":
            raise PermissionError(13, "Permission denied", str(path))
        return listed(path)

    monkeypatch.setattr(os, "listdir", refuse)
    assert problems(scanned(tmp_path)) == {
        "cat/inner": "the folder cannot be read: Permission denied"
    }


ODD_NAMES = [
    "full moon.jpg",
    " .jpg",
    "a.b.c.jpg",
    "größe ★.jpg",
    "new\nline.jpg",
    "tab\tquote'\"\\.jpg",
    "x" * 251 + ".jpg",
    "é" * 125 + ".jpg",
    "\udcff\udcfe.jpg",
    "percent%20%2E.jpg",
    "..jpg",
    "__a__.jpg",
    "-rf.jpg",
    "no_suffix",
    "dot.",
]


@pytest.mark.parametrize("name", ODD_NAMES)
def test_odd_names_survive_a_round_trip(tmp_path: Path, name: str) -> None:
    folder = name if name != ".jpg" and len(os.fsencode(name)) < 250 else "cat"
    if folder.startswith("."):
        folder = "cat"
    inner = name if not name.startswith(".") else "x" + name
    make_tree(tmp_path, {f"{folder}/{inner}": JPEG})
    scan = scanned(tmp_path)
    assert scan.classes == (folder,)
    (record,) = scan.splits[""].read([0])
    assert record.meta["path"] == f"{folder}/{inner}"
    assert f"{folder}/{inner}".startswith(unquote(record.key, errors="surrogateescape"))


def test_files_that_differ_only_in_suffix_are_all_listed(tmp_path: Path) -> None:
    names = ["cat/a", "cat/a.jpg", "cat/a.png", "cat/a.JPG", "cat/a.jpg.png"]
    make_tree(tmp_path, dict.fromkeys(names, JPEG))
    entries = scanned(tmp_path).splits[""].entries
    assert sorted(entry.path for entry in entries) == sorted(names)
    assert len({entry.key for entry in entries}) == len(names)


def test_natural_order_sorts_numbers_by_value(tmp_path: Path) -> None:
    names = ["class10", "class2", "class1", "2", "10", "class02", "b", "A"]
    make_tree(tmp_path, {f"{name}/a.jpg": JPEG for name in names})
    assert scanned(tmp_path).classes == tuple(sorted(names))
    natural = ("2", "10", "A", "b", "class1", "class02", "class2", "class10")
    assert scanned(tmp_path, class_order="natural").classes == natural


@pytest.mark.parametrize(
    ("content", "classes"),
    [
        (b"dog x\r\n\r\nunicorn\ncat", ("dog x", "unicorn", "cat")),
        (b"\xef\xbb\xbfcat\n", ("cat",)),  # a byte order mark
        (b"\xff\n", ("\udcff",)),
        *((f"{name}\n".encode(), (name,)) for name in ("a\x0bb", "a\u2028b", "a\x85b")),
    ],
)
def test_a_file_gives_the_order_of_classes(
    content: bytes, classes: tuple[str, ...], tmp_path: Path
) -> None:
    """It is split only at line feeds, and its names need not be UTF-8."""
    files = {f"{name}/a.jpg": n for n, name in enumerate(classes) if name != "unicorn"}
    make_tree(tmp_path / "src", dict.fromkeys(files, JPEG))
    (tmp_path / "order").write_bytes(content)
    scan = scanned(tmp_path / "src", class_order=str(tmp_path / "order"))
    assert (scan.classes, found(scan)) == (classes, files)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"cat\n", "lacks 1 classes: 'dog'"),
        (b"cat\ndog\ncat\n", "lists twice 1 classes: 'cat'"),
        (b"", "lacks 2 classes: 'cat', 'dog'"),
    ],
)
def test_a_file_of_classes_must_name_each_once(
    tmp_path: Path, content: bytes, message: str
) -> None:
    make_tree(tmp_path / "src", {"cat/a.jpg": JPEG, "dog/b.jpg": JPEG})
    order = tmp_path / "order.txt"
    order.write_bytes(content)
    with pytest.raises(UsageError, match=message):
        scanned(tmp_path / "src", class_order=str(order))


@pytest.mark.parametrize("files", [{"cat/a.jpg": JPEG}, {"a.jpg": JPEG}], ids=["classes", "flat"])
def test_an_unknown_class_order_is_an_error(tmp_path: Path, files: dict[str, bytes | None]) -> None:
    make_tree(tmp_path / "src", files)
    for wrong in (str(tmp_path / "missing"), str(tmp_path), ""):
        with pytest.raises(UsageError, match="class_order="):
            scanned(tmp_path / "src", class_order=wrong)


def test_folders_named_like_splits_are_splits_with_shared_classes(tmp_path: Path) -> None:
    make_tree(
        tmp_path,
        {"train/dog/a.jpg": JPEG, "train/cat/b.jpg": JPEG, "Val/dog/c.jpg": JPEG, "x.txt": b"x"},
    )
    scan = scanned(tmp_path)
    assert sorted(scan.splits) == ["Val", "train"]
    assert scan.classes == ("cat", "dog")
    assert found(scan, "train") == {"cat/b.jpg": 0, "dog/a.jpg": 1}
    assert found(scan, "Val") == {"dog/c.jpg": 1}
    assert [problem.path for part in scan.ignored.values() for problem in part] == ["x.txt"]


def test_a_split_may_be_flat_and_unlabeled(tmp_path: Path) -> None:
    make_tree(tmp_path, {"train/dog/a.jpg": JPEG, "test/b.jpg": JPEG})
    scan = scanned(tmp_path)
    assert scan.classes == ("dog",)
    assert found(scan, "test") == {"b.jpg": -1}
    assert found(scan, "train") == {"dog/a.jpg": 0}


@pytest.mark.parametrize("names", [("train", "val"), ("Train_images", "test_images", "val2017")])
def test_flat_folders_named_like_splits_have_no_labels(
    tmp_path: Path, names: tuple[str, ...]
) -> None:
    make_tree(tmp_path, {f"{name}/{name}.jpg": JPEG for name in names})
    scan = scanned(tmp_path)
    assert scan.classes is None
    assert sorted(scan.splits) == sorted(names)
    for name in names:
        assert found(scan, name) == {f"{name}.jpg": -1}
    assert scanned(tmp_path, splits=False).classes == tuple(sorted(names))


def test_what_systems_leave_behind_is_no_data(tmp_path: Path) -> None:
    files = {
        "cat/1.jpg": JPEG,
        "dog/1.jpg": JPEG,
        "__MACOSX/cat/._1.jpg": b"\0\5\x16\7",
        "lost+found": None,
        "$RECYCLE.BIN/2.jpg": JPEG,
        "cat/@eaDir/1.jpg/SYNOPHOTO_THUMB_M.jpg": JPEG,
        "cat/.thumbnails/1.png": PNG,
        "dog/.ipynb_checkpoints/1-checkpoint.jpg": JPEG,
        "dog/Thumbs.db": JPEG,
    }
    make_tree(tmp_path, files)
    scan = scanned(tmp_path)
    assert scan.classes == ("cat", "dog")
    assert found(scan) == {"cat/1.jpg": 0, "dog/1.jpg": 1}
    assert ignored(scan) == {
        **dict.fromkeys(("$RECYCLE.BIN", "__MACOSX", "lost+found"), "of the system"),
        **dict.fromkeys(("cat/@eaDir", "dog/Thumbs.db"), "of the system"),
        **dict.fromkeys(("cat/.thumbnails", "dog/.ipynb_checkpoints"), "hidden"),
    }


def tiff_with(tags: dict[int, bytes], inner: dict[int, bytes] | None = None) -> bytes:
    """Return a TIFF file of big-endian tags, of type LONG, perhaps with a SubIFD after the first.

    The SubIFD is at 38 after two tags; the tag 330 points there.
    """
    data = b"MM\0*\0\0\0\x08"
    for directory in (tags, inner or {}):
        data += len(directory).to_bytes(2, "big")
        for number, value in sorted(directory.items()):
            data += number.to_bytes(2, "big") + b"\0\4\0\0\0\1" + value
        data += b"\0\0\0\0"
    return data


RAW = {
    "HEIC": b"\0\0\0\x18ftypheic\0\0\0\0mif1heic",
    "HEIF": b"\0\0\0\x18ftypmif1\0\0\0\0mif1",
    "JPEG XL": b"\xff\x0a\xfa\x1f\x41\x90",
    "raw CR3": b"\0\0\0\x18ftypcrx \0\0\0\1crx isom",
    "raw CR2": b"II*\0\x10\0\0\0CR\2\0" + bytes(40),
    "raw DNG": tiff_with({256: b"\0\0\0\4", 50706: b"\1\4\0\0"}),
    "camera raw": tiff_with({256: b"\0\0\0\4", 330: b"\0\0\0\x26"}, {262: b"\x80\x23\0\0"}),
    "DICOM": bytes(128) + b"DICM" + bytes(16),
    "SVG": b'<?xml version="1.0"?>\n<svg xmlns="http://www.w3.org/2000/svg"/>',
}
"""The first bytes of types of images that are not read, from their specifications."""


@pytest.mark.parametrize("name", RAW)
@pytest.mark.parametrize("file", ["photo", "photo.jpg", "photo.tif"])
def test_no_type_of_image_is_left_out(
    tmp_path: Path, name: str, file: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shardkit.codecs.foreign.find_spec", lambda _: None)  # of extras
    make_tree(tmp_path, {"cat/1.jpg": JPEG, f"cat/{file}": RAW[name]})
    scan = scanned(tmp_path)
    assert found(scan).keys() == {"cat/1.jpg", f"cat/{file}"}
    with refused(BadImage, name):
        scan.splits[""].read([1])


def test_a_tiff_file_of_pixels_is_no_raw_file(tmp_path: Path) -> None:
    make_tree(tmp_path, {"cat/1.tif": encoded(kind="TIFF"), "cat/2": b"II*\0\xff\xff\xff\xff"})
    records = scanned(tmp_path).splits[""].read([0, 1])
    assert [next(iter(record.fields)) for record in records] == ["tiff", "tiff"]


@pytest.mark.parametrize(
    "names",
    [
        ("cat/1", "Cat/2"),
        ("caf\xe9/1", "cafe\u0301/2"),
        ("cat/1", "cat /2"),
        ("train/a/1", "val/A/2"),
    ],
)
def test_names_that_look_alike_are_not_two_classes(tmp_path: Path, names: tuple[str, str]) -> None:
    make_tree(tmp_path / "src", {f"{name}.jpg": JPEG for name in names})
    folders = [ascii(name.rpartition("/")[0]) for name in names]
    with refused(UsageError, *folders, "class_order="):
        scanned(tmp_path / "src")
    order = tmp_path / "order.txt"
    classes = [name.split("/")[-2] for name in names]
    order.write_text("\n".join(classes), "utf-8")
    assert scanned(tmp_path / "src", class_order=str(order)).classes == tuple(classes)


def test_numbers_as_classes_are_noted_in_both_orders(tmp_path: Path) -> None:
    make_tree(tmp_path, {f"{number}/a.jpg": JPEG for number in range(11)})
    (note,) = scanned(tmp_path).notes
    for fact in ("10=2", "class_order='natural'", "10=10"):
        assert fact in note
    natural = scanned(tmp_path, class_order="natural")
    assert natural.notes == []
    assert natural.classes == tuple(map(str, range(11)))


def test_splits_can_be_forced_off_and_on(tmp_path: Path) -> None:
    make_tree(tmp_path, {"train/dog/a.jpg": JPEG, "val/cat/b.jpg": JPEG})
    assert scanned(tmp_path, splits=False).classes == ("train", "val")
    make_tree(tmp_path, {"extra/cat/c.jpg": JPEG})
    with refused(UsageError):
        scanned(tmp_path)
    assert scanned(tmp_path, splits=False).classes == ("extra", "train", "val")
    assert sorted(scanned(tmp_path, splits=True).splits) == ["extra", "train", "val"]


def test_a_source_without_images_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(JPEG)
    make_tree(tmp_path / "empty", {})
    make_tree(tmp_path / "texts", {"cat/a.txt": b"x", "dog": None})
    (tmp_path / "loop").symlink_to("loop")
    for name, message in [
        ("missing", "does not exist"),
        ("file", "is a file"),
        ("empty", "contains no images"),
        ("texts", "contains no images"),
        ("loop", "cannot be read"),
    ]:
        with pytest.raises(UsageError, match=message):
            scanned(tmp_path / name)


def test_a_folder_of_only_broken_links_is_reported(tmp_path: Path) -> None:
    make_tree(tmp_path, {"cat": None})
    (tmp_path / "cat/a.jpg").symlink_to("nowhere")
    scan = scanned(tmp_path)
    assert problems(scan) == {"cat/a.jpg": "a broken link"}


@pytest.mark.timeout(120)
def test_a_huge_class_file_is_refused(tmp_path: Path) -> None:
    make_tree(tmp_path / "photos", {"a/1.jpg": jpeg()})
    os.mkfifo(tmp_path / "pipe")
    with (tmp_path / "huge").open("wb") as file:
        file.truncate(1 << 40)
    for path, said in (
        (tmp_path / "pipe", "it is not a file"),
        (Path("/dev/zero"), "it is not a file"),
        (tmp_path / "huge", "it is larger than"),
    ):
        with pytest.raises(UsageError, match=said):
            scanned(tmp_path / "photos", class_order=str(path))


def test_a_file_that_is_too_large_for_an_image_is_bad(tmp_path: Path) -> None:
    make_tree(tmp_path, {"a/1.jpg": JPEG, "a/huge.jpg": JPEG, "a/huge": JPEG, "a/text": b"x"})
    for name in ("huge.jpg", "huge", "text"):
        with (tmp_path / "a" / name).open("r+b") as file:
            file.truncate(200 << 30)
    scan = scanned(tmp_path)
    assert found(scan) == {"a/1.jpg": 0}
    assert {problem.path for problem in scan.problems[""]} == {"a/huge.jpg", "a/huge"}
    assert all(f"{0x7FFFF000:,} bytes" in reason for reason in problems(scan).values())
    assert [problem.path for problem in scan.ignored[""]] == ["a/text"]


def test_photographs_are_upright_whatever_their_size(tmp_path: Path) -> None:
    """--resize keeps the size of small ones, but turns them like the large ones."""
    files = {f"cat/{side}.jpg": jpeg(2 * side, side, exif=exif(6), quality=95) for side in (16, 64)}
    source = make_tree(tmp_path / "src", files)
    convert(source, tmp_path / "made", to="lmdb", resize=24, shuffle=False, workers=1)
    dataset = open_dataset(tmp_path / "made")
    for row, path in enumerate(sorted(files)):
        shown = ImageOps.exif_transpose(Image.open(source / path))
        image, _ = dataset[row]
        assert (image.height > image.width) == (shown.height > shown.width)
        small = np.asarray(shown.convert("L").resize((8, 16)), np.int16)
        assert np.abs(np.asarray(image.convert("L").resize((8, 16)), np.int16) - small).mean() < 8
    assert "orientation" not in dataset.manifest.notes
