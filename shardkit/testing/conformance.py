"""The conformance suite: what every storage format promises, as tests that any format can join.

A test reaches around what it tests: it compares what a reader gives with what was written, and
what a reader says of the file with the file's bytes.
"""

from __future__ import annotations

import contextlib
import gc
import hashlib
import multiprocessing
import os
import pickle
import random
import tempfile
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from math import prod
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from PIL import Image

from shardkit.contracts import Format, ShardReader, ShardSpec
from shardkit.conversion.plan import ConvertOptions
from shardkit.errors import CorruptShard, ShardkitError
from shardkit.recipe import Recipe
from shardkit.record import Record
from shardkit.registry import get_format
from shardkit.sources.imagefolder import scan_imagefolder
from shardkit.testing.strategies import records
from shardkit.torch.datasets import open_dataset
from shardkit.verbs.convert import convert
from shardkit.verbs.verify import verify

_Result = TypeVar("_Result")

RAW_SHAPE = (3, 5, 3)
"""Height, width and channels of the sample's raw pixels."""

_PATIENCE_SECONDS = 90
"""A child process that takes longer hangs; it is under pytest's usual deadline of 120 s."""

_BOUNDARY = 512
"""Tar members begin at multiples of this, and so do the pages of most other formats."""

_CUTS = 64
_FLIPS = 300

_EXAMPLES = settings(
    max_examples=30,
    deadline=None,
    database=None,
    # Each class that inherits a test is another executor of it; ``storage`` has no state.
    suppress_health_check=[
        HealthCheck.differing_executors,
        HealthCheck.function_scoped_fixture,
        HealthCheck.too_slow,
    ],
)


def write_shard(
    storage: Format,
    path: Path,
    content: Sequence[Record],
    *,
    meta: Mapping[str, Any] | None = None,
    raw_shape: tuple[int, int, int] | None = None,
) -> Path:
    """Write the records ``content`` as a shard to ``path``, and return that."""
    writer = storage.write(path, ShardSpec(meta=meta or {}, raw_shape=raw_shape))
    try:
        for record in content:
            writer.write(record)
        writer.close()
    except BaseException:
        writer.abort()
        raise
    return path


def read_shard(storage: Format, path: Path) -> list[Record]:
    """Return all records of the shard at ``path``."""
    with _reading(storage, path) as reader:
        return reader.read(range(len(reader)))


