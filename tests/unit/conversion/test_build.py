from __future__ import annotations

import errno
import os
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from helpers import FORMATS, jpeg, make_tree, png, tree
from refusals import refused

from shardkit.contracts import Images
from shardkit.conversion import build
from shardkit.conversion.build import ShardTask
from shardkit.conversion.task import ShardResult, carry_out, load_result
from shardkit.errors import ConversionFailed
from shardkit.formats.hdf5 import Hdf5Writer
from shardkit.kinds.field import default_schema
from shardkit.recipe import Recipe
from shardkit.record import Record, dump_json, load_json
from shardkit.registry import get_format
from shardkit.sources.imagefolder import scan_imagefolder


def make_task(tmp_path: Path, to: str = "webdataset", **changes: Any) -> ShardTask:
    """Return the task to build one shard of six images, the third of which is bad."""
    files: dict[str, bytes | None] = {f"cat/{n}.jpg": jpeg(20 + n, 18, n) for n in range(5)}
    files["cat/2.jpg"] = b"no image"
    files["dog/5.png"] = png(20, 18, 5)
    source = scan_imagefolder(make_tree(tmp_path / "photos", files)).splits[""]
    folder = tmp_path / "dataset"
    folder.mkdir(parents=True, exist_ok=True)
    task = ShardTask(
        split="",
        number=7,
        folder=folder,
        result_folder=tmp_path / "parts" / "000007",
        format=to,
        recipe=Recipe(),
        schema=default_schema(("cat", "dog")),
        source=source,
        meta={"classes": ["cat", "dog"]},
        software={"pillow": "1"},
        keep=True,
    )
    return replace(task, **changes)


def built(task: ShardTask) -> ShardResult:
    return carry_out(task).result


def test_the_result_of_a_finished_shard_is_loaded(tmp_path: Path) -> None:
    task = make_task(tmp_path)
    assert load_result(task) is None
    result = built(task)
    assert load_result(task) == result
    written = task.path.stat().st_mtime_ns
    assert built(task) == result
    assert task.path.stat().st_mtime_ns == written


@pytest.mark.parametrize("file", ["shard", "rows", "paths"])
def test_a_shard_that_the_disk_has_changed_is_rebuilt(tmp_path: Path, file: str) -> None:
    task = make_task(tmp_path)
    carry_out(task)
    before = tree(tmp_path)
    path = {
        "shard": task.path,
        "rows": task.result_folder / "index/rows.npy",
        "paths": task.result_folder / "index/paths.npy",
    }[file]
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    assert not carry_out(task).kept
    assert tree(tmp_path) == before
    assert carry_out(task).kept


@pytest.mark.parametrize(
    "change",
    [
        {"software": {"pillow": "2"}},
        {"meta": {"classes": ["cat"]}},
        {"recipe": Recipe(orient=True)},
    ],
    ids=str,
)
def test_a_shard_of_something_else_is_rebuilt(tmp_path: Path, change: dict[str, Any]) -> None:
    task = make_task(tmp_path)
    carry_out(task)
    assert load_result(replace(task, **change)) is None
    assert load_result(replace(task, source=task.source.take(range(5)))) is None
    assert load_result(replace(task, keep=False, workers=3)) is not None


@pytest.mark.parametrize("name", ["files", "read_together"])
def test_images_that_do_not_fit_in_memory_together_are_read_one_by_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    def fail(_: object) -> None:
        raise MemoryError

    expected = carry_out(make_task(tmp_path / "together")).result
    monkeypatch.setattr(Images, name, fail)
    assert carry_out(make_task(tmp_path / "alone")).result == expected


