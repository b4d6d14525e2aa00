"""Folders of pictures with planted faults, one of each kind that a report finds."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from helpers import encoded, exif, make_tree
from PIL import Image, ImageEnhance, ImageFilter

FAULTS = {
    "exact-duplicate": {"cat/00", "cat/copy", "cat/01", "dog/copy"},
    "label-conflict": {"cat/01", "dog/copy"},
    "leak": {"cat/02", "cat/leaked", "cat/03", "cat/smaller"},
    "near-duplicate": {"cat/04", "cat/low_quality"},
    "near-duplicate-classes": {"cat/05", "dog/cropped"},
    "blank": {"cat/blank"},
    "dark": {"cat/dark"},
    "blurred": {"cat/blurred"},
    "tiny": {"cat/tiny"},
    "odd-aspect": {"cat/long"},
    "rotated": {"cat/turned"},
    "wrong-suffix": {"cat/really_png"},
    "size-outlier": {"cat/huge", "cat/tiny"},
    "color-outlier": {"cat/dark", "dog/red"},
    "broken": set(),
}
"""The keys of each finding in the dataset of `planted`; only files of ``cat`` and ``dog``."""


def scene(seed: int, size: tuple[int, int] = (160, 120)) -> Image.Image:
    """Return a picture with structure at all scales, as photographs have; green and blue."""
    rng = np.random.default_rng(seed)
    total = np.zeros((size[1], size[0]))
    for side, weight in ((3, 1.0), (6, 0.7), (12, 0.5), (40, 0.3)):
        field = Image.fromarray(rng.normal(size=(side, side)).astype(np.float32))
        total += weight * np.asarray(field.resize(size, Image.Resampling.BICUBIC))
    total += rng.normal(size=total.shape) * 0.15
    gray = np.clip(120 + 45 * total, 0, 255)
    return Image.fromarray(np.stack([0.6 * gray, gray, 0.8 * gray], -1).astype(np.uint8))


def planted(root: Path, each: int = 24) -> Path:
    """Make splits ``train`` and ``val`` of two classes with each of `FAULTS`."""
    seeds = iter(range(1000))
    files: dict[str, Image.Image | bytes] = {}
    for label in ("cat", "dog"):
        files |= {f"train/{label}/{n:02}.jpg": scene(next(seeds)) for n in range(each)}
        files |= {f"val/{label}/v{n}.jpg": scene(next(seeds)) for n in range(3)}

    def cat(number: int) -> Image.Image:
        found = files[f"train/cat/{number:02}.jpg"]
        assert isinstance(found, Image.Image)
        return found

    files["train/cat/copy.jpg"] = cat(0)
    files["train/dog/copy.jpg"] = cat(1)
    files["val/cat/leaked.jpg"] = cat(2)
    files["val/cat/smaller.jpg"] = cat(3).resize((80, 60))
    files["train/cat/low_quality.jpg"] = encoded(cat(4), quality=40)
    files["train/dog/cropped.jpg"] = cat(5).crop((4, 3, 156, 117))
    files["train/cat/blank.jpg"] = Image.new("RGB", (160, 120), (80, 120, 90))
    files["train/cat/dark.jpg"] = ImageEnhance.Brightness(scene(next(seeds))).enhance(0.1)
    files["train/cat/blurred.jpg"] = scene(next(seeds)).filter(ImageFilter.GaussianBlur(5))
    files["train/cat/tiny.jpg"] = scene(next(seeds), (30, 24))
    files["train/cat/long.jpg"] = scene(next(seeds), (640, 60))
    files["train/cat/turned.jpg"] = encoded(scene(next(seeds)), exif=exif(6))
    files["train/cat/really_png.jpg"] = encoded(scene(next(seeds)), "PNG")
    files["train/cat/huge.jpg"] = scene(next(seeds), (1400, 1100))
    gray = scene(next(seeds)).convert("L").point(lambda level: min(255, level + 100))
    files["train/dog/red.jpg"] = Image.merge("RGB", (gray, *[Image.new("L", gray.size)] * 2))
    contents = {
        name: each if isinstance(each, bytes) else encoded(each) for name, each in files.items()
    }
    return make_tree(root, contents)
