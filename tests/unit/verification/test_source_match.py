"""The source file of each row, found for any options of the conversion."""

from __future__ import annotations

import os
import shutil
import subprocess
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from helpers import jpeg, make_dataset, make_folder, make_tree, png
from hostile.forging import blamed, proved, restate
from pairwise import pairwise
from refusals import refused, refuses
from stated import restate_json, stated

from shardkit import convert, open_dataset, verify
from shardkit.errors import CorruptDataset, UsageError


def sources(root: Path) -> dict[str, tuple[Path, dict[str, Any]]]:
    """Return the layouts of a source, with the options to convert each."""
    order = root / "order.txt"
    order.write_text("class10\nnothing\nclass2\n")
    numbered = make_folder(root / "numbered", ("class2", "class10"))
    make_tree(numbered, {"class2/sub/9.jpg": jpeg(seed=9), "class2/a.jpg": jpeg(seed=8)})
    splits = make_folder(root / "splits/train")
    make_folder(root / "splits/val", ("dog",), each=2)
    make_tree(root / "splits", {"test": None, "LIESMICH": b"x"})
    loose = make_tree(root / "loose", {f"{n}.jpg": jpeg(seed=n) for n in range(5)})
    empty = make_folder(make_tree(root / "empty", {"no": None, "cat/x.txt": b"x"}))
    odd = make_tree(
        root / "odd", {"a b/\u00e9 \n\\.jpg": jpeg(), "a b/x.jpg": jpeg(seed=1), "z/x.png": png()}
    )
    make_tree(odd, {os.fsdecode(b"z/\xff.jpg"): jpeg(seed=2), "z/x.jpg": jpeg(seed=3)})
    return {
        "natural": (numbered, {"class_order": "natural"}),
        "file": (numbered, {"class_order": str(order)}),
        "unshuffled": (numbered, {"class_order": "natural", "shuffle": False}),
        "limit": (numbered, {"limit": 3}),
        "first": (numbered, {"limit": 3, "shuffle": False, "class_order": str(order)}),
        "seed": (numbered, {"seed": 7}),
        "splits": (splits.parent, {"splits": True}),
        "splits-limit": (splits.parent, {"splits": True, "limit": 2}),
        "loose": (loose, {}),
        "loose-unshuffled": (loose, {"shuffle": False, "limit": 4}),
        "empty": (empty, {}),
        "odd": (odd, {}),
    }


LAYOUTS = (
    *("natural", "file", "unshuffled", "limit", "first", "seed", "splits", "splits-limit"),
    *("loose", "loose-unshuffled", "empty", "odd"),
)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_of_a_source_is_matched(tmp_path: Path, layout: str) -> None:
    source, options = sources(tmp_path)[layout]
    place = make_dataset(source, tmp_path / "made", to="webdataset", shard_samples=3, **options)
    images = sum(stated(each.parent).source["images"] for each in place.rglob("index"))

    result = proved(place, source)

    assert result.alike == 0
    assert result.left_out == images - result.files


def test_one_split_is_compared_with_its_folder(tmp_path: Path) -> None:
    source, _ = sources(tmp_path)["splits"]
    place = make_dataset(source, tmp_path / "made")
    assert proved(place / "val", source / "val").files == 2


# --- what is no image, and what was bad ---


@pytest.mark.parametrize(
    ("since", "limit", "shuffle"),
    pairwise(["still bad", "gone", "mended"], [None, 9], [True, False]),
)
def test_skipped_bad_files_stay_skipped(
    tmp_path: Path, since: str, limit: int | None, shuffle: bool
) -> None:
    source = make_folder(tmp_path / "photos", each=4)
    bad = ["cat/000.png", "dog/001.jpg", "cat/sub/x.jpg"]  # the first makes a key longer
    make_tree(source, dict.fromkeys(bad, b"bad"))
    place = make_dataset(source, tmp_path / "made", on_error="skip", limit=limit, shuffle=shuffle)
    skipped = {problem.path for problem in stated(place).skipped}
    assert skipped
    if since == "mended":
        for number, name in enumerate(bad):
            (source / name).write_bytes(jpeg(seed=50 + number))
        assert set(blamed(tmp_path / "made", source)) == skipped
        return
    if since == "gone":
        for name in bad:
            (source / name).unlink()
    assert proved(tmp_path / "made", source)


