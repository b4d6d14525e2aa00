"""Files in an object store convert to the same bytes as the same files in a local folder."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from buckets import BUCKET, Bucket
from foreign import (
    Images,
    make_beton,
    make_hdf5,
    make_hdf5_arrays,
    make_parquet,
    make_table,
    make_tar,
    make_tfrecord,
    png_of,
)
from helpers import invoke, tree

IMAGES: Images = {
    f"{name}/{number}.png": png_of(np.full((8, 8, 3), 20 * number + label, np.uint8))
    for label, name in enumerate(("cat", "dog"))
    for number in range(6)
}

Make = Callable[[Path, Images], Path]

CASES: dict[str, tuple[Make, str, tuple[str, ...]]] = {
    "webdataset": (make_tar, "webdataset", ()),
    "tfrecord": (make_tfrecord, "tfrecord", ()),
    "ffcv": (make_beton, "ffcv", ()),
    "hdf5": (make_hdf5, "hdf5", ("--image", "jpeg", "--label", "label")),
    "hdf5, arrays": (make_hdf5_arrays, "hdf5", ("--image", "x", "--label", "y")),
    "parquet": (make_parquet, "huggingface", ("--name", "image")),
    **{
        f"table, {suffix}": (
            partial(make_table, suffix=suffix),
            "table",
            ("--image", "path", "--label", "class"),
        )
        for suffix in ("csv", "tsv", "jsonl", "parquet")
    },
}


@pytest.mark.parametrize("case", CASES)
def test_files_convert_by_url_to_the_same_bytes(case: str, bucket: Bucket, tmp_path: Path) -> None:
    make, kind, options = CASES[case]
    for name in ("source", "alone"):
        (tmp_path / name).mkdir()
    made = make(tmp_path / "source", IMAGES)
    path = made.rename(tmp_path / "alone" / made.name)  # not above a table's images: that is stated
    bucket.put(f"in/{path.name}", path.read_bytes())
    root = ("--root", made.parent) if kind == "table" else ()
    more = ("--to", "webdataset", *options, *root)

    near = invoke("convert", kind, path, tmp_path / "near", *more)
    url, copies = f"s3://{BUCKET}/in/{path.name}", ("--cache", tmp_path / "copies")
    far = invoke("convert", kind, url, tmp_path / "far", *more, *copies)

    assert (near.exit_code, far.exit_code) == (0, 0), near.output + far.output
    assert tree(tmp_path / "far") == tree(tmp_path / "near")
