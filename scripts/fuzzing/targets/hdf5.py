"""The HDF5 reader, whose library parses in C."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import h5py
import numpy as np

from scripts.fuzzing.material import records, write_shard
from scripts.fuzzing.target import SECRET
from scripts.fuzzing.targets.shard import ShardTarget
from shardkit.formats.hdf5 import FORMAT

_SIGNATURES = (b"TREE", b"SNOD", b"HEAP", b"OHDR", b"OCHK", b"FRHP", b"FSHD", b"BTHD", b"GCOL")


class Hdf5Target(ShardTarget):
    """Files as shardkit writes them, as others may, and with links and storage that lead away."""

    name = "hdf5"
    storage = FORMAT
    tokens = (
        *_SIGNATURES,
        b"\x89HDF\r\n\x1a\n",
        *(name + b"\0" for name in (b"data", b"offsets", b"present", b"jpg", b"__key__", b"cls")),
        b"../secret.h5\0",
        b"../secret.bin\0",
        *(number.to_bytes(8, "little") for number in (0, 96, 136, 680, 800, 2048, (1 << 64) - 1)),
        *(bytes((kind, 0)) for kind in range(24)),
    )

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        beside = folder.parent / "secret.h5"
        (folder.parent / "secret.bin").write_bytes(SECRET * 20)
        if not beside.exists():
            with h5py.File(beside, "x") as file:
                file["data"] = np.frombuffer(SECRET * 20, np.uint8)
                file["f/data"] = file["data"]
                file["f/offsets"] = np.array([0, 40, 80, 120, 160, 200], np.int64)
        self.seeds += [_changed(folder, change) for change in CHANGES.values()]


_Change = Callable[[h5py.File], None]


def _changed(folder: Path, change: _Change) -> bytes:
    """Return a shard of records after a change made with h5py."""
    path = write_shard(FORMAT, folder / "change.h5", records())
    with h5py.File(path, "r+") as file:
        change(file)
    data = path.read_bytes()
    path.unlink()
    return data


def _chunked(file: h5py.File) -> None:
    for name in ("jpg/data", "png/data", "json/data"):
        values = file[name][()]
        del file[name]
        file.create_dataset(name, data=values, chunks=(64,), compression="gzip", shuffle=True)


def _external_storage(file: h5py.File) -> None:
    size = len(file["jpg/data"])
    del file["jpg/data"]
    outside = [("../secret.bin", 0, size)]
    file.create_dataset("jpg/data", (size,), np.uint8, external=outside)


def _external_link(file: h5py.File) -> None:
    del file["jpg/data"]
    file["jpg/data"] = h5py.ExternalLink("../secret.h5", "/data")


def _external_field(file: h5py.File) -> None:
    file["txt"] = h5py.ExternalLink("../secret.h5", "/f")


def _virtual(file: h5py.File) -> None:
    size = len(file["jpg/data"])
    del file["jpg/data"]
    layout = h5py.VirtualLayout((size,), np.uint8)
    layout[: 20 * len(SECRET)] = h5py.VirtualSource("../secret.h5", "data", (20 * len(SECRET),))[:]
    file.create_virtual_dataset("jpg/data", layout)


def _soft_link(file: h5py.File) -> None:
    file["txt"] = h5py.SoftLink("/json")


def _soft_circle(file: h5py.File) -> None:
    file["a"] = h5py.SoftLink("/b")
    file["b"] = h5py.SoftLink("/a")


def _hard_circle(file: h5py.File) -> None:
    file["jpg/again"] = file["/"]
    file["root"] = file["/"]


def _huge(file: h5py.File) -> None:
    del file["jpg/data"]
    file.create_dataset("jpg/data", (1 << 40,), np.uint8, chunks=(1 << 20,), compression="gzip")
    file["jpg/offsets"][-1] = 1 << 40


def _huge_description(file: h5py.File) -> None:
    del file["__shardkit__"]
    file.create_dataset("__shardkit__", (1 << 33,), np.uint8, chunks=(1 << 16,))


def _huge_labels(file: h5py.File) -> None:
    del file["cls/data"]
    file.create_dataset("cls/data", (1 << 34,), np.int64, chunks=(1 << 16,))


def _strings(file: h5py.File) -> None:
    del file["jpg/data"], file["__shardkit__"]
    file["jpg/data"] = ["a", "b"]
    file["__shardkit__"] = "{}"


def _compact(file: h5py.File) -> None:
    values = file["json/data"][()]
    del file["json/data"]
    settings = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    settings.set_layout(h5py.h5d.COMPACT)
    space = h5py.h5s.create_simple(values.shape)
    made = h5py.h5d.create(file["json"].id, b"data", h5py.h5t.NATIVE_UINT8, space, settings)
    made.write(h5py.h5s.ALL, h5py.h5s.ALL, values)


def _attributes(file: h5py.File) -> None:
    file.attrs["note"] = "x" * 200
    file["jpg"].attrs["many"] = np.arange(50)
    file["type"] = np.dtype(np.float32)


CHANGES: dict[str, _Change] = {
    change.__name__.strip("_"): change
    for change in (
        *(_chunked, _external_storage, _external_link, _external_field, _virtual, _soft_link),
        *(_soft_circle, _hard_circle, _huge, _huge_description, _huge_labels, _strings, _compact),
        _attributes,
    )
}
"""What a shard may have become in other hands, by name."""
