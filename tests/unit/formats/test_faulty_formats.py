"""The conformance suite can fail: each test finds a fault made for it."""

from __future__ import annotations

import inspect
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, NoReturn

import pytest
from hypothesis import Phase, is_hypothesis_test, settings

from shardkit.contracts import Chunks, Format, Range, ShardReader, ShardSpec, ShardWriter
from shardkit.errors import CorruptShard
from shardkit.formats.webdataset import TarReader, TarWriter, encode
from shardkit.record import Record
from shardkit.registry import get_format
from shardkit.testing import FormatConformance

# --- writers with a fault ---


def writes(change: Callable[[Record], Record | None]) -> type[TarWriter]:
    """Return a writer that writes other records, or leaves some out."""

    class Changes(TarWriter):
        def write(self, record: Record) -> None:
            changed = change(record)
            if changed is not None:
                super().write(changed)

    return Changes


def writes_field(name: str, change: Callable[[bytes], bytes]) -> type[TarWriter]:
    """Return a writer that changes the values of a field."""
    return writes(
        lambda record: Record(
            record.key, {n: change(v) if n == name else v for n, v in record.fields.items()}
        )
    )


def writes_meta(change: Callable[[Mapping[str, Any]], Mapping[str, Any]]) -> type[TarWriter]:
    """Return a writer that describes its shard in another way."""

    class Describes(TarWriter):
        def __init__(self, path: Path, spec: ShardSpec) -> None:
            super().__init__(path, replace(spec, meta=change(spec.meta)))

    return Describes


LosesEmptyFields = writes(
    lambda r: Record(r.key, {n: v for n, v in r.fields.items() if v} or {"x": b""})
)
InvertsPixels = writes_field("raw", lambda value: bytes(255 - each for each in value))
PadsPixels = writes_field("raw", lambda value: (value + bytes(45))[:45])
KeepsLabelsInBytes = writes_field("cls", lambda value: b"%d" % (int(value) % 256))
CutsKeys = writes(lambda r: Record(r.key[-255:], r.fields))
CutsValues = writes(lambda r: Record(r.key, {n: v[: 1 << 20] for n, v in r.fields.items()}))
SkipsRecordsWithoutFields = writes(lambda r: r if r.fields else None)
CleansKeys = writes(lambda r: Record(r.key.replace(".", "_").replace("\n", " "), r.fields))
LosesMeta = writes_meta(lambda meta: {})
LosesLargeMeta = writes_meta(lambda meta: meta if len(str(meta)) < 65536 else {})
SignsWithRandomBytes = writes_meta(lambda meta: {**meta, "id": os.urandom(8).hex()})


class SwapsTwoRecords(TarWriter):
    _held: Record | None = None

    def write(self, record: Record) -> None:
        if record.key.endswith("-2"):
            self._held = record
            return
        super().write(record)
        if self._held is not None:
            super().write(self._held)
            self._held = None


class ForgetsRowsAfterThousand(TarWriter):
    _rows = 0

    def write(self, record: Record) -> None:
        self._rows += 1
        if self._rows <= 1000:
            super().write(record)


class SignsWithItsProcess(TarWriter):
    def __init__(self, path: Path, spec: ShardSpec) -> None:
        super().__init__(path, replace(spec, meta={**spec.meta, "process": os.getpid()}))


class RaisesOnAbort(TarWriter):
    def abort(self) -> None:
        super().abort()
        raise OSError("no space left on device")


class KeepsItsFileOnAbort(TarWriter):
    kept: ClassVar[list[Any]] = []

    def abort(self) -> None:
        self.kept.append(os.dup(self._file.fileno()) if not self._file.closed else None)
        super().abort()


# --- readers with a fault ---


class LosesTheLastRecord(TarReader):
    def __len__(self) -> int:
        return max(0, super().__len__() - 1)


