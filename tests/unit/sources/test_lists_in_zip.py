"""Tables and annotations whose images, or all of them, are in a zip archive."""

from __future__ import annotations

import json
import shlex
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from zipfile import ZIP_DEFLATED, ZIP_STORED, ZipFile, ZipInfo

import pytest
from foreign import problems
from helpers import jpeg, make_tree, png, run_main
from refusals import refused, refuses

from shardkit import convert, diff, open_dataset, open_source, repair, verify
from shardkit.errors import BadImage, BadImages, UsageError

pytestmark = pytest.mark.usefixtures("in_tmp_path")

IMAGES = {f"train/{name}.jpg": jpeg(24, 16, seed) for seed, name in enumerate("abc")}
MASK = png(24, 16, mode="L")
TABLE = b"id,breed\na,cat\nb,dog\nc,cat\n"
FOLDER = {**IMAGES, "labels.csv": TABLE}
TO = ("--to", "lmdb", "--workers", "1")


def write_zip(path: Path, files: Mapping[str, bytes], how: int = ZIP_DEFLATED) -> Path:
    with ZipFile(path, "w", how) as archive:
        for name, data in files.items():
            archive.writestr(name, data)
    return path


def scan(path: str | Path, **options: Any) -> Any:
    return open_source("table", path, **options).scan()


def loaded(path: Path) -> dict[str, tuple[bytes, int]]:
    """Return each image and its label by path."""
    dataset = open_dataset(path, decode="bytes")
    return {name: dataset[row][:2] for row, name in enumerate(dataset.paths)}


@pytest.mark.parametrize("how", [ZIP_DEFLATED, ZIP_STORED])
def test_a_folder_of_a_table_and_an_archive_is_one_source(tmp_path: Path, how: int) -> None:
    """As Kaggle's: a table of IDs, and an archive with a folder for each split."""
    source = make_tree(tmp_path / "dogs", {"labels.csv": TABLE})
    write_zip(source / "train.zip", {**IMAGES, "train/d.jpg": MASK}, how)
    write_zip(source / "test.zip", {"test/x.jpg": MASK})
    done = run_main("convert", source, tmp_path / "out", *TO, "--json")
    assert "labels.csv" in json.loads(done.stdout)["read_as"]
    expected = {"a.jpg": 0, "b.jpg": 1, "c.jpg": 0}
    found = loaded(tmp_path / "out")
    assert found == {n: (IMAGES[f"train/{n}"], label) for n, label in expected.items()}
    assert open_dataset(tmp_path / "out").classes == ["cat", "dog"]
    assert verify(tmp_path / "out", against=source / "labels.csv").findings == []
    (tmp_path / "out" / "shard-000000.lmdb").unlink()
    assert repair(tmp_path / "out", source / "labels.csv").findings == []
    assert loaded(tmp_path / "out") == found


def test_jobs_read_an_archive_where_it_is(tmp_path: Path) -> None:
    path = write_zip(tmp_path / "x.zip", FOLDER)
    assert run_main("convert", path, tmp_path / "out", *TO, "--plan-only").returncode == 0
    assert run_main("work", tmp_path / "out", "--claim").returncode == 0
    assert run_main("commit", tmp_path / "out").returncode == 0
    assert len(loaded(tmp_path / "out")) == 3


def test_an_archive_next_to_a_table_is_found_by_its_first_image(tmp_path: Path) -> None:
    source = make_tree(tmp_path / "dogs", {"labels.csv": TABLE})
    path = write_zip(source / "train.zip", IMAGES)
    (source / "a.zip").write_bytes(b"PK")
    words = ("convert", "table", source / "labels.csv", "DST", *TO, "--image", "id")
    refuses(2, *words, facts=("'a'", f"--root {path}"))
    refuses(2, *words, "--root", path, facts=("train/a.jpg", "--suffix .jpg"))


def test_an_archive_with_its_table_is_the_dataset_of_its_folder(tmp_path: Path) -> None:
    folder = make_tree(tmp_path / "x", FOLDER)
    path = write_zip(tmp_path / "x.zip", FOLDER)
    for source, target in ((folder, "one"), (path, "two")):
        assert run_main("convert", source, tmp_path / target, *TO).returncode == 0
    assert diff(tmp_path / "one", tmp_path / "two").equal
    assert verify(tmp_path / "two", against=path / "labels.csv").findings == []
    done = refuses(2, "convert", "zip", path, "DST", *TO, facts=("labels.csv", "--classes"))
    command = done.stderr.split("run shardkit ")[1].split(";")[0]
    command = command.replace("DST", str(tmp_path / "three"))
    assert run_main(*shlex.split(command)).returncode == 0
    assert diff(tmp_path / "one", tmp_path / "three").equal


