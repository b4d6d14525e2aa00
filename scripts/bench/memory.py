"""Memory used for loading: by the thread engine, and by each worker of the process engine.

    python scripts/bench/memory.py [--work DIR]

Threads: the blocks of batches that are alive at once, and the peak of resident memory, for a
consumer that is slower than they are and one that keeps every batch. Processes: what a worker has
above one of a bare DataLoader that is started in the same way and gives numbers of a tensor. It
takes half a minute, and no data: the pictures are made.
"""

from __future__ import annotations

import argparse
import io
import itertools
import multiprocessing
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from PIL import Image
from torch.utils.data import DataLoader, TensorDataset

from shardkit import CenterCrop, make_loader, open_dataset
from shardkit.conversion.convert import convert
from shardkit.torch.data.memory import BlockPool
from shardkit.torch.engine import threads

BATCH = 64
SIDE = 224
BLOCK = BATCH * 3 * SIDE * SIDE / 2**20
"""MB of a batch."""

WORKERS = 2
IMAGES = 1024

_Result = TypeVar("_Result")


class Memory(NamedTuple):
    """What a process has in memory, in MB."""

    own: float
    """Written by it alone, and no shared memory: what it costs whatever else is going on."""
    private: float
    """Mapped by no other process (USS): the same, and pages of files that only it maps."""
    pss: float
    """All that it maps, each page divided by the number of processes that map it."""
    shared_memory: float
    """The part of ``pss`` that is shared memory: batches on their way."""
    rss: float
    """All that it maps, pages of files in the page cache among them."""

    @classmethod
    def of(cls, process: int | str = "self") -> Memory:
        """Return that of a process, from the kernel's account of its pages."""
        size: Counter[str] = Counter()
        shared = False
        for line in Path(f"/proc/{process}/smaps").read_text().splitlines():
            name, *values = line.split()
            if not name.endswith(":"):
                shared = "/dev/shm/" in line
            elif values[-1:] == ["kB"]:
                size[name] += int(values[0])
                size[name + "shared"] += int(values[0]) * shared
        private = size["Private_Clean:"] + size["Private_Dirty:"]
        own = size["Private_Dirty:"] - size["Private_Dirty:shared"]
        found = own, private, size["Pss:"], size["Pss:shared"], size["Rss:"]
        return cls(*(kilobytes / 1024 for kilobytes in found))

    def above(self, other: Memory) -> Memory:
        """Return what this is above another."""
        return Memory(*(one - two for one, two in zip(self, other, strict=True)))


def of_children() -> Memory:
    """Return the mean over the worker processes of this process."""
    pids = [process.pid for process in multiprocessing.active_children()]
    found = [Memory.of(pid) for pid in pids if pid is not None]
    return Memory(*(statistics.mean(column) for column in zip(*found, strict=True)))


