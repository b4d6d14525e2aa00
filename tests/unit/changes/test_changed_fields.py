"""Fields added, replaced and removed after a conversion, in layers; hostile layers are refused."""

from __future__ import annotations

import csv
import itertools
import json
import math
import runpy
import shutil
import sys
import tarfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import h5py
import lmdb
import numpy as np
import pytest
from buckets import BUCKET, Bucket
from helpers import (
    FORMATS,
    copy_dataset,
    invoke,
    make_dataset,
    make_folder,
    make_tree,
    pixels,
    png,
    tree,
)
from hostile.damage import edit
from hostile.forging import restate
from refusals import refused, refuses
from stated import stated

import shardkit
from shardkit import (
    Balanced,
    Field,
    append,
    attach,
    convert,
    diff,
    export,
    fields,
    make_loader,
    merge,
    open_dataset,
    open_source,
    repair,
    report,
    upload,
    verify,
)
from shardkit.changes import field_table
from shardkit.changes.field_source import LayerSource
from shardkit.contracts import Source
from shardkit.errors import BadImages, CorruptDataset, StateMismatch, UsageError
from shardkit.system import native
from shardkit.verification.reindex import reindex

EXAMPLE = Path(__file__).parents[3] / "docs" / "examples" / "layers_of_tars.py"


def table(path: Path, rows: Sequence[Mapping[str, Any]]) -> Path:
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    return path


def paths_of(place: Path) -> list[str]:
    return list(open_dataset(place).paths)


def captions(place: Path, to: Path) -> Path:
    rows = [{"path": path, "caption": f"a photo of {path}"} for path in sorted(paths_of(place))]
    return table(to / "captions.csv", rows)


def labels(place: Path, to: Path) -> Path:
    names = ("dog", "bird", "cat")
    paths = sorted(paths_of(place))
    rows = [{"path": path, "label": names[n % 3]} for n, path in enumerate(paths)]
    return table(to / "labels.csv", rows)


def read(place: Path, *fields: str, **options: Any) -> list[Any]:
    dataset = open_dataset(place, fields=fields, decode="bytes", **options)
    return [dataset[row] for row in range(len(dataset))]


def members(folder: Path) -> dict[str, bytes]:
    """Return all members of the archives in a folder, but those about the dataset."""
    found = {}
    for path in sorted(folder.glob("*.tar")):
        with tarfile.open(path) as file:
            for member in file:
                content = file.extractfile(member)
                found[member.name] = b"" if content is None else content.read()
    return {name: content for name, content in found.items() if "shardkit" not in name}


def shard_bytes(place: Path) -> dict[str, str]:
    return {name: digest for name, digest in tree(place).items() if name.startswith("shard-")}


@pytest.fixture
def made(folder: Path, tmp_path: Path) -> Path:
    return copy_dataset(folder, tmp_path / "made")


def test_values_of_a_table_come_back_and_shards_stay(made: Path, tmp_path: Path) -> None:
    before, rows = shard_bytes(made), read(made, "image", "label")
    changed = fields.add(made, captions(made, tmp_path), field=["caption"])
    assert changed.written
    assert changed.schema == {"caption": Field("text")}
    assert shard_bytes(made) == before
    assert read(made, "image", "label") == rows
    wanted = [(f"a photo of {path}",) for path in paths_of(made)]
    assert read(made, "caption") == wanted
    assert verify(made, level="decode").ok


VALUES: Mapping[str, Sequence[Any]] = {
    "score": [0.5, 1e300, -0.0, None, 0.1, math.inf, 7.0],
    "count": [0, -5, (1 << 53) + 1, 3, None, 1 << 62, -(1 << 63)],
    "flag": [True, False, None, True, False, True, True],
    "caption": ["plain", '漢 "q"', None, "é", "a\nb", "\\", "\U0001f600"],
    "note": [{"b": 1, "a": [1.5, None, "é"]}, [], None, 2, "text", {"z": True}, 0.25],
}
"""Values of seven rows by field; None where a row lacks one."""


def records_of(path: Path) -> list[dict[str, bytes]]:
    """Return the fields of each record of a shard of seven, as the format's library reads them."""
    rows: list[dict[str, bytes]] = [{} for _ in range(7)]
    if path.suffix == ".tar":
        for name, content in members(path.parent).items():
            row, _, stored = name.partition(".")
            rows[int(row)][stored] = content
    elif path.suffix == ".lmdb":
        environment: Any = lmdb.open(str(path), subdir=False, readonly=True, lock=False)
        with environment, environment.begin() as transaction:
            for key, value in transaction.cursor():
                row, _, stored = key.decode().partition(".")
                if stored not in ("", "__key__"):
                    rows[int(row)][stored] = value
    else:
        hdf5: Any = h5py.File(path)
        with hdf5 as file:
            for stored in file.keys() - {"__key__", "__shardkit__"}:
                ends = file[stored]["offsets"][:].tolist()
                for number, (start, end) in enumerate(itertools.pairwise(ends)):
                    if start < end:
                        rows[number][stored] = file[stored]["data"][start:end].tobytes()
    return rows


