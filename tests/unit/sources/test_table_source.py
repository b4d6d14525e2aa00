"""Tables of image files: every kind of column, and all that is wrong with rows and names."""

from __future__ import annotations

import base64
import gc
import json
import os
import shlex
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from foreign import pixels_of, problems, write_table
from helpers import invoke, jpeg, make_tree, png, run_main
from refusals import refused, refuses

from shardkit import convert, open_dataset, open_source, repair, verify
from shardkit.errors import BadImage, BadImages, UsageError
from shardkit.registry import get_source

IMAGES = [png(8, 6, seed) for seed in range(3)]
MASK = png(8, 6, 9, mode="L")


def scan(path: str | Path, **options: Any) -> Any:
    return open_source("table", path, **options).scan()


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A folder with three images and a mask."""
    (tmp_path / "files" / "a").mkdir(parents=True)
    for number, data in enumerate(IMAGES):
        (tmp_path / "files" / "a" / f"{number}.png").write_bytes(data)
    (tmp_path / "files" / "mask.png").write_bytes(MASK)
    return tmp_path / "files"


def rows(**columns: list[Any]) -> list[dict[str, Any]]:
    """Return a row for each image, with more columns."""
    return [
        {"path": f"a/{number}.png", **{name: values[number] for name, values in columns.items()}}
        for number in range(3)
    ]


CELLS: dict[str, list[Any]] = {
    "n": [7, -1, 2**40],
    "x": [1.5, 2, -3e-7],
    "caption": ["a, b", 'größe "x"', ""],
    "code": ["007", "8", "9"],
    "tags": ["k", "p|k", ""],
    "found": ["[[1, 2, 3, 4]]", "[]", "[[0, 0, 2.5, 1], [1, 1, 1, 1]]"],
    "what": ['["dog"]', "", '["cat", "dog"]'],
    "mask": ["mask.png", "./mask.png", "mask.png"],
}
TYPED: dict[str, list[Any]] = {
    **CELLS,
    "tags": [["k"], ["p", "k"], None],
    "found": [[[1, 2, 3, 4]], [], [[0, 0, 2.5, 1], [1, 1, 1, 1]]],
    "what": [["dog"], None, ["cat", "dog"]],
}


@pytest.mark.parametrize("suffix", ["csv", "tsv", "jsonl", "parquet"])
def test_all_kinds_of_columns_are_kept(suffix: str, root: Path, tmp_path: Path) -> None:
    cells = CELLS if suffix in ("csv", "tsv") else TYPED
    path = write_table(tmp_path / f"t.{suffix}", rows(**cells, unused=["", "", ""]))
    found = scan(
        path,
        root=root,
        image="path",
        labels="tags",
        boxes="found:xywh",
        box_labels="what",
        keep="n,x,caption,code",
        file="mask=mask",
    )
    convert(found.source, tmp_path / "made", to="hdf5", shuffle=False)
    shards = open_dataset(tmp_path / "made")
    assert shards.column("n").tolist() == CELLS["n"]
    assert shards.column("x").tolist() == CELLS["x"]
    assert shards.column("caption").tolist() == CELLS["caption"]
    assert shards.column("code").tolist() == CELLS["code"]
    assert list(map(list, shards.column("labels"))) == [[0], [0, 1], []]
    assert [record.meta["boxes"] for record in found.splits[""].read(range(3))] == [
        [[1, 2, 4, 6, 1]],
        [],
        [[0, 0, 2.5, 1, 0], [1, 1, 2, 2, 1]],
    ]
    assert found.schema["boxes"].classes == ("cat", "dog")
    assert found.schema["labels"].classes == ("k", "p")
    assert [record.fields["mask.png"] for record in found.splits[""].read(range(3))] == [MASK] * 3
    assert verify(tmp_path / "made", against=f"{path}@{root}").findings == []
    assert found.understood["n"] == "n: int64 number"
    assert found.understood["x"] == "x: float64 number"
    assert found.understood["code"] == "code: text"
    assert found.understood["mask"] == "files of mask: mask"
    assert found.understood["unused"] == "unused"
    assert verify(tmp_path / "made", against=f"{path}@{root}").findings == []
    (tmp_path / "made" / "shard-000000.h5").unlink()
    assert repair(tmp_path / "made", path).findings == []  # the folder is below that of the table


@pytest.mark.parametrize("values", [["a", "b", "a"], [3, 1, 2]])
def test_the_advice_to_store_a_label_next_to_labels_works(values: list[Any], root: Path) -> None:
    table = write_table(root / "x.csv", rows(tags=["k", "p|k", ""], kind=values))
    with refused(UsageError, "labels='tags'", "keep='label_value=kind'"):
        scan(table, image="path", label="kind", labels="tags")
    source = open_source("table", table, image="path", labels="tags", keep="label_value=kind")
    convert(source, root.parent / "made", to="lmdb", shuffle=False)
    assert list(open_dataset(root.parent / "made").column("label_value")) == values


def test_images_that_lost_a_box_are_not_called_dropped(root: Path, tmp_path: Path) -> None:
    boxes = ["[[0, 0, 0.5, 0.5]]", "[]", "[[2, 2, 4, 4]]"]
    table = write_table(root / "x.csv", rows(found=boxes))
    options = ("--to", "lmdb", "--workers", 1, "--image", "path", "--boxes", "found:xyxy")
    done = invoke("convert", "table", table, tmp_path / "made", *options, "--resize", "6x2")
    printed = " ".join(done.stdout.split())
    assert "dataset 3 images with boxes," in printed
    assert "noted 1 image lost boxes or keypoints that the crop cut off; --resize-mode" in printed


def test_parts_of_json_and_given_kinds_are_kept(root: Path, tmp_path: Path) -> None:
    info = [{"class": "b", "ids": [1, 2]}, {"class": "a", "ids": []}, {"class": "b", "ids": [3]}]
    table = rows(info=info, day=[date(2026, 1, 2)] * 3, yes=[True, False, True], odd=[1, None, 2])
    path = write_table(tmp_path / "t.parquet", table)
    keep = "ids=info:/ids:array,day,yes,n=odd:float64?,text=day:text"
    found = scan(path, root=root, image="path", label="info:/class", keep=keep)
    assert found.classes == ("a", "b")
    assert [entry.label for entry in found.splits[""].entries] == [1, 0, 1]
    first, second, _ = found.splits[""].read(range(3))
    assert (first.meta["yes"], first.meta["n"]) == (True, 1.0)
    assert "n" not in second.meta
    assert first.fields["day.txt"] == b"2026-01-02"
    wrong = scan(path, root=root, image="path", keep="n=info:int64").splits[""]
    with refused(ValueError):
        wrong.read([0])


def test_rows_that_cannot_be_used_are_named(root: Path, tmp_path: Path) -> None:
    (tmp_path / "out.png").write_bytes(IMAGES[0])
    (root / "link.png").symlink_to(tmp_path / "out.png")
    (root / "inner.png").symlink_to(root / "a" / "0.png")
    (root / "leads").symlink_to(tmp_path)
    os.mkfifo(root / "pipe.png")
    lines = [
        "path,class,n",
        "a/0.png,cat,1",
        "a/0.png,cat,1",
        "a/9.png,dog,1",
        "../out.png,cat,1",
        f"{tmp_path}/out.png,cat,1",
        "link.png,cat,1",
        "leads/out.png,cat,1",
        "pipe.png,cat,1",
        "a,cat,1",
        "inner.png,vögel,1",
        "/mask.png,cat,1",
        ".//mask.png,cat,1",
        """a/1.png,"['cat', 'dog']",1""",
        "a/2.png,cat,x",
        ",cat,1",
        "a/1.png,cat",
        "",
    ]
    path = tmp_path / "t.csv"
    path.write_bytes("\n".join(lines).encode() + b"\xff.png,cat,1\na/\0.png,cat,1\n")
    found = scan(path, root=root, image="path", label="class", keep="n:int64")
    reasons = problems(found)
    plain = "its name is not a plain path inside the root folder"
    leads = "it is below a link that points outside the root folder"
    entries = found.splits[""].entries
    assert [entry.path for entry in entries] == ["a/0.png", "inner.png", "mask.png"]
    for name, reason in {
        "t.csv:3": "'a/0.png': another row also names it; list all of its boxes, "
        "labels and captions in one row, or join the rows of a table with the option join_rows",
        "a/9.png": "it cannot be read: No such file or directory (t.csv:4)",
        "../out.png": plain,
        f"{tmp_path}/out.png": f"{plain}; make it relative to the option root",
        "link.png": leads,
        "leads/out.png": leads,
        "pipe.png": "is not a file",
        "a": "is not a file",
        ".//mask.png": plain,
        "a/1.png": "its label at class is a list, \"['cat', 'dog']\"",
        "a/2.png": "its n is 'x', not a number",
        "t.csv:16": "it has no file name",
        "t.csv:17": "it has 2 values, but the header has 3",
        "\udcff.png": "it is not UTF-8",
        "a/\0.png": plain,
    }.items():
        assert reason in reasons.pop(name), name
    assert reasons == {}
    unused = {problem.path for problem in found.ignored[""]}
    assert unused == {"a/1.png", "a/2.png", "leads", "link.png", "pipe.png"}


def test_a_table_that_cannot_be_parsed_is_reported(root: Path, tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text('path\na/0.png\n"a/1.png\na/2.png\n')
    assert (
        "this and all later rows are not read"
        in problems(scan(path, root=root, image="path"))["t.csv:4"]
    )
    lines = tmp_path / "t.jsonl"
    lines.write_bytes(b'{"path": "a/0.png"}\n[1]\n{"path": \n\xff\n{"path": 7}\n' + b"[" * 100_000)
    reasons = problems(scan(lines, root=root, image="path"))
    assert reasons.pop("t.jsonl:2") == "it is not a JSON object"
    assert reasons.pop("t.jsonl:4") == "it is not UTF-8"
    assert reasons.pop("t.jsonl:5") == "7: its file name is not text"
    assert all("it is not JSON" in reason for reason in reasons.values())
    assert len(reasons) == 2


def test_wrong_options_and_tables_are_named(root: Path, tmp_path: Path) -> None:
    path = write_table(tmp_path / "t.csv", rows(n=[1, 2, 3]))
    for options, reason in (
        ({}, "choose the image column with image= from path, n"),
        ({"image": "name"}, "has no column name; it has path, n"),
        ({"image": "path", "keep": "m"}, "has no column m"),
        ({"image": "path", "keep": "m=n,m=path"}, "names a field twice"),
        ({"image": "path", "keep": "n", "file": "n=n"}, "two fields are called n"),
        ({"image": "path", "keep": "mask=n:mask"}, "kind mask needs a separate file: use file="),
        ({"image": "path", "boxes": "n"}, "boxes='n' is not COLUMN:xyxy or COLUMN:xywh"),
        ({"image": "path", "label": "n", "labels": "n"}, "label= and labels= cannot"),
        ({"image": "path", "root": tmp_path / "none"}, "the image folder .*none does not exist"),
    ):
        with pytest.raises(UsageError, match=reason):
            scan(path, **{"root": root, **options})
    for name, content, reason in (
        ("e.csv", b"", "has no rows"),
        ("e.jsonl", b"\n", "has no rows"),
        ("bad.jsonl", b'\n{"a": 1,}\n7\n', r"bad\.jsonl:2: it is not JSON: "),
        ("d.csv", b"a,a\n", "has two columns called 'a'"),
        ("p.parquet", b"PAR1 nothing PAR1", r"p\.parquet: .*[Pp]arquet"),
        ("x.dat", b"", "its name must end in one of .csv, .tsv"),
    ):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(UsageError, match=reason):
            scan(tmp_path / name, root=root, image="a")


def test_a_dataset_does_not_name_a_folder_elsewhere(root: Path, tmp_path: Path) -> None:
    (tmp_path / "lists").mkdir()
    path = write_table(tmp_path / "lists" / "t.csv", rows())
    found = scan(path, root=root, image="path")
    described = dict(found.source.describe(""))
    assert str(tmp_path) not in str(described)
    (tmp_path / "lists" / "leads").symlink_to(root)
    kind = get_source("table")
    assert len(kind.find(Path(f"{path}@{root}"), {"": described}).scan().splits[""]) == 3
    for name in (described["root"], "../files", str(root), "leads", "none"):
        with refused(UsageError):
            kind.find(path, {"": {**described, "root": name}})


def test_no_value_is_taken_for_a_path(root: Path, tmp_path: Path) -> None:
    """Python samples may be paths; values in files of others may not."""
    np.save(tmp_path / "secret.npy", np.arange(3))
    table = rows(values=[str(tmp_path / "secret.npy")] * 3)
    path = write_table(tmp_path / "t.jsonl", table)
    found = scan(path, root=root, image="path", keep="values:array")
    with refused(BadImage):
        found.splits[""].read([0])


def test_an_at_sign_in_the_path_of_a_table_is_no_root(root: Path, tmp_path: Path) -> None:
    (tmp_path / "me@home").mkdir()
    root.rename(tmp_path / "me@home" / "files")
    path = write_table(tmp_path / "me@home" / "t.csv", rows())
    found = scan(path, root=tmp_path / "me@home" / "files", image="path")
    convert(found.source, tmp_path / "made", to="lmdb")
    assert verify(tmp_path / "made", against=path).findings == []


def test_a_changed_table_is_not_resumed(root: Path, tmp_path: Path) -> None:
    path = write_table(tmp_path / "t.csv", rows(n=[1, 2, 3]))
    (root / "a" / "2.png").write_bytes(b"not an image")
    source = open_source("table", path, root=root, image="path", keep="n")
    with pytest.raises(BadImages):
        convert(source, tmp_path / "made", to="lmdb", shard_samples=1)
    write_table(path, rows(n=[1, 5, 3]))
    with pytest.raises(UsageError, match=r"1 file changed \(a/1.png\)"):
        convert(source, tmp_path / "made", to="lmdb", on_error="skip", shard_samples=1)


def test_the_metadata_of_hugging_face_needs_no_options(root: Path, tmp_path: Path) -> None:
    table = rows(mask_file_name=["../mask.png"] * 3, text=["a", "b", "c"])
    for row in table:
        row["file_name"] = row.pop("path").removeprefix("a/")
    write_table(root / "a" / "metadata.csv", table)
    shown = invoke(
        "convert",
        "table",
        root / "a" / "metadata.csv",
        tmp_path / "x",
        "--to",
        "lmdb",
        "--keep",
        "text",
        "--dry-run",
    )
    assert shown.exit_code == 0
    assert "its mask_file_name '../mask.png': its name is not a plain path" in shown.output
    for row in table:
        row["mask_file_name"] = "0.png"
    write_table(root / "a" / "metadata.jsonl", table)
    found = scan(root / "a" / "metadata.jsonl", keep="text")
    assert found.schema.keys() == {"image", "mask", "text"}
    assert [entry.path for entry in found.splits[""].entries] == ["0.png", "1.png", "2.png"]
    assert [problem.path for problem in found.ignored[""]] == ["metadata.csv"]


@pytest.mark.slow  # it imports pandas
@pytest.mark.filterwarnings("ignore::ResourceWarning")  # datasets leaves the table open
def test_the_rows_equal_those_of_the_datasets_package(root: Path, tmp_path: Path) -> None:
    import datasets

    table = [{"file_name": f"a/{n}.png", "text": f"größe {n}", "n": n} for n in range(3)]
    write_table(root / "metadata.csv", table)
    known = datasets.load_dataset(
        "imagefolder", data_dir=str(root), cache_dir=str(tmp_path / "cache"), split="train"
    )
    rows_of = {row["text"]: row for row in known}
    gc.collect()
    found = scan(root / "metadata.csv", keep="text,n").splits[""]
    for record in found.read(range(3)):
        row = rows_of.pop(record.fields["txt"].decode())
        assert record.meta["n"] == row["n"]
        assert np.array_equal(pixels_of(record.fields["png"]), np.asarray(row["image"]))
    assert rows_of == {}


def test_the_exit_code_states_whose_fault_it_is(root: Path, tmp_path: Path) -> None:
    path = write_table(tmp_path / "t.csv", [*rows(), {"path": "a/7.png"}])
    command = ("convert", "table", path, tmp_path / "made", "--to", "lmdb", "--root", root)
    missing = run_main(*command, "--image", "path")
    assert missing.returncode == 1
    assert "bad: a/7.png: it cannot be read: No such file or directory (t.csv:5)" in (
        missing.stderr
    )
    elsewhere = run_main(*command[:-1], tmp_path, "--image", "path", "--to", "hdf5", "--force")
    assert elsewhere.returncode == 2
    assert "made and the source" in elsewhere.stderr
    unknown = run_main(*command, "--image", "name")
    assert unknown.returncode == 2
    assert "has no column name; it has path" in unknown.stderr
    assert not (tmp_path / "made" / "shardkit.json").exists()
    assert run_main(*command, "--image", "path", "--on-error", "skip").returncode == 0
    assert run_main("verify", tmp_path / "made", "--against", f"{path}@{root}").returncode == 0


def test_files_in_subfolders_are_found_by_a_name_that_is_unique(tmp_path: Path) -> None:
    """As HAM10000, whose table names images of two folders."""
    root = make_tree(tmp_path, {"one/a.png": IMAGES[0], "two/b.png": IMAGES[1]})
    make_tree(root, {"one/twice.png": IMAGES[2], "two/twice.png": IMAGES[2]})
    path = write_table(root / "t.csv", [{"path": name} for name in ("b", "a", "twice")])
    found = scan(path, image="path", suffix=".png")
    assert [entry.path for entry in found.splits[""].entries] == ["two/b.png", "one/a.png"]
    assert problems(found).keys() == {"twice.png"}
    with refused(UsageError, path, "one/a.png", "suffix='.png'"):
        scan(write_table(root / "t.csv", [{"path": "a"}, {"path": "b"}]), image="path")


@pytest.mark.parametrize("prefix", ["", "data:image/jpeg;base64,"])
def test_images_as_base64_text_are_refused_without_the_text(tmp_path: Path, prefix: str) -> None:
    text = base64.b64encode(jpeg(64, 64)).decode()
    table = tmp_path / "t.jsonl"
    table.write_text(json.dumps({"image": prefix + text, "label": "cat"}))
    with refused(UsageError, table, "base64") as caught:
        scan(table, image="image")
    assert text[:50] not in str(caught.value)


@pytest.mark.parametrize(
    ("table", "missing"),
    [
        ("train.csv", {"c.png"}),
        ("test_labels.csv", {"a.png", "b.png"}),
        ("train_test.csv", set()),
        ("labels.csv", set()),
    ],
)
def test_a_table_of_one_split_takes_no_image_of_the_other(
    tmp_path: Path, table: str, missing: set[str]
) -> None:
    """Names are unique over both folders, and the training set lacks one of its files."""
    files = {"train_images/a.png": IMAGES[0], "train_images/b.png": IMAGES[1]}
    root = make_tree(tmp_path, {**files, "test_images/c.png": IMAGES[2]})
    path = write_table(root / table, [{"path": name} for name in ("a.png", "b.png", "c.png")])
    assert problems(scan(path, image="path")).keys() == missing


def test_the_column_called_label_is_the_label(root: Path, tmp_path: Path) -> None:
    cells: dict[str, list[Any]] = {"label": ["b", "a", "b"], "target": [7, 8, 9], "x": [1, 2, 3]}
    path = write_table(tmp_path / "t.csv", rows(**cells))
    found = scan(path, root=root, image="path")
    assert (found.classes, [e.label for e in found.splits[""].entries]) == (("a", "b"), [1, 0, 1])
    assert scan(path, root=root, image="path", label="none").classes is None
    assert scan(path, root=root, image="path", keep="kind=label").classes is None
    path = write_table(tmp_path / "t.jsonl", rows(category=["b", "a", "b"], x=[1, 2, 3]))
    assert scan(path, root=root, image="path").classes == ("a", "b")
    path = write_table(tmp_path / "t.jsonl", rows(category=["b", "a", "b"], target=["c", "d", "c"]))
    assert scan(path, root=root, image="path").classes is None


def test_a_table_without_a_header_is_refused(root: Path, tmp_path: Path) -> None:
    path = tmp_path / "captions.tsv"
    path.write_text("a/0.png\tA man\na/1.png\tA dog\n")
    with refused(UsageError, path, "a/0.png"):
        scan(path, root=root, image="a/0.png")


def test_nothing_is_left_if_every_row_is_bad(root: Path, tmp_path: Path) -> None:
    path = write_table(tmp_path / "t.csv", [{"path": "b/0.png"}, {"path": "b/1.png"}])
    source = open_source("table", path, root=root, image="path")
    with refused(BadImages, "2"):
        convert(source, tmp_path / "made", to="lmdb")
    assert not (tmp_path / "made").exists()


def test_names_of_classes_may_be_given(root: Path, tmp_path: Path) -> None:
    names = tmp_path / "names.txt"
    names.write_text("zero\none\ntwo\n")
    path = write_table(tmp_path / "t.csv", rows(n=[2, 0, 2], tags=["two one", "", "zero"]))
    found = scan(path, root=root, image="path", label="n", classes=str(names))
    assert found.classes == ("zero", "one", "two")
    assert [entry.label for entry in found.splits[""].entries] == [2, 0, 2]
    options = {"labels": "tags", "separator": " ", "classes": str(names)}
    several = scan(path, root=root, image="path", **options)
    assert several.schema["labels"].classes == ("zero", "one", "two")
    assert [record.meta["labels"] for record in several.splits[""].read(range(3))] == [
        [1, 2],
        [],
        [0],
    ]
    again = get_source("table").find(path, {"": several.source.describe("")}).scan()
    assert again.schema == several.schema
    names.write_text("zero\none\n")
    with refused(UsageError, "2"):
        scan(path, root=root, image="path", label="n", classes=str(names))


def test_rows_of_one_value_stay_on_one_side(root: Path, tmp_path: Path) -> None:
    names = [f"a/{n}.png" for n in range(20)]
    for n, name in enumerate(names):
        (root / name).write_bytes(png(8, 6, n))
    table = [{"path": name, "person": 7 * (n // 4)} for n, name in enumerate(names)]
    path = write_table(tmp_path / "t.csv", table)
    source = open_source("table", path, root=root, image="path", keep="person")
    convert(source, tmp_path / "made", to="lmdb", val=0.4, group="person")
    sides = {
        side: set(open_dataset(tmp_path / "made" / side).column("person").tolist())
        for side in ("train", "val")
    }
    assert sides["train"] | sides["val"] == {0, 7, 14, 21, 28}
    assert not sides["train"] & sides["val"]
    assert verify(tmp_path / "made", against=f"{path}@{root}").findings == []


def test_a_row_may_lack_all_kept_values(tmp_path: Path) -> None:
    make_tree(tmp_path, {"a.png": png(4, 4), "b.png": png(4, 4)})
    (tmp_path / "list.csv").write_text("file_name,age\na.png,3\nb.png,\n")
    source = open_source("table", tmp_path / "list.csv", keep="age?")
    records = source.scan().splits[""].read([0, 1])
    assert [record.meta.get("age") for record in records] == [3, None]


ONE_HOT = {"cat": [0, 1, 0], "dog": [1, 0, 0], "2": [0, 0, 1]}
"""The classes of the images are dog, cat and 2."""


@pytest.mark.parametrize(
    ("suffix", "spell"),
    [
        ("csv", str),
        ("csv", " {}".format),
        ("csv", float),
        ("csv", bool),
        ("parquet", int),
        ("jsonl", bool),
    ],
)
def test_a_column_for_each_class_is_one_label(
    suffix: str, spell: Any, root: Path, tmp_path: Path
) -> None:
    cells = {name: [spell(value) for value in values] for name, values in ONE_HOT.items()}
    path = write_table(tmp_path / f"t.{suffix}", rows(**cells))
    source = open_source("table", path, root=root, image="path", label="cat,dog,2")
    convert(source, tmp_path / "made", to="lmdb", shuffle=False)
    dataset = open_dataset(tmp_path / "made")
    assert dataset.classes == ["cat", "dog", "2"]
    assert list(dataset.targets) == [1, 0, 2]
    assert verify(tmp_path / "made", against=f"{path}@{root}").ok
    found = scan(path, root=root, image="path")
    assert "cat,dog,2" in found.notes[0]
    assert found.classes is None


@pytest.mark.parametrize("odd", [[1, 1, 1], [0, 0, 0], ["0.5", 1, 0], ["", 1, 0]])
def test_rows_without_just_one_class_are_bad_or_have_several_labels(
    odd: list[Any], root: Path, tmp_path: Path
) -> None:
    cells = {name: [*ONE_HOT[name][:2], cell] for name, cell in zip(ONE_HOT, odd, strict=True)}
    path = write_table(tmp_path / "t.csv", rows(**cells))
    (reason,) = problems(scan(path, root=root, image="path", label="cat,dog,2")).values()
    if odd[0] not in (0, 1):
        assert "the option keep" in reason
        return
    assert "the option labels=cat,dog,2" in reason
    found = scan(path, root=root, image="path", labels="cat,dog,2")
    labels = [record.meta["labels"] for record in found.splits[""].read(range(3))]
    assert labels == [[1], [0], [0, 1, 2] if odd[0] else []]
    assert found.schema["labels"].classes == ("cat", "dog", "2")


@pytest.mark.parametrize(("third", "option"), [(0, "--label"), (1, "--labels")])
def test_the_classes_of_roboflow_are_recognized(third: int, option: str, tmp_path: Path) -> None:
    lines = ["filename, cat, dog", "0.png, 0, 1", f"1.png, 1, {third}"]
    files = {f"src/{number}.png": IMAGES[number] for number in range(2)}
    make_tree(tmp_path, {**files, "src/_classes.csv": "\n".join(lines).encode()})
    done = invoke("convert", tmp_path / "src", tmp_path / "made", "--to", "lmdb", "--no-shuffle")
    assert done.exit_code == 0, done.output
    dataset = open_dataset(tmp_path / "made")
    if option == "--label":
        assert (dataset.classes, [*dataset.targets]) == (["cat", "dog"], [1, 0])
    else:
        assert [*map(list, dataset.column("labels"))] == [[1], [0, 1]]


def test_tables_with_other_suffixes_are_read_or_refused_with_a_way_out(
    root: Path, tmp_path: Path
) -> None:
    captions = ["a cat, asleep", 'a "dog"', "größe"]
    table = rows(caption=captions)
    text = write_table(tmp_path / "t.csv", table).rename(tmp_path / "captions.txt")
    (tmp_path / "list.json").write_text(json.dumps(table))
    for path in text, tmp_path / "list.json":
        found = scan(path, root=root, image="path", keep="caption")
        assert [
            record.fields["caption.txt"].decode() for record in found.splits[""].read(range(3))
        ] == captions
    (tmp_path / "columns.json").write_text(json.dumps({"path": ["a/0.png"]}))
    (tmp_path / "bad.json").write_text("[")
    (tmp_path / "t.xlsx").write_bytes(b"PK")
    (tmp_path / "pixels.csv").write_text("label,pixel0,pixel1\n1,0,255\n")
    for name, fact in (
        ("columns.json", "orient='records'"),
        ("bad.json", ".jsonl"),
        ("pixels.csv", "numpy.savez"),
        ("t.xlsx", f"to_csv('{tmp_path}/t.csv')"),
    ):
        with refused(UsageError, tmp_path / name, fact):
            scan(tmp_path / name, root=root)


def test_columns_that_may_be_labels_are_noted(root: Path, tmp_path: Path) -> None:
    path = write_table(tmp_path / "t.csv", rows(class_id=[1, 2, 1], class_name=["a", "b", "a"]))
    (note,) = scan(path, root=root, image="path").notes
    assert "class_id" in note
    assert "class_name" in note
    assert scan(path, root=root, image="path", label="none").notes == []
    assert scan(path, root=root, image="path", keep="class_id,class_name").notes == []
    path = write_table(tmp_path / "t.csv", rows(cat=[1, 0, 1], dog=[1, 0, 0]))
    for keep in (None, "cat:int64,dog:int64"):
        (note,) = scan(path, root=root, image="path", keep=keep).notes
        assert "labels='cat,dog'" in note
    assert scan(path, root=root, image="path", labels="cat,dog").notes == []


LISTS = {
    "Caffe's": (b"b.jpg 7\r\na.jpg 0\n", {"a.jpg": "0", "b.jpg": "7"}),
    "with tabs": (b"a.jpg\tn01\t0 9\nb.jpg\tn02\t4 5\n", {"a.jpg": "n01", "b.jpg": "n02"}),
    "with commas": (b"a.jpg, cat\nb.jpg, a dog\n", {"a.jpg": "cat", "b.jpg": "a dog"}),
    "with comments": (b"# NAME CLASS ID\na.jpg x 1\n\nb.jpg y 2\n", {"a.jpg": "x", "b.jpg": "y"}),
    "with spaces in labels": (
        b"a.jpg 707-320\nb.jpg A 300 B4\n",
        {"a.jpg": "707-320", "b.jpg": "A 300 B4"},
    ),
}


@pytest.mark.parametrize("name", LISTS)
def test_lists_have_no_header(tmp_path: Path, name: str) -> None:
    content, expected = LISTS[name]
    make_tree(tmp_path, {"a.jpg": jpeg(), "b.jpg": jpeg(), "val.txt": content})
    scanned = scan(tmp_path / "val.txt", image="1", label="2")
    labels = {entry.path: entry.label for entry in scanned.splits[""].entries}
    assert {path: scanned.classes[label] for path, label in labels.items()} == expected
    assert not scanned.problems[""]


def test_class_names_may_be_those_of_folders(tmp_path: Path) -> None:
    """So that labels are those of another split, with class folders."""
    make_tree(tmp_path, {"val/a.jpg": jpeg(), "val.csv": b"file_name,label\na.jpg,n02\n"})
    make_tree(
        tmp_path, {"train/n01": None, "train/n02": None, "train/.git": None, "train/x.txt": b""}
    )
    scanned = scan(tmp_path / "val.csv", root=tmp_path / "val", classes=str(tmp_path / "train"))
    assert scanned.classes == ("n01", "n02")
    assert [entry.label for entry in scanned.splits[""].entries] == [1]


def test_a_cache_of_the_hub_gets_the_command_that_follows_its_links(tmp_path: Path) -> None:
    snapshot = tmp_path / "hub" / "snapshots" / "1f"
    snapshot.mkdir(parents=True)
    make_tree(tmp_path / "hub" / "blobs", {"a": IMAGES[0], "t": b"file_name,label\na.png,x\n"})
    (snapshot / "a.png").symlink_to("../../blobs/a")
    (snapshot / "metadata.csv").symlink_to("../../blobs/t")
    command = ("convert", tmp_path / "hub", tmp_path / "out", "--to", "lmdb", "--workers", "1")
    done = refuses(2, *command, facts=(snapshot, "links"))
    again = done.stderr.split("add --follow-links: shardkit ")[1]
    assert shlex.split(again) == [*map(str, command), "--follow-links"]
    assert run_main(*shlex.split(again)).returncode == 0
    assert [*open_dataset(tmp_path / "out").paths] == ["a.png"]