def reads(change: Callable[[Sequence[int], int], Sequence[int]]) -> type[TarReader]:
    """Return a reader that reads other rows: a function of the rows and their number."""

    class Changes(TarReader):
        def read(self, rows: Sequence[int]) -> list[Record]:
            return super().read(change(rows, len(self)))

    return Changes


SortsRows = reads(lambda rows, _: sorted(rows))
LosesDuplicates = reads(lambda rows, _: list(dict.fromkeys(rows)))
ReadsAllForNone = reads(lambda rows, count: rows or range(count))
GivesANeighbour = reads(lambda rows, count: [min(row, count - 1) for row in rows])
CountsFromTheEnd = reads(lambda rows, count: [row % count if row < 0 else row for row in rows])


class RefusesEmptyShards(TarReader):
    def __init__(self, path: Path) -> None:
        super().__init__(path)
        if not self._keys:
            self._fail("there is nothing in it")


class FillsInMissingFields(TarReader):
    def read(self, rows: Sequence[int]) -> list[Record]:
        return [Record(r.key, {"txt": b"", **r.fields}) for r in super().read(rows)]


class GivesMemoryViews(TarReader):
    def read(self, rows: Sequence[int]) -> list[Record]:
        return [
            Record(r.key, {n: memoryview(v) for n, v in r.fields.items()})  # type: ignore[misc]
            for r in super().read(rows)
        ]


class PointsOneByteFurther(TarReader):
    def ranges(self) -> Sequence[Mapping[str, Range]]:
        return [
            {name: Range(range_.offset + 1, range_.length) for name, range_ in fields.items()}
            for fields in super().ranges()
        ]


class ForgetsTheRangesOfTheLastRow(TarReader):
    def ranges(self) -> Sequence[Mapping[str, Range]]:
        return super().ranges()[:-1]


class LeavesALockFile(TarReader):
    def __init__(self, path: Path) -> None:
        super().__init__(path)
        path.with_name(f"{path.name}-lock").touch()


class TakesTheMissingEndForZeros(TarReader):
    def _pread(self, range_: Range) -> bytes:
        return os.pread(self._file.fileno(), range_.length, range_.offset).ljust(
            range_.length, b"\0"
        )

    def _check_end(self, offset: int, stop: int | None) -> None:
        pass


class RaisesKeyErrorOnDamage(TarReader):
    def _fail(self, reason: str) -> NoReturn:
        self.close()
        raise KeyError(reason)


class CrashesOnDamage(TarReader):
    def _fail(self, reason: str) -> NoReturn:
        os._exit(139)


class LeavesDamagedFilesOpen(TarReader):
    kept: ClassVar[list[Any]] = []

    def _fail(self, reason: str) -> NoReturn:
        self.kept.append(os.dup(self._file.fileno()))
        super()._fail(reason)


class LetsMissingFilesThrough(TarReader):
    def __init__(self, path: Path) -> None:
        path.stat()
        super().__init__(path)


class TakesJunkForAnEmptyShard(TarReader):
    def __init__(self, path: Path) -> None:
        try:
            super().__init__(path)
        except CorruptShard:
            self._keys = []


class ClosesOnlyOnce(TarReader):
    def close(self) -> None:
        os.close(os.dup(self._file.fileno()))  # fails on a closed file
        super().close()


class OpensAFileOnlyOnce(TarReader):
    opened: ClassVar[set[Path]] = set()

    def __init__(self, path: Path) -> None:
        if path in self.opened:
            raise CorruptShard(f"{path} is open in this process already")
        super().__init__(path)
        self.opened.add(path)

    def close(self) -> None:
        self.opened.discard(self.path)
        super().close()


class WorksInTheMainThreadOnly(TarReader):
    def __init__(self, path: Path) -> None:
        if threading.current_thread() is not threading.main_thread():
            raise CorruptShard("objects can only be used in the main thread")
        super().__init__(path)


class NeverCloses(TarReader):
    kept: ClassVar[list[Any]] = []

    def close(self) -> None:
        self.kept.append(self._file)