class FormatConformance:
    """What a storage format must do.

    To test one, subclass it in a test module::

        class TestZip(FormatConformance):
            name = "zip"

    The format must be registered, since the last tests convert and read whole datasets.
    """

    name: str
    """The format's name in the registry."""

    @pytest.fixture
    def storage(self) -> Format:
        """The format to be tested; override it to choose one in another way."""
        return get_format(self.name)

    # --- what is written comes back ---

    @_EXAMPLES
    @given(content=records())
    @example(content=[])
    def test_any_records_come_back(self, storage: Format, content: list[Record]) -> None:
        with _place() as path:
            found = read_shard(storage, write_shard(storage, path, content))
        assert found == content
        assert {type(value) for record in found for value in record.fields.values()} <= {bytes}

    @_EXAMPLES
    @given(content=records(raw_shape=RAW_SHAPE))
    def test_raw_pixels_of_one_shape_come_back(
        self, storage: Format, content: list[Record]
    ) -> None:
        with _place() as path:
            write_shard(storage, path, content, raw_shape=RAW_SHAPE)
            assert read_shard(storage, path) == content

    @_EXAMPLES
    @given(data=st.data(), content=records(min_size=1))
    def test_any_rows_come_in_the_order_asked(
        self, storage: Format, data: st.DataObject, content: list[Record]
    ) -> None:
        rows = data.draw(st.lists(st.integers(0, len(content) - 1), max_size=20))
        with _place() as path, _reading(storage, write_shard(storage, path, content)) as reader:
            assert reader.read(rows) == [content[row] for row in rows]

    def test_rows_come_in_the_order_asked(self, storage: Format, tmp_path: Path) -> None:
        content = sample_records()
        with _reading(storage, _write_sample(storage, tmp_path / "s")) as reader:
            assert reader.read([5, 0, 3]) == [content[5], content[0], content[3]]

    def test_a_row_asked_twice_comes_twice(self, storage: Format, tmp_path: Path) -> None:
        content = sample_records()
        with _reading(storage, _write_sample(storage, tmp_path / "s")) as reader:
            assert reader.read([2, 2, 1, 2]) == [content[2], content[2], content[1], content[2]]

    def test_no_rows_give_no_records(self, storage: Format, tmp_path: Path) -> None:
        with _reading(storage, _write_sample(storage, tmp_path / "s")) as reader:
            assert reader.read([]) == []

    def test_a_row_outside_is_an_index_error(self, storage: Format, tmp_path: Path) -> None:
        content = sample_records()
        with _reading(storage, _write_sample(storage, tmp_path / "s")) as reader:
            assert len(reader) == len(content)
            for row in (len(content), len(content) + 1, 1 << 40):
                with pytest.raises(IndexError):
                    reader.read([0, row])

    def test_a_negative_row_is_an_index_error(self, storage: Format, tmp_path: Path) -> None:
        content = sample_records()
        with _reading(storage, _write_sample(storage, tmp_path / "s")) as reader:
            for row in (-1, -len(content), -(1 << 40)):
                with pytest.raises(IndexError):
                    reader.read([row])

    def test_an_empty_shard_has_no_rows(self, storage: Format, tmp_path: Path) -> None:
        path = write_shard(storage, tmp_path / "s", [], meta={"a": 1}, raw_shape=RAW_SHAPE)
        with _reading(storage, path) as reader:
            assert len(reader) == 0
            assert dict(reader.meta) == {"a": 1}
            assert list(reader.ranges()) == []
            with pytest.raises(IndexError):
                reader.read([0])

    def test_a_missing_field_is_not_an_empty_one(self, storage: Format, tmp_path: Path) -> None:
        content = [
            Record("a", {"txt": b""}),
            Record("b", {"json": b"{}"}),
            Record("c", {"json": b"", "txt": b"c"}),
            Record("d", {"cls": b"0"}),
        ]
        assert read_shard(storage, write_shard(storage, tmp_path / "s", content)) == content

    def test_labels_come_back_as_they_were(self, storage: Format, tmp_path: Path) -> None:
        labels = (b"0", b"1", b"10", b"999999999", None, b"7")
        content = [
            Record(f"r{row}", {"txt": b"x"} | ({"cls": label} if label else {}))
            for row, label in enumerate(labels)
        ]
        assert read_shard(storage, write_shard(storage, tmp_path / "s", content)) == content

    def test_long_keys_come_back(self, storage: Format, tmp_path: Path) -> None:
        content = [
            Record(prefix + "k" * length, {"txt": b"%d" % length})
            for prefix in ("", "d/" * 60)
            for length in (1, 94, 95, 96, 97, 100, 101, 155, 256, 511, 2000)
        ]
        assert read_shard(storage, write_shard(storage, tmp_path / "s", content)) == content

    def test_raw_pixels_of_another_shape_are_refused(self, storage: Format, tmp_path: Path) -> None:
        wrong = [(RAW_SHAPE, b"short"), (RAW_SHAPE, b""), (None, b"pixels"), (None, b"")]
        for number, (shape, value) in enumerate(wrong):
            content = [Record("a", {"raw": value})]
            with pytest.raises(ValueError, match="shape"):
                write_shard(storage, tmp_path / str(number), content, raw_shape=shape)

    def test_many_rows_come_back(self, storage: Format, tmp_path: Path) -> None:
        content = [
            Record(f"r{row}", {"txt": b"%d" % row, "cls": b"%d" % row}) for row in range(3000)
        ]
        path = write_shard(storage, tmp_path / "s", content)
        assert read_shard(storage, path) == content
        with _reading(storage, path) as reader:
            assert reader.read([2999, 999, 1000]) == [content[2999], content[999], content[1000]]

    def test_a_value_of_five_megabytes_comes_back(self, storage: Format, tmp_path: Path) -> None:
        values = (b"before", random.Random(0).randbytes(5 << 20), b"after")
        content = [Record(f"r{row}", {"bin": value}) for row, value in enumerate(values)]
        assert read_shard(storage, write_shard(storage, tmp_path / "s", content)) == content

    def test_a_record_without_fields_is_kept_or_refused(
        self, storage: Format, tmp_path: Path
    ) -> None:
        content = [Record("a", {}), Record("b", {"txt": b"b"}), Record("c", {})]
        with contextlib.suppress(ValueError):
            assert read_shard(storage, write_shard(storage, tmp_path / "s", content)) == content

    def test_a_key_of_another_making_is_kept_or_refused(
        self, storage: Format, tmp_path: Path
    ) -> None:
        foreign = (
            "a.b",
            "a/",
            "/a",
            "a/.b",
            ".",
            "..",
            "ü",
            "a b",
            "a\nb",
            "a\\b",
            "a\0b",
            "__x__",
        )
        for number, key in enumerate(foreign):
            content = [Record(key, {"txt": b"1"}), Record("z", {"txt": b"2"})]
            try:
                path = write_shard(storage, tmp_path / str(number), content)
            except ValueError:
                continue
            assert read_shard(storage, path) == content, f"the key {key!r}"

    def test_meta_comes_back(self, storage: Format, tmp_path: Path) -> None:
        meta = {"classes": ["ä", "★ 🎈", "\x00\n\"'"], "n": [1, 2.5, None, True, {"": {}}], "ß": -1}
        path = _write_sample(storage, tmp_path / "s", meta)
        with _reading(storage, path) as reader:
            assert dict(reader.meta) == meta

    def test_meta_may_be_large(self, storage: Format, tmp_path: Path) -> None:
        meta = {"classes": [f"class number {number}" for number in range(20_000)]}
        path = _write_sample(storage, tmp_path / "s", meta)
        with _reading(storage, path) as reader:
            assert dict(reader.meta) == meta
            assert reader.read(range(len(reader))) == sample_records()

    # --- the file ---

    @_EXAMPLES
    @given(content=records(raw_shape=RAW_SHAPE))
    @example(content=[Record("a", {"txt": b""}), Record("b", {"txt": b"b" * 9000})])
    def test_ranges_are_the_bytes_of_the_file(self, storage: Format, content: list[Record]) -> None:
        with _place() as path:
            write_shard(storage, path, content, raw_shape=RAW_SHAPE)
            with _reading(storage, path) as reader:
                ranges = list(reader.ranges())
            data = path.read_bytes()
        assert len(ranges) == len(content)
        for record, fields in zip(content, ranges, strict=True):
            assert fields.keys() <= record.fields.keys()
            for field, (offset, length) in fields.items():
                assert 0 <= offset <= offset + length <= len(data)
                assert data[offset : offset + length] == record.fields[field]

    def test_two_writes_give_the_same_bytes(self, storage: Format, tmp_path: Path) -> None:
        assert _sha256_of_sample(storage, tmp_path / "a") == _sha256_of_sample(
            storage, tmp_path / "b"
        )

    def test_another_process_writes_the_same_bytes(self, storage: Format, tmp_path: Path) -> None:
        there = _call_in("spawn", _sha256_of_sample, storage, tmp_path / "there")
        assert there == _sha256_of_sample(storage, tmp_path / "here")

    def test_a_shard_is_one_file_and_reading_leaves_it_alone(
        self, storage: Format, tmp_path: Path
    ) -> None:
        path = _write_sample(storage, tmp_path / "s")
        before = path.read_bytes()
        read_shard(storage, path)
        assert os.listdir(tmp_path) == ["s"]
        assert path.read_bytes() == before

    def test_a_cut_file_never_gives_wrong_records(self, storage: Format, tmp_path: Path) -> None:
        path = _write_sample(storage, tmp_path / "s")
        data = path.read_bytes()
        boundaries = range(0, len(data), _BOUNDARY)
        chosen = random.Random(0).sample(range(len(data)), k=min(_CUTS, len(data)))
        around = [
            cut + shift for cut in boundaries[:: 1 + len(boundaries) // 200] for shift in (0, 1)
        ]
        cuts = sorted({0, 1, len(data) - 1, *chosen, *around} & set(range(len(data))))
        outcomes = _call_in("fork", _outcomes, storage, path, [data[:cut] for cut in cuts])
        for cut, outcome in zip(cuts, outcomes, strict=False):
            assert outcome in ("refused", "right"), f"cut to {cut} of {len(data)}: {outcome}"
        assert len(outcomes) == len(cuts)
        assert "refused" in outcomes

    def test_a_flipped_byte_never_does_worse_than_change_records(
        self, storage: Format, tmp_path: Path
    ) -> None:
        path = _write_sample(storage, tmp_path / "s")
        data = path.read_bytes()
        positions = sorted(random.Random(0).sample(range(len(data)), k=min(_FLIPS, len(data))))
        damaged = [_flipped(data, position) for position in positions]
        outcomes = _call_in("fork", _outcomes, storage, path, damaged)
        for position, outcome in zip(positions, outcomes, strict=False):
            assert outcome in ("refused", "right", "wrong"), f"byte {position} flipped: {outcome}"
        assert len(outcomes) == len(positions)

    def test_a_missing_file_is_a_corrupt_shard(self, storage: Format, tmp_path: Path) -> None:
        with pytest.raises(CorruptShard):
            storage.read(tmp_path / "missing")
        assert os.listdir(tmp_path) == []

    def test_junk_is_a_corrupt_shard(self, storage: Format, tmp_path: Path) -> None:
        junk = (
            b"",
            b"\n",
            b"no shard\n" * 1000,
            random.Random(0).randbytes(20_000),
            b"\xff" * 9000,
        )
        for number, content in enumerate(junk):
            path = tmp_path / str(number)
            path.write_bytes(content)
            with pytest.raises(CorruptShard):
                read_shard(storage, path)

    # --- opening and closing ---

    def test_closing_twice_does_nothing(self, storage: Format, tmp_path: Path) -> None:
        reader = storage.read(_write_sample(storage, tmp_path / "s"))
        reader.close()
        reader.close()

    def test_two_readers_of_one_file_do_not_disturb_each_other(
        self, storage: Format, tmp_path: Path
    ) -> None:
        content = sample_records()
        path = _write_sample(storage, tmp_path / "s")
        with _reading(storage, path) as first:
            with _reading(storage, path) as second:
                assert first.read([1]) == second.read([1]) == [content[1]]
            assert first.read([4, 2]) == [content[4], content[2]]

    def test_threads_read_with_readers_of_their_own(self, storage: Format, tmp_path: Path) -> None:
        content = sample_records()
        path = _write_sample(storage, tmp_path / "s")
        with ThreadPoolExecutor(4) as threads:
            found = [threads.submit(read_shard, storage, path) for _ in range(16)]
            assert all(future.result() == content for future in found)

    def test_nothing_stays_open(self, storage: Format, tmp_path: Path) -> None:
        read_shard(storage, _write_sample(storage, tmp_path / "warm-up"))
        before = _open_files()
        read_shard(storage, _write_sample(storage, tmp_path / "s"))
        assert not _leaves_open(before)

    def test_aborting_never_raises_and_leaves_nothing_open(
        self, storage: Format, tmp_path: Path
    ) -> None:
        _write_sample(storage, tmp_path / "warm-up")
        before = _open_files()
        for rows in (0, 1, 7):
            writer = storage.write(tmp_path / str(rows), ShardSpec(raw_shape=RAW_SHAPE))
            for record in sample_records()[:rows]:
                writer.write(record)
            writer.abort()
            writer.abort()
        finished = storage.write(tmp_path / "finished", ShardSpec())
        finished.close()
        finished.abort()
        assert read_shard(storage, tmp_path / "finished") == []
        del writer, finished
        assert not _leaves_open(before)

    # --- processes ---

    def test_a_forked_child_reads_and_so_does_its_parent(
        self, storage: Format, tmp_path: Path
    ) -> None:
        content = sample_records()
        path = _write_sample(storage, tmp_path / "s")
        with _reading(storage, path) as reader:
            assert reader.read([3]) == [content[3]]
            assert _call_in("fork", read_shard, storage, path) == content
            assert reader.read(range(len(content))) == content

    def test_a_spawned_child_reads(self, storage: Format, tmp_path: Path) -> None:
        path = _write_sample(storage, tmp_path / "s")
        assert _call_in("spawn", read_shard, storage, path) == sample_records()

    # --- whole datasets ---

    def test_a_dataset_has_the_bytes_of_its_source(self, storage: Format, tmp_path: Path) -> None:
        target = _convert(storage, tmp_path)
        assert verify(target, "decode").findings == []
        dataset = open_dataset(target, decode="bytes")
        assert sorted(dataset.paths) == sorted(_PICTURES)
        for row, path in enumerate(dataset.paths):
            data, label = dataset[row]
            assert data == (tmp_path / "source" / path).read_bytes()
            assert dataset.classes[label] == path.split("/")[0]

    def test_the_index_points_at_the_bytes_of_the_source(
        self, storage: Format, tmp_path: Path
    ) -> None:
        target = _convert(storage, tmp_path)
        dataset = open_dataset(target)
        row = 0
        for shard in dataset.manifest.shards:
            data = (target / shard.name).read_bytes()
            for _ in range(shard.rows):
                offset, length = (int(dataset._shards.rows[n][row]) for n in ("offset", "length"))
                source = (tmp_path / "source" / dataset.paths[row]).read_bytes()
                assert length == len(source)
                assert offset == -1 or data[offset : offset + length] == source
                row += 1

    def test_a_dataset_of_raw_pixels_has_the_pixels_of_its_source(
        self, storage: Format, tmp_path: Path
    ) -> None:
        recipe = Recipe(encode="raw", resize=(6, 5), resize_mode="stretch")
        target = _convert(storage, tmp_path, recipe=recipe)
        assert verify(target, "decode").findings == []
        dataset = open_dataset(target, decode="numpy")
        for row, path in enumerate(dataset.paths):
            with Image.open(tmp_path / "source" / path) as image:
                assert np.array_equal(dataset[row][0], np.asarray(image.convert("RGB")))

    def test_a_pickled_dataset_reads_the_same(self, storage: Format, tmp_path: Path) -> None:
        dataset = open_dataset(_convert(storage, tmp_path), decode="bytes")
        rows = [3, 0, 5, 3]
        expected = list(dataset[rows])
        copy = pickle.loads(pickle.dumps(dataset))
        assert list(copy[rows]) == expected
        assert _call_in("spawn", _samples, copy, rows) == expected

    def test_the_number_of_workers_changes_no_byte(self, storage: Format, tmp_path: Path) -> None:
        one = _convert(storage, tmp_path, name="one", workers=1)
        three = _convert(storage, tmp_path, name="three", workers=3)
        assert _contents(one) == _contents(three)

    def test_verify_finds_a_flipped_byte(self, storage: Format, tmp_path: Path) -> None:
        target = _convert(storage, tmp_path)
        name = open_dataset(target).manifest.shards[1].name
        data = (target / name).read_bytes()
        for position in random.Random(0).sample(range(len(data)), k=5):
            (target / name).write_bytes(_flipped(data, position))
            found = verify(target)
            assert {finding.file for finding in found.findings} == {name}
        (target / name).write_bytes(data)
        assert verify(target).ok


def sample_records() -> list[Record]:
    """Return seven different records; every second has a label and raw pixels of `RAW_SHAPE`."""
    rng = random.Random("sample")
    made = []
    for row in range(7):
        fields = {"jpg": rng.randbytes(1 + 900 * row), "json": b'{"row":%d}' % row}
        if row % 2:
            fields["cls"] = b"%d" % row
            fields["raw"] = rng.randbytes(prod(RAW_SHAPE))
        made.append(Record(f"class {row % 3}/name-{row}", fields))
    return made


@contextlib.contextmanager
def _place() -> Iterator[Path]:
    """Give a path at which nothing stands; hypothesis needs a new one for each example."""
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder) / "shard"


