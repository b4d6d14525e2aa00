"""The cache of a dataset in an object store on a slow link, compared with what the link can carry.

    python scripts/bench/link.py [--megabits 1000] [--delay 20] [--rounds 3] [--work DIR]

A server on the loopback answers each request after the delay (one round trip) and sends all answers
over one link of the given speed. TCP's slow start and lost packets are not simulated, nor TLS. The
limit is the size of all shards divided by the speed of the link. Each line reads a dataset once, in
order and without decoding, into an empty cache: its first batch waits for the first shard.

* ``plain client``: ranges of 8 MiB over 4 connections, without a file: what the server can do.
* ``shards`` and ``ranges``: the values of ``open_dataset(fetch=)``; several readers are processes
  with one cache, and each reads the whole dataset.

CPU seconds are those of the readers and their helpers, for each GB fetched. It takes 2 GB of disk
and 3 minutes.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import http.server
import io
import multiprocessing
import os
import re
import shutil
import socketserver
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import psutil
from PIL import Image

from shardkit import Sample, convert, make_loader, open_dataset

_T = TypeVar("_T")

SLICE = 64 << 10
"""Bytes that are sent at a time."""

_CREDIT = 0.02
"""Seconds that the link may catch up, as if by buffers: threads do not wake in time."""

_PART = 8 << 20


class Link:
    """A link that carries one thing after another."""

    def __init__(self, rate: float) -> None:
        self._rate = rate
        self._free = 0.0
        self._lock = threading.Lock()

    def carry(self, size: int) -> None:
        """Wait until so many bytes have passed."""
        with self._lock:
            self._free = max(self._free, time.monotonic() - _CREDIT) + size / self._rate
            end = self._free
        if (left := end - time.monotonic()) > 0:
            time.sleep(left)


class Server(socketserver.ThreadingMixIn, http.server.HTTPServer):
    daemon_threads = True
    request_queue_size = 128


def _serve(folder: Path, rate: float, delay: float, answer: Connection) -> None:
    link = Link(rate)

    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True

        def do_GET(self) -> None:
            time.sleep(delay)
            path = folder / self.path.lstrip("/")
            if not path.is_file():
                self._state(404, 0, 0)
                return
            with path.open("rb") as file:
                size = os.fstat(file.fileno()).st_size
                found = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
                start, end = (int(found[1]), int(found[2]) + 1) if found else (0, size)
                if found:
                    self._state(206, end - start, size, f"bytes {start}-{end - 1}/{size}")
                else:
                    self._state(200, size, size)
                while start < end and self.command == "GET":
                    link.carry(min(SLICE, end - start))
                    start += os.sendfile(
                        self.connection.fileno(), file.fileno(), start, min(SLICE, end - start)
                    )

        do_HEAD = do_GET  # noqa: N815

        def _state(self, status: int, length: int, size: int, content: str = "") -> None:
            self.send_response(status)
            self.send_header("Content-Length", str(length))
            self.send_header("Last-Modified", "Thu, 01 Jan 2026 00:00:00 GMT")
            self.send_header("ETag", f'"{size}"')
            if content:
                self.send_header("Content-Range", content)
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            """Print nothing."""

    server = Server(("127.0.0.1", 0), Handler)
    answer.send(server.server_address[1])
    server.serve_forever()


@contextlib.contextmanager
def serving(
    serve: Callable[[_T, float, float, Connection], None], served: _T, rate: float, delay: float
) -> Iterator[str]:
    """Serve something over a link, in a process of its own; yield its host and port."""
    here, there = multiprocessing.Pipe()
    process = multiprocessing.get_context("fork").Process(
        target=serve, args=(served, rate, delay, there), daemon=True
    )
    process.start()
    try:
        yield f"127.0.0.1:{here.recv()}"
    finally:
        process.kill()
        process.join()


def make(folder: Path, shards: int, shard: int) -> None:
    """Make a dataset of shards of ``shard`` MiB: photographs of 100 KB, of noise."""
    rng = np.random.default_rng(0)
    photos = []
    for _ in range(32):
        file = io.BytesIO()
        pixels = rng.integers(0, 256, (256, 256, 3), np.uint8)
        Image.fromarray(pixels).save(file, "jpeg", quality=95)
        photos.append(file.getvalue())
    each = (shard << 20) // (sum(map(len, photos)) // len(photos) + 1536)
    samples = (Sample(f"{row:08d}", image=photos[row % 32]) for row in range(shards * each))
    convert(samples, folder, to="webdataset", shard_samples=each, check="header", workers=2)


def plain(host: str, folder: Path) -> tuple[float, float]:
    """Fetch all shards without files; return seconds, and CPU seconds."""
    begun, used = time.perf_counter(), time.process_time()
    parts = [
        (path.name, start)
        for path in sorted(folder.glob("shard-*"))
        for start in range(0, path.stat().st_size, _PART)
    ]

    def fetch(mine: list[tuple[str, int]]) -> None:
        client, room = http.client.HTTPConnection(host, timeout=60), bytearray(1 << 20)
        for name, start in mine:
            end = min(start + _PART, (folder / name).stat().st_size)
            client.request("GET", f"/{name}", headers={"Range": f"bytes={start}-{end - 1}"})
            answer = client.getresponse()
            while answer.readinto(room):
                pass

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(fetch, (parts[number::4] for number in range(4))))
    return time.perf_counter() - begun, time.process_time() - used


def _cpu() -> float:
    """Return the CPU seconds of this process and its helper, which runs as long."""
    us = psutil.Process()
    times = [each.cpu_times() for each in (us, *us.children(recursive=True))]
    return sum(each.user + each.system for each in times)


def _read(url: str, cache: Path, fetch: str, start: Any, answer: Connection) -> None:
    dataset = open_dataset(url, decode="bytes", cache=cache, fetch=fetch)
    options: dict[str, Any] = {"num_workers": 0, "collate_fn": len}
    start.wait()
    begun, used = time.perf_counter(), _cpu()
    images = sum(make_loader(dataset, 64, **options))
    answer.send((time.perf_counter() - begun, _cpu() - used))
    assert images == len(dataset)


def read(url: str, cache: Path, fetch: str, readers: int) -> tuple[float, float]:
    """Read the dataset in several processes; return the longest seconds, and all CPU seconds."""
    spawn = multiprocessing.get_context("spawn")
    start, pipes, processes = spawn.Barrier(readers), [], []
    for _ in range(readers):
        here, there = spawn.Pipe()
        pipes.append(here)
        processes.append(spawn.Process(target=_read, args=(url, cache, fetch, start, there)))
        processes[-1].start()
    found = [pipe.recv() for pipe in pipes]
    for process in processes:
        process.join()
    return max(seconds for seconds, _ in found), sum(cpu for _, cpu in found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--megabits", type=float, default=1000.0, help="Speed of the link.")
    parser.add_argument("--delay", type=float, default=20.0, help="Milliseconds of a round trip.")
    parser.add_argument("--shards", type=int, default=16, help="Number of shards.")
    parser.add_argument("--shard", type=int, default=64, help="MiB of a shard.")
    parser.add_argument("--rounds", type=int, default=3, help="Interleaved rounds.")
    parser.add_argument("--readers", type=int, default=4, help="Processes with one cache.")
    parser.add_argument("--work", type=Path, help="Where to put the data (default: temporary).")
    given = parser.parse_args()
    rate = given.megabits * 1e6 / 8
    with tempfile.TemporaryDirectory(dir=given.work) as work:
        folder = Path(work, "data")
        make(folder, given.shards, given.shard)
        size = sum(path.stat().st_size for path in folder.glob("shard-*"))
        print(
            f"{given.shards} shards, {size / 1e6:,.0f} MB; limit {rate / 1e6:,.1f} MB/s, "
            f"{size / rate:.2f} s; round trip {given.delay:g} ms"
        )
        found: dict[str, list[tuple[float, float]]] = {}
        with serving(_serve, folder, rate, given.delay / 1e3) as host:
            for number in range(given.rounds):
                found.setdefault("plain client", []).append(plain(host, folder))
                for fetch in ("shards", "ranges"):
                    for readers in (1, given.readers):
                        cache = Path(work, f"cache-{number}-{fetch}-{readers}")
                        line = f"{fetch}, {readers} reader{'s' * (readers > 1)}"
                        measured = read(f"http://{host}", cache, fetch, readers)
                        found.setdefault(line, []).append(measured)
                        shutil.rmtree(cache)
    for line, rounds in found.items():
        seconds = statistics.median(each for each, _ in rounds)
        cpu = statistics.median(each for _, each in rounds)
        print(
            f"{line:20} {size / seconds / 1e6:7.1f} MB/s  {size / seconds / rate:4.0%} of the link"
            f"  {seconds:6.2f} s  {cpu / size * 1e9:5.2f} CPU s/GB"
        )


if __name__ == "__main__":
    main()