def fresh(function: Callable[[], _Result]) -> _Result:
    """Call a function in an interpreter of its own that has imported all of this."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        return pool.submit(function).result()


def table(title: str, columns: tuple[str, ...], lines: list[tuple[object, ...]]) -> None:
    """Print a Markdown table, numbers to three digits."""
    print(f"\n**{title}**\n\n| {' | '.join(columns)} |\n|---{'|---:' * (len(columns) - 1)}|")
    for line in lines:
        cells = (f"{v:,.3g}" if isinstance(v, float) and v < 100 else v for v in line)
        print("|", " | ".join(f"{v:,.0f}" if isinstance(v, float) else str(v) for v in cells), "|")


def timed(call: Callable[[], object]) -> float:
    """Return the milliseconds that a call takes."""
    begun = time.perf_counter()
    call()
    return 1000 * (time.perf_counter() - begun)


def pictures(count: int) -> list[bytes]:
    """Return JPEGs of 500 x 375 pixels with smooth parts and some grain, as photographs have."""
    rng = np.random.default_rng(0)
    made = []
    for _ in range(count):
        coarse = Image.fromarray(rng.integers(0, 256, (7, 9, 3), np.uint8))
        smooth = np.asarray(coarse.resize((500, 375), Image.Resampling.BICUBIC), np.int16)
        grain = smooth + rng.normal(0, 6, (375, 500, 1)).astype(np.int16)
        buffer = io.BytesIO()
        Image.fromarray(grain.clip(0, 255).astype(np.uint8)).save(buffer, "JPEG", quality=78)
        made.append(buffer.getvalue())
    return made


class Watched(BlockPool):
    """A pool that notes the most blocks that it ever had, in use and free."""

    most = 0

    def new(self, shape: tuple[int, ...]) -> torch.Tensor:
        """Return a block as any pool does."""
        block = super().new(shape)
        Watched.most = max(Watched.most, len(self._lent) + sum(map(len, self._free.values())))
        return block


def write_photos(folder: Path) -> Path:
    """Make an LMDB dataset of pictures below ``folder``; return its place."""
    source = folder / "photos" / "one"
    source.mkdir(parents=True)
    for number, picture in zip(range(IMAGES), itertools.cycle(pictures(32)), strict=False):
        (source / f"{number:04d}.jpg").write_bytes(picture)
    convert(source.parent, folder / "made", to="lmdb")
    return folder / "made"


def by_threads(path: Path, prefetch: int | None, *, keep: bool) -> tuple[int, float]:
    """Read 14 batches, slowly; return the most blocks there were, and MB at the peak above none.

    Args:
        path: A dataset.
        prefetch: Batches ahead; None reads in the main thread.
        keep: Whether the consumer keeps all batches.
    """
    vars(threads)["BlockPool"] = Watched
    dataset = open_dataset(path, decode=CenterCrop(SIDE))
    dataset[:BATCH]
    before = Memory.of().rss
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins again
    workers = 0 if prefetch is None else min(WORKERS, prefetch)
    options: dict[str, Any] = {
        "engine": "thread",
        "num_workers": workers,
        "prefetch_factor": prefetch and prefetch // workers,
    }
    kept = []
    for batch in itertools.islice(make_loader(dataset, BATCH, shuffle=True, **options), 14):
        time.sleep(0.12 if prefetch else 0)
        if keep:
            kept.append(batch)
    status = Path("/proc/self/status").read_text().splitlines()
    peak = next(int(line.split()[1]) for line in status if line.startswith("VmHWM:"))
    return Watched.most, peak / 1024 - before


def of_bare_worker(method: str) -> Memory:
    """Return what a worker of a DataLoader over a tensor of numbers has, torch being loaded.

    A fork server loads torch once, as that of shardkit does; without that a bare worker would load
    it by itself, and have more of its own than ours.
    """
    if method == "forkserver":
        multiprocessing.set_forkserver_preload(["__main__", "torch"])
    numbers = TensorDataset(torch.arange(100 * BATCH))
    loader = DataLoader(
        numbers, BATCH, num_workers=WORKERS, multiprocessing_context=method, persistent_workers=True
    )
    for _ in itertools.islice(loader, 60):
        pass
    return of_children()


def of_worker(path: Path, method: str) -> Memory:
    """Return what a worker of the process engine has after three epochs."""
    options: dict[str, Any] = {"engine": "process", "num_workers": WORKERS, "start_method": method}
    loader = make_loader(
        open_dataset(path, decode=CenterCrop(SIDE)), BATCH, shuffle=True, **options
    )
    for _ in range(3):
        for _ in loader:
            pass
    found = of_children()
    loader.close()
    return found


def show_threads(path: Path) -> None:
    """Blocks and peak memory of the thread engine."""
    lines: list[tuple[object, ...]] = []
    for prefetch in (None, 1, 2, 4, 8):
        blocks, peak = fresh(partial(by_threads, path, prefetch, keep=False))
        bound = "2, main thread" if prefetch is None else f"{prefetch} + 2"
        lines.append((bound, blocks, blocks * BLOCK, peak))
    title = f"a slow consumer and {WORKERS} threads, batches of {BLOCK:.1f} MB"
    table(title, ("prefetch + 2", "most blocks", "their MB", "peak, MB above none"), lines)
    blocks, peak = fresh(partial(by_threads, path, 4, keep=True))
    print(f"\nIf 14 batches are kept, prefetch 4: {blocks} blocks, {peak:,.0f} MB above none.")


def show_processes(path: Path) -> None:
    """Memory of worker processes above bare ones."""
    lines: list[tuple[object, ...]] = []
    for method in ("fork", "forkserver"):
        bare = fresh(partial(of_bare_worker, method))
        ours = fresh(partial(of_worker, path, method))
        more = ours.above(bare)
        apart = more.pss - more.shared_memory
        lines.append((method, bare.private, ours.private, more.private, apart, ours.shared_memory))
    columns = (
        "start method",
        "bare worker, USS",
        "ours, USS",
        "more USS",
        "more PSS without batches",
        "batches, PSS",
    )
    table(f"each of {WORKERS} worker processes, MB", columns, lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--work", type=Path, help="Where to put the data (default: temporary).")
    given = parser.parse_args()
    begun = time.perf_counter()
    with tempfile.TemporaryDirectory(dir=given.work) as folder:
        path = write_photos(Path(folder))
        show_threads(path)
        show_processes(path)
    print(f"\n{time.perf_counter() - begun:.0f} s in all.")


if __name__ == "__main__":
    main()
