"""Convert what other libraries wrote, and compare every image and label with what they were given.

    python scripts/bench/imports.py PHOTOS FOLDER [--count 10000] [--rounds 3]

PHOTOS has class folders of JPEG files, which are repeated up to the count, each with its number
appended, so all differ. FOLDER is made, and removed at the end. Streaming and LitData store
the files; FFCV stores pixels, of 64 x 64, since it encodes JPEGs anew. Each writes in its own
environment (scripts/bench/peers streaming litdata ffcv). Then each is converted in turn with the
folder of the same images, which gives the ratio of their speeds.
"""

from __future__ import annotations

import argparse
import io
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from importlib import import_module
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
from PIL import Image

ROOT = Path(__file__).parents[2]
KINDS = ("mds", "litdata", "ffcv")
PEERS = {"mds": "streaming", "litdata": "litdata", "ffcv": "ffcv"}
_SIDE = 64


def main() -> None:
    """Measure, or write in the environment of a library."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("photos", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--count", type=int, default=10_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--write", choices=KINDS, help="write only; used by the script itself")
    options = parser.parse_args()
    if options.write:
        WRITERS[options.write](options.folder, options.photos)
        return
    options.folder.mkdir(parents=True)
    try:
        _measure(options)
    finally:
        shutil.rmtree(options.folder)


def samples(folder: Path) -> Iterator[tuple[bytes, int]]:
    """Yield each image file with its label, in order."""
    for path in sorted(folder.glob("*/*.jpg")):
        yield path.read_bytes(), int(path.parent.name)


def small(data: bytes) -> Any:
    """Return the pixels that FFCV is given."""
    image = Image.open(io.BytesIO(data)).convert("RGB")
    return np.asarray(image.resize((_SIDE, _SIDE), Image.Resampling.BILINEAR))


def _write_mds(folder: Path, images: Path) -> None:
    for name in ("", ".datasets", ".transforms", ".transforms.functional"):  # which it only names
        module = sys.modules[f"torchvision{name}"] = ModuleType(f"torchvision{name}")
        module.__spec__ = ModuleSpec(module.__name__, None)
    vars(sys.modules["torchvision.datasets"])["VisionDataset"] = object
    vars(sys.modules["torchvision.transforms.functional"])["to_tensor"] = None
    writer = import_module("streaming").MDSWriter
    with writer(out=str(folder), columns={"image": "jpeg", "label": "int"}) as shards:
        for data, label in samples(images):
            shards.write({"image": data, "label": label})


def _write_litdata(folder: Path, images: Path) -> None:
    folder.mkdir()
    writer = import_module("litdata.streaming.writer").BinaryWriter(str(folder), chunk_bytes="64MB")
    for row, (data, label) in enumerate(samples(images)):
        writer.add_item(row, {"image": data, "label": label})
    writer.done()
    writer.merge()


class _Rows:
    """What FFCV's writer asks for."""

    def __init__(self, images: Path) -> None:
        self.rows = [(small(data), label) for data, label in samples(images)]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, row: int) -> tuple[Any, int]:
        return self.rows[row]


def _write_ffcv(folder: Path, images: Path) -> None:
    fields = import_module("ffcv.fields")
    columns = {"image": fields.RGBImageField(write_mode="raw"), "label": fields.IntField()}
    folder.mkdir()
    open_writer = import_module("ffcv.writer").DatasetWriter
    writer = open_writer(str(folder / "x.beton"), columns, num_workers=2)
    writer.from_indexed_dataset(_Rows(images))


WRITERS = {"mds": _write_mds, "litdata": _write_litdata, "ffcv": _write_ffcv}


def _measure(options: argparse.Namespace) -> None:
    folder, images = options.folder, options.folder / "images"
    photos = [path for path in sorted(options.photos.glob("*/*")) if path.is_file()]
    for label in range(10):
        (images / f"{label}").mkdir(parents=True)
    for row in range(options.count):
        data = photos[row % len(photos)].read_bytes() + b"%09d" % row
        (images / f"{row % 10}" / f"{row:06d}.jpg").write_bytes(data)
    total = sum(path.stat().st_size for path in images.glob("*/*"))
    print(f"{options.count:,} images, {total / 1e9:.2f} GB", flush=True)
    inputs = {}
    for kind in KINDS:
        python = ROOT / ".venv-peers" / PEERS[kind] / "bin" / "python"
        made = folder / kind
        command = [python, __file__, images, made, "--write", kind]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        inputs[kind] = made / "x.beton" if kind == "ffcv" else made
        _compare(kind, inputs[kind], images, folder / "dataset")
    seconds: dict[str, list[float]] = {"imagefolder": [], "mds": [], "litdata": []}
    inputs["imagefolder"] = images
    for _ in range(options.rounds):
        for kind, taken in seconds.items():
            taken.append(_convert(kind, inputs[kind], folder / "dataset"))
            shutil.rmtree(folder / "dataset")
    for kind in ("mds", "litdata"):
        ratios = [a / b for a, b in zip(seconds["imagefolder"], seconds[kind], strict=True)]
        print(
            f"{kind}: {statistics.median(seconds[kind]):.1f} s, {statistics.median(ratios):.2f} of "
            f"the speed of the folder ({min(ratios):.2f} to {max(ratios):.2f})"
        )


def _convert(kind: str, source: Path, target: Path) -> float:
    start = time.perf_counter()
    command = ["convert", kind, str(source), str(target), "--to", "lmdb", "--no-shuffle", "--quiet"]
    subprocess.run([sys.executable, "-m", "shardkit", *command], check=True)
    return time.perf_counter() - start


def _compare(kind: str, source: Path, images: Path, target: Path) -> None:
    """Convert, and compare each sample with what was written."""
    _convert(kind, source, target)
    dataset = import_module("shardkit").open_dataset(target, decode="bytes")
    for row, (data, label) in enumerate(samples(images)):
        stored, stored_label = dataset[row]
        equal = stored == data
        if kind == "ffcv":
            equal = np.array_equal(np.asarray(Image.open(io.BytesIO(stored))), small(data))
        if not equal or stored_label != label:
            raise SystemExit(f"{kind}: the sample {row} differs")
    print(f"{kind}: {len(dataset):,} samples have equal bytes, labels and order", flush=True)
    shutil.rmtree(target)


if __name__ == "__main__":
    main()