def test_memory_that_runs_out_is_not_blamed_on_the_image(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise MemoryError

    monkeypatch.setattr(build, "_read", fail)
    monkeypatch.setattr(build, "read_ordinary", lambda source, *_: [None] * len(source))
    with refused(ConversionFailed, "cat/0.jpg", "workers"):
        carry_out(make_task(tmp_path))


@pytest.mark.parametrize(
    ("said", "kind", "told"),
    [
        ("can't start new thread", ConversionFailed, ()),
        ("a bug", RuntimeError, ()),
    ],
)
def test_only_a_lack_of_threads_is_blamed_on_memory(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    said: str,
    kind: type[Exception],
    told: tuple[str, ...],
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError(said)

    monkeypatch.setattr(build, "_write", fail)
    with refused(kind, *told):
        carry_out(make_task(tmp_path))


def test_a_shard_without_digests_of_its_part_is_rebuilt(tmp_path: Path) -> None:
    task = make_task(tmp_path)
    result = built(task)
    path = task.result_folder / "result.json"
    whole = path.read_bytes()
    path.write_bytes(dump_json({n: v for n, v in load_json(whole).items() if n != "part"}))
    assert load_result(task) == result
    assert not carry_out(task).kept
    assert path.read_bytes() == whole


@pytest.mark.parametrize("damage", ["shard missing", "shard cut", "result missing", "result cut"])
def test_an_incomplete_shard_is_rebuilt(tmp_path: Path, damage: str) -> None:
    task = make_task(tmp_path)
    result = built(task)
    content = task.path.read_bytes()
    path = task.path if damage.startswith("shard") else task.result_folder / "result.json"
    if damage.endswith("missing"):
        path.unlink()
    else:
        path.write_bytes(path.read_bytes()[:-10])
    assert load_result(task) is None
    assert built(task) == result
    assert task.path.read_bytes() == content


def test_an_invalid_result_is_ignored(tmp_path: Path) -> None:
    task = make_task(tmp_path)
    result = built(task)
    for content in (b"[]", b"{}", b'{"entry": null}', b'{"entry": {"a": 1}}'):
        (task.result_folder / "result.json").write_bytes(content)
        assert built(task) == result


@pytest.mark.parametrize("method", ["write", "close"])
@pytest.mark.parametrize("to", FORMATS)
def test_a_failing_disk_is_reported_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, to: str, method: str
) -> None:
    task = make_task(tmp_path, to)
    for code, message in [
        (errno.ENOSPC, "is full.*rerun the same command"),
        (errno.EDQUOT, "quota.*is full"),
        (errno.EIO, "cannot be read or written: Input/output error"),
    ]:

        def fail(*_: object, code: int = code) -> None:
            raise OSError(code, os.strerror(code), "shard")

        with monkeypatch.context() as patch:
            patch.setattr(get_format(to).write, method, fail)
            if method == "write":
                patch.setitem(vars(get_format(to)), "write_all", fail)
                if chunks := get_format(to).chunks:
                    patch.setitem(vars(chunks), "append", fail)
            with pytest.raises(ConversionFailed, match=message):
                carry_out(task)
        assert os.listdir(task.folder) == []
        assert load_result(task) is None
    assert built(task).entry is not None


def test_the_message_of_a_failing_disk_does_not_print_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise OSError("Can't write data (file write failed)")

    monkeypatch.setitem(vars(get_format("hdf5")), "write_all", fail)
    with refused(ConversionFailed) as caught:
        carry_out(make_task(tmp_path, "hdf5"))
    assert "None" not in str(caught.value)


@pytest.mark.parametrize("change", ["content", "order", "loss"])
def test_a_shard_that_reads_back_differently_is_not_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    """A writer (or a disk, or memory) that changes its input is detected at once."""
    write = Hdf5Writer.write
    held: list[Record] = []

    def forge(self: Hdf5Writer, records: Iterable[Record]) -> None:
        for record in records:
            if change == "content":
                fields = dict(record.fields)
                fields["cls"] = b"1"
                write(self, Record(record.key, fields))
            elif change == "order":
                held.append(record)
                if len(held) == 2:
                    write(self, held.pop())
                    write(self, held.pop())
            elif record.key != "dog/5":
                write(self, record)

    task = make_task(tmp_path, "hdf5")
    monkeypatch.setitem(vars(get_format("hdf5")), "write_all", forge)
    with refused(ConversionFailed, "shard-000007.h5"):
        carry_out(replace(task, source=task.source.take([0, 1, 3, 5])))
    assert os.listdir(task.folder) == []


def test_an_interruption_leaves_no_partial_shard(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    task = make_task(tmp_path)
    monkeypatch.setattr(build, "index_shard", interrupt)
    with pytest.raises(KeyboardInterrupt):
        carry_out(task)
    assert os.listdir(task.folder) == []


def test_an_internal_error_is_not_taken_for_a_bad_image(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("a mistake")

    monkeypatch.setattr(build, "_read", fail)
    monkeypatch.setattr(build, "read_ordinary", lambda source, *_: [None] * len(source))
    with pytest.raises(RuntimeError, match="a mistake"):
        carry_out(make_task(tmp_path))
