"""``shardkit report`` and ``shardkit show``: files, exit codes and errors."""

from __future__ import annotations

import functools
import json
from pathlib import Path

import numpy as np
import pytest
from helpers import encoded, invoke, make_dataset, make_tree, opened, png, run_main
from PIL import Image
from planted_faults import scene

from shardkit import Field, convert, report
from shardkit.dataset.shardset import open_shards
from shardkit.reporting import similar
from shardkit.reporting.findings import BY_EMBEDDING, KINDS
from shardkit.reporting.neighbors import near_pairs


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("reported")
    files = {f"cat/{n}.jpg": encoded(scene(n)) for n in range(4)}
    files |= {"cat/copy.jpg": files["cat/0.jpg"], "dog/9.jpg": encoded(scene(9, (90, 120)))}
    return make_dataset(make_tree(folder / "photos", files), folder / "made", shuffle=False)


def test_files_are_written(dataset: Path, tmp_path: Path) -> None:
    page, data, lists = tmp_path / "page.html", tmp_path / "report.json", tmp_path / "lists"
    options = ("-o", page, "--json-file", data, "--exclude", lists)
    for _ in range(2):  # its own files are replaced
        result = invoke("report", dataset, *options, "--workers", 1)
        assert result.exit_code == 0
    value = json.loads(data.read_text())

    assert "exact-duplicate                 2  The same picture" in result.stdout
    assert value == {
        "generator": "made by shardkit report",
        **json.loads(json.dumps(report(dataset).as_dict())),
    }
    assert page.read_text().startswith("<!doctype html>")
    assert [path.name for path in lists.iterdir()] == ["exact-duplicate.txt"]
    assert (lists / "exact-duplicate.txt").read_text() == "cat/copy\n"


def test_old_lists_are_removed(dataset: Path, tmp_path: Path) -> None:
    lists = tmp_path / "lists"
    theirs = {
        "notes.txt": b"1",
        "train-leak.txt": b"2",
        "blurred.txt.bak": b"3",
        "blank.txt/x": b"4",
    }
    make_tree(lists, {**theirs, "blurred.txt": b"old", "label-error.txt": b"old"})
    assert invoke("report", dataset, "--exclude", lists).exit_code == 0

    left = {path.relative_to(lists).as_posix() for path in lists.rglob("*") if path.is_file()}
    assert left == {*theirs, "exact-duplicate.txt"}  # this dataset has no split `train`


def test_a_conversion_accepts_the_lists(dataset: Path, tmp_path: Path) -> None:
    files = {f"{n}.png": encoded(scene(n % 3), "PNG") for n in range(4)}  # keys that are numbers
    numbered = make_dataset(make_tree(tmp_path / "photos", files), tmp_path / "numbered")
    for place in (dataset, numbered):
        lists = tmp_path / f"{place.name}-lists"
        invoke("report", place, "--exclude", lists)
        target = tmp_path / f"{place.name}-clean"
        options = ("--exclude", lists / "exact-duplicate.txt", "--to", "lmdb", "--workers", 1)
        assert invoke("convert", "dataset", place, target, *options).exit_code == 0

        left = {each.kind: each.rows for each in report(target).findings}
        assert left["exact-duplicate"] == 0
        assert len(open_shards(target)) == len(open_shards(place)) - 1


def test_a_conversion_may_report(dataset: Path, tmp_path: Path) -> None:
    photos, page = dataset.parent / "photos", tmp_path / "page.html"
    options = ("--to", "lmdb", "--report", page, "--workers", 1)
    dry = run_main("convert", "imagefolder", photos, tmp_path / "made", *options, "--dry-run")
    assert (dry.returncode, page.exists()) == (2, False)
    assert "leave out --dry-run" in dry.stderr
    done = invoke("convert", "imagefolder", photos, tmp_path / "made", *options)

    assert f"report    written to {page}" in done.stdout
    assert "<h1>Report on made</h1>" in page.read_text()


def test_json_is_printed(dataset: Path) -> None:
    value = json.loads(invoke("report", dataset, "--json").stdout)

    assert [each["kind"] for each in value["findings"]] == [
        kind for kind in KINDS if kind not in BY_EMBEDDING
    ]
    assert value["images"] == 6


@pytest.mark.parametrize(
    ("kinds", "code"), [("leak,label-conflict", 0), ("leak, exact-duplicate", 1)]
)
def test_findings_may_fail_the_command(dataset: Path, kinds: str, code: int) -> None:
    result = invoke("report", dataset, "--fail-on", kinds)

    assert result.exit_code == code
    assert ("--fail-on: found exact-duplicate (2 images)\n" in result.stderr) == bool(code)


