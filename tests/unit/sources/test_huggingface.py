"""Hugging Face's folders and Parquet files: splits, columns, names, and what is refused."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from foreign import arrow_table, make_parquet, make_saved
from helpers import invoke, jpeg, png, python, run_main, tree
from refusals import refused

from shardkit import convert, export, open_dataset, open_source, verify
from shardkit.errors import BadImage, BadImages, UsageError

IMAGES = {"cat/1.png": png(seed=1), "dog/2.jpg": jpeg(seed=2), "cat/3.png": png(seed=3)}


def opened(path: Path, **options: Any) -> Any:
    return open_source("huggingface", path, **options)


def write(path: Path, rows: list[dict[str, Any]], **types: Any) -> Path:
    """Write rows with the columns image and others to a Parquet file."""
    image = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist(rows, pa.schema([("image", image), *types.items()])), path)
    return path


def test_saved_splits_become_splits(tmp_path: Path) -> None:
    for split in ("train", "test"):
        (tmp_path / "saved" / split).mkdir(parents=True)
        make_saved(tmp_path / "saved" / split, IMAGES)
    (tmp_path / "saved/dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    convert(opened(tmp_path / "saved"), tmp_path / "made", to="lmdb")
    assert len(open_dataset(tmp_path / "made", split="test")) == 3
    assert verify(tmp_path / "made", against=tmp_path / "saved").ok
    convert(opened(tmp_path / "saved", split="test"), tmp_path / "one", to="lmdb")
    assert verify(tmp_path / "one", against=tmp_path / "saved").ok
    with refused(UsageError, "split='val'"):
        opened(tmp_path / "saved", split="val")


def test_parquet_files_of_the_hub_become_splits(tmp_path: Path) -> None:
    for name in ("train-00000-of-00002", "train-00001-of-00002", "test-00000-of-00001"):
        (tmp_path / "hub/data").mkdir(parents=True, exist_ok=True)
        make_parquet(tmp_path, IMAGES).rename(tmp_path / f"hub/data/{name}.parquet")
    scan = opened(tmp_path / "hub").scan()
    assert {split: len(images) for split, images in scan.splits.items()} == {"test": 3, "train": 6}
    assert scan.classes == ("cat", "dog")
    for name in ("train", "test"):  # as some save them
        (tmp_path / "named").mkdir(exist_ok=True)
        make_parquet(tmp_path, IMAGES).rename(tmp_path / f"named/{name}.parquet")
    assert [*opened(tmp_path / "named").scan().splits] == ["test", "train"]


def test_folders_of_parquet_files_become_splits(tmp_path: Path) -> None:
    """As in the branch of a dataset on the Hub that has Parquet files."""
    source = tmp_path / "src/default"
    for split in ("train", "test"):
        (source / split).mkdir(parents=True)
        make_parquet(tmp_path, IMAGES).rename(source / f"{split}/0000.parquet")
    command = ("convert", source.parent, tmp_path / "out", "--to", "lmdb", "--workers", "1")
    assert run_main(*command).returncode == 0
    for split in ("train", "test"):
        assert len(open_dataset(tmp_path / "out" / split)) == len(IMAGES)


def test_an_exported_dataset_comes_back(tmp_path: Path) -> None:
    source = make_saved(tmp_path, IMAGES)
    convert(opened(source, name="image", keep="caption=caption"), tmp_path / "a", to="lmdb")
    export(tmp_path / "a", tmp_path / "hub", layout="parquet")
    again = opened(tmp_path / "hub", name="image", keep="caption=caption")
    convert(again, tmp_path / "b", to="hdf5")
    shown = invoke("diff", tmp_path / "a", tmp_path / "b", "--json")
    assert json.loads(shown.stdout)["equal"], shown.stdout
    assert sorted(open_dataset(tmp_path / "b").paths) == sorted(IMAGES)


def test_columns_are_kept_by_their_types(tmp_path: Path) -> None:
    rows = [
        {
            "image": {"bytes": png(), "path": None},
            "mask": {"bytes": png(mode="L"), "path": None},
            "caption": "größer",
            "age": 7,
            "score": np.float16(0.5),  # PyArrow 18 takes no float
            "ids": [1, 2],
            "objects": {"x": 1, "y": None},
            "text": '{"a": {"b": 3}}',
            "rare": None,
        }
    ]
    struct = pa.struct([("x", pa.int64()), ("y", pa.string())])
    path = write(
        tmp_path / "x.parquet",
        rows,
        mask=pa.struct([("bytes", pa.binary()), ("path", pa.string())]),
        caption=pa.string(),
        age=pa.uint8(),
        score=pa.float16(),
        ids=pa.list_(pa.int64()),
        objects=struct,
        text=pa.string(),
        rare=pa.string(),
    )
    keep = (
        "mask=mask:mask,caption=caption,age=age,score=score,ids=ids:array,objects=objects,"
        "deep=text:/a/b:int64,rare=rare?"
    )
    assert opened(path).scan().understood["image"] == "image: image"
    with refused(UsageError, "text (text)", "shardkit convert table"):
        opened(path, image="text")
    convert(opened(path, image="image", keep=keep), tmp_path / "made", to="lmdb")
    names = ("mask", "caption", "age", "score", "ids", "objects", "deep", "rare")
    dataset = open_dataset(tmp_path / "made", fields=names, as_dict=True, decode="numpy")
    found = dataset[0]
    assert found["mask"].shape == (16, 24)
    assert found["ids"].tolist() == [1, 2]
    assert [found[name] for name in names if name not in ("mask", "ids")] == [
        *("größer", 7, 0.5, {"x": 1, "y": None}, 3, None)
    ]
    schema = dataset.schema
    assert (schema["age"].dtype, schema["score"].dtype) == ("uint8", "float16")
    source = opened(path, image="image", keep="rare=rare")
    with pytest.raises(BadImages) as failed:
        convert(source, tmp_path / "bad", to="lmdb")
    assert "its row has no rare; to allow this, write rare?" in failed.value.problems[0].reason


def test_bytes_become_a_text_if_they_are_one(tmp_path: Path) -> None:
    image = {"bytes": png(), "path": None}
    rows = [{"image": image, "b": each} for each in ("größe".encode(), b"\xff")]
    path = write(tmp_path / "x.parquet", rows, b=pa.binary())
    source = opened(path, image="image", keep="b=b:text")
    first, second = source.scan().splits[""].entries
    assert source.read("", first).fields["b.txt"] == "größe".encode()
    with refused(BadImage, "'utf-8'"):
        source.read("", second)


def test_a_path_without_bytes_is_named_with_its_row(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [
        {"image": {"bytes": png(), "path": "a.png"}},
        {"image": {"bytes": None, "path": "/home/me/b.png"}},
        {"image": None},
    ]
    path = write(tmp_path / "x.parquet", rows)
    failed = run_main("convert", "huggingface", path, tmp_path / "made", "--to", "lmdb")
    assert failed.returncode == 1
    assert "row 1 of the file has no image bytes, only the path '/home/me/b.png'" in failed.stderr
    assert "row 2 of the file has no image bytes" in failed.stderr
    done = convert(opened(path), tmp_path / "made", to="lmdb", on_error="skip")
    assert done.manifests[""].rows == 1
    assert verify(tmp_path / "made", against=path).ok


def test_minus_one_and_null_are_no_label(tmp_path: Path) -> None:
    table = arrow_table(IMAGES)
    labels = pa.array([-1, None, 1], pa.int64())
    pq.write_table(table.set_column(1, table.schema.field("label"), labels), tmp_path / "x.parquet")
    convert(opened(tmp_path / "x.parquet"), tmp_path / "made", to="lmdb", shuffle=False)
    dataset = open_dataset(tmp_path / "made", decode="bytes")
    assert [dataset[row][1] for row in range(3)] == [-1, -1, 1]
    assert dataset.classes == ["cat", "dog"]


def test_texts_are_class_names(tmp_path: Path) -> None:
    rows = [{"image": {"bytes": png(), "path": None}, "kind": name} for name in ("b", "a")]
    path = write(tmp_path / "x.parquet", rows, kind=pa.string())
    assert opened(path).scan().classes is None
    assert opened(path, label="kind").scan().classes == ("a", "b")


def test_a_dry_run_shows_what_was_understood(tmp_path: Path) -> None:
    path = make_parquet(tmp_path, IMAGES)
    shown = run_main("convert", "huggingface", path, tmp_path / "x", "--to", "lmdb", "--dry-run")
    for line in (
        "  image     image: image",
        "  label     label: 2 integers from 0 to 1, first cat=0",
        "  unused    caption (text)",
        "  first     00000000",
    ):
        assert line in shown.stdout
    made = run_main("convert", "huggingface", path, tmp_path / "x", "--to", "lmdb")
    assert "  unused    caption (text); --keep NAME stores one" in made.stdout


@pytest.mark.parametrize("name", ["../x.arrow", "/etc/passwd", "a/b.arrow", "", None, 7])
def test_a_state_that_names_other_files_is_refused(name: object, tmp_path: Path) -> None:
    make_saved(tmp_path, IMAGES)
    (tmp_path / "state.json").write_text(json.dumps({"_data_files": [{"filename": name}]}))
    with refused(UsageError):
        opened(tmp_path)


def test_other_wrong_folders_are_refused(tmp_path: Path) -> None:
    make_saved(tmp_path, IMAGES)
    for state, why in (
        ("[]", "cannot be read"),
        ("{}", "lists no files"),
        ('{"_data_files": [1]}', "lists no files"),
        ('{"_data_files": [{"filename": "gone.arrow"}]}', "is not a file"),
    ):
        (tmp_path / "state.json").write_text(state)
        with pytest.raises(UsageError, match=why):
            opened(tmp_path)
    (tmp_path / "link.arrow").symlink_to("/etc/passwd")
    (tmp_path / "state.json").write_text('{"_data_files": [{"filename": "link.arrow"}]}')
    with refused(UsageError):
        opened(tmp_path)
    (tmp_path / "dataset_dict.json").write_text('{"splits": [".."]}')
    with refused(UsageError):
        opened(tmp_path)


def test_damaged_files_are_reported(tmp_path: Path) -> None:
    path = make_parquet(tmp_path, IMAGES)
    data = path.read_bytes()
    path.write_bytes(data[:-10])
    with pytest.raises(UsageError, match=r"x\.parquet"):
        opened(path)
    saved = make_saved(tmp_path, IMAGES) / "data-00000-of-00001.arrow"
    saved.write_bytes(saved.read_bytes()[:-500])
    with pytest.raises(UsageError, match=r"data-00000-of-00001\.arrow"):
        opened(tmp_path)


def test_a_missing_pyarrow_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(UsageError, match=r"pip install 'shardkit\[parquet\]'"):
        opened(tmp_path)


@pytest.mark.slow
def test_what_datasets_writes_is_read(tmp_path: Path) -> None:
    """The real library saves and exports images, class labels and splits."""
    (tmp_path / "files").mkdir()
    for name, data in IMAGES.items():
        (tmp_path / "files" / name.replace("/", "-")).write_bytes(data)
    code = """
