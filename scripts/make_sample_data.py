"""Draw sample_data/: 96 small images of four shapes, some with odd names or encodings.

    python scripts/make_sample_data.py [DIRECTORY]

docs/examples/annotations has the mask of each image, and captions and boxes in
annotations.jsonl.

They are drawn, so no one else holds rights to them. The oddities occur in real folders: spaces and
umlauts in names, upper-case suffixes, two files that differ only in suffix, a PNG with
transparency, an EXIF orientation, and a file that is not an image.
"""

from __future__ import annotations

import json
import math
import random
import sys
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFilter

SHAPES = ("circle", "square", "star", "triangle")
EACH = 24
_ODD_NAMES = {
    ("circle", 1): "full moon.jpg",
    ("circle", 2): "Straßenschild größer.jpeg",
    ("square", 3): "window.v2.final.JPG",
    ("square", 4): "twin.jpg",
    ("square", 5): "twin.png",
    ("star", 6): "stern ★.png",
    ("triangle", 7): "pennant.webp",
}


_COLORS = {
    "white": (255, 255, 255),
    "gray": (170, 170, 170),
    "red": (255, 140, 140),
    "green": (140, 255, 140),
    "blue": (140, 140, 255),
    "yellow": (255, 255, 140),
    "pink": (255, 140, 255),
    "cyan": (140, 255, 255),
}
"""Names for captions."""


def draw(shape: str, number: int) -> Image.Image:
    """Return picture ``number`` of ``shape``, RGB, the same every time."""
    return _draw(shape, number)[0]


def _draw(shape: str, number: int) -> tuple[Image.Image, Image.Image, str]:
    """Return a picture, its mask (0, or 1 plus the position in `SHAPES`), and its caption."""
    rng = random.Random(f"{shape} {number}")
    width, height = rng.randint(80, 128), rng.randint(80, 128)
    ground = tuple(rng.randint(0, 110) for _ in range(3))
    color = tuple(rng.randint(140, 255) for _ in range(3))
    image = Image.new("RGB", (4 * width, 4 * height), ground)
    pen = ImageDraw.Draw(image)
    for _ in range(12):
        x, y = rng.randrange(4 * width), rng.randrange(4 * height)
        blot = tuple(min(255, part + rng.randint(0, 40)) for part in ground)
        pen.ellipse((x, y, x + rng.randint(40, 160), y + rng.randint(40, 160)), fill=blot)
    radius = rng.uniform(0.22, 0.4) * 4 * min(width, height)
    center = 4 * width * rng.uniform(0.42, 0.58), 4 * height * rng.uniform(0.42, 0.58)
    turn = rng.uniform(0, 2 * math.pi)
    cover = Image.new("L", image.size)
    for each, fill in ((pen, color), (ImageDraw.Draw(cover), 255)):
        if shape == "circle":
            each.ellipse(
                (center[0] - radius, center[1] - radius, center[0] + radius, center[1] + radius),
                fill=fill,
            )
        else:
            each.polygon(_corners(shape, center, radius, turn), fill=fill)
    picture = image.filter(ImageFilter.GaussianBlur(2))
    size = "small" if radius < 1.2 * min(width, height) else "large"
    return (
        picture.resize((width, height), Image.Resampling.BOX),
        cover.resize((width, height), Image.Resampling.BOX).point(
            [0] * 128 + [1 + SHAPES.index(shape)] * 128
        ),
        f"a {size} {_color_name(color)} {shape}",
    )


def _color_name(color: tuple[int, ...]) -> str:
    def distance(name: str) -> int:
        return sum((one - other) ** 2 for one, other in zip(color, _COLORS[name], strict=True))

    return min(_COLORS, key=distance)


def file_name(shape: str, number: int) -> str:
    """Return the name of the file of a picture."""
    return _ODD_NAMES.get((shape, number), f"{shape}_{number:02d}.jpg")


def main(directory: Path) -> None:
    """Draw everything below ``directory``."""
    for shape in SHAPES:
        (directory / shape).mkdir(parents=True, exist_ok=True)
        for number in range(EACH):
            _save(draw(shape, number), directory / shape / file_name(shape, number), number)
    note = "These pictures are drawn by scripts/make_sample_data.py.\n"
    (directory / "star" / "notes.txt").write_text(note, "utf-8")


def annotate(directory: Path) -> None:
    """Write the mask of each picture, and its caption and box, below ``directory``."""
    lines = []
    for label, shape in enumerate(SHAPES):
        (directory / "masks" / shape).mkdir(parents=True, exist_ok=True)
        for number in range(EACH):
            _, mask, caption = _draw(shape, number)
            image = f"{shape}/{file_name(shape, number)}"
            if _is_turned(image, number):
                mask = mask.transpose(Image.Transpose.ROTATE_90)
            name = f"masks/{shape}/{number:02d}.png"
            mask.save(directory / name, optimize=True)
            rows, columns = np.nonzero(np.asarray(mask))
            box = [columns.min(), rows.min(), columns.max() + 1, rows.max() + 1]
            line = {
                "image": image,
                "mask": name,
                "label": shape,
                "caption": caption,
                "boxes": [[*map(int, box), label]],
            }
            lines.append(json.dumps(line) + "\n")
    (directory / "annotations.jsonl").write_text("".join(lines), "ascii")


def _corners(
    shape: str, center: tuple[float, float], radius: float, turn: float
) -> list[tuple[float, float]]:
    count = {"triangle": 3, "square": 4, "star": 10}[shape]
    return [
        (
            center[0] + math.cos(turn + 2 * math.pi * n / count) * r,
            center[1] + math.sin(turn + 2 * math.pi * n / count) * r,
        )
        for n in range(count)
        for r in [radius * (0.45 if shape == "star" and n % 2 else 1)]
    ]


def _is_turned(name: str, number: int) -> bool:
    """Return whether a picture is stored turned, with an EXIF orientation."""
    return number == 9 and name.endswith(".jpg")


def _save(image: Image.Image, path: Path, number: int) -> None:
    if path.suffix == ".png":
        mask = Image.new("L", image.size, 255)
        ImageDraw.Draw(mask).rectangle((0, 0, image.width // 6, image.height), fill=0)
        image.putalpha(mask)
        image.save(path, optimize=True)
    elif path.suffix == ".webp":
        image.save(path, quality=85)
    elif _is_turned(path.name, number):
        exif = Image.Exif()
        exif[0x0112] = 6  # turn by 90 degrees to see it upright
        image.transpose(Image.Transpose.ROTATE_90).save(path, quality=85, exif=exif)
    else:
        image.save(path, quality=85)


if __name__ == "__main__":
    place = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parents[1] / "sample_data"
    main(place)
    annotate(place.parent / "docs" / "examples" / "annotations")