CELLS = 'image;label\n"train\\a.jpg";0.0\n"train\\b.jpg";\n"./train/c.jpg";10.0\n'


@pytest.mark.parametrize(
    ("table", "options"),
    [
        (b",image,label\n0,train/a.jpg,0.0\n1,train/b.jpg,\n2,train/c.jpg,10.0\n", {}),
        (CELLS.encode("utf-16"), {}),
        (b"image,label\na.jpg,0\nb.jpg,NaN\nc.jpg,10\n", {}),
        (b"image,label\na,0\nb,-1\nc,10\n", {"suffix": ".jpg", "root": "train"}),
    ],
    ids=["pandas", "Excel", "unique names", "IDs"],
)
def test_all_tables_mean_in_an_archive_what_they_mean_elsewhere(
    tmp_path: Path, table: bytes, options: dict[str, str]
) -> None:
    path = write_zip(tmp_path / "x.zip", {**IMAGES, "lists/t.csv": table})
    root = path / options.pop("root", "")
    found = scan(path / "lists" / "t.csv", image="image", root=root, **options)
    assert problems(found) == {}
    assert [entry.label for entry in found.splits[""].entries] == [0, -1, 10]
    records = found.splits[""].read(range(3))
    assert [record.fields["jpg"] for record in records] == [*IMAGES.values()]


def test_missing_and_unused_members_are_named(tmp_path: Path) -> None:
    files = {**IMAGES, "train/out.png": MASK, "train/note.txt": b"a caption"}
    path = write_zip(tmp_path / "x.zip", files)
    table = tmp_path / "t.csv"
    rows = [
        "a.jpg,out.png,note.txt",
        "nix.jpg,out.png,note.txt",
        "b.jpg,no.png,note.txt",
        "../c.jpg,,",
    ]
    table.write_text("\n".join(["path,mask,text", *rows]))
    found = scan(table, root=path / "train", image="path", file="mask=mask,text=text")
    reasons = problems(found)
    assert sorted(reasons) == ["../c.jpg", "b.jpg", "nix.jpg"]
    assert "not a file in the archive (t.csv:3)" in reasons["nix.jpg"]
    assert "'no.png'" in reasons["b.jpg"]
    (record,) = found.splits[""].read([0])
    assert record.fields["mask.png"] == MASK
    assert record.fields["txt"] == b"a caption"
    assert [problem.path for problem in found.ignored[""]] == ["b.jpg", "c.jpg"]


def test_an_archive_that_changes_is_not_resumed(tmp_path: Path) -> None:
    path = write_zip(tmp_path / "x.zip", {**FOLDER, "train/c.jpg": b"not an image"})
    options = {"root": path / "train", "image": "id", "suffix": ".jpg"}
    source = open_source("table", path / "labels.csv", **options)
    images = source.scan().splits[""]
    with refused(BadImages, "c.jpg"):
        convert(source, tmp_path / "out", to="lmdb", shard_samples=1, workers=1)
    write_zip(path, {**FOLDER, "train/b.jpg": MASK})
    with refused(UsageError, "b.jpg", "changed"):
        convert(source, tmp_path / "out", to="lmdb", shard_samples=1, workers=1)
    with refused(BadImage):
        images.read([1])
    convert(source, tmp_path / "out", to="lmdb", workers=1, on_error="skip", force=True)
    assert verify(tmp_path / "out", against=f"{path}/labels.csv@{path}/train").findings == []


def test_annotations_name_images_in_an_archive(tmp_path: Path) -> None:
    boxes = [{"id": 1, "image_id": 1, "category_id": 1, "bbox": [1, 2, 3, 4]}]
    content = {
        "images": [{"id": 1, "file_name": "a.jpg", "width": 24, "height": 16}],
        "categories": [{"id": 1, "name": "cat"}],
        "annotations": boxes,
    }
    files = {"train/_annotations.coco.json": json.dumps(content).encode()}
    files |= {"val/a.jpg": MASK, "val/_annotations.coco.json": files.popitem()[1]}
    files["train/_annotations.coco.json"] = files["val/_annotations.coco.json"]
    path = write_zip(tmp_path / "x.zip", {**files, "train/a.jpg": IMAGES["train/a.jpg"]})
    assert run_main("convert", path, tmp_path / "out", *TO).returncode == 0
    train, val = (
        open_dataset(tmp_path / "out" / split, decode="bytes") for split in ("train", "val")
    )
    assert (train[0][0], val[0][0]) == (IMAGES["train/a.jpg"], MASK)
    assert train.column("boxes")[0][0].tolist() == [[1, 2, 4, 6]]
    assert verify(tmp_path / "out", against=path).findings == []
    (tmp_path / "one.json").write_text(json.dumps(content))
    found = open_source("coco", tmp_path / "one.json", root=path / "val").scan()
    assert [record.fields["png"] for record in found.splits[""].read([0])] == [MASK]