@pytest.mark.parametrize("since", ["still bad", "gone", "mended"])
def test_broken_links_have_no_key_and_no_row(tmp_path: Path, since: str) -> None:
    source = make_folder(tmp_path / "photos")
    link = source / "cat/000.png"
    link.symlink_to("nowhere")
    place = tmp_path / "made"
    convert(source, place, to="lmdb", on_error="skip", limit=5)
    assert [problem.path for problem in stated(place).skipped] == ["cat/000.png"]
    if since != "still bad":
        link.unlink()
    if since == "mended":
        link.write_bytes(png())
        assert list(blamed(tmp_path / "made", source)) == ["cat/000.png"]
    else:
        assert proved(tmp_path / "made", source)


def test_other_files_do_not_matter(folder: Path, tmp_path: Path) -> None:
    place = make_dataset(folder, tmp_path / "made")
    make_tree(folder, {"notes.txt": b"x", "cat/.hidden.jpg": b"x", "cat/list": b"x", "new": None})
    assert proved(place, folder)


def test_the_list_of_files_has_the_digest_that_sha256sum_gives(tmp_path: Path) -> None:
    if not shutil.which("sha256sum"):
        pytest.skip("there is no sha256sum")
    source, _ = sources(tmp_path)["odd"]
    place = make_dataset(source, tmp_path / "made")
    names = sorted(path.relative_to(source) for path in source.rglob("*.*") if path.is_file())
    lines = subprocess.run(
        ["sha256sum", "--", *sorted(names, key=os.fsencode)],
        cwd=source,
        capture_output=True,
        check=True,
    ).stdout
    digest = subprocess.run(["sha256sum"], input=lines, capture_output=True, check=True).stdout
    report = proved(place, source)
    assert report.sha256 == digest.decode().split()[0]


ODD_MANIFESTS: dict[str, dict[str, dict[str, Any]]] = {
    "a seed that is a text": {"source": {"seed": "1"}},
    "a seed that is a number with a point": {"source": {"seed": 0.5}},
    "a limit that is a list": {"source": {"limit": [1]}},
    "a limit that is a truth": {"source": {"limit": True}},
    "a kind that is a number": {"source": {"kind": 1}},
    "a filter that nobody has": {"recipe": {"filter": "sharp"}},
    "a filter that is a list": {"recipe": {"filter": []}},
    "an option that nobody has": {"recipe": {"sharpen": True}},
    "a resize of words": {"recipe": {"resize": ["a", "b"]}},
    "a resize of three": {"recipe": {"resize": [1, 2, 3]}},
    "a quality that is a text": {"recipe": {"quality": "90"}},
    "a background that is a text": {"recipe": {"background": "white"}},
    "no background": {"recipe": {"background": None}},
    "a number of images that is a text": {"source": {"images": "x"}},
    "fewer images than none": {"source": {"images": -1}},
}


def with_values(
    manifest: Any, values: dict[str, dict[str, Any]] | None = None, lost: str = ""
) -> Any:
    """Return a manifest with other values in its dictionaries, or without one in ``source``."""
    parts: dict[str, Any] = {n: {**getattr(manifest, n), **v} for n, v in (values or {}).items()}
    source = {n: v for n, v in parts.get("source", manifest.source).items() if n != lost}
    return replace(manifest, **{**parts, "source": source})


def test_a_manifest_without_recipe_or_source_is_refused(folder: Path, tmp_path: Path) -> None:
    place = make_dataset(folder, tmp_path / "made")
    plain = (place / "shardkit.json").read_bytes()
    for odd in ODD_MANIFESTS.values():
        restate(place, partial(with_values, values=odd))
        with refused(CorruptDataset, place / "shardkit.json"):
            open_dataset(place)
        assert [finding.file for finding in verify(place, against=folder).findings] == [
            "shardkit.json"
        ]
        refuses(1, "export", place, tmp_path / "exported", facts=(place / "shardkit.json",))
        (place / "shardkit.json").write_bytes(plain)
    for name in ("seed", "limit"):
        restate(place, partial(with_values, lost=name))
        with refused(CorruptDataset, "manifest", name):
            verify(place, against=folder)
        (place / "shardkit.json").write_bytes(plain)


def test_splits_from_sources_of_different_kinds_are_refused(tmp_path: Path) -> None:
    source, _ = sources(tmp_path)["splits"]
    place = make_dataset(source, tmp_path / "made")
    restate_json(place / "val", lambda value: value["source"].update(kind="video"))
    digest = stated(place / "val").digest
    restate_json(place, lambda value: value["splits"].update(val=digest))
    with refused(UsageError, "imagefolder", "video"):
        verify(place, against=source)
