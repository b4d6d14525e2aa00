"""Convert and attach a file of 10,000 samples that FFCV wrote, and read it as FFCV does.

    python scripts/bench/beton.py [--samples 10000] [--rounds 3] [--work DIR]

FFCV's own package, in the environment that ``scripts/bench/peers ffcv`` makes, writes JPEGs of 256
pixels and labels in a random order. First, bytes, labels and order after `convert` and `attach`
are compared with those that FFCV's reader finds. Then FFCV and shardkit read the file in
interleaved rounds, each in a fresh process: a center crop of 224, shuffled, with two workers; the
second epoch counts. FFCV decodes with the fast DCT, shardkit exactly unless the table says so.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).parents[2]
SIDE, BATCH, WORKERS = 224, 64, 2


def main() -> None:
    """Run the parent, or a part of it in a process of its own."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--samples", type=int, default=10_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--work", type=Path)
    parser.add_argument("--part", choices=PARTS)
    given = parser.parse_args()
    if given.part:
        print(json.dumps(PARTS[given.part](given.work, given.samples)))
        return
    with tempfile.TemporaryDirectory() as temporary:
        _run((given.work or Path(temporary)).absolute(), given.samples, given.rounds)


def _run(work: Path, samples: int, rounds: int) -> None:
    print(f"{_processor()}, {os.cpu_count()} CPUs, load before: {os.getloadavg()[0]:.1f}")
    print(_part("write", work, samples))
    print(_part("compare", work, samples))
    names = ("ffcv", "attached", "attached-fast", "converted")
    rates: dict[str, list[float]] = {name: [] for name in names}
    for _ in range(rounds):
        for name in names:
            rates[name].append(_part(name, work, samples)["images/s"])
    for name, values in rates.items():
        speedup = statistics.median(
            value / base for value, base in zip(values, rates["ffcv"], strict=True)
        )
        listed = ", ".join(f"{value:,.0f}" for value in values)
        print(f"{name:14} {statistics.median(values):8,.0f} images/s  {speedup:.2f}x  ({listed})")


def _part(name: str, work: Path, samples: int) -> Any:
    peers = Path(os.environ.get("SHARDKIT_PEERS", ROOT / ".venv-peers"))
    program = peers / "ffcv" / "bin" / "python" if name in ("write", "ffcv") else sys.executable
    words = [program, __file__, "--part", name, "--work", work, "--samples", samples]
    environment = {**os.environ, "XDG_STATE_HOME": str(work / "state"), "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [*map(str, words)], check=True, env=environment, stdout=subprocess.PIPE, text=True
    )
    return json.loads(done.stdout.splitlines()[-1])


class _Pictures:
    """Smooth images with noise, of different sizes, and labels."""

    def __init__(self, samples: int) -> None:
        self.labels = np.random.default_rng(0).integers(0, 1000, samples)

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, row: int) -> tuple[Any, int]:
        rng = np.random.default_rng(row)
        height, width = [(256, 341), (341, 256), (256, 256), (256, 384)][row % 4]
        coarse = rng.integers(0, 256, (8, 8, 3)).astype(np.float32)
        rows = np.linspace(0, 7, height).astype(int)
        columns = np.linspace(0, 7, width).astype(int)
        image = coarse[rows][:, columns] + rng.integers(-20, 20, (height, width, 1))
        return np.clip(image, 0, 255).astype(np.uint8), int(self.labels[row])


