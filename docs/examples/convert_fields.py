"""Convert images with masks, captions and boxes: sample_data and its annotations.

    python convert_fields.py ../../sample_data annotations fields

Any object with ``len()`` and ``[number]`` is a source of samples; here each is a dict. The schema
states only what one sample cannot show: which classes there are.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from shardkit import Field, convert

SHAPES = ("circle", "square", "star", "triangle")


class Annotated:
    """The images of a folder, with the annotations of another."""

    def __init__(self, images: Path, annotations: Path) -> None:
        self.images = images
        self.annotations = annotations
        self.lines = (annotations / "annotations.jsonl").read_text().splitlines()

    def __len__(self) -> int:
        return len(self.lines)

    def __getitem__(self, number: int) -> dict[str, Any]:
        line = json.loads(self.lines[number])
        return {
            "image": self.images / line["image"],
            "mask": self.annotations / line["mask"],
            "label": line["label"],
            "caption": line["caption"],
            "boxes": line["boxes"],
        }


def main(images: str, annotations: str, target: str) -> None:
    """Convert all images; scale them, their masks and their boxes to 64 x 64 pixels."""
    made = convert(
        Annotated(Path(images), Path(annotations)),
        target,
        to="lmdb",
        schema={
            "label": Field("label", classes=SHAPES),
            "boxes": Field("boxes", classes=SHAPES),
        },
        resize="64x64",
    )
    for name, field in made.plan.scan.schema.items():
        print(f"{name}: {field}")


if __name__ == "__main__":
    main(*sys.argv[1:])