@pytest.mark.parametrize("to", FORMATS)
def test_records_made_together_are_those_made_one_by_one(
    tmp_path: Path, to: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    samples = [{"key": f"{row}", "label": row % 2} for row in range(7)]
    schema = {"label": Field("label", classes=2)}
    convert(samples, tmp_path / "together", to=to, schema=schema, shuffle=False)
    for copy in ("alone", "python"):
        shutil.copytree(tmp_path / "together", tmp_path / copy)
    rows = [dict(zip(VALUES, row, strict=True)) for row in zip(*VALUES.values(), strict=True)]
    lines = [json.dumps({"key": f"{row}", **values}) for row, values in enumerate(rows)]
    source = tmp_path / "values.jsonl"
    source.write_text("\n".join(lines))
    kinds = ["score:float64?", "count:int64?", "flag:json?", "caption:text?", "note:json?"]
    fields.add(tmp_path / "together", source, field=kinds)
    with monkeypatch.context() as patch:
        patch.setattr(LayerSource, "read_together", Source.read_together)
        fields.add(tmp_path / "alone", source, field=kinds)
        patch.setattr(native, "module", lambda: None)
        fields.add(tmp_path / "python", source, field=kinds)
    assert tree(tmp_path / "together") == tree(tmp_path / "alone") == tree(tmp_path / "python")
    (shard,) = (tmp_path / "together" / "layers").glob("*/shard-*")
    for record, values, path in zip(
        records_of(shard), rows, paths_of(tmp_path / "together"), strict=True
    ):
        meta = {name: value for name, value in values.items() if value is not None}
        caption = meta.pop("caption", None)
        if meta.get("score") == math.inf:
            meta["score"] = "Infinity"
        stated = json.dumps({"path": path, **meta}, sort_keys=True, separators=(",", ":"))
        text = {} if caption is None else {"caption.txt": caption.encode()}
        assert record == {"json": stated.encode(), **text}
    assert read(tmp_path / "together", *VALUES) == [tuple(row.values()) for row in rows]


def test_a_copy_has_the_fields_of_all_layers_in_its_shards(made: Path, tmp_path: Path) -> None:
    fields.add(made, captions(made, tmp_path), field=["caption"])
    fields.add(made, {"latent": np.arange(48, dtype=np.float16).reshape(6, 4, 2)})
    fields.replace(made, labels(made, tmp_path), field=["label"])
    fields.remove(made, ["caption"])
    layered, rows = stated(made), read(made, "image", "label", "latent")
    copy = copied(made, tmp_path / "copy")
    manifest = stated(copy)
    assert manifest.content_digest == layered.content_digest
    assert (manifest.schema, manifest.fields) == (layered.schema, layered.fields)
    assert manifest.class_counts == layered.class_counts
    assert not hasattr(manifest, "layering")
    for one, two in zip(read(copy, "image", "label", "latent"), rows, strict=True):
        assert one[:2] == two[:2]
        assert one[2].tolist() == two[2].tolist()
    assert verify(copy).ok
    assert not (copy / "layers").exists()
    assert b"a photo of" not in b"".join(path.read_bytes() for path in copy.glob("shard-*"))


def copied(place: Path, to: Path, **options: Any) -> Path:
    """Return a copy of a dataset, as `shardkit convert dataset` makes it."""
    convert(open_source("dataset", place), to, to=stated(place).format, **options)
    return to


def test_a_copy_of_an_unchanged_dataset_is_the_same(made: Path, tmp_path: Path) -> None:
    assert tree(copied(made, tmp_path / "copy", shard_samples=4)) == tree(made)


def test_a_copy_goes_with_the_source_of_its_original(
    made: Path, folder: Path, tmp_path: Path
) -> None:
    loader = make_loader(open_dataset(made, decode="bytes"), 2, seed=1, num_workers=0)
    state = loader.state_dict()
    fields.add(made, captions(made, tmp_path), field=["caption"])
    fields.replace(made, labels(made, tmp_path), field=["label"])
    copy = copied(made, tmp_path / "copy", shard_samples=2)
    make_loader(open_dataset(copy, decode="bytes"), 2, seed=1).load_state_dict(state)
    assert (stated(copy).recipe, stated(copy).source["kind"]) == (
        stated(made).recipe,
        "imagefolder",
    )
    for source in (folder, made):
        verification = verify(copy, against=source)
        assert verification.ok, verification.findings
        assert verification.source is not None
        assert verification.source.same == 6
    more = make_tree(tmp_path / "more", {"cat/new.png": png(seed=8)})
    append(copy, more, missing="skip")
    assert verify(copy, against=[folder, more]).ok
    again = copied(copy, tmp_path / "again")
    assert read(again, "label", "caption") == read(copy, "label", "caption")
    assert verify(again, against=[folder, more]).ok
    folder.joinpath("cat", "000.jpg").write_bytes(png(seed=9))
    assert not verify(copy, against=[folder, more]).ok


def test_shards_of_a_copy_are_repaired_from_the_original(
    made: Path, folder: Path, tmp_path: Path
) -> None:
    fields.add(made, captions(made, tmp_path), field=["caption"])
    copy = copied(made, tmp_path / "copy")
    before = tree(copy)
    (copy / "shard-000000.lmdb").unlink()
    (finding,) = repair(copy, folder).findings
    assert "caption" in finding.reason
    assert repair(copy, made).ok
    assert tree(copy) == before
    fields.undo(made)
    unchanged = copied(made, tmp_path / "unchanged")
    before = tree(unchanged)
    (unchanged / "shard-000000.lmdb").unlink()
    assert repair(unchanged, folder).ok
    assert tree(unchanged) == before


def test_a_rerun_of_a_copy_sees_changed_fields(made: Path, tmp_path: Path) -> None:
    fields.add(made, {"number": list(range(6))})
    copy = copied(made, tmp_path / "copy")
    before = tree(copy)
    assert tree(copied(made, copy)) == before
    fields.replace(made, {"number": list(range(10, 16))})
    with refused(UsageError, copy):
        copied(made, copy)
    assert [value for (value,) in read(copied(made, copy, force=True), "number")] == [
        *range(10, 16)
    ]


def test_a_relabeled_dataset_is_read_with_the_new_labels(made: Path, tmp_path: Path) -> None:
    rows = read(made, "image", "label")
    changed = fields.replace(made, labels(made, tmp_path), field=["label"])
    assert (changed.new_classes, changed.lost_classes) == (("bird",), ())
    dataset = open_dataset(made)
    assert dataset.classes == ["cat", "dog", "bird"]
    numbers = {path: [1, 2, 0][n % 3] for n, path in enumerate(sorted(dataset.paths))}
    wanted = [numbers[path] for path in dataset.paths]
    assert [label for _, label in read(made, "image", "label", verify=True)] == wanted
    assert [image for image, _ in read(made, "image", "label")] == [image for image, _ in rows]
    assert list(dataset.targets) == wanted
    assert verify(made, level="decode").ok


def test_replaced_labels_have_the_classes_of_the_new_values(made: Path, tmp_path: Path) -> None:
    rows = [
        {"path": path, "label": "ox" if path[:3] == "cat" else "dog"} for path in paths_of(made)
    ]
    file = table(tmp_path / "labels.csv", rows)
    for given, field in ((file, ["label"]), ({"label": [row["label"] for row in rows]}, [])):
        changed = fields.replace(made, given, field=field)
        assert (changed.new_classes, changed.lost_classes) == (("ox",), ("cat",))
        assert open_dataset(made).classes == ["dog", "ox"]
        counts = [sum(row["label"] == name for row in rows) for name in ("dog", "ox")]
        assert list(stated(made).class_counts) == counts
        assert not fields.replace(made, given, field=field).written
        fields.undo(made)
        fields.replace(made, given, field=field, keep_classes=True)
        assert open_dataset(made).classes == ["cat", "dog", "ox"]
        fields.undo(made)
    told = invoke("fields", "replace", made, "--from", file, "--field", "label")
    assert "1 without a label left out: cat (--keep-classes" in told.output


def test_labels_that_are_numbers_keep_all_classes(made: Path) -> None:
    fields.replace(made, {"label": [1] * 6})
    assert open_dataset(made).classes == ["cat", "dog"]
    fields.replace(made, {"label": [1, "fox", 1, 1, None, 1]})
    dataset = open_dataset(made)
    assert dataset.classes == ["cat", "dog", "fox"]
    assert list(dataset.targets) == [1, 2, 1, 1, -1, 1]


def test_undo_restores_the_dataset_byte_for_byte_once(made: Path, tmp_path: Path) -> None:
    before = tree(made)
    fields.add(made, captions(made, tmp_path), field=["caption"])
    fields.undo(made)
    assert tree(made) == before
    assert not fields.undo(made).written
    again = invoke("fields", "undo", made)
    assert (again.exit_code, "nothing to undo" in again.output) == (0, True)
    assert tree(made) == before


def test_undo_brings_a_replaced_field_back(made: Path) -> None:
    fields.add(made, {"number": list(range(6))})
    fields.add(made, {"other": list(range(6))})
    before = stated(made)
    fields.replace(made, {"number": list(range(10, 16))})
    assert [value for (value,) in read(made, "number")] == list(range(10, 16))
    fields.undo(made)
    after = stated(made)
    assert (after.content_digest, after.schema) == (before.content_digest, before.schema)
    assert [value for (value,) in read(made, "number")] == list(range(6))
    assert verify(made).ok


def test_files_of_a_replaced_layer_go_with_the_next_change(made: Path) -> None:
    for start in (0, 10, 20):
        change = fields.replace if start else fields.add
        change(made, {"number": list(range(start, start + 6))})
    assert sorted(path.name for path in (made / "layers").iterdir()) == ["000002", "000003"]
    fields.remove(made, "number")
    assert sorted(path.name for path in (made / "layers").iterdir()) == ["000003"]
    assert verify(made).ok
    fields.undo(made)
    assert [value for (value,) in read(made, "number")] == list(range(20, 26))


def test_a_repeated_change_does_nothing(made: Path, tmp_path: Path) -> None:
    source = captions(made, tmp_path)
    fields.add(made, source, field=["caption"])
    before = tree(made)
    assert not fields.add(made, source, field=["caption"]).written
    assert tree(made) == before
    table(source, [{"path": path, "caption": "other"} for path in paths_of(made)])
    with refused(UsageError, "'caption'"):
        fields.add(made, source, field=["caption"])


def test_a_layer_is_opened_only_for_its_fields(made: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fields.add(made, {"number": list(range(6))})
    shutil.rmtree(made / "layers")
    dataset = open_dataset(made)
    assert len([dataset[row] for row in range(6)]) == 6
    with pytest.raises((CorruptDataset, UsageError), match="layers/000001"):
        open_dataset(made, fields=["number"])[0]


def test_functions_get_samples_and_give_fields(made: Path) -> None:
    fields.add(made, {"number": [0.5 * n for n in range(6)]})
    fields.add(
        made,
        {
            "pixels": lambda sample: np.asarray(sample["image"]).mean((0, 1)),
            "text": lambda sample: f"{sample['key']} {sample['label']} {sample['number']}",
        },
    )
    dataset = open_dataset(made, fields=("image", "label", "number", "pixels", "text"))
    for row in range(6):
        image, label, number, mean, text = dataset[row]
        assert np.allclose(np.asarray(image).mean((0, 1)), mean.numpy())
        assert text == f"{dataset.keys[row]} {label} {number}"


def measure(sample: Mapping[str, Any]) -> int:
    width: int = sample["image"].width
    return width


@pytest.mark.slow
def test_functions_run_in_worker_processes(made: Path) -> None:
    fields.add(made, {"wide": measure}, workers=2)
    dataset = open_dataset(made, fields=("image", "wide"))
    assert all(image.width == wide for image, wide in (dataset[row] for row in range(6)))


def test_a_function_that_fails_names_the_row(made: Path) -> None:
    with refused(UsageError, "text: ZeroDivisionError"):
        fields.add(made, {"text": lambda sample: 1 / 0})
    path = sorted(paths_of(made))[2]
    with pytest.raises(BadImages, match=f"{path}: text: KeyError"):
        fields.add(made, {"text": lambda sample: {True: "a"}[sample["path"] != path]})
    assert not hasattr(stated(made), "layering")


def test_arrays_of_a_file_are_in_row_order(made: Path, tmp_path: Path) -> None:
    values = np.random.default_rng(0).standard_normal((6, 3, 2)).astype(np.float32)
    np.save(tmp_path / "latents.npy", values)
    fields.add(made, tmp_path / "latents.npy", field=["latent"])
    assert all((a.numpy() == b).all() for (a,), b in zip(read(made, "latent"), values, strict=True))
    batch = open_dataset(made, fields=["latent"]).__getitems__(range(6))
    assert shardkit.collate(batch)[0].shape == (6, 3, 2)


def test_values_that_are_no_fields_are_refused(made: Path, tmp_path: Path) -> None:
    arrays = {"single value": np.array(1), "Fortran": np.asfortranarray(np.zeros((6, 2)))}
    for fact, array in arrays.items():
        np.save(tmp_path / "latents.npy", array)
        with refused(UsageError, "latents.npy", fact):
            fields.add(made, tmp_path / "latents.npy", field=["latent"])
    picture = np.zeros((1, 1), np.uint8)
    wrong: list[tuple[Any, str]] = [({}, "no fields"), ([1], "list"), ({"B": [picture] * 6}, "B")]
    for given, fact in wrong:
        with refused(UsageError, fact):
            fields.add(made, given)
    with refused(UsageError, "schema", "texts"):
        fields.add(made, {"a": ["b"] * 6}, schema={"a": "texts"})


def test_an_array_of_another_length_is_refused(made: Path, tmp_path: Path) -> None:
    np.save(tmp_path / "latents.npy", np.zeros((5, 2)))
    with refused(UsageError, "latents.npy", 5, 6):
        fields.add(made, tmp_path / "latents.npy", field=["latent"])
    with refused(UsageError, "number", 5, 6):
        fields.add(made, {"number": range(5)})


def split_dataset(folder: Path) -> Path:
    for split, each in (("train", 3), ("val", 2)):
        make_folder(folder / "photos" / split, each=each)
    return make_dataset(folder / "photos", folder / "made")


def test_a_folder_has_the_arrays_of_all_splits(tmp_path: Path) -> None:
    made, folder = split_dataset(tmp_path), tmp_path / "vectors"
    rng = np.random.default_rng(1)
    arrays = {
        split: rng.normal(size=(len(paths_of(made / split)), 4)) for split in ("train", "val")
    }
    folder.mkdir()
    np.save(folder / "train.npy", arrays["train"])
    tables = make_tree(tmp_path / "tables", {"train.csv": b"path,vector\n", "val.csv": b""})
    for source, facts in (
        (folder / "train.npy", ("train.npy", "val.npy")),
        (folder, ("vectors", "val.npy")),
        (tables, (tables, "one table for all splits")),
    ):
        with refused(UsageError, *facts):
            fields.add(made, source, field=["vector"])
    np.save(folder / "val.npy", arrays["val"].astype(np.float32))
    with refused(UsageError, "val.npy", "float32", "train.npy", "float64"):
        fields.add(made, folder, field=["vector"])
    np.save(folder / "val.npy", arrays["val"])
    fields.add(made, folder, field=["vector"], workers=2)

    for split, array in arrays.items():
        assert np.array_equal([vector.numpy() for (vector,) in read(made / split, "vector")], array)
    assert not fields.add(made, folder, field=["vector"]).written
    assert verify(made, against=folder).ok
    np.save(folder / "val.npy", arrays["val"] + 1)
    assert not verify(made, against=folder).ok


def test_a_dataset_without_splits_has_one_file(made: Path, tmp_path: Path) -> None:
    with refused(UsageError, tmp_path, made, ".npy"):
        fields.add(made, tmp_path, field=["vector"])


def test_lists_of_one_length_become_arrays_of_one_shape(made: Path, tmp_path: Path) -> None:
    lists = [[n, 0.5] if n else [0, 1] for n in range(6)]  # the first one has integers
    rows = [
        {
            "path": path,
            "vector": json.dumps(vector),
            "grid": json.dumps([vector]),
            "ragged": json.dumps(vector[: n % 2 + 1]),
        }
        for n, (path, vector) in enumerate(zip(paths_of(made), lists, strict=True))
    ]
    by_line = tmp_path / "lists.jsonl"
    by_line.write_text(
        "".join(
            json.dumps({"path": row["path"], "other": json.loads(row["vector"])}) + "\n"
            for row in rows
        )
    )
    columns = [f"{name}:array" for name in ("vector", "grid", "ragged")]
    schema = fields.add(made, table(tmp_path / "lists.csv", rows), field=columns).schema
    schema = {**schema, **fields.add(made, by_line, field=["other:array"]).schema}

    assert {name: str(field) for name, field in schema.items()} == {
        "vector": "float64 array, 2",
        "grid": "float64 array, 1 x 2",
        "ragged": "array",
        "other": "float64 array, 2",
    }
    for name, shape in (("vector", (6, 2)), ("grid", (6, 1, 2)), ("other", (6, 2))):
        stored = np.array([value.numpy() for (value,) in read(made, name)])
        assert np.array_equal(stored, np.reshape(lists, shape))
    assert verify(made, against=[by_line, tmp_path / "lists.csv"]).ok


@pytest.mark.parametrize("suffix", [".csv", ".jsonl"])
@pytest.mark.parametrize("at_once", [1, 4])
def test_columns_of_any_values_come_back(
    made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, suffix: str, at_once: int
) -> None:
    monkeypatch.setattr(field_table, "_AT_ONCE", at_once)
    values: dict[str, list[Any]] = {
        "text": ["plain", "café", 'a "b", c', "", "中文 \U0001f600", "007"],
        "count": [3, -1, 0, 2**40, 5, 6],
        "score": [0.5, 1e-7, -2.25, 1e30, 0.1, 3.0],
        "note": ["x", None, "y", None, None, "z"],
        "kind": ["one", "two", "one", "one", "two", "two"],
    }
    rows = [
        {"path": path, **dict(zip(values, row, strict=True))}
        for path, row in zip(paths_of(made), zip(*values.values(), strict=True), strict=True)
    ]
    source = tmp_path / f"values{suffix}"
    if suffix == ".csv":
        table(source, rows[::-1])
    else:
        source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    note = "note:json?" if suffix == ".jsonl" else "note:text?"
    fields.add(made, source, field=["text", "count", "score", note])
    fields.replace(made, source, field=["label=kind"])
    missing = "" if suffix == ".csv" else None  # an empty cell is a text
    values["note"] = [missing if value is None else value for value in values["note"]]
    values["kind"] = [["one", "two"].index(name) for name in values["kind"]]
    names = ("text", "count", "score", "note", "label")
    assert read(made, *names) == [*zip(*values.values(), strict=True)]
    assert verify(made).ok


def test_a_key_is_refused_that_an_earlier_batch_has(
    made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(field_table, "_AT_ONCE", 2)
    rows = [{"path": path, "caption": "x"} for path in paths_of(made)]
    twice = table(tmp_path / "a.csv", [*rows[:3], rows[0], *rows[3:]])
    with refused(UsageError, "a.csv:5", rows[0]["path"]):
        fields.add(made, twice, field=["caption"])


def test_missing_unknown_and_repeated_keys_are_named(made: Path, tmp_path: Path) -> None:
    paths = sorted(paths_of(made))
    rows = [{"key": path, "caption": "x"} for path in [*paths[1:], "cat/none.jpg"]]
    source = table(tmp_path / "a.csv", rows)
    with refused(UsageError, "1 of the 6", "'cat/none.jpg'"):
        fields.add(made, source, field=["caption"])
    with refused(UsageError, made, paths[0]):
        fields.add(made, source, field=["caption"], unknown="skip")
    fields.add(made, source, field=["caption"], unknown="skip", missing="skip")
    lacking = {
        path: value for path, (value,) in zip(paths_of(made), read(made, "caption"), strict=True)
    }
    assert lacking == {path: None if path == paths[0] else "x" for path in paths}
    keys = list(open_dataset(made).keys)
    twice = table(tmp_path / "b.csv", [{"key": name, "other": "x"} for name in [*paths, keys[2]]])
    with refused(UsageError, "b.csv:8"):
        fields.add(made, twice, field=["other"])


def test_the_file_of_a_field_keeps_its_name(made: Path, folder: Path, tmp_path: Path) -> None:
    source = captions(made, tmp_path)
    fields.add(made, source, key="path", field=["caption"])
    assert verify(made, against=[folder, source]).ok
    renamed = source.rename(tmp_path / "renamed.csv")
    with refused(UsageError, "'imagefolder'", "original name"):
        verify(made, against=[folder, renamed])


def test_wrong_fields_are_refused(made: Path, tmp_path: Path) -> None:
    source = captions(made, tmp_path)
    for field, fact in (
        (["none"], "'none'"),
        ([], "caption"),
        (["image=caption"], "'image'"),
        (["caption:int64"], "caption"),
        (["label=caption", "label=caption"], "label"),
    ):
        with refused(UsageError, fact):
            fields.add(made, source, field=field)


def test_one_table_serves_all_splits(tmp_path: Path) -> None:
    for split in ("train", "val"):
        make_folder(tmp_path / "photos" / split)
    made = make_dataset(tmp_path / "photos", tmp_path / "made")
    names = {
        split: [f"{split}/{path}" for path in paths_of(made / split)] for split in ("train", "val")
    }
    every = sorted([*names["train"], *names["val"]])
    rows = [{"path": name, "caption": name.upper()} for name in every]
    fields.add(made, table(tmp_path / "c.csv", rows), field=["caption"])
    for split, each in names.items():
        assert read(made / split, "caption") == [(name.upper(),) for name in each]
    assert verify(made).ok
    ambiguous = [{"path": name.partition("/")[2], "x": 1} for name in names["train"]]
    with refused(UsageError, "d.csv"):
        fields.add(made, table(tmp_path / "d.csv", ambiguous), field=["x"])
    fields.undo(made)
    assert verify(made).ok
    assert not hasattr(stated(made / "train"), "layering")


def test_damage_in_a_layer_is_found(made: Path, tmp_path: Path) -> None:
    fields.add(made, captions(made, tmp_path), field=["caption"])
    (shard,) = (made / "layers" / "000001").glob("shard-*")
    content = shard.read_bytes()
    at = content.index(b"a photo of")
    shard.write_bytes(content[:at] + b"X" + content[at + 1 :])
    assert {finding.file for finding in verify(made).findings} == {f"layers/000001/{shard.name}"}
    shard.write_bytes(content)
    index = made / "layers" / "000001" / "index" / "columns" / "caption.npy"
    index.write_bytes(index.read_bytes()[:-1] + b"X")
    assert {finding.file for finding in verify(made).findings} == {
        "layers/000001/index/columns/caption.npy"
    }
    assert reindex(made) == 6
    assert verify(made).ok
    (made / "layers" / "000001" / "shardkit.json").write_text("{}")
    assert not verify(made).ok


def test_a_layer_of_another_dataset_is_refused(made: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    shutil.copytree(made, other)
    fields.add(made, {"number": list(range(6))})
    fields.add(other, {"number": list(range(1, 7))})
    shutil.rmtree(made / "layers")
    shutil.copytree(other / "layers", made / "layers")
    with refused(CorruptDataset, "layers/000001"):
        open_dataset(made, fields=["number"])[0]


def test_repair_rebuilds_base_shards_and_names_those_of_layers(
    made: Path, folder: Path, tmp_path: Path
) -> None:
    fields.add(made, captions(made, tmp_path), field=["caption"])
    wanted = tree(made)
    (made / "shard-000000.lmdb").unlink()
    (made / "layers/000001/index/columns/caption.npy").unlink()
    (made / "index/rows.npy").unlink()
    assert repair(made, folder).ok
    assert tree(made) == wanted
    (shard,) = (made / "layers" / "000001").glob("shard-*")
    shard.unlink()
    (finding,) = repair(made, folder).findings
    assert "captions.csv" in finding.reason
    assert repair(made, [folder, tmp_path / "captions.csv"]).ok
    assert tree(made) == wanted
    shard.unlink()
    assert repair(made, tmp_path / "captions.csv").ok
    assert tree(made) == wanted


def test_repair_names_the_source_that_a_shard_of_the_conversion_needs(
    made: Path, tmp_path: Path
) -> None:
    source = captions(made, tmp_path)
    fields.add(made, source, field=["caption"])
    (made / "shard-000000.lmdb").unlink()
    (finding,) = repair(made, source).findings
    assert finding.file == "shard-000000.lmdb"
    assert all(fact in finding.reason for fact in ("image, label", "from photos"))


def test_all_sources_repair_the_index_that_their_rows_are_matched_by(
    made: Path, folder: Path, tmp_path: Path
) -> None:
    sources = [folder, captions(made, tmp_path)]
    fields.add(made, sources[1], field=["caption"])
    wanted = tree(made)
    keys = made / "index/keys.npy"
    for harmed in (b"", keys.read_bytes()[:-1] + b"?"):
        keys.write_bytes(harmed)
        (made / "shard-000000.lmdb").unlink()
        (made / "layers/000001/shard-000000.lmdb").unlink()
        assert repair(made, sources).ok
        assert tree(made) == wanted


def test_verify_compares_layers_with_their_files(made: Path, folder: Path, tmp_path: Path) -> None:
    source = captions(made, tmp_path)
    fields.add(made, source, field=["caption"])
    np.save(tmp_path / "latents.npy", np.arange(12.0).reshape(6, 2))
    fields.add(made, tmp_path / "latents.npy", field=["latent"])
    fields.replace(made, labels(made, tmp_path), field=["label"])
    files = [tmp_path / name for name in ("captions.csv", "latents.npy", "labels.csv")]
    assert verify(made, against=[folder, *files]).ok
    assert verify(made, against=files).ok
    text = source.read_text()
    source.write_text(text.replace("a photo of", "a picture of", 1))
    (finding,) = verify(made, against=files).findings
    assert (finding.file, finding.source) == ("layers/000001/shard-000000.lmdb", True)
    np.save(tmp_path / "latents.npy", np.ones((6, 2)))
    assert len(verify(made, against=files[1]).findings) == 6


def test_a_record_counts_once_with_all_its_layers(made: Path) -> None:
    fields.add(made, {"number": list(range(6))})
    fields.add(made, {"other": list(range(6))})
    assert verify(made).records == 6


def test_names_of_images_and_commands_with_line_breaks_are_plain(
    made: Path, tmp_path: Path
) -> None:
    file = captions(made, tmp_path)
    given = ("--from", file, "--field", "image=caption")
    refuses(2, "fields", "add", made, *given, facts=("'image'", "another name"))
    odd = made.rename(tmp_path / "two\nlines")
    told = invoke("fields", "add", odd, "--from", file, "--field", "caption")
    assert f"shardkit fields undo $'{tmp_path}/two\\x0alines'" in told.output


def test_verify_compares_the_images_with_their_source(made: Path, folder: Path) -> None:
    fields.add(made, {"number": list(range(6))})
    verification = verify(made, against=folder)
    assert verification.ok
    assert verification.source is not None
    assert verification.source.files == 6


@pytest.mark.slow
@pytest.mark.parametrize("to", FORMATS)
def test_append_extends_each_layer(folder: Path, tmp_path: Path, to: str) -> None:
    made = make_dataset(folder, tmp_path / "made", to=to)
    fields.replace(made, labels(made, tmp_path), field=["label"])
    fields.add(made, {"number": list(range(6)), "latent": np.arange(12.0).reshape(6, 2)})
    fields.add(made, {"gone": list(range(6))})
    fields.remove(made, ["gone"])
    rows = read(made, "image", "label", "number")
    kept = {name: digest for name, digest in tree(made).items() if "shard-" in name}
    more = make_tree(tmp_path / "more", {"bird/x.png": png(seed=8), "emu/y.png": png(seed=9)})
    with refused(UsageError, more, "missing='skip'", "number", "latent"):
        append(made, more)
    assert append(made, more, missing="skip").images == 2
    assert {name: kept[name] for name in kept if "000003" not in name}.items() <= tree(made).items()
    after = read(made, "image", "label", "number")
    assert after[:6] == rows
    names = open_dataset(made).classes
    assert names[:3] == ["cat", "dog", "bird"]
    paths = paths_of(made)
    found = {path: (row[0], names[row[1]], row[2]) for path, row in zip(paths, after, strict=True)}
    assert found["bird/x.png"] == (png(seed=8), "bird", None)
    assert found["emu/y.png"] == (png(seed=9), "emu", None)
    assert verify(made, level="decode", against=[folder, more]).ok
    assert append(made, more, missing="skip").images == 0
    assert fields.undo(made).written is False


def test_appended_samples_bring_the_fields_of_layers(tmp_path: Path) -> None:
    def samples(first: int, **more: Any) -> list[dict[str, Any]]:
        numbers = range(first, first + 3)
        return [{"key": f"k{n}", "image": pixels(seed=n), "text": f"t{n}", **more} for n in numbers]

    made = tmp_path / "made"
    convert(samples(0), made, to="lmdb")
    fields.add(made, {"number": [0, 1, 2], "boxes": [np.ones((1, 4))] * 3})
    fields.replace(made, {"text": ["a", "b", "c"]})
    new = samples(10, number=7, boxes=np.zeros((2, 4)))
    append(made, new)
    rows = dict(zip(open_dataset(made).keys, read(made, "text", "number", "boxes"), strict=True))
    assert [rows[f"k{n}"][0] for n in range(3)] == ["a", "b", "c"]
    assert [rows[f"k{n}"][:2] for n in range(10, 13)] == [(f"t{n}", 7) for n in range(10, 13)]
    assert rows["k12"][2].shape == (2, 4)
    assert verify(made, level="decode", against=[samples(0), new]).ok


def test_a_bad_image_is_left_out_of_all_layers(made: Path, tmp_path: Path) -> None:
    fields.add(made, {"number": list(range(6))})
    more = make_tree(tmp_path / "more", {"cat/bad.png": png()[:60], "cat/good.png": png(seed=8)})
    assert append(made, more, missing="skip", on_error="skip").images == 1
    assert read(made, "number")[6:] == [(None,)]
    assert verify(made, level="decode").ok


def test_boxes_of_new_images_move_with_them(tmp_path: Path) -> None:
    def sample(key: str, **boxes: Any) -> dict[str, Any]:
        return {"key": key, "image": pixels(40, 20, seed=len(key)), **boxes}

    made = tmp_path / "made"
    convert([sample("a")], made, to="lmdb", resize=10)
    fields.add(made, {"boxes": [np.array([[1.0, 2.0, 3.0, 4.0]])]})
    append(made, [sample("bb", boxes=np.array([[2.0, 4.0, 6.0, 8.0]]))])
    for (value,) in read(made, "boxes"):  # in pixels of the stored images, of half the size
        assert value.tolist() == [[1.0, 2.0, 3.0, 4.0]]


def test_merge_links_layers_made_by_the_same_steps(made: Path, tmp_path: Path) -> None:
    other = make_dataset(
        make_tree(tmp_path / "more", {"cat/new.png": png(seed=8)}), tmp_path / "other"
    )
    for place in (made, other):
        fields.add(place, captions(place, tmp_path), field=["caption"])
    merged = tmp_path / "merged"
    merge([made, other], merged)
    assert read(merged, "image", "caption") == [
        *read(made, "image", "caption"),
        *read(other, "image", "caption"),
    ]
    assert verify(merged, level="decode").ok
    before = tree(merged)
    merge([made, other], merged)
    assert tree(merged) == before
    fields.replace(other, {"caption": ["another one"]})
    with refused(UsageError, merged):
        merge([made, other], merged)
    copies = [copied(place, tmp_path / f"copy of {place.name}") for place in (made, other)]
    merge(copies, tmp_path / "all")
    assert read(tmp_path / "all", "caption")[-1] == ("another one",)


def test_merge_names_datasets_changed_in_other_steps(made: Path, tmp_path: Path) -> None:
    other = make_dataset(
        make_tree(tmp_path / "more", {"dog/new.png": png(seed=8)}), tmp_path / "other"
    )
    fields.replace(other, {"label": ["cat"]})
    with refused(UsageError, other, made, "`shardkit convert dataset`"):
        merge([made, other], tmp_path / "all")


def test_an_appended_dataset_gets_fields(made: Path, tmp_path: Path) -> None:
    append(made, make_tree(tmp_path / "more", {"cat/new.png": png(seed=8)}))
    fields.add(made, {"number": list(range(7))})
    assert [value for (value,) in read(made, "number")] == list(range(7))
    assert verify(made).ok
    fields.remove(made, "label")
    assert verify(made).ok
    assert open_dataset(made)[0][1] == -1


def test_an_attached_dataset_gets_fields_next_to_its_manifest(folder: Path, tmp_path: Path) -> None:
    made, archive = tmp_path / "index", tmp_path / "photos.tar"
    with tarfile.open(archive, "w") as file:
        file.add(folder, ".")
    attach(archive, made)
    content = archive.read_bytes()
    fields.add(made, captions(made, tmp_path), field=["caption"])
    assert read(made, "caption") == [(f"a photo of {path}",) for path in paths_of(made)]
    assert len(open_dataset(made)[:]) == 6
    assert archive.read_bytes() == content
    assert verify(made).ok
    assert attach(archive, made).unchanged
    fields.undo(made)
    assert verify(made).ok


def test_exports_have_the_fields_of_all_layers(made: Path, tmp_path: Path) -> None:
    fields.add(made, captions(made, tmp_path), field=["caption"])
    fields.replace(made, labels(made, tmp_path), field=["label"])
    export(made, tmp_path / "layered", layout="webdataset")
    export(made, tmp_path / "csv", layout="csv")
    export(copied(made, tmp_path / "copy"), tmp_path / "copied", layout="webdataset")
    assert members(tmp_path / "layered") == members(tmp_path / "copied")
    (path,) = (tmp_path / "csv").glob("*.csv")
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert {row["label"] for row in rows} == {"cat", "dog", "bird"}
    assert all(row["caption"].startswith("a photo of ") for row in rows)


def test_diff_and_report_see_the_layers(made: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    shutil.copytree(made, other)
    assert diff(made, other).equal
    fields.replace(other, labels(made, tmp_path), field=["label"])
    assert not diff(made, other).equal
    found = report(other)
    assert found is not None


@pytest.mark.slow
def test_a_bucket_serves_layers(made: Path, tmp_path: Path, bucket: Bucket) -> None:
    fields.add(made, captions(made, tmp_path), field=["caption"])
    fields.add(made, {"latent": np.arange(12, dtype=np.float32).reshape(6, 2)})
    url = f"s3://{BUCKET}/made"
    upload(made, url)
    before = len(bucket.requests)
    plain = open_dataset(url, cache=tmp_path / "plain")
    assert len(plain[:]) == 6
    assert not any("layers" in path for _, path in bucket.requests[before:])
    names = ("caption", "latent", "label")
    local = [(text, array.tolist(), label) for text, array, label in read(made, *names)]
    remote = open_dataset(url, fields=names, cache=tmp_path / "plain")
    assert [(text, array.tolist(), label) for text, array, label in remote[:]] == local


def test_states_resume_after_a_field_is_added_and_not_if_their_order_uses_old_labels(
    made: Path, tmp_path: Path
) -> None:
    def loader(**options: Any) -> Any:
        return make_loader(open_dataset(made, decode="bytes"), 2, seed=1, num_workers=0, **options)

    plain, balanced = loader().state_dict(), loader(sampler=Balanced()).state_dict()
    fields.add(made, {"number": list(range(6))})
    loader().load_state_dict(plain)
    loader(sampler=Balanced()).load_state_dict(balanced)
    fields.replace(made, labels(made, tmp_path), field=["label"])
    loader().load_state_dict(plain)
    with pytest.raises(StateMismatch, match="order"):
        loader(sampler=Balanced()).load_state_dict(balanced)


def test_convert_dataset_selects_by_an_added_field(made: Path, tmp_path: Path) -> None:
    fields.add(made, {"number": list(range(6))})
    source = open_source("dataset", made, where="number >= 4")
    convert(source, tmp_path / "some", to="hdf5")
    assert [value for (value,) in read(tmp_path / "some", "number")] == [4, 5]


def test_the_commands_do_the_same(made: Path, tmp_path: Path) -> None:
    before = tree(made)
    given = ("--from", captions(made, tmp_path), "--key", "path", "--field", "caption")
    dry = invoke("fields", "add", made, *given, "--dry-run")
    assert (dry.exit_code, tree(made)) == (0, before)
    assert "caption: text" in dry.output
    rows = [f"{name},1" for name in (paths_of(made)[0], *"abcdef")]
    (tmp_path / "few.csv").write_text("\n".join(("path,n", *rows)))
    few = ("--from", tmp_path / "few.csv", "--missing", "skip", "--unknown", "skip")
    told = invoke("fields", "add", made, *few, "--field", "n", "--dry-run").output
    assert f"missing   5: {', '.join(paths_of(made)[1:])}\n" in told
    assert "unknown   6: a, b, c, d, e ...\n" in told
    done = invoke("fields", "add", made, *given, "--json")
    assert json.loads(done.output)["fields"][0]["name"] == "caption"
    told = invoke("fields", "replace", made, *few, "--field", "caption=n", "--dry-run").output
    assert f"removed   values of 5 rows: {', '.join(paths_of(made)[1:])}\n" in told
    again = invoke("fields", "add", made, *given)
    assert "nothing to do" in again.output
    relabeled = invoke(
        "fields", "replace", made, "--from", labels(made, tmp_path), "--field", "label"
    )
    assert "1 new: bird" in relabeled.output
    assert "kept for" not in invoke("info", made).output
    assert invoke("fields", "undo", made).exit_code == 0
    assert invoke("fields", "remove", made, "caption").exit_code == 0
    assert "kept for `fields undo`" in invoke("info", made).output
    again = invoke("fields", "remove", made, "caption")
    assert (again.exit_code, "already" in again.output) == (0, True)
    assert invoke("verify", made).exit_code == 0
    assert (made / "shardkit.json").exists()


def test_wrong_commands_get_one_message(made: Path, tmp_path: Path) -> None:
    for words, fact in (
        (("add", made, "--from", tmp_path / "none.csv", "--field", "x"), "none.csv"),
        (("add", made, "--from", tmp_path / "x.txt", "--field", "x"), "x.txt"),
        (("remove", made, "x"), "'x'"),
        (("remove", made, "image"), "image"),
    ):
        refuses(2, "fields", *words, facts=(fact,))


def test_the_example_reads_layers_with_tarfile(
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    made = make_dataset(folder, tmp_path / "made", to="webdataset")
    fields.add(made, captions(made, tmp_path), field=["caption"])
    fields.add(made, {"latent": np.zeros((6, 2), np.float32)})
    monkeypatch.setattr(sys, "argv", ["example", str(made)])
    runpy.run_path(str(EXAMPLE))
    kinds = dict(zip(open_dataset(made).keys, paths_of(made), strict=True))
    assert capsys.readouterr().out.splitlines() == [
        f"{key} {sorted(['caption.txt', 'cls', 'latent.npy', path[-3:]])}"
        for key, path in kinds.items()
    ]


def test_no_layer_follows_the_one_with_the_last_number(tmp_path: Path) -> None:
    place = make_dataset(make_folder(tmp_path / "photos", each=1), tmp_path / "made")
    fields.add(place, {"score": [1, 2]})

    def renumbered(manifest: Any) -> Any:
        (layer,) = manifest.layers
        files = tuple(
            replace(entry, name=entry.name.replace("000001", "999999")) for entry in layer.files
        )
        layers = (replace(layer, name="999999", files=files),)
        return replace(manifest, layering=replace(manifest.layering, layers=layers))

    restate(place, renumbered)
    (place / "layers/000001").rename(place / "layers/999999")
    assert verify(place).ok
    before = tree(place)
    with refused(UsageError, 999999, "shardkit convert dataset"):
        fields.add(place, {"other": [1, 2]})
    with refused(UsageError, 999999):
        fields.remove(place, ["score"])
    assert tree(place) == before


# Layers: hostile manifests, links and files of other datasets.


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("made")
    place = make_dataset(make_folder(root / "photos"), root / "made")
    fields.add(place, {"first": list(range(6))})
    fields.add(place, {"second": list("abcdef")})
    return place


@pytest.fixture
def layered(pristine: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(pristine, tmp_path / "made"))


def layer(value: dict[str, Any]) -> Any:
    return value["layering"]["layers"][0]


def rename_file(name: str) -> Callable[[dict[str, Any]], object]:
    return lambda value: layer(value)["files"][1].update(name=name)


EDITS: dict[str, Callable[[dict[str, Any]], object]] = {
    "a file that climbs": rename_file("layers/000001/../../secret"),
    "a file elsewhere": rename_file("index/rows2.npy"),
    "a file of another layer": rename_file("layers/000009/shard-000000.lmdb"),
    "a file without a name": rename_file("layers/000001/"),
    "a file of the work folder": rename_file("layers/000001/.shardkit-work/x"),
    "a manifest in a folder": rename_file("layers/000001/index/shardkit.json"),
    "two files of one name": lambda value: layer(value)["files"].append(layer(value)["files"][0]),
    "a folder that climbs": lambda value: layer(value).update(name="../../"),
    "a folder of other letters": lambda value: layer(value).update(name="abc"),
    "folders in another order": lambda value: value["layering"]["layers"].reverse(),
    "an unknown operation": lambda value: layer(value).update(operation="rename"),
    "no fields": lambda value: layer(value).update(fields=[]),
    "other fields": lambda value: layer(value).update(fields=["third"]),
    "no layers": lambda value: value["layering"].update(layers=[]),
    "no layering": lambda value: value.update(layering=None),
    "no files": lambda value: layer(value).update(files=[]),
    "more layers before": lambda value: value["layering"].update(before=3),
    "a field that no layer has": lambda value: value["schema"].append(
        {**value["schema"][-1], "name": "third"}
    ),
    "another base": lambda value: value["layering"]["base"]["schema"].pop(),
    "another field of the base": lambda value: value["schema"][0].update(rows=3),
    "a field of the base that cannot be": lambda value: value["layering"]["base"]["schema"][
        0
    ].update(kind="text"),
    "unknown entries": lambda value: layer(value).update(more=1),
    "files of layers among those of the dataset": lambda value: value["files"].append(
        layer(value)["files"].pop()
    ),
}


def test_a_manifest_with_impossible_layers_is_refused(layered: Path) -> None:
    good = (layered / "shardkit.json").read_bytes()
    for name, change in EDITS.items():
        edit(layered, change)
        with refused(CorruptDataset, layered):
            open_dataset(layered)
        assert not verify(layered).ok, name
        (layered / "shardkit.json").write_bytes(good)
    assert verify(layered).ok


def test_a_manifest_with_another_digest_of_a_layer_is_found(layered: Path) -> None:
    edit(layered, lambda value: layer(value).update(digest="0" * 64))
    assert open_dataset(layered)[0][1] in (0, 1)
    with refused(CorruptDataset):
        open_dataset(layered, fields=["first"])[0]
    assert {finding.file for finding in verify(layered).findings} == {"layers/000001/shardkit.json"}


def test_a_forged_schema_of_a_layer_is_found(layered: Path) -> None:
    edit(layered, lambda value: value["schema"][2].update(dtype="float64"))
    with pytest.raises(CorruptDataset, match="'first'"):
        open_dataset(layered, fields=["first"])[0]
    assert not verify(layered).ok


@pytest.mark.parametrize("name", ["layers", "layers/000001"])
def test_links_in_place_of_layers_are_refused(layered: Path, tmp_path: Path, name: str) -> None:
    shutil.move(layered / name, tmp_path / "moved")
    (layered / name).symlink_to(tmp_path / "moved")
    with pytest.raises(CorruptDataset, match="symbolic link"):
        open_dataset(layered, fields=["first"])[0]
    assert not verify(layered).ok
    with refused(UsageError, layered / name, "symbolic link"):
        fields.remove(layered, "first")


def test_a_layer_of_other_rows_is_refused(pristine: Path, layered: Path, tmp_path: Path) -> None:
    """Its manifest is right, and so is the digest, but its keys are those of another dataset."""
    other = make_dataset(pristine.parent / "photos", tmp_path / "other", shuffle=False)
    fields.add(other, {"first": list(range(6))})
    stated = json.loads((other / "shardkit.json").read_bytes())["layering"]["layers"][0]
    shutil.rmtree(layered / "layers" / "000001")
    shutil.copytree(other / "layers" / "000001", layered / "layers" / "000001")
    edit(layered, lambda value: layer(value).update(stated))
    with refused(CorruptDataset):
        open_dataset(layered, fields=["first"])[0]
    assert not verify(layered).ok
