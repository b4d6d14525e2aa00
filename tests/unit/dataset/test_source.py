"""A dataset as a source: copies are exact, selections and changes are what was asked for."""

from __future__ import annotations

import pickle
from pathlib import Path

import numpy as np
import pytest
from fields import SCHEMA, Samples, make_fields, sample_of
from helpers import FORMATS, invoke, jpeg, make_dataset, make_folder, make_tree, run_main

from shardkit import convert, open_dataset, repair, verify
from shardkit.dataset.shardset import open_shards
from shardkit.errors import BadImages, CorruptDataset, UsageError
from shardkit.recipe import Recipe
from shardkit.registry import open_source


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dataset of ten records with all kinds of fields."""
    return make_fields(tmp_path_factory.mktemp("fields") / "made")


@pytest.mark.parametrize("to", FORMATS)
def test_a_copy_has_the_same_records(place: Path, tmp_path: Path, to: str) -> None:
    made = convert(
        open_source("dataset", place), tmp_path / "copy", to=to, shard_samples=3
    ).manifests[""]
    one, two = open_shards(place), open_shards(tmp_path / "copy")
    assert made.content_digest == one.manifest.content_digest
    assert [two.record(row) for row in range(10)] == [one.record(row) for row in range(10)]
    assert (made.fields, made.notes) == (one.manifest.fields, one.manifest.notes)
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
    assert pickle.loads(planned).read("", entry) == open_shards(place).record(0)


@pytest.mark.parametrize("to", FORMATS)
def test_raw_pixels_stay_raw(tmp_path: Path, to: str) -> None:
    raw = Recipe(resize=(8, 9), resize_mode="stretch", encode="raw")
    one = make_dataset(make_folder(tmp_path / "photos"), tmp_path / "raw", recipe=raw)
    made = convert(open_source("dataset", one), tmp_path / "copy", to=to).manifests[""]
    assert made.content_digest == open_shards(one).manifest.content_digest
    assert made.raw_shape == (8, 9, 3)
    convert(open_source("dataset", one), tmp_path / "png", to=to, encode="png")
    pixels = [np.asarray(open_dataset(each)[0][0]) for each in (one, tmp_path / "png")]
    np.testing.assert_array_equal(pixels[0], pixels[1])


def test_notes_are_kept_by_a_copy_and_renewed_by_a_change(tmp_path: Path) -> None:
    source = make_tree(tmp_path / "photos", {f"a/{n}.jpg": jpeg(20, 18, n) for n in range(3)})
    convert(source, tmp_path / "small", to="lmdb", resize=64, quality=80)
    copied = convert(
        open_source("dataset", tmp_path / "small"), tmp_path / "copy", to="hdf5"
    ).manifests[""]
    assert copied.notes == {"small": 3}
    changed = convert(
        open_source("dataset", tmp_path / "small"), tmp_path / "png", to="hdf5", encode="png"
    )
    assert changed.manifests[""].notes == {}
    assert "small" not in open_shards(tmp_path / "png").record(0).meta


def test_masks_and_boxes_follow_a_resize(tmp_path: Path) -> None:
    whole = make_fields(tmp_path / "made", whole=True)
    convert(open_source("dataset", whole), tmp_path / "a", to="lmdb", resize=10)
    convert(Samples(whole=True), tmp_path / "b", to="lmdb", schema=SCHEMA, resize=10, shuffle=False)
    digests = {open_shards(tmp_path / name).manifest.content_digest for name in "ab"}
    assert len(digests) == 1


def test_rows_are_selected(place: Path, tmp_path: Path) -> None:
    (tmp_path / "rows").write_text("8\n1\n4\n")
    source = open_source("dataset", place, rows=tmp_path / "rows", where='label == "bee"')
    made = convert(source, tmp_path / "made", to="hdf5").manifests[""]
    assert list(open_shards(tmp_path / "made").keys) == ["000000001", "000000004"]
    assert made.source["where"] == 'label == "bee"'
    assert verify(tmp_path / "made", against=place).findings == []
    limited = convert(source, tmp_path / "limited", to="lmdb", limit=1, shuffle=True, seed=5)
    assert limited.manifests[""].rows == 1
    assert verify(tmp_path / "limited", against=place).findings == []
    with pytest.raises(UsageError, match=r"no row of .* is selected"):
        open_source("dataset", place, where="price > 100").scan()


def test_a_verification_finds_a_selection_of_other_rows(place: Path, tmp_path: Path) -> None:
    source = open_source("dataset", place, where="price < 1")
    convert(source, tmp_path / "made", to="hdf5")
    assert verify(tmp_path / "made", against=place).findings == []
    samples = [sample_of(n) | {"price": 0.0 if n == 9 else n / 4} for n in range(10)]
    convert(samples, tmp_path / "other", to="lmdb", schema=SCHEMA, shuffle=False)
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
    assert "is damaged: the index has another" in problem.reason
    assert not (tmp_path / "copy" / "shardkit.json").exists()
    column.write_bytes(column.read_bytes()[:-1] + b"?")
    with pytest.raises(CorruptDataset, match=r"price\.npy differs from the manifest"):
        open_source("dataset", place).scan()


def test_splits_are_copied_together(tmp_path: Path) -> None:
    for split in ("train", "val"):
        make_folder(tmp_path / "photos" / split)
    convert(tmp_path / "photos", tmp_path / "made", to="lmdb")
    made = convert(
        open_source("dataset", tmp_path / "made"), tmp_path / "copy", to="webdataset"
    ).manifests
    assert {name: manifest.content_digest for name, manifest in made.items()} == {
        name: open_shards(tmp_path / "made" / name).manifest.content_digest
        for name in ("train", "val")
    }
    assert verify(tmp_path / "copy", against=tmp_path / "made").findings == []
    (tmp_path / "rows").write_text("1")
    with pytest.raises(UsageError, match="has the splits train, val"):
        open_source("dataset", tmp_path / "made", rows=tmp_path / "rows")


def test_the_command_selects_and_names_wrong_input(place: Path, tmp_path: Path) -> None:
    options = (tmp_path / "x", "--to", "lmdb", "--where")
    told = run_main("convert", "dataset", place, *options, "a > 1")
    assert (told.returncode, "'a' is not one of its columns" in told.stderr) == (2, True)
    done = invoke("convert", "dataset", tmp_path, *options, "a > 1")
    assert isinstance(done.exception, UsageError)
    done = invoke("convert", "dataset", place, *options, 'key > "000000006"')
    assert done.exit_code == 0, done.output
    assert len(open_dataset(tmp_path / "x")) == 3