@contextlib.contextmanager
def _reading(storage: Format, path: Path) -> Iterator[ShardReader]:
    reader = storage.read(path)
    try:
        yield reader
    finally:
        reader.close()


def _write_sample(storage: Format, path: Path, meta: Mapping[str, Any] | None = None) -> Path:
    """Write the sample as a shard to ``path``, and return that."""
    return write_shard(storage, path, sample_records(), meta=meta, raw_shape=RAW_SHAPE)


def _sha256_of_sample(storage: Format, path: Path) -> str:
    """Write the sample, and return the file's SHA-256."""
    _write_sample(storage, path, {"z": 1, "a": {"y": 2, "b": 3}})
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _outcomes(storage: Format, path: Path, contents: Sequence[bytes]) -> list[str]:
    """Return what becomes of reading the sample from each of ``contents``, up to the worst."""
    expected = sample_records()
    found = []
    for content in contents:
        before = _open_files()
        path.write_bytes(content)
        try:
            found.append("right" if read_shard(storage, path) == expected else "wrong")
        except (ShardkitError, ValueError, OSError):
            found.append("refused")
        except Exception:
            return [*found, traceback.format_exc()]
        if _leaves_open(before):
            return [*found, f"files stay open ({found[-1]})"]
    return found


def _flipped(data: bytes, position: int) -> bytes:
    """Return ``data`` with another byte at ``position``; which bits differ depends on it."""
    mask = 1 + position * 37 % 255
    return data[:position] + bytes([data[position] ^ mask]) + data[position + 1 :]


