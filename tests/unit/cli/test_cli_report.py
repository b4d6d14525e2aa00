"""``shardkit report`` and ``shardkit show``: files, exit codes and errors."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from helpers import encoded, make_tree, opened, png, run_main
from PIL import Image, ImageDraw, ImageFont
from planted_faults import scene
from refusals import refuses

from shardkit import Field, convert, open_dataset, report


def told(*words: object, code: int = 0) -> str:
    """Run a command; return what it prints."""
    done = run_main(*words)
    assert done.returncode == code, done.stderr
    return done.stdout


def made(files: dict[str, bytes], place: Path) -> Path:
    """Convert files in their order."""
    source = make_tree(place.parent / f"{place.name} photos", {**files})
    convert(source, place, to="lmdb", shuffle=False, workers=1)
    return place


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    files = {f"cat/{n}.jpg": encoded(scene(n)) for n in range(4)}
    files |= {"cat/copy.jpg": files["cat/0.jpg"], "dog/9.jpg": encoded(scene(9, (90, 120)))}
    return made(files, tmp_path_factory.mktemp("reported") / "made")


def test_files_are_written(dataset: Path, tmp_path: Path) -> None:
    page, lists = tmp_path / "page.html", tmp_path / "lists"
    options = ("-o", page, "--exclude", lists, "--workers", 1)
    told("report", dataset, *options)
    shown = told("report", dataset, *options)  # its own files are replaced
    expected = json.loads(json.dumps(report(dataset, workers=1).as_dict()))

    assert any(line.split()[:2] == ["exact-duplicate", "2"] for line in shown.splitlines())
    assert page.read_text().startswith("<!doctype html>")
    assert [path.name for path in lists.iterdir()] == ["exact-duplicate.txt"]
    assert (lists / "exact-duplicate.txt").read_text() == "cat/copy\n"
    printed = json.loads(told("report", dataset, "--json", "--workers", 1))
    assert {name: printed[name] for name in expected} == expected


def test_old_lists_are_removed(dataset: Path, tmp_path: Path) -> None:
    lists = tmp_path / "lists"
    theirs = {f"{name}": b"x" for name in ("notes.txt", "train-leak.txt", "blurred.txt.bak")}
    theirs["blank.txt/x"] = b"x"
    make_tree(lists, {**theirs, "blurred.txt": b"old", "label-error.txt": b"old"})
    told("report", dataset, "--exclude", lists, "--workers", 1)

    left = {path.relative_to(lists).as_posix() for path in lists.rglob("*") if path.is_file()}
    assert left == {*theirs, "exact-duplicate.txt"}  # this dataset has no split `train`


def test_a_conversion_accepts_the_lists(dataset: Path, tmp_path: Path) -> None:
    files = {f"{n}.png": encoded(scene(n % 3), "PNG") for n in range(4)}  # keys that are numbers
    for place in (dataset, made(files, tmp_path / "numbered")):
        lists, target = tmp_path / f"{place.name}-lists", tmp_path / f"{place.name}-clean"
        told("report", place, "--exclude", lists, "--workers", 1)
        options = ("--exclude", lists / "exact-duplicate.txt", "--to", "lmdb", "--workers", 1)
        told("convert", "dataset", place, target, *options)

        left = {each.kind: each.rows for each in report(target, workers=1).findings}
        assert left["exact-duplicate"] == 0
        assert len(open_dataset(target)) == len(open_dataset(place)) - 1


def test_a_conversion_may_report(dataset: Path, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    how = ("convert", "imagefolder", dataset.parent / "made photos", tmp_path / "made")
    options = ("--to", "lmdb", "--report", page, "--workers", 1)
    refuses(2, *how, *options, "--dry-run", facts=("--dry-run",))
    assert not page.exists()

    assert f"  report    written to {page}" in told(*how, *options)
    assert "<h1>Report on made</h1>" in page.read_text()


@pytest.mark.parametrize(
    ("kinds", "code"), [("leak,label-conflict", 0), ("leak, exact-duplicate", 1)]
)
def test_findings_may_fail_the_command(dataset: Path, kinds: str, code: int) -> None:
    for quiet in ((), ("--quiet",)):
        done = run_main("report", dataset, "--workers", 1, "--fail-on", kinds, *quiet)

        assert done.returncode == code
        assert ("exact-duplicate (2 images)" in done.stderr) == bool(code)
    assert done.stdout == ""
    assert bool(done.stderr) == bool(code)


def test_a_list_of_too_many_pairs_is_called_incomplete(
    dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    few = {"queries": None, "limit": 1}
    monkeypatch.setattr("shardkit.reporting.neighbors.near_pairs.__kwdefaults__", few)
    files = {f"{n}.jpg": encoded(scene(0), quality=50 + 10 * n) for n in range(4)}
    place, page = made(files, tmp_path / "made"), tmp_path / "page.html"

    warning = "more similar pairs"
    assert warning in told("report", place, "-o", page, "--workers", 1)
    assert warning in page.read_text()
    assert warning not in told("report", dataset, "--workers", 1)


def test_mistakes_are_named(dataset: Path, tmp_path: Path) -> None:
    mine, picture = tmp_path / "mine.html", tmp_path / "mine.png"
    mine.write_text("<p>mine</p>")
    Image.new("RGB", (2, 2)).save(picture)
    for words, facts in (
        (("report", dataset, "--fail-on", "leaks"), ("'leaks'", "leak,")),
        (("report", dataset, "--fail-on", ""), ("''", "leak,")),
        (("report", dataset, "--fail-on", "leak,"), ("''", "leak,")),
        (("report", dataset, "-o", mine), ("mine.html",)),
        (("report", dataset, "-o", tmp_path / "no/page.html"), ("/no",)),
        (("report", tmp_path / "nothing"), ("nothing",)),
        (("report", dataset, dataset), ("twice",)),
        (("show", dataset, "6"), ("6 rows", "`key:6`")),
        (("show", dataset, "cat/nix"), ("'cat/nix'",)),
        (("show", dataset, "--class", "cow"), ("'cow'", "`shardkit info`")),
        (("show", dataset, "0", "--random", 3), ("--class", "--random")),
        (("show", dataset, "0", "-o", picture), ("mine.png",)),
        (("show", dataset, "0", "-o", tmp_path / "x.jpg"), (".png",)),
    ):
        refuses(2, *words, facts=facts)
    refuses(1, "report", dataset, "--workers", 1, "--exclude", mine / "lists", facts=("/lists",))
    assert "17" in run_main("report", dataset, "--distance", 17).stderr
    assert mine.read_text() == "<p>mine</p>"


def test_a_record_is_shown(dataset: Path, tmp_path: Path) -> None:
    picture = tmp_path / "record.png"
    by_row = told("show", dataset, "5", "-o", picture)
    (by_key,) = json.loads(told("show", dataset, "dog/9", "--json"))["records"]

    assert "row 5: dog/9" in by_row
    assert "row 5: dog/9" in told("show", dataset, "dog/9.jpg")
    assert " bytes, 90 x 120" in by_row
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
    convert([sample], tmp_path / "made", to="lmdb", schema=schema, workers=1)
    shown = told("show", tmp_path / "made", "0")
    assert "kinds        ['dog']" in shown
    assert "[[1.0, 2.06, 30.0, 20.0, 'dog']]" in shown


def test_a_sheet_of_a_class_is_written(dataset: Path, tmp_path: Path) -> None:
    options = ("--class", "cat", "--random", 4, "-o", tmp_path / "sheet.png")
    told("show", dataset, *options)
    shown = told("show", dataset, *options)  # its own file is replaced
    rows = [int(line.split()[0]) for line in shown.splitlines()[2:6]]

    assert len(rows) == 4
    assert rows == sorted(rows)
    assert 5 not in rows
    keys = open_dataset(dataset).keys
    pictures = opened((tmp_path / "sheet.png").read_bytes())
    assert pictures.size == (332, 388)
    for number, row in enumerate(rows):
        text = f"{row}: {keys[row]}\ncat"
        expected = Image.new("RGB", (160, 28), "white")
        ImageDraw.Draw(expected).text((0, 0), text, "black", ImageFont.load_default())
        left, top = 4 + number % 2 * 164, 164 + number // 2 * 192
        assert pictures.crop((left, top, left + 160, top + 28)).tobytes() == expected.tobytes()
