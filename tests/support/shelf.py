"""A file system of fsspec for tests: files of a folder, with faults, under the scheme ``shelf``."""

from __future__ import annotations

import fcntl
import os
import time
from pathlib import Path
from typing import Any

from fsspec.spec import AbstractBufferedFile, AbstractFileSystem

FAULTS = "faults"
"""A file of the folder. Each line is the name of a file and the fault of one read of it."""


class Shelf(AbstractFileSystem):  # type: ignore[misc]
    """``shelf://host/x`` is the file ``x`` of the folder ``FSSPEC_SHELF_PLACE``."""

    protocol = "shelf"

    def __init__(self, place: str, **options: Any) -> None:
        super().__init__(**options)
        self.place = Path(place)

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return path.removeprefix("shelf://host").strip("/")

    def ls(self, path: str, detail: bool = True, **_: Any) -> list[Any]:
        path = self._strip_protocol(path)
        if path not in self.dircache:  # as real ones do: a trap for what asks without clearing it
            self.dircache[path] = [self._entry(path, each) for each in self._scanned(path)]
        return self.dircache[path] if detail else [each["name"] for each in self.dircache[path]]

    def invalidate_cache(self, path: str | None = None) -> None:
        self.dircache.clear()

    def _scanned(self, path: str) -> list[os.DirEntry[str]]:
        return [each for each in os.scandir(self.place / path) if each.name != FAULTS]

    def _entry(self, path: str, entry: os.DirEntry[str]) -> dict[str, Any]:
        status = entry.stat()
        kind = "directory" if entry.is_dir() else "file"
        name = f"{path}/{entry.name}".lstrip("/")
        return {"name": name, "size": status.st_size, "type": kind, "mtime": status.st_mtime_ns}

    def _open(self, path: str, mode: str = "rb", **options: Any) -> AbstractBufferedFile:
        options.pop("autocommit", None)
        return _File(self, path, mode, **options)

    def fault(self, path: str) -> str:
        """Return the next fault that is planned for a file, or ""."""
        with open(self.place / FAULTS, "a+", encoding="utf-8") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            file.seek(0)
            planned = [line.split() for line in file]
            found = next((each for each in planned if path.endswith(each[0])), None)
            file.truncate(0)
            file.writelines(f"{' '.join(each)}\n" for each in planned if each is not found)
        return found[1] if found else ""


class _File(AbstractBufferedFile):  # type: ignore[misc]
    def _fetch_range(self, start: int, end: int) -> bytes:
        fault = self.fs.fault(self.path)
        if fault == "busy":
            raise OSError("secret text of a server")
        if fault == "denied":
            raise PermissionError("secret text of a server")
        if fault == "stall":
            time.sleep(20)
        data: bytes = (self.fs.place / self.path).read_bytes()[start:end]
        if fault == "short":
            return data[: len(data) // 2]
        return bytes([data[0] ^ 1]) + data[1:] if fault == "wrong" else data