def _open_files() -> int:
    return len(os.listdir("/dev/fd"))


def _leaves_open(before: int) -> bool:
    """Return whether more files are open than ``before``, once all garbage is collected."""
    return _open_files() > before and gc.collect() >= 0 and _open_files() > before


def _call_in(method: str, function: Callable[..., _Result], *arguments: Any) -> _Result:
    """Return what ``function`` returns in a child process, whatever becomes of that.

    Args:
        method: How the child is started, as `multiprocessing` names it.
        function: A function of a module.
        arguments: Its arguments.
    """
    context = multiprocessing.get_context(method)
    receiver, sender = context.Pipe(duplex=False)
    child = context.Process(target=_send, args=(sender, function, arguments))  # type: ignore[attr-defined]
    with warnings.catch_warnings():
        # From Python 3.12 on: threads of numpy and torch exist, but none holds a lock of ours.
        warnings.simplefilter("ignore", DeprecationWarning)
        child.start()
    sender.close()
    try:
        if not receiver.poll(_PATIENCE_SECONDS):
            pytest.fail(f"{function.__name__} hangs in a child process ({method})")
        result, error = receiver.recv()
    except EOFError:
        child.join()
        pytest.fail(f"a child process ({method}) ended with exit code {child.exitcode}")
    finally:
        child.kill()
        child.join()
        child.close()
        receiver.close()
    if error:
        pytest.fail(f"in a child process ({method}):\n{error}")
    returned: _Result = result
    return returned


