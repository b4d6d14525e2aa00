"""Input of all candidates, created once: folders of photographs and the expected images."""

from __future__ import annotations

import io
import json
import zlib
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from contenders.adapter import (
    LATENT,
    SIDE,
    crop,
    entries,
    make_once,
    resize_and_crop,
    resized,
    square,
    whole,
)
from harness import show
from PIL import Image, UnidentifiedImageError

LARGE = (2000, 1500)
"""Width and height of what stands for a camera's photographs."""


def make(photos: Path, work: Path, copies: int) -> None:
    """Make everything in ``work``, or find that it is there.

    Args:
        photos: An image folder of photographs.
        work: Where to; the same for another run.
        copies: How many times each photograph is taken.

    Raises:
        SystemExit: If ``work`` was made from something else.
    """
    chosen = [path for path in sorted(photos.glob("*/*")) if _is_large_enough(path)]
    if not chosen:
        raise SystemExit(f"{photos} has no class folders with images of at least 256 pixels")
    _stamp(work, {"photographs": _digest(chosen), "copies": copies})
    for name, content in FOLDERS.items():
        show(f"making the folder {name}")
        times = max(1, copies // 5) if name == "large" else copies
        make_once(work / name, lambda to, n=times, c=content: _write(chosen, to, n, c))  # type: ignore[misc]
    show("making latents")
    make_once(work / "latents", lambda to: _latents(to, len(chosen) * copies))
    references: list[tuple[str, str, Callable[[Path], Any]]] = [
        ("crop", "jpeg256", partial(_transformed, crop)),
        ("resize", "originals", partial(_transformed, resize_and_crop)),
        ("raw", "pixels224", partial(_transformed, whole)),
        ("random-originals", "originals", partial(_transformed, square)),
        ("random-large", "large", partial(_transformed, square)),
        ("latents", "latents", np.load),
    ]
    for name, folder, load in references:
        show(f"making the reference {name}")
        make_once(work / "references" / name, partial(_refer, work / folder, load))


def describe(work: Path) -> list[str]:
    """Say what the folders hold."""
    lines = []
    for name in ("originals", "jpeg256", "large"):
        files = [path for path in (work / name).rglob("*") if path.is_file()]
        size = sum(path.stat().st_size for path in files)
        lines.append(f"{name}: {len(files)} files, {size / len(files) / 1000:.0f} KB in the mean")
    return lines


def _is_large_enough(path: Path) -> bool:
    try:
        with Image.open(path) as image:
            return min(image.size) >= 256
    except UnidentifiedImageError:
        return False  # a note beside the photographs


def _digest(paths: Iterable[Path]) -> str:
    value = 0
    for path in paths:
        value = zlib.crc32(path.read_bytes(), zlib.crc32(path.name.encode(), value))
    return f"{value:08x}"


def _stamp(work: Path, made_from: dict[str, Any]) -> None:
    place = work / "made-from.json"
    if place.exists() and json.loads(place.read_text("utf-8")) != made_from:
        raise SystemExit(
            f"{work} was made from other photographs or numbers of copies "
            f"({place.read_text('utf-8')}, not {json.dumps(made_from)}); give an empty --work"
        )
    work.mkdir(parents=True, exist_ok=True)
    place.write_text(json.dumps(made_from), "utf-8")


def _write(chosen: list[Path], target: Path, copies: int, content: Callable[[Path], bytes]) -> None:
    """Write each file ``copies`` times, so that neighbors in path order differ."""
    for path in chosen:
        data = content(path)
        suffix = ".ppm" if data[:2] == b"P6" else ".jpg"
        folder = target / path.parent.name
        folder.mkdir(exist_ok=True)
        for number in range(copies):
            (folder / f"{number:02d}_{path.stem}{suffix}").write_bytes(data)


def _smaller(path: Path) -> bytes:
    with Image.open(path) as image:
        return _jpeg(resized(image.convert("RGB")))


def _pixels(path: Path) -> bytes:
    """Return the center of the smaller JPEG, as a PPM file: raw pixels with a header."""
    with Image.open(io.BytesIO(_smaller(path))) as image:
        pixels = crop(image).permute(1, 2, 0).numpy()
    return b"P6\n%d %d\n255\n" % (SIDE, SIDE) + pixels.tobytes()


def _enlarged(path: Path) -> bytes:
    with Image.open(path) as image:
        return _jpeg(image.convert("RGB").resize(LARGE, Image.Resampling.BICUBIC))


FOLDERS: dict[str, Callable[[Path], bytes]] = {
    "originals": Path.read_bytes,
    "jpeg256": _smaller,
    "pixels224": _pixels,
    "large": _enlarged,
}
"""Folders of images, and what each makes of a photograph."""


def _jpeg(image: Image.Image) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, "JPEG", quality=90)
    return buffer.getvalue()


def _transformed(transform: Callable[[Image.Image], Any], path: Path) -> Any:
    with Image.open(path) as image:
        return transform(image.convert("RGB")).numpy()


def _refer(folder: Path, load: Callable[[Path], Any], target: Path) -> None:
    """Write the values of all files of a folder, channels last, with labels and paths."""
    found = entries(folder)
    first = load(folder / found[0][0]).transpose(1, 2, 0)
    shape = (len(found), *first.shape)
    values = np.lib.format.open_memmap(target / "images.npy", "w+", first.dtype, shape)
    for row, (path, _) in enumerate(found):
        values[row] = load(folder / path).transpose(1, 2, 0)
    np.save(target / "digests.npy", [value.mean(dtype=np.float64) for value in values])
    np.save(target / "labels.npy", [label for _, label in found])
    (target / "paths.json").write_text(json.dumps([path for path, _ in found]), "utf-8")


def _latents(target: Path, count: int) -> None:
    """Write arrays of the size of an autoencoder's latents, each in a file."""
    rng = np.random.default_rng(0)
    for name in "ab":
        (target / name).mkdir()
    for number in range(count):
        values = rng.standard_normal(LATENT, np.float32).astype(np.float16)
        np.save(target / "ab"[number % 2] / f"{number:06d}.npy", values)
