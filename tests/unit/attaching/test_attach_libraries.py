"""LMDB environments and HDF5 files of other programs, read in place."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import h5py
import lmdb
import numpy as np
import pytest
from foreign import pixels_of, write_lmdb
from helpers import invoke, png, tree
from refusals import refused

from shardkit import attach, convert, open_dataset, verify
from shardkit.errors import ConversionFailed, CorruptRecord, CorruptShard, UsageError
from shardkit.registry import get_source
from shardkit.sources import lmdb_reader

pytestmark = pytest.mark.usefixtures("state")

PICTURES = [png(8, 6, 0), png(8, 6, 1), png(120, 90, 2)]
"""Two that fit into a page of LMDB, and one that takes several pages."""
SAME = [png(8, 6, seed) for seed in range(5)]
PIXELS = np.stack([pixels_of(data) for data in SAME])


def lmdb_of(folder: Path, layout: str) -> Path:
    names = {"ocr": "image-{:09d}", "basicsr": "p{}", "images": "a/p{}.png"}[layout]
    values = {names.format(n).encode(): data for n, data in enumerate(PICTURES, 1)}
    if layout == "ocr":
        values |= {b"label-%09d" % n: b"text %d" % n for n in range(1, 4)}
        values[b"num-samples"] = b"3"
    write_lmdb(folder, values)
    if layout == "basicsr":
        lines = [f"p{n}.png (6,8,3) 1\n" for n in range(1, 4)]
        (folder / "meta_info.txt").write_text("".join(lines))
    (folder / "lock.mdb").unlink()
    return folder


def hdf5_of(path: Path, *, userblock: int = 0) -> Path:
    with h5py.File(path, "w", userblock_size=userblock) as file:
        for name, chunks in (("vlen", None), ("vlen_chunks", (2,))):
            rows = file.create_dataset(name, (5,), h5py.vlen_dtype(np.uint8), chunks=chunks)
            for row, data in enumerate(SAME):
                rows[row] = np.frombuffer(data, np.uint8)
        file["void"] = np.array(SAME, dtype=f"V{max(map(len, SAME))}")
        file["x"] = PIXELS
        file["gray"] = PIXELS[..., 0]
        rows = file.create_dataset("chunks", PIXELS.shape, "u1", chunks=(2, *PIXELS.shape[1:]))
        for row in reversed(range(5)):  # so that chunks are not in the order of rows
            rows[row] = PIXELS[row]
        file.create_dataset("parts", data=PIXELS, chunks=(2, 3, 8, 3))
        file.create_dataset("gzip", data=PIXELS, chunks=(2, *PIXELS.shape[1:]), compression="gzip")
        file["y"] = np.array([2, 0, 1, 0, 1])
        file["age"] = np.arange(5, dtype=np.float32)
        file["emb"] = np.zeros((5, 4), np.float32)
    return path


def stat_of(path: Path) -> tuple[int, ...]:
    status = path.stat()
    return status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns


@pytest.mark.parametrize("layout", ["ocr", "basicsr", "images"])
def test_lmdb_equals_the_converted_dataset(layout: str, tmp_path: Path) -> None:
    path = lmdb_of(tmp_path / "source", layout)
    before = tree(path), stat_of(path / "data.mdb")
    own = {"label": "folder"} if layout == "images" else {}
    source = get_source("lmdb").open(path, **own)
    made = attach(source, tmp_path / "index").manifests[""]
    convert(source, tmp_path / "made", to="webdataset", shuffle=False)
    other = open_dataset(tmp_path / "made", decode="bytes")
    dataset = open_dataset(tmp_path / "index", decode="bytes")
    assert made.content_digest == other.manifest.content_digest
    assert [*dataset[:]] == [*other[:]]
    assert verify(tmp_path / "index", "decode").ok
    assert (tree(path), stat_of(path / "data.mdb")) == before  # and there is no lock file
    assert attach(source, tmp_path / "index").unchanged


def first_label(dataset: Any) -> int:
    return int(dataset[0][1])


def test_lmdb_is_read_beside_a_writer_and_after_a_fork(tmp_path: Path) -> None:
    path = lmdb_of(tmp_path / "source", "images")
    source = get_source("lmdb").open(path, label="folder")
    with lmdb.open(str(path), map_size=1 << 26) as env:
        with env.begin(write=True):  # which has LMDB's lock
            attach(source, tmp_path / "index")
            dataset = open_dataset(tmp_path / "index")
            assert first_label(dataset) == 0
            context = multiprocessing.get_context("fork")
            with ProcessPoolExecutor(1, mp_context=context) as pool:
                assert pool.submit(first_label, dataset).result(timeout=240) == 0
        attach(source, tmp_path / "quick", quick=True)
        for _ in range(3):  # LMDB takes the pages of older versions again
            with env.begin(write=True) as txn:
                for number in range(1, 4):
                    txn.put(b"a/p%d.png" % number, png(120, 90, 7))
    assert not verify(tmp_path / "index").ok
    with pytest.raises((CorruptRecord, CorruptShard)):
        _ = open_dataset(tmp_path / "index", decode="bytes")[:]
    with refused(CorruptShard):
        open_dataset(tmp_path / "quick")[0]
    changed = get_source("lmdb").open(path, label="folder")
    attach(changed, tmp_path / "index")
    assert open_dataset(tmp_path / "index", decode="bytes")[2][0] == png(120, 90, 7)


def test_an_offset_that_does_not_fit_is_a_finding(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = lmdb_of(tmp_path / "source", "images")
    source: Any = get_source("lmdb").open(path)
    images = source.scan().splits[""]
    monkeypatch.setattr("shardkit.sources.lmdb.call", wrong_offsets)
    found = [str(each) for each in source.located("", images.entries)]
    assert found == ["its file does not contain its bytes unchanged, in one range"] * 3


def wrong_offsets(function: Callable[..., Any], *arguments: Any) -> Any:
    answer = function(*arguments)
    return [1, None, 99999999] if function is lmdb_reader.offsets else answer


@pytest.mark.parametrize("userblock", [0, 512])
def test_hdf5_in_all_layouts(userblock: int, tmp_path: Path) -> None:
    if userblock and h5py.version.hdf5_version_tuple < (1, 14, 4):
        pytest.skip("this HDF5 misplaces chunks after a user block, which attach reports")
    path = hdf5_of(tmp_path / "x.h5", userblock=userblock)
    before = path.read_bytes(), stat_of(path)
    for name in ("vlen", "vlen_chunks", "void", "x", "chunks"):
        source = get_source("hdf5").open(path, image=name, label="y", keep="age")
        index = tmp_path / name
        made = attach(source, index).manifests[""]
        dataset = open_dataset(index, decode="numpy", fields=("image", "label", "age"))
        for row in range(5):
            image, label, age = dataset[row]
            assert (image == PIXELS[row]).all(), name
            assert (label, age) == ((2, 0, 1, 0, 1)[row], row)
        assert verify(index, "decode").ok
        assert made.raw_shape == (None if name[0] == "v" else (6, 8, 3))
    convert(
        get_source("hdf5").open(path, image="vlen", label="y", keep="age"),
        tmp_path / "made",
        to="webdataset",
        shuffle=False,
    )
    other = open_dataset(tmp_path / "made").manifest
    assert open_dataset(tmp_path / "vlen").manifest.content_digest == other.content_digest
    assert (path.read_bytes(), stat_of(path)) == before
    with path.open("r+b") as file:
        content = file.read()
        file.seek(content.index(PIXELS[3].tobytes()))
        file.write(bytes(9))
    (_, finding) = verify(tmp_path / "x").findings
    assert (finding.row, finding.file) == (3, "x.h5")
    with refused(CorruptRecord):
        _ = open_dataset(tmp_path / "x", decode="torch")[2:5]


def test_what_has_no_bytes_in_the_file_is_refused(tmp_path: Path) -> None:
    path = hdf5_of(tmp_path / "x.h5")
    index = tmp_path / "index"
    for options, message in (
        ({"image": "gzip"}, "gzip cannot be read in place.*compressed or filtered"),
        ({"image": "parts"}, "its chunks contain parts of rows"),
        ({"image": "gray"}, "rows of 6x8; arrays other than height x width x 3"),
        ({"image": "x", "keep": "emb"}, "column emb"),
    ):
        with pytest.raises(UsageError, match=message):
            attach(get_source("hdf5").open(path, **options), index)
    environment = lmdb_of(tmp_path / "source", "images")
    with refused(UsageError):
        attach(get_source("lmdb").open(environment, layout="ntpath:join"), index)
    source = get_source("lmdb").open(environment)
    with refused(UsageError):
        attach(source, index, image="png")
    with refused(UsageError):
        attach(get_source("npy").open(tmp_path), index)
    attach(source, index)
    with refused(UsageError, "label=", "force=True"):
        attach(get_source("lmdb").open(environment, label="folder"), index)


def test_a_file_that_changes_after_the_scan_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = get_source("hdf5").open(hdf5_of(tmp_path / "x.h5"), image="x")
    scan = source.scan()
    monkeypatch.setattr(source, "scan", lambda _: scan)
    os.utime(tmp_path / "x.h5")
    with refused(ConversionFailed):
        attach(source, tmp_path / "index")


def test_the_commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    lmdb_of(tmp_path / "source", "ocr")
    done = invoke("attach", "lmdb", "source", "index", "--workers", 1)
    assert done.exit_code == 0, done.output
    assert "3 images in 1 file" in done.output
    assert open_dataset("index").manifest.folder == "../source"  # type: ignore[attr-defined]
    hdf5_of(tmp_path / "x.h5")
    done = invoke("attach", "hdf5", "x.h5", "other", "--image", "x", "--label", "y")
    assert "5 images in 1 file" in done.output
    assert "cannot be read in place" in str(
        invoke("attach", "hdf5", "x.h5", "new", "--image", "gzip").exception
    )
    for name in ("index", "other"):
        assert invoke("verify", name, "--workers", 1).exit_code == 0
    copied = invoke("convert", "dataset", "other", "copy", "--to", "lmdb")
    assert copied.exit_code == 0, copied.output
    assert invoke("diff", "other", "copy").exit_code == 0
    assert "COMMAND is the file type" in invoke("attach", "--help").output
