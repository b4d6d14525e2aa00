"""Valid inputs to damage: images of all kinds, records, shards and datasets."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import numpy as np
from helpers import encoded, picture
from PIL import Image

from shardkit import convert
from shardkit.codecs.planes import from_rgb
from shardkit.contracts import Format, ShardSpec
from shardkit.kinds.field import Field, Schema, describe_schema
from shardkit.record import PLANES, Record, dump_json
from shardkit.system.npy import npy_header

RAW_SHAPE = (2, 3, 3)


def image_file(kind: str, mode: str = "RGB", **options: Any) -> bytes:
    """Return a small picture as the bytes of a file; ``kind`` is Pillow's name of the format."""
    return encoded(picture(12, 9, mode=mode), kind, **options)


def pictures() -> dict[str, list[bytes]]:
    """Return pictures of each kind of image field but ``raw``, as many as differ in structure."""
    exif = Image.Exif()
    exif[0x0112] = 6
    text = {"icc_profile": b"icc " * 40, "exif": exif.tobytes()}
    return {
        "jpg": [
            image_file("JPEG", quality=80),
            image_file("JPEG", quality=80, progressive=True, exif=exif.tobytes()),
            image_file("JPEG", "L"),
            image_file("JPEG", "CMYK"),
            image_file("JPEG", subsampling=1, restart_marker_blocks=1, comment=b"hello"),
            image_file("MPO", **_animated()),
        ],
        "png": [
            image_file("PNG"),
            image_file("PNG", "P", transparency=b"\0\x80\xff"),
            image_file("PNG", "LA"),
            image_file("PNG", "I;16"),
            image_file("PNG", "1"),
            image_file("PNG", "RGBA", **text),
            image_file("PNG", **_animated()),
        ],
        "webp": [
            image_file("WEBP", quality=60),
            image_file("WEBP", "RGBA", lossless=True, **text),
            image_file("WEBP", **_animated()),
        ],
        "bmp": [image_file("BMP", mode) for mode in ("RGB", "L", "1", "P", "RGBA")],
        "gif": [
            image_file("GIF", "P"),
            image_file("GIF", "L", transparency=3),
            image_file("GIF", **_animated()),
        ],
        "tiff": [
            image_file("TIFF"),
            image_file("TIFF", "I;16"),
            image_file("TIFF", "CMYK"),
            *(
                image_file("TIFF", "L", compression=name)
                for name in ("tiff_lzw", "packbits", "tiff_adobe_deflate")
            ),
            image_file("TIFF", compression="jpeg", exif=exif),
            image_file("TIFF", "1", compression="group4"),
            image_file("TIFF", **_animated()),
        ],
        "ppm": [
            *(image_file("PPM", mode) for mode in ("RGB", "L", "1", "I;16")),
            b"P3 2 2 255 1 2 3 4 5 6 7 8 9 10 11 12\n",
            b"P2\n# a comment\n2 1 65535 1 60000\n",
            b"P1 3 1 101\n",
        ],
        PLANES: [
            *(from_rgb(np.asarray(picture(12, 9)), chroma) for chroma in ("420", "444")),
            from_rgb(np.asarray(picture(12, 9, mode="L").convert("RGB")), "420"),
        ],
    }


def _animated() -> dict[str, Any]:
    more = [picture(12, 9, seed) for seed in (1, 2)]  # new ones: saving leaves settings in an image
    return {"save_all": True, "append_images": more, "duration": 50}


def records(raw: bool = False) -> list[Record]:
    """Return five records of one shard: labels, metadata, images of two kinds, or raw pixels."""
    made = []
    for row, (field, image) in enumerate(_images(raw)):
        meta = {"path": f"class {row % 2}/{row}.{field}", "width": 12, "height": 9, "n": row}
        fields = {field: image, "json": dump_json(meta)}
        if row != 3:
            fields["cls"] = b"%d" % (row % 2)
        made.append(Record(f"class%20{row % 2}/{row}", fields))
    return made


