"""Helpers shared by test modules: images, image folders and the command line."""

from __future__ import annotations

import contextlib
import gc
import hashlib
import io
import os
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
import zlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import numpy.typing as npt
import pytest
from click.testing import CliRunner, Result
from PIL import Image

from shardkit import convert
from shardkit.cli.main import cli, main

Pixels = npt.NDArray[np.uint8]

ORIENTATION = 0x0112
"""The EXIF tag that says how an image is to be turned."""

DEADLINE = 120.0
"""Seconds after which a child process is taken for hung; on an idle machine, none takes a tenth."""

FORMATS = ("hdf5", "lmdb", "webdataset")


def pixels(width: int = 24, height: int = 16, seed: int = 0, channels: int = 3) -> Pixels:
    """Return smooth pixels with a little noise: uint8 of shape (height, width, channels)."""
    rng = np.random.default_rng(seed)
    y, x = np.mgrid[0:height, 0:width]
    planes = [
        127
        + 80 * np.sin((x * (c + 1) + seed) / 7.0)
        + 40 * np.cos((y + c * 5) / 5.0)
        + rng.integers(-6, 7, (height, width))
        for c in range(channels)
    ]
    stacked: Pixels = np.clip(np.stack(planes, axis=-1), 0, 255).astype(np.uint8)
    return stacked


def picture(width: int = 24, height: int = 16, seed: int = 0, mode: str = "RGB") -> Image.Image:
    """Return an image of the given mode."""
    if mode in ("RGBA", "CMYK", "LA"):
        values = pixels(width, height, seed, len(mode))
        return Image.frombytes(mode, (width, height), values.tobytes())
    if mode.startswith("I;16"):
        wide = pixels(width, height, seed)[:, :, 0].astype(np.uint16) * 256 + 17
        return Image.fromarray(wide)
    return Image.fromarray(pixels(width, height, seed)).convert(mode)


def encoded(image: Image.Image | None = None, kind: str = "JPEG", **options: Any) -> bytes:
    """Return an image as the bytes of a file; ``kind`` is Pillow's name of the format."""
    buffer = io.BytesIO()
    (image or picture()).save(buffer, kind, **options)
    return buffer.getvalue()


def jpeg(width: int = 24, height: int = 16, seed: int = 0, **options: Any) -> bytes:
    """Return a JPEG file."""
    return encoded(picture(width, height, seed), "JPEG", **{"quality": 90, **options})


def png(width: int = 24, height: int = 16, seed: int = 0, mode: str = "RGB") -> bytes:
    """Return a PNG file."""
    return encoded(picture(width, height, seed, mode), "PNG")


def exif(orientation: int) -> Image.Exif:
    """Return EXIF data that hold an orientation and nothing else."""
    data = Image.Exif()
    data[ORIENTATION] = orientation
    return data


def png_chunk(name: bytes, content: bytes) -> bytes:
    """Return a chunk of a PNG file."""
    return (
        len(content).to_bytes(4, "big")
        + name
        + content
        + zlib.crc32(name + content).to_bytes(4, "big")
    )


def png_file(header: bytes, rows: bytes, *extra: bytes) -> bytes:
    """Return a PNG file from the content of its IHDR chunk and its unpacked rows."""
    return b"".join(
        (
            b"\x89PNG\r\n\x1a\n",
            png_chunk(b"IHDR", header),
            *extra,
            png_chunk(b"IDAT", zlib.compress(rows)),
            png_chunk(b"IEND", b""),
        )
    )


def jpeg_of_scans(count: int) -> bytes:
    """Return a sequential JPEG of 8 x 8 gray pixels in ``count`` scans of one component."""
    segments = {
        0xDB: b"\0" + b"\1" * 64,  # quantizers
        0xC0: b"\x08\0\x08\0\x08\3" + b"".join(bytes((n, 0x11, 0)) for n in (1, 2, 3)),
        0xC4: b"".join(bytes((table, 1)) + bytes(16) for table in (0, 0x10)),  # one code: 0
    }
    head = b"".join(
        bytes((0xFF, marker)) + (len(content) + 2).to_bytes(2, "big") + content
        for marker, content in segments.items()
    )
    scans = (b"\xff\xda\0\x08\1%c\0\0\x3f\0\x3f" % (1 + n % 3) for n in range(count))
    return b"\xff\xd8" + head + b"".join(scans) + b"\xff\xd9"


def jpeg_stating(width: int, height: int) -> bytes:
    """Return a small JPEG file whose header states another size than it has."""
    data = bytearray(jpeg(32, 32))
    start = data.index(b"\xff\xc0")
    data[start + 5 : start + 9] = height.to_bytes(2, "big") + width.to_bytes(2, "big")
    return bytes(data)


def opened(data: bytes) -> Image.Image:
    """Return the pixels that Pillow decodes."""
    return Image.open(io.BytesIO(data))


def make_tree(root: Path, files: Mapping[str, bytes | None]) -> Path:
    """Write files below ``root``, whose folders are made; None makes an empty folder."""
    root.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        path = root / name
        if content is None:
            path.mkdir(parents=True, exist_ok=True)
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
    return root