class DoesNotSurviveAFork(TarReader):
    _owner = os.getpid()

    def __init__(self, path: Path) -> None:
        if os.getpid() != self._owner:
            raise CorruptShard("the environment belongs to another process")
        super().__init__(path)


class KnowsOnlyWhatItsProcessWrote(TarReader):
    written: ClassVar[set[Path]] = set()

    def __init__(self, path: Path) -> None:
        if path not in self.written:
            raise CorruptShard(f"{path} is unknown here")
        super().__init__(path)


class RemembersWhatItWrote(TarWriter):
    def __init__(self, path: Path, spec: ShardSpec) -> None:
        super().__init__(path, spec)
        KnowsOnlyWhatItsProcessWrote.written.add(path)


class ReadsOnAfterAPiece(TarReader):
    def __init__(self, path: Path, start: int = 0, _stop: int | None = None) -> None:
        super().__init__(path, start)


class ReportsTheEndOfAPiece(TarWriter):
    def append(self, encoded: Sequence[bytes]) -> int:
        return super().append(encoded) + sum(map(len, encoded))


_Writer = type[ShardWriter]
_Reader = type[ShardReader]

FAULTS: list[tuple[str, _Writer, _Reader]] = [
    ("any_records_come_back", LosesEmptyFields, TarReader),
    ("any_records_come_back", TarWriter, LosesTheLastRecord),
    ("any_records_come_back", TarWriter, GivesMemoryViews),
    ("raw_pixels_of_one_shape_come_back", InvertsPixels, TarReader),
    ("raw_pixels_of_a_stated_dtype_come_back", InvertsPixels, TarReader),
    ("raw_pixels_of_another_shape_are_refused", PadsPixels, TarReader),
    ("any_rows_come_in_the_requested_order", TarWriter, SortsRows),
    ("rows_come_in_the_requested_order", TarWriter, SortsRows),
    ("rows_come_in_the_requested_order", SwapsTwoRecords, TarReader),
    ("pieces_equal_the_whole", TarWriter, ReadsOnAfterAPiece),
    ("pieces_equal_the_whole", ReportsTheEndOfAPiece, TarReader),
    ("a_repeated_row_is_returned_twice", TarWriter, LosesDuplicates),
    ("no_rows_give_no_records", TarWriter, ReadsAllForNone),
    ("a_row_out_of_range_is_an_index_error", TarWriter, GivesANeighbour),
    ("a_negative_row_is_an_index_error", TarWriter, CountsFromTheEnd),
    ("an_empty_shard_has_no_rows", TarWriter, RefusesEmptyShards),
    ("a_missing_field_is_not_an_empty_one", TarWriter, FillsInMissingFields),
    ("labels_come_back_unchanged", KeepsLabelsInBytes, TarReader),
    ("long_keys_come_back", CutsKeys, TarReader),
    ("many_rows_come_back", ForgetsRowsAfterThousand, TarReader),
    ("a_value_of_five_megabytes_comes_back", CutsValues, TarReader),
    ("a_record_without_fields_is_kept_or_refused", SkipsRecordsWithoutFields, TarReader),
    ("an_unusual_key_is_kept_or_refused", CleansKeys, TarReader),
    ("meta_comes_back", LosesMeta, TarReader),
    ("meta_may_be_large", LosesLargeMeta, TarReader),
    ("ranges_are_the_bytes_of_the_file", TarWriter, PointsOneByteFurther),
    ("ranges_are_the_bytes_of_the_file", TarWriter, ForgetsTheRangesOfTheLastRow),
    ("two_writes_give_the_same_bytes", SignsWithRandomBytes, TarReader),
    ("another_process_writes_the_same_bytes", SignsWithItsProcess, TarReader),
    ("a_shard_is_one_file_and_reading_leaves_it_alone", TarWriter, LeavesALockFile),
    ("a_truncated_file_never_gives_wrong_records", TarWriter, TakesTheMissingEndForZeros),
    ("a_truncated_file_never_gives_wrong_records", TarWriter, CrashesOnDamage),
    ("a_flipped_byte_changes_a_record_or_is_refused", TarWriter, RaisesKeyErrorOnDamage),
    ("a_flipped_byte_changes_a_record_or_is_refused", TarWriter, LeavesDamagedFilesOpen),
    ("a_missing_file_is_a_corrupt_shard", TarWriter, LetsMissingFilesThrough),
    ("junk_is_a_corrupt_shard", TarWriter, TakesJunkForAnEmptyShard),
    ("closing_twice_does_nothing", TarWriter, ClosesOnlyOnce),
    ("two_readers_of_one_file_are_independent", TarWriter, OpensAFileOnlyOnce),
    ("threads_read_with_separate_readers", TarWriter, WorksInTheMainThreadOnly),
    ("reading_leaves_no_file_open", TarWriter, NeverCloses),
    ("aborting_never_raises_and_leaves_no_file_open", RaisesOnAbort, TarReader),
    ("aborting_never_raises_and_leaves_no_file_open", KeepsItsFileOnAbort, TarReader),
    ("a_forked_child_and_its_parent_read", TarWriter, DoesNotSurviveAFork),
    ("a_new_process_reads", RemembersWhatItWrote, KnowsOnlyWhatItsProcessWrote),
]