import sys
from pathlib import Path
import datasets as d
place = Path(sys.argv[1])
files = [str(place / "files" / name) for name in ("cat-1.png", "dog-2.jpg", "cat-3.png")]
features = d.Features(
    {"image": d.Image(), "label": d.ClassLabel(names=["cat", "dog"]),
     "tags": d.Sequence(d.ClassLabel(names=["x", "y", "z"])), "caption": d.Value("string")}
)
rows = {"image": files, "label": [0, 1, 0], "tags": [[0, 2], [], [1]], "caption": ["a", "b", "c"]}
data = d.Dataset.from_dict(rows, features=features)
splits = d.DatasetDict({"train": data, "test": data.select([1])})
splits.save_to_disk(place / "saved", num_shards={"train": 2, "test": 1})
data.to_parquet(place / "paths.parquet")
d.load_from_disk(place / "saved")["train"].to_parquet(place / "train.parquet")

import shardkit
data = data.remove_columns("tags")
shardkit.convert(data, place / "pixels", to="lmdb", shuffle=False, workers=1)
data = data.cast_column("image", d.Image(decode=False))
shardkit.convert(data, place / "unchanged", to="lmdb", shuffle=False, workers=1)
"""
    variables = {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "home")}
    python(code, tmp_path, env=variables, check=True)
    with pytest.raises(BadImages) as failed:  # it embeds nothing
        convert(opened(tmp_path / "paths.parquet"), tmp_path / "paths", to="lmdb")
    assert "has no image bytes, only the path" in failed.value.problems[0].reason
    keep = "tags=tags,caption=caption"
    for source, name in ((tmp_path / "saved", "made/train"), (tmp_path / "train.parquet", "other")):
        target = tmp_path / name.partition("/")[0]
        convert(opened(source, keep=keep), target, to="lmdb", shuffle=False)
        dataset = open_dataset(
            tmp_path / name,
            fields=("image", "label", "tags", "caption"),
            as_dict=True,
            decode={"image": "bytes"},
        )
        found = [dataset[row] for row in range(3)]
        assert [bytes(each["image"]) for each in found] == list(IMAGES.values())
        assert [each["label"] for each in found] == [0, 1, 0]
        assert [each["tags"].tolist() for each in found] == [[1, 0, 1], [0, 0, 0], [0, 1, 0]]
        assert [each["caption"] for each in found] == ["a", "b", "c"]
        assert dataset.schema["tags"].classes == ("x", "y", "z")
        assert verify(target, against=source).ok
    assert tree(tmp_path / "made/test")
    # Datasets in memory, too.
    for name in ("unchanged", "pixels"):
        dataset = open_dataset(tmp_path / name, decode="bytes")
        samples = [dataset[row] for row in range(3)]
        files = [bytes(image) for image, _ in samples]
        assert (files == list(IMAGES.values())) == (name == "unchanged")
        assert (dataset.classes, [label for _, label in samples]) == (["cat", "dog"], [0, 1, 0])


def test_images_without_a_path_and_labels_of_several_types_are_read(tmp_path: Path) -> None:
    """As pandas writes them: integers are floats next to None, categories are numbered."""
    data = [png(seed=seed) for seed in range(3)]
    image = pa.array([{"bytes": each} for each in data])
    for labels, classes, expected in (
        (pa.array([2.0, None, 0.0]), ["0", "1", "2"], [2, -1, 0]),
        (pa.array([True, False, True]), ["0", "1"], [1, 0, 1]),
        (pa.array(["b", "a", "b"]).dictionary_encode(), ["a", "b"], [1, 0, 1]),
        (pa.array([1, 0, 3], pa.uint8()), ["0", "1", "2", "3"], [1, 0, 3]),
    ):
        pq.write_table(pa.table({"image": image, "label": labels}), tmp_path / "x.parquet")
        scan = opened(tmp_path / "x.parquet").scan()
        assert list(scan.classes) == classes
        assert [entry.label for entry in scan.splits[""].entries] == expected
        assert [record.fields["png"] for record in scan.splits[""].read(range(3))] == data


def test_several_labels_are_noted_and_several_images_refused(tmp_path: Path) -> None:
    feature = {"feature": {"_type": "ClassLabel", "names": ["a", "b"]}, "_type": "Sequence"}
    about = json.dumps({"info": {"features": {"labels": feature}}})
    path = write(tmp_path / "x.parquet", [{"image": {"bytes": png()}, "labels": [1]}])
    table = pq.read_table(path).append_column("labels", pa.array([[1, 0]]))
    pq.write_table(table.replace_schema_metadata({"huggingface": about}), path)
    (note,) = opened(path).scan().notes
    assert "labels" in note
    scan = opened(path, keep="labels").scan()
    assert (scan.notes, scan.schema["labels"].classes) == ([], ("a", "b"))
    assert scan.splits[""].read([0])[0].meta["labels"] == [0, 1]
    image = table.column("image").to_pylist()
    pq.write_table(pa.table({"image": pa.array([image * 2]), "label": [1]}), path)
    with refused(UsageError, "image (images)"):
        opened(path)
