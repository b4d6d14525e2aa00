"""A folder of images in an object store on a slow link: how much of the link a conversion uses.

    python scripts/bench/link_folder.py [--megabits 1000] [--delay 20] [--rounds 3] [--workers 2]

A server on the loopback speaks enough of S3 to list and send objects, as `link.py` does: each
answer after the delay, and all over one link of the given speed. Each line converts a folder to
WebDataset shards, in interleaved rounds:

* ``files of 1 MB, --check none``: the link should be the limit.
* ``photographs of 100 KB, --check decode``: decoding needs processors, too.

Seconds are those of the whole command, with its start, its listing and the write of the last
shard. "Transfer" is the rate from the first request of an object to the end of the last one. CPU
seconds are those of the conversion with its workers and helpers, for each GB; the server needs more
on the same processors. It takes 4 GB of disk and 3 minutes.
"""

from __future__ import annotations

import argparse
import hashlib
import http.client
import http.server
import io
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import parse_qs, unquote, urlsplit

import numpy as np
from link import SLICE, Link, Server, serving
from PIL import Image

_FILES = 16
"""Different contents."""

_CLASSES = 10

_TIMES = "/times"
"""Path of the seconds from the first to the last request of an object since the last listing."""


class _Case(NamedTuple):
    """A folder of the bucket."""

    name: str
    title: str
    images: int
    side: int
    """Width and height in pixels: noise, of which a JPEG needs about 1.2 bytes for a pixel."""
    check: str


_CASES = (
    _Case("large", "files of 1 MB, --check none", 3000, 925, "none"),
    _Case("photos", "photographs of 100 KB, --check decode", 10_000, 288, "decode"),
)


def _contents(case: _Case) -> list[bytes]:
    rng = np.random.default_rng(0)
    contents = []
    for _ in range(_FILES):
        file = io.BytesIO()
        pixels = rng.integers(0, 256, (case.side, case.side, 3), np.uint8)
        Image.fromarray(pixels).save(file, "jpeg", quality=95)
        contents.append(file.getvalue())
    return contents


class _Bucket:
    """The objects of all cases, which share their contents."""

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}
        self.tags: dict[bytes, str] = {}
        for case in _CASES:
            contents = _contents(case)
            self.tags |= {data: hashlib.md5(data).hexdigest() for data in contents}
            for number in range(case.images):
                name = f"{case.name}/{number * _CLASSES // case.images}/{number:06d}.jpg"
                self.objects[name] = contents[number % _FILES]

    def size(self, case: _Case) -> int:
        """Return the size of a folder in bytes."""
        return sum(
            len(data) for name, data in self.objects.items() if name.startswith(f"{case.name}/")
        )

    def listing(self, query: dict[str, str]) -> bytes:
        """Return a page of ListObjectsV2."""
        prefix, after = query.get("prefix", ""), query.get("continuation-token", "")
        names = sorted(n for n in self.objects if n.startswith(prefix) and n > after)
        lines = []
        if "delimiter" in query:
            inner = {prefix + name[len(prefix) :].partition("/")[0] + "/" for name in names}
            lines = [f"<CommonPrefixes><Prefix>{n}</Prefix></CommonPrefixes>" for n in inner]
            names = []
        page = names[:1000]
        for name in page:
            data = self.objects[name]
            lines.append(
                f"<Contents><Key>{name}</Key><Size>{len(data)}</Size>"
                f'<ETag>"{self.tags[data]}"</ETag>'
                "<LastModified>2026-01-01T00:00:00.000Z</LastModified></Contents>"
            )
        if more := len(names) > len(page):
            lines.append(f"<NextContinuationToken>{page[-1]}</NextContinuationToken>")
        lines.append(f"<IsTruncated>{str(more).lower()}</IsTruncated>")
        return f"<ListBucketResult>{''.join(lines)}</ListBucketResult>".encode()