def test_a_list_of_too_many_pairs_is_called_incomplete(
    dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    few = functools.partial(near_pairs, limit=1)
    monkeypatch.setattr(similar, "near_pairs", few)
    files = {f"{n}.jpg": encoded(scene(0), quality=50 + 10 * n) for n in range(4)}
    place = make_dataset(make_tree(tmp_path / "photos", files), tmp_path / "made")
    page = tmp_path / "page.html"

    assert "more similar pairs than can be listed" in invoke("report", place, "-o", page).stdout
    assert "more similar pairs than can be listed" in page.read_text()
    assert "more similar pairs" not in invoke("report", dataset).stdout


def test_mistakes_are_named(dataset: Path, tmp_path: Path) -> None:
    mine = tmp_path / "mine.html"
    mine.write_text("<p>mine</p>")
    for options, message in (
        ((dataset, "--fail-on", "leaks"), "'leaks' is unknown; choose from leak,"),
        ((dataset, "--fail-on", ""), "'' is unknown; choose from leak,"),
        ((dataset, "--fail-on", "leak,"), "'' is unknown; choose from leak,"),
        ((dataset, "-o", mine), "shardkit report did not write this file"),
        ((dataset, "--json-file", mine), "shardkit report did not write this file"),
        ((dataset, "-o", tmp_path / "no/page.html"), "does not exist or cannot be written"),
        ((tmp_path / "nothing",), "nothing"),
        ((dataset, dataset), "is given twice"),
        ((dataset, "--distance", 17), "17 is not in the range"),
    ):
        result = run_main("report", *options)
        assert result.returncode == 2, result.stderr
        assert message in result.stderr
    failed = run_main("report", dataset, "--exclude", mine / "lists")
    assert (failed.returncode, failed.stderr) == (
        1,
        f"shardkit: error: {mine / 'lists'} cannot be changed: Not a directory\n",
    )
    assert mine.read_text() == "<p>mine</p>"


def test_a_record_is_shown(dataset: Path, tmp_path: Path) -> None:
    picture = tmp_path / "record.png"
    by_row = invoke("show", dataset, "5", "-o", picture)
    (by_key,) = json.loads(invoke("show", dataset, "dog/9", "--json").stdout)["records"]

    assert "row 5: dog/9" in by_row.stdout
    assert "row 5: dog/9" in invoke("show", dataset, "dog/9.jpg").stdout
    assert " bytes, 90 x 120" in by_row.stdout
    assert (by_key["row"], by_key["class"], by_key["facts"]["mode"]) == (5, "dog", "RGB")
    assert by_key["fields"]["image"]["height"] == 120
    shown = np.asarray(opened(picture.read_bytes()), np.int64)
    assert shown.shape == (120, 90, 3)
    assert np.abs(shown - np.asarray(scene(9, (90, 120)))).mean() < 6


def test_labels_of_a_record_are_shown_by_name(tmp_path: Path) -> None:
    sample = {
        "image": png(40, 30),
        "kinds": ["dog"],
        "boxes": {"boxes": [[1, 2.0625, 30, 20]], "labels": ["dog"]},
    }
    names = ["cat", "dog"]
    schema = {"kinds": Field("labels", classes=names), "boxes": Field("boxes", classes=names)}
    convert([sample], tmp_path / "made", to="lmdb", schema=schema)
    shown = invoke("show", tmp_path / "made", "0").stdout
    assert "kinds        ['dog']" in shown
    assert "[[1.0, 2.06, 30.0, 20.0, 'dog']]" in shown


def test_a_sheet_of_a_class_is_written(dataset: Path, tmp_path: Path) -> None:
    for _ in range(2):
        options = ("--class", "cat", "--random", 4, "-o", tmp_path / "sheet.png")
        result = invoke("show", dataset, *options)
    rows = [int(line.split()[0]) for line in result.stdout.splitlines()[2:6]]

    assert len(rows) == 4
    assert rows == sorted(rows)
    assert 5 not in rows
    assert opened((tmp_path / "sheet.png").read_bytes()).size == (332, 332)


def test_show_names_mistakes(dataset: Path, tmp_path: Path) -> None:
    mine = tmp_path / "mine.png"
    Image.new("RGB", (2, 2)).save(mine)
    for options, message in (
        (("6",), "which has 6 rows; `key:6` names a key"),
        (("cat/nix",), "has no record 'cat/nix'"),
        (("--class", "cow"), "has no class 'cow'; `shardkit info` lists its classes"),
        (("0", "--random", 3), "leave out --class and --random"),
        (("0", "-o", mine), "shardkit show did not write this file"),
        (("0", "-o", tmp_path / "x.jpg"), "named *.png"),
    ):
        result = run_main("show", dataset, *options)
        assert result.returncode == 2, result.stderr
        assert message in result.stderr