OF_DATASETS = {
    "a_dataset_has_the_bytes_of_its_source",
    "a_dataset_of_raw_pixels_has_the_pixels_of_its_source",
    "a_pickled_dataset_reads_the_same",
    "fields_and_layers_have_the_values_of_their_samples",
    "images_of_other_types_come_back",
    "planes_have_the_pixels_of_their_jpegs",
    "the_index_locates_the_bytes_of_the_source",
    "the_number_of_workers_does_not_change_a_byte",
    "verify_finds_a_flipped_byte",
}
"""Tests that need a registered format; they test the engine more than the format."""


def faulty(write: _Writer, read: _Reader) -> Format:
    """Return the format that consists of ``write`` and ``read``."""
    chunks = Chunks(encode=encode, append=write.append, read=read)  # type: ignore[attr-defined]
    return Format(name="faulty", suffix=".tar", title="", write=write, read=read, chunks=chunks)


def run(test: str, write: _Writer, read: _Reader, folder: Path) -> None:
    """Run one test of the suite on a format that consists of ``write`` and ``read``."""
    storage = faulty(write, read)
    method = getattr(FormatConformance(), f"test_{test}")
    arguments = {"storage": storage, "tmp_path": folder}
    wanted = inspect.signature(method).parameters
    method(**{name: value for name, value in arguments.items() if name in wanted})


@pytest.mark.parametrize(("test", "write", "read"), FAULTS)
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_fault_is_found(
    test: str, write: _Writer, read: _Reader, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    function = getattr(FormatConformance, f"test_{test}")
    if is_hypothesis_test(function):  # one failing example will do; it need not be a small one
        quick = settings(function._hypothesis_internal_use_settings, phases=[Phase.generate])
        monkeypatch.setattr(function, "_hypothesis_internal_use_settings", quick)
    with pytest.raises((Exception, pytest.fail.Exception)):
        run(test, write, read, tmp_path)


def test_without_a_fault_it_is_a_registered_format_that_passes() -> None:
    """As `test_conformance` shows."""
    tar, found = get_format("webdataset"), faulty(TarWriter, TarReader)
    assert (found.write, found.read, found.chunks) == (tar.write, tar.read, tar.chunks)


def test_each_test_of_the_suite_has_a_fault_to_find() -> None:
    suite = {name[5:] for name in dir(FormatConformance) if name.startswith("test_")}
    assert suite == OF_DATASETS | {test for test, _, _ in FAULTS}