def _serve(bucket: _Bucket, rate: float, delay: float, answer: Connection) -> None:
    link = Link(rate)
    times: list[float] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True

        def do_GET(self) -> None:
            if self.path == _TIMES:
                self._send({}, json.dumps(max(times) - min(times)).encode())
                times.clear()
                return
            times.append(time.monotonic())
            self._answer()
            times.append(time.monotonic())

        def _answer(self) -> None:
            time.sleep(delay)
            url = urlsplit(self.path)
            query = {name: values[0] for name, values in parse_qs(url.query).items()}
            headers = {"Last-Modified": "Thu, 01 Jan 2026 00:00:00 GMT"}
            name = unquote(url.path).removeprefix("/bucket").lstrip("/")
            data = bucket.listing(query) if "list-type" in query else bucket.objects[name]
            if "list-type" in query:
                times.clear()
            else:
                headers["ETag"] = f'"{bucket.tags[data]}"'
            self._send(headers, data)

        def _send(self, headers: dict[str, str], data: bytes) -> None:
            self.send_response(200)
            for header, value in {**headers, "Content-Length": str(len(data))}.items():
                self.send_header(header, value)
            self.end_headers()
            content = memoryview(data)
            for start in range(0, len(data), SLICE):
                piece = content[start : start + SLICE]
                link.carry(len(piece))
                self.wfile.write(piece)

        def log_message(self, *_: Any) -> None:
            """Print nothing."""

    server = Server(("127.0.0.1", 0), Handler)
    answer.send(server.server_address[1])
    server.serve_forever()


class _Round(NamedTuple):
    """Seconds of a conversion."""

    whole: float
    transfer: float
    cpu: float


def _convert(host: str, case: _Case, folder: Path, workers: int) -> _Round:
    environment = {
        **os.environ,
        "AWS_ENDPOINT_URL": f"http://{host}",
        "AWS_SKIP_SIGNATURE": "true",
        "AWS_REGION": "us-east-1",
    }
    options = ["--to=webdataset", f"--check={case.check}", f"--workers={workers}", "--quiet"]
    command = [sys.executable, "-m", "shardkit", "convert", "imagefolder"]
    begun, used = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(
        [*command, f"s3://bucket/{case.name}", folder, *options], env=environment, check=True
    )
    now = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = now.ru_utime + now.ru_stime - used.ru_utime - used.ru_stime
    seconds = time.perf_counter() - begun
    client = http.client.HTTPConnection(host)
    client.request("GET", _TIMES)
    return _Round(seconds, json.loads(client.getresponse().read()), cpu)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--megabits", type=float, default=1000.0, help="Speed of the link.")
    parser.add_argument("--delay", type=float, default=20.0, help="Milliseconds of a round trip.")
    parser.add_argument("--rounds", type=int, default=3, help="Interleaved rounds.")
    parser.add_argument("--workers", type=int, default=2, help="Processes of the conversion.")
    parser.add_argument("--work", type=Path, help="Where to put the data (default: temporary).")
    given = parser.parse_args()
    rate = given.megabits * 1e6 / 8
    bucket = _Bucket()
    found: dict[_Case, list[_Round]] = {case: [] for case in _CASES}
    with serving(_serve, bucket, rate, given.delay / 1e3) as host:
        for number in range(given.rounds):
            for case, rounds in found.items():
                with tempfile.TemporaryDirectory(dir=given.work) as work:
                    rounds.append(_convert(host, case, Path(work, str(number)), given.workers))
    for case, rounds in found.items():
        size = bucket.size(case)
        whole, transfer, cpu = map(statistics.median, zip(*rounds, strict=True))
        print(
            f"{case.title:38} {size / 1e6:6,.0f} MB in {whole:6.2f} s,"
            f" {size / whole / rate:4.0%} of the link; transfer {size / transfer / 1e6:6.1f} MB/s,"
            f" {size / transfer / rate:4.0%}; {cpu / size * 1e9:5.2f} CPU s/GB"
        )


if __name__ == "__main__":
    main()
