"""``shardkit append`` and ``merge``: shards stay, sources are still known, nothing is half done."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import (
    FORMATS,
    copy_dataset,
    invoke,
    jpeg,
    make_dataset,
    make_folder,
    make_tree,
    pixels,
    png,
    run_main,
    tree,
)
from PIL import Image
from refusals import refused
from stated import done, restate_json, stated

from shardkit import (
    Field,
    ShardDataset,
    append,
    attach,
    convert,
    diff,
    export,
    fields,
    merge,
    open_dataset,
    open_source,
    repair,
    verify,
)
from shardkit.errors import BadImages, CorruptDataset, UsageError

MORE = {"cat/new.jpg": jpeg(seed=8), "bird/1.png": png(seed=9), "bird/2.png": png(seed=10)}
"""Images of an existing and a new class."""


def samples(dataset: ShardDataset) -> list[Any]:
    return [dataset[row] for row in range(len(dataset))]


@pytest.fixture
def place(folder: Path, tmp_path: Path) -> Path:
    return copy_dataset(folder, tmp_path / "made")


@pytest.fixture
def more(tmp_path: Path) -> Path:
    return make_tree(tmp_path / "more", MORE)


def test_rows_and_shards_stay_and_new_ones_follow(place: Path, folder: Path, more: Path) -> None:
    before = open_dataset(place, decode="bytes")
    rows, shards, paths = samples(before), before.manifest.shards, list(before.paths)
    added = append(place, more, shard_samples=2)
    assert (added.images, added.left_out) == (3, [])
    after = open_dataset(place, decode="bytes")
    assert samples(after)[:6] == rows
    assert after.manifest.shards[: len(shards)] == shards
    assert list(after.paths)[:6] == paths
    assert sorted(list(after.paths)[6:]) == sorted(MORE)
    assert after.classes == ["cat", "dog", "bird"]
    found = {path: after[row] for row, path in enumerate(after.paths)}
    for path, data in MORE.items():
        assert found[path] == (data, after.classes.index(path.split("/")[0]))
    result = verify(place, "decode", against=[folder, more])
    assert result.findings == []
    assert result.source is not None
    assert (result.source.files, result.source.name) == (9, "photos, more")
    assert result.extras == []


def test_the_part_that_is_not_from_a_source_is_named(place: Path, folder: Path, more: Path) -> None:
    append(place, more)
    with refused(UsageError, "2 parts", f"part 2: {folder}"):
        verify(place, against=folder)
    with refused(UsageError, f"part 1: {more}"):
        verify(place, against=[more, folder])


def test_images_left_out_as_existing_are_not_missing(folder: Path, tmp_path: Path) -> None:
    """By path, by key, and as bad."""
    (folder / "cat/bad.jpg").write_bytes(b"bad")
    place = make_dataset(folder, tmp_path / "made", on_error="skip")
    big = shutil.copytree(folder, tmp_path / "big")
    make_tree(big, MORE)
    (big / "cat/000.jpg").rename(big / "cat/000.jpeg")
    added = append(place, big, skip_existing=True)
    assert (added.images, len(added.left_out)) == (3, 7)
    result = verify(place, against=[folder, big])
    assert result.findings == []
    assert result.source is not None
    assert (result.source.files, result.source.left_out) == (9, 8)
    (big / "dog/late.jpg").write_bytes(jpeg())
    (finding,) = verify(place, against=[folder, big]).findings
    assert (finding.file, finding.reason) == (
        "dog/late.jpg",
        "it is in the source but not in the dataset",
    )


def test_the_first_conversion_does_not_discard_added_rows(
    place: Path, folder: Path, more: Path
) -> None:
    append(place, more)
    before = tree(place)
    with refused(UsageError, place):
        convert(folder, place, to="lmdb")
    assert tree(place) == before


def test_the_content_is_that_of_a_conversion(
    place: Path, folder: Path, more: Path, tmp_path: Path
) -> None:
    append(place, more)
    make_tree(folder, MORE)
    (tmp_path / "classes").write_text("cat\ndog\nbird\n")
    convert(folder, tmp_path / "all", to="lmdb", class_order=str(tmp_path / "classes"))
    assert diff(place, tmp_path / "all").equal


def test_a_folder_that_has_grown(place: Path, folder: Path) -> None:
    make_tree(folder, MORE)
    before = tree(place)
    with refused(UsageError, 6, "'cat/000.jpg'", "skip_existing=True"):
        append(place, folder)
    assert tree(place) == before
    added = append(place, folder, skip_existing=True)
    assert (added.images, len(added.left_out)) == (3, 6)
    assert verify(place, against=folder).findings == []
    (folder / "dog/late.jpg").write_bytes(jpeg())
    (finding,) = {f.reason: f for f in verify(place, against=folder).findings}.values()
    assert finding.file == "dog/late.jpg"
    assert append(place, folder, skip_existing=True).images == 1
    assert len(stated(place).source["parts"]) == 3
    assert verify(place, against=folder).findings == []


def test_an_existing_name_with_other_content_is_refused(place: Path, folder: Path) -> None:
    (folder / "cat/000.jpg").write_bytes(jpeg(90, 90))
    with refused(UsageError, 1, "'cat/000.jpg'"):
        append(place, folder, skip_existing=True)


def test_a_finished_command_does_nothing_again(place: Path, more: Path) -> None:
    append(place, more)
    before = tree(place)
    assert append(place, more).images == 0
    shown = invoke("append", place, "--from", more)
    assert shown.stdout.startswith(
        f"{place}: nothing to append: all images are already in the dataset"
    )
    assert tree(place) == before


def test_damage_is_found_and_repaired_from_the_source_of_its_part(
    place: Path, folder: Path, more: Path
) -> None:
    append(place, more, shard_samples=2)
    before = tree(place)
    for name in ("shard-000001.lmdb", "shard-000003.lmdb", "index/keys.npy"):
        (place / name).write_bytes(b"damaged")
    assert {each.file for each in verify(place).findings} >= {"shard-000003.lmdb"}
    with refused(UsageError, "2 parts", "'photos', 'more'", 1):
        repair(place, [folder])
    assert repair(place, [folder, more]).findings == []
    assert tree(place) == before
    (more / "bird/1.png").write_bytes(png(seed=11))
    (finding,) = verify(place, against=[folder, more]).findings
    assert finding.path == "bird/1.png"
    shown = run_main("verify", place, "--against", folder, "--against", more)
    assert shown.returncode == 1
    assert "bird/1.png" in shown.stdout + shown.stderr


def test_splits_are_appended_by_name(tmp_path: Path) -> None:
    for split in ("train", "val"):
        make_folder(tmp_path / "photos" / split, each=2)
    place = make_dataset(tmp_path / "photos", tmp_path / "made")
    more = make_tree(tmp_path / "more", {f"val/{name}": data for name, data in MORE.items()})
    append(place, more)
    assert [len(open_dataset(place, split=split)) for split in ("train", "val")] == [4, 7]
    assert open_dataset(place, split="train").classes == ["cat", "dog", "bird"]
    assert verify(place, against=[tmp_path / "photos", more]).findings == []
    train = make_tree(tmp_path / "even", {"train/cat/even.jpg": jpeg()})
    append(place, train)
    assert verify(place, against=[tmp_path / "photos", more, train]).findings == []
    other = make_tree(tmp_path / "other", {"test/cat/1.png": png()})
    with refused(UsageError, "test", "train, val"):
        append(place, other)
    with refused(UsageError, place / "val"):
        append(place / "val", make_tree(tmp_path / "x", MORE))


def test_images_are_divided_as_those_of_the_dataset(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "photos", each=10)
    place = tmp_path / "made"
    convert(folder, place, to="lmdb", val=0.3)
    one = make_tree(tmp_path / "one", {"cat/one.png": png()})  # one side gets nothing
    assert append(place, one).images == 1
    assert append(place, one).images == 0
    make_tree(folder, {f"dog/{n}.png": png(8, 8, n) for n in range(9)})
    assert len(append(place, folder, skip_existing=True).left_out) == 20
    assert verify(place, against=[folder, one, folder]).findings == []
    make_tree(folder, {"cat/one.png": png()})
    convert(folder, tmp_path / "all", to="lmdb", val=0.3)
    assert diff(place, tmp_path / "all").equal
    sides = make_tree(tmp_path / "sides", {"val/cat/chosen.png": png()})
    assert append(place, sides).images == 1
    assert "cat/chosen.png" in open_dataset(place, split="val").paths
    other = make_tree(tmp_path / "other", {"train/cat/chosen.png": png()})
    assert append(place, other, skip_existing=True).images == 0  # never on two sides


def test_a_stratified_division_is_not_extended(tmp_path: Path, more: Path) -> None:
    place = tmp_path / "made"
    convert(make_folder(tmp_path / "photos", each=10), place, to="lmdb", val=0.3, stratify=True)
    with refused(UsageError, "stratify=", "train and val"):
        append(place, more)
    assert append(place, make_tree(tmp_path / "x", {"val/cat/1.png": png()})).images == 1


def test_a_copy_of_a_dataset_gets_only_datasets(place: Path, more: Path, tmp_path: Path) -> None:
    convert(open_source("dataset", place, where='label == "cat"'), tmp_path / "cats", to="lmdb")
    with refused(UsageError, tmp_path / "cats", more, "convert it"):
        append(tmp_path / "cats", more)
    convert(more, tmp_path / "new", to="hdf5")
    append(tmp_path / "cats", tmp_path / "new")
    assert len(open_dataset(tmp_path / "cats")) > len(open_dataset(tmp_path / "new"))


def test_bad_images_write_nothing_or_are_left_out(place: Path, folder: Path, more: Path) -> None:
    (more / "bird/1.png").write_bytes(b"no image")
    before = {name: digest for name, digest in tree(place).items() if name[0] != "."}
    with pytest.raises(BadImages) as failed:
        append(place, more)
    assert [problem.path for problem in failed.value.problems] == ["bird/1.png"]
    assert {name: digest for name, digest in tree(place).items() if name[0] != "."} == before
    assert append(place, more, on_error="skip").images == 2
    manifest = stated(place)
    assert (manifest.rows, [problem.path for problem in manifest.skipped]) == (8, ["bird/1.png"])
    assert verify(place, against=[folder, more]).findings == []
    assert not list(place.glob(".shardkit*"))
    (more / "bird/3.png").symlink_to("nowhere")
    with refused(BadImages, "bird/3.png"):
        append(place, more, skip_existing=True)


def test_other_fields_and_labels_are_refused(place: Path, tmp_path: Path) -> None:
    loose = make_tree(tmp_path / "loose", {"a.png": png()})
    with refused(UsageError, "image (image)", "label (label with 2"):
        append(place, loose)
    with refused(UsageError, tmp_path / "nowhere"):
        append(tmp_path / "nowhere", loose)
    with refused(UsageError, place):
        append(place, place)


def _samples(first: int, count: int, *, keys: bool = True) -> list[dict[str, Any]]:
    return [
        {**({"key": f"k/{n}"} if keys else {}), "image": pixels(seed=n), "number": n}
        for n in range(first, first + count)
    ]


def _numbers(place: Path) -> dict[str, int]:
    dataset = open_dataset(place, fields=("number",), decode="bytes")
    return {key: int(dataset[row][0]) for row, key in enumerate(dataset.keys)}


@pytest.mark.parametrize("to", FORMATS)
def test_samples_with_keys_are_appended(tmp_path: Path, to: Any) -> None:
    place, new = tmp_path / "made", _samples(3, 2)
    convert(_samples(0, 3), place, to=to)
    assert append(place, new).images == 2
    assert append(place, [*new]).images == 0
    assert append(place, _samples(4, 2), skip_existing=True).left_out == ["k/4"]
    assert _numbers(place) == {f"k/{n}": n for n in range(6)}
    dataset = open_dataset(place, decode="numpy", fields=("image",))
    for row, key in enumerate(dataset.keys):
        assert np.array_equal(dataset[row][0], pixels(seed=int(key[2:])))
    sources = [_samples(0, 3), new, _samples(4, 2)]
    assert verify(place, level="decode", against=sources).ok
    before = tree(place)
    for shard in place.glob("shard-*"):
        shard.unlink()
    assert repair(place, sources).ok
    assert tree(place) == before


def test_datasets_of_samples_are_appended_to_each_other(tmp_path: Path) -> None:
    for first in (0, 10):
        convert(_samples(first, 2), tmp_path / str(first), to="lmdb")
    for images in (2, 0):
        assert append(tmp_path / "0", tmp_path / "10").images == images
    assert _numbers(tmp_path / "0") == {"k/0": 0, "k/1": 1, "k/10": 10, "k/11": 11}
    assert verify(tmp_path / "0", against=[_samples(0, 2), _samples(10, 2)]).ok
    export(tmp_path / "0", tmp_path / "files", layout="csv")
    files = {path.stem: path for path in (tmp_path / "files/k").iterdir()}
    assert files.keys() == {"0", "1", "10", "11"}  # their paths are numbers, which repeat
    for stem, path in files.items():
        assert np.array_equal(np.asarray(Image.open(path)), pixels(seed=int(stem)))


def _labeled(*labels: str) -> list[dict[str, Any]]:
    return [{"key": f"{label}/1", "image": pixels(seed=1), "label": label} for label in labels]


def _of(*classes: str) -> dict[str, Field]:
    return {"label": Field("label", classes=classes)}


def test_samples_of_new_classes_are_appended(tmp_path: Path) -> None:
    place = tmp_path / "made"
    convert(_labeled("cat", "dog"), place, to="lmdb", schema=_of("cat", "dog"))
    with refused(BadImages, "owl"):
        append(place, _labeled("owl"))
    with refused(UsageError, "cat, dog"):
        append(place, _labeled("owl"), schema=_of("owl", "cat", "dog"))
    with refused(UsageError, "schema"):
        append(place, tmp_path, schema=_of("cat", "dog", "owl"))
    assert append(place, _labeled("owl"), schema=_of("cat", "dog", "owl")).images == 1
    dataset = open_dataset(place, decode="bytes")
    assert dataset.classes == ["cat", "dog", "owl"]
    named = {key: dataset.classes[dataset[row][1]] for row, key in enumerate(dataset.keys)}
    assert named == {"cat/1": "cat", "dog/1": "dog", "owl/1": "owl"}
    assert verify(place).ok


def test_unfinished_work_of_another_command_is_named(tmp_path: Path) -> None:
    place = tmp_path / "made"
    convert(_labeled("cat"), place, to="lmdb", schema=_of("cat"))
    bad = {"key": "bad", "image": b"x", "label": "cat"}
    with refused(BadImages):
        append(place, [{**bad, "key": "a", "image": pixels(seed=2)}, bad], shard_samples=1)
    with refused(UsageError, place, "append", "force=True"):
        fields.replace(place, {"label": ["cat"]})
    assert fields.replace(place, {"label": ["cat"]}, force=True).written


def test_samples_without_keys_are_told_apart_by_them(tmp_path: Path) -> None:
    place = tmp_path / "made"
    convert(_samples(0, 2, keys=False), place, to="lmdb")
    with refused(UsageError, place, "key="):
        append(place, _samples(2, 3, keys=False))
    lacking = [{"key": "k/9", "image": pixels(seed=9)}]
    with refused(UsageError, place, "number", "missing='skip'"):
        append(place, lacking)
    assert append(place, lacking, missing="skip").images == 1
    assert append(place, _samples(8, 1)).images == 1


def test_samples_are_divided_as_those_before(tmp_path: Path) -> None:
    place, new = tmp_path / "made", _samples(20, 20)
    convert(_samples(0, 20), place, to="lmdb", val=0.4)
    before = {side: stated(place / side).rows for side in ("train", "val")}
    assert append(place, new).images == 20
    assert all(stated(place / side).rows > rows for side, rows in before.items())
    assert append(place, new).images == 0
    assert verify(place, against=[_samples(0, 20), new]).ok


# Merging


def test_merged_datasets_share_shards_and_are_verified(
    place: Path, folder: Path, tmp_path: Path
) -> None:
    names = ("cat", "dog", "emu")
    other = make_tree(tmp_path / "other", {f"{name}/o.jpg": jpeg(seed=7) for name in names})
    second = make_dataset(other, tmp_path / "second")
    shown = invoke("merge", place, second, tmp_path / "out")
    assert shown.stdout.startswith(f"{tmp_path / 'out'}: 9 rows in 3 shards, merged from 2 dataset")
    out = tmp_path / "out"
    assert os.path.samefile(place / "shard-000000.lmdb", out / "shard-000000.lmdb")
    assert os.path.samefile(second / "shard-000000.lmdb", out / "shard-000002.lmdb")
    one, two, both = (open_dataset(each, decode="bytes") for each in (place, second, out))
    assert samples(both) == samples(one) + samples(two)
    assert both.classes == ["cat", "dog", "emu"]
    before = tree(out)
    assert merge([place, second], out)[""].rows == 9
    assert tree(out) == before
    with refused(UsageError, out):
        merge([second, place], out)
    result = verify(out, against=[folder, other])
    assert (result.findings, result.extras) == ([], [])
    assert verify(place, against=folder).ok
    (out / "shard-000002.lmdb").unlink()
    (out / "shard-000002.lmdb").write_bytes(b"")
    assert repair(out, [folder, other]).findings == []
    assert tree(out) == before
    third = make_dataset(make_tree(tmp_path / "x", {"cat/x.png": png()}), tmp_path / "third")
    merge([out, third], tmp_path / "all")
    assert [part["shards"] for part in stated(tmp_path / "all").source["parts"]] == [2, 1, 1]
    assert verify(tmp_path / "all", against=[folder, other, tmp_path / "x"]).ok
    append(tmp_path / "all", make_tree(tmp_path / "y", {"dog/y.png": png()}))
    assert verify(tmp_path / "all", against=[folder, other, tmp_path / "x", tmp_path / "y"]).ok


def test_shards_are_copied_where_they_cannot_be_linked(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(18, "Invalid cross-device link")

    other = make_dataset(make_tree(tmp_path / "o", {"cat/o.jpg": jpeg()}), tmp_path / "second")
    monkeypatch.setattr(os, "link", refuse)
    merge([place, other], tmp_path / "out")
    assert verify(tmp_path / "out").findings == []
    assert not os.path.samefile(place / "shard-000000.lmdb", tmp_path / "out/shard-000000.lmdb")


def _with_a_number(folder: Path) -> Path:
    make_tree(folder, {"in/x.jpg": jpeg(), "in/t.csv": b"file_name,class,n\nx.jpg,cat,1\n"})
    source = open_source("table", folder / "in" / "t.csv", label="class", keep="n")
    convert(source, folder / "made", to="lmdb")
    return folder / "made"


def test_conflicts_are_named(place: Path, folder: Path, tmp_path: Path) -> None:
    def converted(name: str, files: dict[str, bytes], **options: object) -> Path:
        source = make_tree(tmp_path / f"{name} source", files)
        convert(source, tmp_path / name, **{"to": "lmdb", **options})  # type: ignore[arg-type]
        return tmp_path / name

    before = tree(tmp_path)
    cases: list[tuple[Path, tuple[str, ...]]] = [
        (
            converted("keys", {f"cat/00{n}.jpg": jpeg(seed=n) for n in range(3)}),
            ("3 keys", "'cat/00"),
        ),
        (
            converted("classes", {"dog/x.jpg": jpeg()}),
            ("'dog'", "'cat'", "class_order="),
        ),
        (converted("format", {"cat/x.jpg": jpeg()}, to="hdf5"), ("lmdb", "hdf5")),
        (converted("recipe", {"cat/x.jpg": jpeg()}, resize="8x8"), ("resize", "[8, 8]")),
        (_with_a_number(tmp_path / "more"), ("n: none and int64 number",)),
        (converted("loose", {"x.jpg": jpeg()}), ("labels",)),
    ]
    for other, facts in cases:
        with refused(UsageError, *facts):
            merge([place, other], tmp_path / "out")
        assert not (tmp_path / "out").exists()
    for datasets in ([place, place], [place], "made", ["made"]):
        with refused(UsageError):
            merge(datasets, tmp_path / "out")
    with refused(UsageError, place):
        merge([place, tmp_path / "format"], place / "in")
    assert before.items() <= tree(tmp_path).items()


def test_a_damaged_dataset_is_not_merged(place: Path, tmp_path: Path) -> None:
    other = make_dataset(make_tree(tmp_path / "o", {"cat/o.jpg": jpeg()}), tmp_path / "second")
    shard = other / "shard-000000.lmdb"
    data = shard.read_bytes()
    shard.write_bytes(data[:-1])
    with refused(CorruptDataset, shard):
        merge([place, other], tmp_path / "out")
    shard.unlink()
    shard.symlink_to("/etc/passwd")
    with pytest.raises(CorruptDataset):
        merge([place, other], tmp_path / "out")


def test_a_merge_leaves_an_unfinished_conversion_alone(
    place: Path, folder: Path, tmp_path: Path
) -> None:
    make_folder(tmp_path / "others", each=2)
    for path in sorted((tmp_path / "others").glob("*/*")):
        path.rename(path.with_name(f"other {path.name}"))
    convert(tmp_path / "others", tmp_path / "other", to="lmdb")
    words = ("convert", "imagefolder", folder, tmp_path / "out", "--to", "webdataset")
    done(*words, "--plan-only")
    before = tree(tmp_path / "out")
    with refused(UsageError, tmp_path / "out"):
        merge([place, tmp_path / "other"], tmp_path / "out")
    assert tree(tmp_path / "out") == before


def test_attached_archives_are_refused(tmp_path: Path, more: Path) -> None:
    plain = make_dataset(more, tmp_path / "plain", to="webdataset")
    tars = make_tree(tmp_path / "tars", {p.name: p.read_bytes() for p in plain.glob("*.tar")})
    attach(tars, tmp_path / "attached")
    with refused(UsageError, tmp_path / "attached", "shardkit convert dataset"):
        merge([plain, tmp_path / "attached"], tmp_path / "out")


def test_forged_parts_are_refused(place: Path, folder: Path, more: Path) -> None:
    append(place, more)
    other = make_dataset(more, place.parent / "other")
    changes: list[dict[str, Any]] = [{"source": {"kind": "parts"}}, {"source": None}]
    changes += [{"source": {"kind": "imagefolder", "images": "x"}}, {"source": {}}]
    changes += [{"shards": 9}, {"classes": 9}, {"skipped": 1}, {"first": "x"}, {"more": 1}]
    for change in changes:
        plain = (place / "shardkit.json").read_bytes()
        restate_json(place, lambda value: value["source"]["parts"][0].update(change))  # noqa: B023
        with refused(CorruptDataset, "shardkit.json"):
            open_dataset(place)
        with refused(CorruptDataset, "shardkit.json"):
            merge([place, other], place.parent / "merged")
        (place / "shardkit.json").write_bytes(plain)
    assert verify(place, against=[folder, more]).ok


def test_info_names_each_source(place: Path, more: Path) -> None:
    append(place, more)
    sources = [line for line in done("info", place).splitlines() if "source" in line.split()[:1]]
    assert ["photos" in sources[0], "more" in sources[1], len(sources)] == [True, True, 2]


class Numbered(list[Any]):
    """Samples whose labels are numbers of their own classes, as of torchvision's datasets."""

    classes = ("dog", "cat")


def test_samples_with_classes_in_another_order_are_refused(tmp_path: Path) -> None:
    image = np.zeros((5, 5, 3), np.uint8)
    schema = {"label": Field("label", classes=("cat", "dog"))}
    convert([{"key": "a", "image": image, "label": 0}], tmp_path / "d", to="lmdb", schema=schema)
    more = Numbered([{"key": "b", "image": image, "label": 0}])
    with refused(UsageError, "dog, cat", "cat, dog"):
        append(tmp_path / "d", more)
    more.classes = ("cat", "dog")
    append(tmp_path / "d", more)
    assert sorted(open_dataset(tmp_path / "d").targets.tolist()) == [0, 0]
