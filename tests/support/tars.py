"""Tar archives by many programs."""

from __future__ import annotations

import io
import os
import shutil
import subprocess
import tarfile
from collections.abc import Callable, Mapping
from pathlib import Path

import webdataset

Files = Mapping[str, bytes]

LONG = f"{'x' * 99}/{'y' * 90}/{'z' * 80}.png"
"""A name that only extensions can store."""


class NotInstalledError(Exception):
    """The program is not installed."""


def write_with_holes(path: Path, data: bytes) -> None:
    """Write a file whose blocks of zeros take no space."""
    with path.open("wb") as file:
        for start in range(0, len(data), 4096):
            block = data[start : start + 4096]
            if block.strip(b"\0"):
                file.seek(start)
                file.write(block)
        file.truncate(len(data))


def _by_program(*command: str) -> Callable[[Path, Files], None]:
    """Return a function that archives files by a program, called in their folder."""

    def make(path: Path, files: Files) -> None:
        if shutil.which(command[0]) is None:
            raise NotInstalledError(command[0])
        folder = path.with_suffix(".files")
        for name, data in files.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            write_with_holes(folder / name, data)
        words = [str(path) if word == "OUT" else word for word in command]
        names = "\n".join(files).encode() + b"\n"
        if "-o" not in command:
            words += list(files)
        with path.open("wb") if "-o" in command else io.BytesIO() as out:
            given = {"stdout": out} if "-o" in command else {}
            subprocess.run(words, cwd=folder, input=names, check=True, stderr=-3, **given)  # type: ignore[call-overload]

    return make


def _by_tarfile(kind: int) -> Callable[[Path, Files], None]:
    def make(path: Path, files: Files) -> None:
        with tarfile.open(path, "w", format=kind) as archive:
            folder = tarfile.TarInfo("folder/")
            folder.type = tarfile.DIRTYPE
            archive.addfile(folder)
            for name, data in files.items():
                info = tarfile.TarInfo(name)
                info.size, info.mtime = len(data), 1.5
                archive.addfile(info, io.BytesIO(data))

    return make


def _by_webdataset(path: Path, files: Files) -> None:
    with webdataset.TarWriter(str(path), encoder=False) as writer:
        for name, data in files.items():
            key, _, suffix = name.rpartition(".")
            writer.write({"__key__": key, suffix: data})


def _by_shard_writer(path: Path, files: Files) -> None:
    pattern = str(path.parent / "shards-%d.tar")
    with webdataset.ShardWriter(pattern, encoder=False, verbose=0) as writer:
        for name, data in files.items():
            key, _, suffix = name.rpartition(".")
            writer.write({"__key__": key, suffix: data})
    os.replace(pattern % 0, path)


PRODUCERS: dict[str, Callable[[Path, Files], None]] = {
    **{
        f"GNU tar, {name}": _by_program("tar", f"--format={name}", "-cf", "OUT")
        for name in ("v7", "oldgnu", "gnu", "ustar", "posix")
    },
    "GNU tar, with folders": _by_program("tar", "--format=gnu", "-cf", "OUT", "."),
    **{
        f"GNU tar, sparse {name}": _by_program("tar", "-S", *options, "-cf", "OUT")
        for name, options in {
            "old": ("--format=gnu",),
            "0.0": ("--format=posix", "--sparse-version=0.0"),
            "0.1": ("--format=posix", "--sparse-version=0.1"),
            "1.0": ("--format=posix", "--sparse-version=1.0"),
        }.items()
    },
    **{
        f"bsdtar, {name}": _by_program("bsdtar", f"--format={name}", "-cf", "OUT")
        for name in ("pax", "ustar", "gnutar", "v7")
    },
    "busybox": _by_program("busybox", "tar", "-c", "-f", "OUT"),
    "cpio, tar": _by_program("cpio", "-o", "-H", "tar"),
    "cpio, ustar": _by_program("cpio", "-o", "-H", "ustar"),
    "Python, ustar": _by_tarfile(tarfile.USTAR_FORMAT),
    "Python, GNU": _by_tarfile(tarfile.GNU_FORMAT),
    "Python, PAX": _by_tarfile(tarfile.PAX_FORMAT),
    "webdataset.TarWriter": _by_webdataset,
    "webdataset.ShardWriter": _by_shard_writer,
}
"""Program and format to the function that archives files with it."""

SHORT_NAMES = ("v7", "ustar", "cpio")
"""Parts of the names of producers whose formats cannot store `LONG`."""