# Hostile and damaged archives


def patched(path: Path, old: bytes, new: bytes) -> Path:
    content = path.read_bytes()
    assert old in content
    path.write_bytes(content.replace(old, new))
    return path


@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_members_that_cannot_be_read_are_bad_rows(tmp_path: Path) -> None:
    path = tmp_path / "x.zip"
    with ZipFile(path, "w") as archive:
        for name in ("a.jpg", "twice.jpg", "twice.jpg", "../up.jpg", "damaged.jpg"):
            archive.writestr(name, IMAGES["train/a.jpg"] + name[:3].encode())
        link = ZipInfo("link.jpg")
        link.external_attr = (stat.S_IFLNK | 0o777) << 16
        archive.writestr(link, "/etc/passwd")
    patched(path, b"damPK", b"DAMPK")
    table = tmp_path / "t.csv"
    names = ["a.jpg", "twice.jpg", "../up.jpg", "up.jpg", "damaged.jpg", "link.jpg", "/up.jpg", "."]
    table.write_text("\n".join(["file_name", *names]))
    found = scan(table, root=path)
    assert [entry.path for entry in found.splits[""].entries] == ["a.jpg", "damaged.jpg"]
    reasons = problems(found)
    assert sorted(reasons) == sorted({*names} - {"a.jpg", "damaged.jpg"})
    assert "two members" in reasons["twice.jpg"]
    assert "plain path" in reasons["../up.jpg"]
    assert "link" in reasons["link.jpg"]
    assert "../up.jpg" in {problem.path for problem in found.ignored[""]}
    with refused(BadImage, "checksum"):
        found.splits[""].read([1])


def test_a_table_in_an_archive_is_whole_or_refused(tmp_path: Path) -> None:
    path = write_zip(tmp_path / "x.zip", FOLDER, ZIP_STORED)
    options = {"root": path / "train", "image": "id", "suffix": ".jpg"}
    for old, new in ((b"c,cat\n", b"c,dog\n"), (b"labels.csv", b"labels.c\0v")):
        changed = patched(write_zip(tmp_path / "y.zip", FOLDER, ZIP_STORED), old, new)
        with refused(UsageError, changed / "labels.csv"):
            scan(changed / "labels.csv", **options)
    with refused(UsageError, path, "labels.csv"):
        scan(path, **options)
    with refused(UsageError, path / "nix.csv", path / "labels.csv"):
        scan(path / "nix.csv", **options)
    with refused(UsageError, path / "nix"):
        scan(path / "labels.csv", **{**options, "root": path / "nix"})
    packed = write_zip(tmp_path / "z.zip", {**FOLDER, "t.parquet": b"PAR1"})
    with refused(UsageError, packed / "t.parquet", "unpack"):
        scan(packed / "t.parquet", **options)
    (tmp_path / "cut.zip").write_bytes(path.read_bytes()[:-30])
    with refused(UsageError, tmp_path / "cut.zip", "truncated"):
        scan(tmp_path / "cut.zip" / "labels.csv", **options)


def test_a_table_that_unpacks_to_more_than_stated_is_refused(tmp_path: Path) -> None:
    """Its stated size bounds what is unpacked, and no size is over 1,100 times the packed one."""
    path = write_zip(
        tmp_path / "x.zip", {"t.csv": b"file_name\n" + b"\n" * (4 << 20), "a.jpg": MASK}
    )
    size = (10 + (4 << 20)).to_bytes(4, "little")
    for stated in (99, 1 << 30):
        changed = tmp_path / f"{stated}.zip"
        changed.write_bytes(path.read_bytes())
        patched(changed, size, stated.to_bytes(4, "little"))
        with refused(UsageError, changed / "t.csv"):
            scan(changed / "t.csv")
