"""Facts of images of all kinds, with and without the compiled module."""

from __future__ import annotations

from pathlib import Path

import pytest
from helpers import encoded, exif, make_tree, png
from PIL import ImageFilter
from planted_faults import scene

from shardkit import convert
from shardkit.dataset.manifest import FACTS_NAME
from shardkit.dataset.shardset import open_shards
from shardkit.reporting.facts import load_facts
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


def test_facts_do_not_need_the_compiled_module(
    photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if native.module() is None:
        pytest.skip("the compiled module is not used")
    convert(photos, tmp_path / "made", to="lmdb")
    compiled = load_facts(open_shards(tmp_path / "made"))
    (tmp_path / "made" / FACTS_NAME).unlink()
    monkeypatch.setattr(native, "module", lambda: None)

    assert load_facts(open_shards(tmp_path / "made")).tobytes() == compiled.tobytes()


def test_a_blurred_jpeg_is_found_at_full_size(photos: Path, tmp_path: Path) -> None:
    convert(photos, tmp_path / "made", to="lmdb", shuffle=False)
    made = open_shards(tmp_path / "made")
    sharpness = dict(zip(made.keys, load_facts(made)["sharpness"].tolist(), strict=True))

    assert sharpness["a/blurred"] == sharpness["a/progressive-blurred"] < 0.3
    assert sharpness["a/plain"] == sharpness["a/progressive"] > 0.5
