"""Arrow and Parquet files, whose library parses in a child process."""

from __future__ import annotations

import io
import itertools
import json
import os
import struct
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from scripts.fuzzing.target import SECRET
from scripts.fuzzing.targets.lists import ListTarget
from scripts.fuzzing.targets.sources import GIF, SourceTarget
from shardkit.sources import library_process

_COLUMNS = {"image": [{"bytes": GIF, "path": "a.gif"}, {"bytes": GIF, "path": None}] * 2}
_COLUMNS |= {"label": [0, 1, None, 0], "text": ["k", "", None, "l"], "list": [[1], [], None, [2]]}
_NUMBERS = tuple(
    struct.pack("<q", number) for number in (-1, 1 << 31, (1 << 31) - 1, 1 << 40, (1 << 63) - 1)
)
_VARINTS = (b"\xff" * 9 + b"\x01", b"\xff\xff\xff\xff\x0f", b"\x80\x80\x80\x80\x10", b"\0", b"\x01")


class _LibraryTarget(SourceTarget):
    """A file of which each input has a time of its own, which is how the child tells them apart."""

    tokens = (
        *(b"PAR1", b"PARE", b"ARROW1", b"\xff\xff\xff\xff", b"huggingface", b"../secret.parquet"),
        *(*_NUMBERS, *_VARINTS, GIF),
    )

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        library_process.HELPER.seconds = 5.0  # less than that of an input
        self._times = itertools.count(1)
        secret = pa.table({"image": [SECRET] * 4, "label": [0, 1, 0, 1]})
        pq.write_table(secret, folder.parent / "secret.parquet", compression="none")

    def check(self, data: bytes) -> str:
        (self.folder / self.file).unlink(missing_ok=True)  # it may be mapped
        return super().check(data)

    def _one(self, path: Path, data: bytes, options: dict[str, Any]) -> str:
        time = next(self._times)
        os.utime(self.folder / self.file, ns=(time, time))
        return super()._one(path, data, options)


class ParquetTarget(_LibraryTarget):
    """Parquet with a column of images, as Hugging Face's datasets write it."""

    name = "source-parquet"
    kind = "huggingface"
    file = "x.parquet"
    options = ({"image": "image"}, {"image": "image", "name": "image", "keep": "text?,list?"})

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.seeds = [
            parquet(_table(), compression="none"),
            parquet(_table(), compression="snappy", row_group_size=2, data_page_version="2.0"),
            parquet(_table(), compression="zstd", use_dictionary=False, write_page_index=True),
        ]


class ArrowTarget(_LibraryTarget):
    """The stream of a folder from ``save_to_disk``."""

    name = "source-arrow"
    kind = "huggingface"
    file = "x.arrow"
    whole = True
    options = ParquetTarget.options

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        state = {"_data_files": [{"filename": self.file}]}
        (folder / "state.json").write_text(json.dumps(state))
        self.seeds = [stream(_table()), stream(_table(), "lz4"), stream(_table(), "zstd")]


class ParquetTableTarget(_LibraryTarget, ListTarget):
    """A table of image files in Parquet."""

    name = "source-parquet-table"
    kind = "table"
    file = "t.parquet"
    options = ({"image": "a", "label": "b"}, {"image": "a", "boxes": "c:xywh", "keep": "d?"})
    tokens = (*_LibraryTarget.tokens, *ListTarget.names)

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        columns = {"a": ["x.gif", "in/x.gif"], "b": ["k", "l"], "c": [[[1, 2, 3, 4]], []]}
        table = pa.table({**columns, "d": [1.5, None]})
        away = pa.table({**columns, "a": ["../x.gif", "/x.gif"], "d": ["\0", None]})
        self.seeds = [
            parquet(table, compression="none"),
            parquet(table, compression="snappy", row_group_size=1),
            parquet(away, compression="none"),
        ]


def parquet(table: Any, **options: Any) -> bytes:
    file = io.BytesIO()
    pq.write_table(table, file, **options)
    return file.getvalue()


def stream(table: Any, compression: str | None = None) -> bytes:
    file = io.BytesIO()
    options = pa.ipc.IpcWriteOptions(compression=compression)
    with pa.ipc.new_stream(file, table.schema, options=options) as writer:
        writer.write_table(table, max_chunksize=2)
    return file.getvalue()


def _table() -> Any:
    image = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    kinds = {"image": image, "label": pa.int64(), "text": pa.string(), "list": pa.list_(pa.int8())}
    features = {"label": {"_type": "ClassLabel", "names": ["cat", "dog"]}}
    stated = {"huggingface": json.dumps({"info": {"features": features}})}
    return pa.table(_COLUMNS, pa.schema(list(kinds.items()), stated))