def make_folder(root: Path, classes: Sequence[str] = ("cat", "dog"), each: int = 3) -> Path:
    """Make an image folder with ``each`` small JPEG and PNG files in every class."""
    files: dict[str, bytes] = {}
    for label, name in enumerate(classes):
        for number in range(each):
            seed = 100 * label + number
            if number % 3 == 2:
                files[f"{name}/{number:03d}.png"] = png(20 + number, 18, seed)
            else:
                files[f"{name}/{number:03d}.jpg"] = jpeg(20 + number, 18, seed)
    return make_tree(root, files)


def tree(root: Path) -> dict[str, str]:
    """Return the SHA-256 of each file below ``root``, and "folder" for folders, by path."""
    return {
        str(path.relative_to(root)): "folder"
        if path.is_dir()
        else hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(root.rglob("*"))
    }


def assert_same(first: Mapping[str, Any], second: Mapping[str, Any]) -> None:
    """Compare arrays by name: their types and values."""
    assert first.keys() == second.keys()
    for name, values in first.items():
        assert values.dtype == second[name].dtype
        np.testing.assert_array_equal(values, second[name], name)


def contents(root: Path) -> dict[str, bytes]:
    """Return the content of each file below ``root``, by path."""
    files = (path for path in root.rglob("*") if path.is_file())
    return {str(path.relative_to(root)): path.read_bytes() for path in files}


def wait_until(condition: Callable[[], object], what: str) -> None:
    """Wait until ``condition`` holds; fail at the deadline."""
    end = time.monotonic() + DEADLINE
    while not condition():
        assert time.monotonic() < end, f"waited in vain for {what}"
        time.sleep(0.002)


def limit_memory(more: int) -> None:
    """Let this process map at most ``more`` bytes beyond those that it maps now.

    A forked child maps what the tests before it did: a fixed limit may leave it nothing.
    """
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + more
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def in_fork(work: Callable[[], object]) -> int:
    """Call a function in a fork of this process; return its exit code, 0 unless it fails.

    It fails by an error, or by returning False.
    """
    child = os.fork()
    if child == 0:
        code = 1
        try:
            code = int(work() is False)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def invoke(*arguments: object) -> Result:
    """Call the command line in this process; errors of shardkit are raised."""
    return CliRunner().invoke(cli, [str(argument) for argument in arguments])


def run_main(*arguments: object) -> subprocess.CompletedProcess[str]:
    """Call the command line's entry point in this process: what it prints, and its exit code.

    Two seconds faster than `run`, which starts a process.
    """
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    out, err = (io.TextIOWrapper(io.BytesIO(), "utf-8") for _ in range(2))
    command = ["shardkit", *map(str, arguments)]
    try:
        with (
            mock.patch.object(sys, "argv", command),
            mock.patch.object(warnings, "showwarning"),
            mock.patch.dict(os.environ),
            mock.patch.multiple(gc, disable=mock.DEFAULT, freeze=mock.DEFAULT),
            contextlib.redirect_stdout(out),
            contextlib.redirect_stderr(err),
            pytest.raises(SystemExit) as ended,
        ):
            main()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    texts = []
    for stream in (out, err):
        stream.flush()
        texts.append(stream.buffer.getvalue().decode())
    code = ended.value.code
    assert isinstance(code, int)
    return subprocess.CompletedProcess(command, code, *texts)


def shardkit_command(*arguments: object) -> list[str]:
    """Return the command that runs ``shardkit`` in a separate process."""
    return [
        sys.executable,
        "-m",
        "shardkit",
        *(os.fspath(a) if isinstance(a, os.PathLike) else str(a) for a in arguments),
    ]


def run(
    *arguments: object, env: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run ``shardkit`` in a separate process."""
    return execute(*shardkit_command(*arguments), env=env, errors="backslashreplace")


def python(code: str, *arguments: object, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run Python code in a separate process, with the options of `execute`."""
    return execute(sys.executable, "-c", code, *arguments, **options)


def execute(
    *command: object,
    env: Mapping[str, str] | None = None,
    timeout: float = DEADLINE,
    check: bool = False,
    **options: Any,
) -> subprocess.CompletedProcess[str]:
    """Run a program, with more variables in ``env``; return its exit code and what it prints."""
    words = [os.fspath(a) if isinstance(a, os.PathLike) else str(a) for a in command]
    return subprocess.run(
        words,
        env={**os.environ, **(env or {})},
        capture_output=True,
        text=True,
        timeout=timeout,
        check=check,
        **options,
    )


def make_dataset(source: Path, target: Path, *, to: Any = "lmdb", **options: Any) -> Path:
    """Convert the folder ``source`` into ``target``, four images to a shard; return ``target``."""
    convert(source, target, to=to, **{"shard_samples": 4, "workers": 1, **options})
    return target


def copy_dataset(source: Path, target: Path, *, to: str = "lmdb", **options: Any) -> Path:
    """Do what `make_dataset` does, but convert the same files once, and then copy the dataset.

    It is for fixtures of tests that need any dataset, not for tests of conversions.
    """
    call = repr((source.name, tree(source), to, options))
    if call not in _MADE:
        _MADE[call] = make_dataset(source, Path(_KEPT.name) / str(len(_MADE)), to=to, **options)
    return Path(shutil.copytree(_MADE[call], target))


_KEPT = tempfile.TemporaryDirectory(prefix="shardkit-tests-")
_MADE: dict[str, Path] = {}
"""What `copy_dataset` has copied in this process."""