def _send(sender: Connection, function: Callable[..., Any], arguments: Sequence[Any]) -> None:
    try:
        sender.send((function(*arguments), ""))
    except BaseException:
        sender.send((None, traceback.format_exc()))
    sender.close()


_PICTURES = (
    "bird/a b.png",
    "bird/größer.v2.png",
    "cat/1.png",
    "cat/1.bmp",
    "cat/deep/__2__.png",
    "cat/" + "x" * 120 + ".png",
    "dog/UPPER.PNG",
    "dog/z.ppm",
)


def _convert(
    storage: Format,
    folder: Path,
    *,
    name: str = "dataset",
    recipe: Recipe | None = None,
    workers: int = 1,
) -> Path:
    """Convert a small image folder, which is drawn if need be, to a dataset of several shards."""
    source = folder / "source"
    for number, path in enumerate(_PICTURES):
        if not (source / path).exists():
            (source / path).parent.mkdir(parents=True, exist_ok=True)
            pixels = np.random.default_rng(number).integers(0, 256, (6, 5, 3), np.uint8)
            Image.fromarray(pixels).save(source / path)
    options = ConvertOptions(to=storage.name, recipe=recipe or Recipe(), shard_samples=3)
    convert(scan_imagefolder(source), folder / name, options, workers=workers)
    return folder / name


def _samples(dataset: Any, rows: Sequence[int]) -> list[Any]:
    return list(dataset[rows])


def _contents(folder: Path) -> dict[str, bytes]:
    files = (path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}
