"""Facts that a conversion stores: those that a report would measure."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import encoded, exif, make_tree, png, tree
from PIL import ImageFilter
from planted_faults import scene

from shardkit import convert
from shardkit.conversion.convert import Converted
from shardkit.dataset.manifest import FACTS_NAME
from shardkit.dataset.shardset import open_shards
from shardkit.errors import BadImages
from shardkit.reporting.facts import load_facts
from shardkit.reporting.image_facts import VERSION
from shardkit.system import native


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """A JPEG of each kind that is measured in another way, and other images."""
    large = scene(1, (600, 450))
    blurred = large.filter(ImageFilter.GaussianBlur(6))
    return make_tree(
        tmp_path / "photos",
        {
            "a/plain.jpg": encoded(large, quality=95),
            "a/blurred.jpg": encoded(blurred, quality=90),
            "a/gray.jpg": encoded(scene(2).convert("L")),
            "a/turned.jpg": encoded(scene(3), exif=exif(6)),
            "a/progressive.jpg": encoded(large, quality=95, progressive=True),
            "a/progressive-blurred.jpg": encoded(blurred, quality=90, progressive=True),
            "a/profiled.jpg": encoded(scene(4), icc_profile=b"profile"),
            "a/cmyk.jpg": encoded(scene(5).convert("CMYK"), "JPEG"),
            "b/plain.png": png(40, 30, 1),
            "b/gray.png": png(40, 30, 1, "L"),
            "b/clear.png": png(20, 50, 2, "RGBA"),
            "b/palette.png": encoded(scene(6).quantize(16), "PNG"),
            "b/web.webp": encoded(scene(7), "WEBP"),
        },
    )


def facts_of(place: Path) -> bytes:
    """Return the stored facts of a dataset, after checking that they are those of a report."""
    stored = (place / FACTS_NAME).read_bytes()
    (place / FACTS_NAME).unlink()
    load_facts(open_shards(place))
    assert (place / FACTS_NAME).read_bytes() == stored
    return stored


@pytest.mark.parametrize(
    ("to", "options"),
    [
        ("lmdb", {"check": "header"}),
        ("webdataset", {"resize": 16}),
        ("hdf5", {"resize": (20, 16), "encode": "raw"}),
    ],
)
def test_facts_are_those_of_a_report(
    photos: Path, tmp_path: Path, to: Any, options: dict[str, Any]
) -> None:
    convert(photos, tmp_path / "made", to=to, facts=True, **options)

    facts_of(tmp_path / "made")


@pytest.mark.slow
def test_facts_change_nothing_and_do_not_depend_on_workers(photos: Path, tmp_path: Path) -> None:
    for name, workers in (("one", 1), ("two", 2), ("elsewhere", 1), ("without", 1)):
        convert(
            photos,
            tmp_path / name,
            to="lmdb",
            facts=name != "without",
            workers=workers,
            executor=ThreadPoolExecutor(1) if name == "elsewhere" else None,
            shard_samples=6,
        )

    assert len({facts_of(tmp_path / name) for name in ("one", "two", "elsewhere")}) == 1
    for name in ("one", "two", "elsewhere"):
        (tmp_path / name / FACTS_NAME).unlink()
        assert tree(tmp_path / name) == tree(tmp_path / "without")


def test_facts_do_not_need_the_compiled_module(
    photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if native.module() is None:
        pytest.skip("the compiled module is not used")
    convert(photos, tmp_path / "compiled", to="lmdb", facts=True)
    monkeypatch.setattr(native, "module", lambda: None)
    convert(photos, tmp_path / "plain", to="lmdb", facts=True)

    assert facts_of(tmp_path / "plain") == (tmp_path / "compiled" / FACTS_NAME).read_bytes()


def test_a_blurred_jpeg_is_found_at_full_size(photos: Path, tmp_path: Path) -> None:
    convert(photos, tmp_path / "made", to="lmdb", facts=True, shuffle=False)
    made = open_shards(tmp_path / "made")
    sharpness = dict(zip(made.keys, load_facts(made)["sharpness"].tolist(), strict=True))

    assert sharpness["a/blurred"] == sharpness["a/progressive-blurred"] < 0.3
    assert sharpness["a/plain"] == sharpness["a/progressive"] > 0.5


def test_splits_have_facts_and_left_out_images_have_none(tmp_path: Path) -> None:
    good, bad = encoded(scene(1)), encoded(scene(2))[:900]
    files = {f"{split}/a/{name}": good for split in ("train", "val") for name in ("1.jpg", "3.jpg")}
    source = make_tree(tmp_path / "photos", {**files, "train/a/2.jpg": bad})
    convert(source, tmp_path / "made", to="hdf5", facts=True, on_error="skip")

    for split in ("train", "val"):
        assert len(load_facts(open_shards(tmp_path / "made" / split))) == 2
        facts_of(tmp_path / "made" / split)


def test_finished_shards_keep_their_facts(tmp_path: Path) -> None:
    source = make_tree(tmp_path / "photos", {f"a/{n}.jpg": encoded(scene(n)) for n in range(4)})
    make_tree(source, {"a/4.jpg": encoded(scene(4))[:900]})

    def run(*, facts: bool) -> Converted:
        target = tmp_path / "made"
        return convert(source, target, to="lmdb", shuffle=False, shard_samples=2, facts=facts)

    with pytest.raises(BadImages):
        run(facts=True)
    make_tree(source, {"a/4.jpg": encoded(scene(4))})
    made = run(facts=False)
    versions = np.load(tmp_path / "made" / FACTS_NAME)["version"]

    assert made.reused_shards == 2
    assert versions.tolist() == [VERSION] * 4 + [0]
    assert (load_facts(open_shards(tmp_path / "made"))["version"] == VERSION).all()
