"""A dataset as a source: exact copies, rows by expression or list, and the changes asked for."""

from __future__ import annotations

import operator
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fields import LACKING, SCHEMA, Samples, make_fields, sample_of
from helpers import FORMATS, invoke, jpeg, make_dataset, make_folder, make_tree
from hostile.damage import restate_files, with_checks
from refusals import refused, refuses

from shardkit import convert, merge, open_dataset, open_source, repair, verify
from shardkit.errors import BadImages, CorruptDataset, UsageError


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dataset of ten records with all kinds of fields."""
    return make_fields(tmp_path_factory.mktemp("fields") / "made")


def copied(place: Path, target: Path, to: Any, **options: Any) -> Any:
    """Return the manifest of a copy."""
    source = open_source("dataset", place)
    return convert(source, target, to=to, workers=1, **options).manifests[""]


def digest_of(place: Path) -> str:
    digest: str = open_dataset(place).manifest.content_digest
    return digest


@pytest.mark.parametrize("to", FORMATS)
def test_a_copy_has_the_same_records(place: Path, tmp_path: Path, to: str) -> None:
    made, original = copied(place, tmp_path / "copy", to, shard_samples=3), open_dataset(place)
    assert made.content_digest == original.manifest.content_digest
    assert (made.fields, made.notes) == (original.manifest.fields, original.manifest.notes)
    assert verify(tmp_path / "copy", against=place).findings == []
    (tmp_path / "copy" / made.shards[2].name).unlink()
    assert repair(tmp_path / "copy", place).findings == []


def test_a_plan_is_read_in_another_working_directory(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(place.parent)
    source = open_source("dataset", place.name)
    (entry,) = source.scan().splits[""].entries[:1]
    planned = pickle.dumps(source)
    monkeypatch.chdir(tmp_path)
    assert pickle.loads(planned).read("", entry) == open_source("dataset", place).read("", entry)


@pytest.mark.parametrize("to", FORMATS)
def test_raw_pixels_stay_raw(tmp_path: Path, to: str) -> None:
    raw = {"resize": "8x9", "resize_mode": "stretch", "encode": "raw"}
    one = make_dataset(make_folder(tmp_path / "photos"), tmp_path / "raw", **raw)
    made = copied(one, tmp_path / "copy", to)
    assert made.content_digest == digest_of(one)
    assert made.raw_shape == (8, 9, 3)
    copied(one, tmp_path / "png", to, encode="png")
    pixels = [np.asarray(open_dataset(each)[0][0]) for each in (one, tmp_path / "png")]
    np.testing.assert_array_equal(pixels[0], pixels[1])


def test_notes_are_kept_by_a_copy_and_renewed_by_a_change(tmp_path: Path) -> None:
    source = make_tree(tmp_path / "photos", {f"a/{n}.jpg": jpeg(20, 18, n) for n in range(3)})
    make_dataset(source, tmp_path / "small", resize=64, quality=80)
    assert copied(tmp_path / "small", tmp_path / "copy", "hdf5").notes == {"small": 3}
    assert copied(tmp_path / "small", tmp_path / "png", "hdf5", encode="png").notes == {}
    for name, noted in (("copy", True), ("png", False)):
        reread = open_source("dataset", tmp_path / name)
        (entry, *_) = reread.scan().splits[""].entries
        assert ("small" in reread.read("", entry).meta) == noted


def test_masks_and_boxes_follow_a_resize(tmp_path: Path) -> None:
    whole = make_fields(tmp_path / "made", whole=True)
    options: dict[str, Any] = {"to": "lmdb", "resize": 10, "shuffle": False, "workers": 1}
    convert(Samples(whole=True), tmp_path / "b", schema=SCHEMA, **options)
    resized = copied(whole, tmp_path / "a", "lmdb", resize=10)
    assert resized.content_digest == digest_of(tmp_path / "b")


def test_rows_are_selected(place: Path, tmp_path: Path) -> None:
    (tmp_path / "rows").write_text("8\n1\n4\n")
    source = open_source("dataset", place, rows=tmp_path / "rows", where='label == "bee"')
    made = convert(source, tmp_path / "made", to="hdf5").manifests[""]
    assert list(open_dataset(tmp_path / "made").keys) == ["000000001", "000000004"]
    assert made.source["where"] == 'label == "bee"'
    assert verify(tmp_path / "made", against=place).findings == []
    limited = convert(source, tmp_path / "limited", to="lmdb", limit=1, shuffle=True, seed=5)
    assert limited.manifests[""].rows == 1
    assert verify(tmp_path / "limited", against=place).findings == []
    with refused(UsageError, place):
        open_source("dataset", place, where="price > 100").scan()


def test_a_verification_finds_a_selection_of_other_rows(place: Path, tmp_path: Path) -> None:
    source = open_source("dataset", place, where="price < 1")
    convert(source, tmp_path / "made", to="hdf5")
    assert verify(tmp_path / "made", against=place).findings == []
    samples = [sample_of(n) | {"price": 0.0 if n == 9 else n / 4} for n in range(10)]
    convert(samples, tmp_path / "other", to="lmdb", schema=SCHEMA, shuffle=False, workers=1)
    (finding,) = verify(tmp_path / "made", against=tmp_path / "other").findings
    assert "in the source but not in the dataset" in finding.reason


def test_damage_is_never_copied(tmp_path: Path) -> None:
    place = make_fields(tmp_path / "made")
    shard, column = place / "shard-000000.lmdb", place / "index/columns/price.npy"
    content = bytearray(shard.read_bytes())
    content[content.rfind(b"number 2 ")] ^= 1
    shard.write_bytes(content)
    with pytest.raises(BadImages) as caught:
        convert(open_source("dataset", place), tmp_path / "copy", to="hdf5")
    (problem,) = caught.value.problems
    assert (problem.path, "damaged" in problem.reason) == ("000000002", True)
    assert not (tmp_path / "copy" / "shardkit.json").exists()
    column.write_bytes(column.read_bytes()[:-1] + b"?")
    with refused(CorruptDataset, column):
        open_source("dataset", place).scan()


def test_splits_are_copied_together(tmp_path: Path) -> None:
    for split in ("train", "val"):
        make_folder(tmp_path / "photos" / split)
    convert(tmp_path / "photos", tmp_path / "made", to="lmdb")
    made = convert(
        open_source("dataset", tmp_path / "made"), tmp_path / "copy", to="webdataset"
    ).manifests
    assert {name: manifest.content_digest for name, manifest in made.items()} == {
        name: digest_of(tmp_path / "made" / name) for name in ("train", "val")
    }
    assert verify(tmp_path / "copy", against=tmp_path / "made").findings == []
    (tmp_path / "rows").write_text("1")
    with refused(UsageError, "train, val"):
        open_source("dataset", tmp_path / "made", rows=tmp_path / "rows")


def test_the_command_selects_and_names_wrong_input(place: Path, tmp_path: Path) -> None:
    options = (tmp_path / "x", "--to", "lmdb", "--where")
    refuses(2, "convert", "dataset", place, *options, "a > 1", facts=("'a'", "--where"))
    refuses(2, "convert", "dataset", tmp_path, *options, "a > 1", facts=(tmp_path,))
    done = invoke("convert", "dataset", place, *options, 'key > "000000006"')
    assert done.exit_code == 0, done.output
    assert len(open_dataset(tmp_path / "x")) == 3


def forge_index(place: Path, name: str, change: Callable[[Any], None]) -> None:
    """Change values of a file of the index; its checks and digests follow."""
    values = np.load(place / f"index/{name}.npy")
    change(values)
    np.save(place / f"index/{name}.npy", with_checks(values) if values.dtype.names else values)
    restate_files(place, f"index/{name}.npy")


@pytest.mark.parametrize("byte", [0, 255])
def test_a_forged_key_is_named(byte: int, folder: Path, tmp_path: Path) -> None:
    """A zero byte is a key that WebDataset has no place for; others are not UTF-8."""
    place = make_dataset(folder, tmp_path / "made", to="webdataset")
    forge_index(place, "keys", lambda keys: operator.setitem(keys, 3, byte))
    table = tmp_path / "table.csv"
    table.write_text("path,n\ncat/000.jpg,1\n")
    words = ("fields", "add", place, "--from", table, "--field", "n", "--missing", "skip")
    refuses(1, *words, facts=("\\x00",) if byte == 0 else ("UTF-8", "`shardkit index`"))


def test_an_image_of_a_forged_kind_is_named(folder: Path, tmp_path: Path) -> None:
    place = make_dataset(folder, tmp_path / "made")
    other = make_dataset(make_tree(tmp_path / "more", {"cat/9.jpg": jpeg()}), tmp_path / "other")
    forge_index(place, "rows", lambda rows: operator.setitem(rows["field"], 0, 200))
    with refused(CorruptDataset, "image"):
        merge([place, other], tmp_path / "merged")


# Rows of a dataset by expression and by list.

HEAD = "# rows of the dataset with the content digest "


def chosen(place: Path, **selection: Any) -> list[int]:
    """Return the rows that a source selects of a dataset."""
    scan = open_source("dataset", place, **selection).scan()
    return [int(entry.key) for entry in scan.splits[""].entries]


@pytest.mark.parametrize(
    ("expression", "rows"),
    [
        ('label == "ant"', [0, 3, 6, 9]),
        ('label in ("ant", "cat")', [0, 2, 3, 5, 6, 8, 9]),
        ('label != "ant" and price < 1', [1, 2]),
        ("price >= 1.75", [8, 9]),
        ("1 < price <= 1.5", [5, 6]),
        ("not price >= 0.5", [0, 1, LACKING]),
        ('"wet" in tags', [2, 3, 6]),
        ('"red" not in tags', [0, 4, 8]),
        ('caption == "number 3 äß★"', [3]),
        ('"8" in caption or key == "000000001"', [1, 8]),
        ("width == 26 and height == 20", [2, 8]),
        ('path > "000000007"', [8, 9]),
        ("price in (0.25, 0.5)", [1, 2]),
    ],
)
def test_an_expression_selects_rows(place: Path, expression: str, rows: list[int]) -> None:
    assert chosen(place, where=expression) == rows


OTHERS: dict[str, tuple[str, ...]] = {
    "": (),
    'label == "bee': (),
    "label": ("label",),
    "label == price": ("label == price",),
    "1 == 1": ("1 == 1",),
    "size > 3": ("'size'", "label, tags, price, caption, key, path"),
    "extra == 3": ("'extra'",),
    'label == "wasp"': ("label", "'wasp'", "'ant', 'bee', 'cat'"),
    "label == 0": ("label",),
    'price > "1"': ("price",),
    'label in "ant"': ("label", "list"),
    '"1" in price': ("price",),
    "1 in price": ("price",),
    '__import__("os").system("exit") == 1': ("__import__",),
    "price.__class__ == 1": ("price.__class__",),
    "price > (lambda: 1)()": (),
    "price > 9**9**9": (),
    "(" * 1990 + "price": (),
    "price > 1 or " * 300: ("2000",),
    "price is None": ("price is None",),
    "tags > 3": ("tags",),
    'tags > "wet"': (),
}


@pytest.mark.parametrize("expression", OTHERS)
def test_other_expressions_are_refused(place: Path, expression: str) -> None:
    with refused(UsageError, "--where", *OTHERS[expression]):
        chosen(place, where=expression)


def test_a_deep_expression_within_the_limits_is_allowed(place: Path) -> None:
    assert chosen(place, where="not " * 400 + "price > 1") == chosen(place, where="price > 1")


def test_a_file_lists_rows_or_keys(place: Path, tmp_path: Path) -> None:
    file, digest = tmp_path / "rows.txt", open_dataset(place).manifest.content_digest
    for text, rows in {
        "7\n2\n": [2, 7],
        "# comment\n000000002\r\n\n000000007": [2, 7],
        HEAD + f"{digest}\n4\n": [4],
        "key:000000007\n": [7],
        "3\n4\n": [3, 4],
    }.items():
        file.write_text(text)
        assert chosen(place, rows=file) == rows
    assert chosen(place, rows=file, where="price > 0.75") == [4]


LISTS = {
    "": (),
    "# nothing": (),
    "1\n10\n11\n": ("2 of 3", "'10', '11'"),
    "000000001\nsomething": ("1 of 2", "'something'"),
    "-1": ("1 of 1", "'-1'"),
    "3\n3": ("'3'",),
    "9" * 30: ("9" * 30,),
    HEAD + "0" * 64 + "\n1": (),
}


@pytest.mark.parametrize("text", LISTS)
def test_other_lists_are_refused(place: Path, tmp_path: Path, text: str) -> None:
    (tmp_path / "rows.txt").write_text(text)
    with refused(UsageError, "rows=", tmp_path / "rows.txt", *LISTS[text]):
        chosen(place, rows=tmp_path / "rows.txt")


def test_a_list_must_be_readable_text(place: Path, tmp_path: Path) -> None:
    (tmp_path / "bytes").write_bytes(b"\xff\xfe")
    for name in ("none", "bytes"):
        with refused(UsageError, "rows=", tmp_path / name):
            chosen(place, rows=tmp_path / name)