def _images(raw: bool) -> list[tuple[str, bytes]]:
    if raw:
        return [("raw", bytes(range(row, row + 18))) for row in range(5)]
    kinds = pictures()
    large = struct.pack("<5000H", *range(5000))  # in LMDB on a page of its own; no image at all
    return [
        ("jpg", kinds["jpg"][0]),
        ("png", kinds["png"][1]),
        ("jpg", kinds["jpg"][1] + large),
        ("webp", kinds["webp"][0]),
        ("gif", kinds["gif"][0]),
    ]


def several() -> list[Record]:
    """Return three records of `SCHEMA`; the second lacks most fields."""
    mask = pictures()["png"][0]
    made = []
    for row in range(3):
        meta: dict[str, Any] = {"path": str(row), "n": row, "boxes": [[0, 0, 1, row]] * row}
        fields = {"latent.npy": bytes(range(12)), "npy": npy_header((2,), np.uint8) + b"ab"}
        meta["points"] = [[row, 1, 2], [0, 0, 0]]
        if row != 1:
            fields |= {"mask.png": mask, "txt": b"text", "bin": b"bytes"}
            meta |= {"mask": {"width": 12, "height": 9}, "tags": [0, row]}
        made.append(Record(f"key{row}", {**fields, "json": dump_json(meta)}))
    return made


SCHEMA = {
    "mask": Field("mask"),
    "latent": Field("array", "float16", (2, 3)),
    "array": Field("array"),
    "text": Field("text"),
    "bytes": Field("bytes"),
    "n": Field("number", "int32"),
    "tags": Field("labels", classes=4),
    "boxes": Field("boxes"),
    "points": Field("keypoints", classes=2),
}


def write_shard(
    storage: Format, path: Path, made: list[Record], schema: Schema | None = None
) -> Path:
    """Write a shard; return its path."""
    meta: dict[str, Any] = {"shard": 0}
    if schema is not None:
        meta["schema"] = describe_schema(schema)
    writer = storage.write(path, ShardSpec(meta=meta, raw_shape=RAW_SHAPE))
    for record in made:
        writer.write(record)
    writer.close()
    return path


def shards(storage: Format, folder: Path) -> list[bytes]:
    """Return shards of a format: of pictures, of raw pixels, of nothing, of many small records."""
    many = [
        Record(f"{row:03d}/" + "x" * (1 + row % 90), {"txt": b"%d" % row, "gif": b"GIF89a"})
        for row in range(130)
    ]
    contents = [(made, None) for made in (records(), records(raw=True), [], many)]
    found = []
    for made, schema in (*contents, (several(), SCHEMA)):
        path = write_shard(storage, folder / f"made{storage.suffix}", made, schema)
        found.append(path.read_bytes())
        path.unlink()
    return found


def dataset(to: Any, folder: Path, *, raw: bool = False) -> Path:
    """Convert eleven small pictures to a dataset of three shards; return its directory."""
    source = folder / f"source-{to}-{raw}"
    for row in range(11):
        kind = ("JPEG", "PNG", "WEBP")[row % 3]
        path = source / f"class {row % 2}" / f"{row:02d}.{kind.lower()}"
        path.parent.mkdir(parents=True, exist_ok=True)
        width, height = (8, 8) if row else (40, 90)
        y, x = np.mgrid[0:height, 0:width]
        grain = np.random.default_rng(row).integers(0, 9, (3, height, width))
        planes = [(x * (9 + c) + y * (5 + row) + grain[c]) % 256 for c in range(3)]
        Image.fromarray(np.stack(planes, axis=-1).astype(np.uint8)).save(path, kind)
    options: dict[str, Any] = {"encode": "raw", "resize": (6, 5), "resize_mode": "stretch"}
    options["enlarge"] = True
    target = folder / f"dataset-{to}-{raw}"
    convert(source, target, to=to, shard_samples=4, **(options if raw else {}))
    return target