def _write(work: Path, samples: int) -> dict[str, Any]:
    """Write the file, and the label and digest that FFCV reads of each sample."""
    from ffcv.fields import IntField, RGBImageField  # type: ignore[import-not-found]
    from ffcv.memory_managers.os_cache import (  # type: ignore[import-not-found]
        OSCacheManager,
    )
    from ffcv.reader import Reader  # type: ignore[import-not-found]
    from ffcv.writer import DatasetWriter  # type: ignore[import-not-found]

    work.mkdir(parents=True, exist_ok=True)
    path, started = work / "data.beton", time.perf_counter()
    fields = {"image": RGBImageField(write_mode="jpg"), "label": IntField()}
    writer = DatasetWriter(str(path), fields, num_workers=WORKERS)
    writer.from_indexed_dataset(_Pictures(samples), shuffle_indices=True)
    seconds = time.perf_counter() - started
    reader = Reader(str(path))
    sizes, data = OSCacheManager(reader).ptr_to_size, np.memmap(path, "u1", "r")
    expected = []
    for image, label in reader.metadata:
        start = int(image[3])
        content = data[start : start + int(sizes[image[3]])].tobytes()
        expected.append([int(label), hashlib.sha256(content).hexdigest()])
    (work / "expected.json").write_text(json.dumps(expected))
    return {"samples": samples, "bytes": path.stat().st_size, "write s": round(seconds, 1)}


def _compare(work: Path, samples: int) -> dict[str, Any]:
    """Convert and attach the file; compare bytes, labels and order."""
    from shardkit import attach, convert, open_dataset, open_source

    source, seconds = open_source("ffcv", work / "data.beton"), []
    started = time.perf_counter()
    convert(source, work / "converted", to="lmdb", shuffle=False)
    seconds.append(time.perf_counter() - started)
    attach(source, work / "attached")
    seconds.append(time.perf_counter() - started - seconds[0])
    expected = json.loads((work / "expected.json").read_text())
    for name in ("converted", "attached"):
        dataset = open_dataset(work / name, decode="bytes")
        pairs = [
            [int(dataset.classes[n]), hashlib.sha256(data).hexdigest()] for data, n in dataset[:]
        ]
        if pairs != expected or len(pairs) != samples:
            raise SystemExit(f"{name}: the samples differ from those that FFCV reads")
    return {
        "equal bytes, labels and order": samples,
        "convert s": round(seconds[0], 1),
        "attach s": round(seconds[1], 1),
    }


def _ffcv(work: Path, samples: int) -> dict[str, Any]:
    from ffcv.fields.decoders import (  # type: ignore[import-not-found]
        CenterCropRGBImageDecoder,
        IntDecoder,
    )
    from ffcv.loader import Loader, OrderOption  # type: ignore[import-not-found]
    from ffcv.transforms import ToTensor, ToTorchImage  # type: ignore[import-not-found]

    crop = CenterCropRGBImageDecoder((SIDE, SIDE), ratio=SIDE / 256)
    loader = Loader(
        str(work / "data.beton"),
        BATCH,
        num_workers=WORKERS,
        order=OrderOption.RANDOM,
        os_cache=True,
        drop_last=False,
        pipelines={
            "image": [crop, ToTensor(), ToTorchImage()],
            "label": [IntDecoder(), ToTensor()],
        },
    )
    return _timed(loader, samples)


def _shardkit(name: str, work: Path, samples: int, **options: Any) -> dict[str, Any]:
    from shardkit import CenterCrop, make_loader, open_dataset

    dataset = open_dataset(work / name, decode=CenterCrop(SIDE), **options)
    return _timed(make_loader(dataset, BATCH, shuffle=True, num_workers=WORKERS), samples)


def _timed(loader: Iterable[Any], samples: int) -> dict[str, Any]:
    """Read two epochs; return the rate of the second."""
    seconds = 0.0
    for _ in range(2):
        started, count = time.perf_counter(), 0
        for images, _labels in loader:
            count += len(images)
        seconds = time.perf_counter() - started
        if count != samples:
            raise SystemExit(f"an epoch has {count} images")
    return {"images/s": samples / seconds}


def _processor() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = [line.partition(": ")[2] for line in lines if line.startswith("model name")]
    return next(iter(names), platform.processor())


PARTS: dict[str, Any] = {
    "write": _write,
    "compare": _compare,
    "ffcv": _ffcv,
    "attached": lambda work, samples: _shardkit("attached", work, samples),
    "attached-fast": lambda work, samples: _shardkit("attached", work, samples, jpeg="fast"),
    "converted": lambda work, samples: _shardkit("converted", work, samples),
}

if __name__ == "__main__":
    main()
