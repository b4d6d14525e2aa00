"""Conformance tests: damaged files, open files, threads and processes."""

from __future__ import annotations

import gc
import os
import random
import traceback
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from shardkit.contracts import Format, ShardSpec
from shardkit.errors import CorruptShard, ShardkitError
from shardkit.testing.tools import (
    NEW_PROCESS,
    RAW_SHAPE,
    call_in,
    flipped,
    leaves_open,
    open_files,
    read_shard,
    reading,
    sample_records,
    write_sample,
)

_BOUNDARY = 512
"""Tar members, and the pages of most other formats, start at multiples of this."""

_LENGTHS = 64
_FLIPS = 300


class DamageConformance:
    """Tests of damaged files, open files, threads and processes."""

    # --- damage ---

    def test_a_truncated_file_never_gives_wrong_records(
        self, storage: Format, tmp_path: Path
    ) -> None:
        path = write_sample(storage, tmp_path / "s")
        data = path.read_bytes()
        boundaries = range(0, len(data), _BOUNDARY)
        chosen = random.Random(0).sample(range(len(data)), k=min(_LENGTHS, len(data)))
        around = [
            end + shift for end in boundaries[:: 1 + len(boundaries) // 200] for shift in (0, 1)
        ]
        lengths = sorted({0, 1, len(data) - 1, *chosen, *around} & set(range(len(data))))
        outcomes = call_in("fork", _outcomes, storage, path, [data[:end] for end in lengths])
        for length, outcome in zip(lengths, outcomes, strict=False):
            assert outcome in ("refused", "right"), f"{length} of {len(data)} bytes: {outcome}"
        assert len(outcomes) == len(lengths)
        assert "refused" in outcomes

    def test_a_flipped_byte_changes_a_record_or_is_refused(
        self, storage: Format, tmp_path: Path
    ) -> None:
        path = write_sample(storage, tmp_path / "s")
        data = path.read_bytes()
        positions = sorted(random.Random(0).sample(range(len(data)), k=min(_FLIPS, len(data))))
        damaged = [flipped(data, position) for position in positions]
        outcomes = call_in("fork", _outcomes, storage, path, damaged)
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
        reader = storage.read(write_sample(storage, tmp_path / "s"))
        reader.close()
        reader.close()

    def test_two_readers_of_one_file_are_independent(self, storage: Format, tmp_path: Path) -> None:
        content = sample_records()
        path = write_sample(storage, tmp_path / "s")
        with reading(storage, path) as first:
            with reading(storage, path) as second:
                assert first.read([1]) == second.read([1]) == [content[1]]
            assert first.read([4, 2]) == [content[4], content[2]]

    def test_threads_read_with_separate_readers(self, storage: Format, tmp_path: Path) -> None:
        content = sample_records()
        path = write_sample(storage, tmp_path / "s")
        with ThreadPoolExecutor(4) as threads:
            futures = [threads.submit(read_shard, storage, path) for _ in range(16)]
            assert all(future.result() == content for future in futures)

    def test_reading_leaves_no_file_open(self, storage: Format, tmp_path: Path) -> None:
        read_shard(storage, write_sample(storage, tmp_path / "warm-up"))
        gc.collect()  # garbage of other tests, collected later, would hide a leak
        before = open_files()
        read_shard(storage, write_sample(storage, tmp_path / "s"))
        assert not leaves_open(before)

    def test_aborting_never_raises_and_leaves_no_file_open(
        self, storage: Format, tmp_path: Path
    ) -> None:
        write_sample(storage, tmp_path / "warm-up")
        gc.collect()  # garbage of other tests, collected later, would hide a leak
        before = open_files()
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
        assert not leaves_open(before)

    # --- processes ---

    def test_a_forked_child_and_its_parent_read(self, storage: Format, tmp_path: Path) -> None:
        content = sample_records()
        path = write_sample(storage, tmp_path / "s")
        with reading(storage, path) as reader:
            assert reader.read([3]) == [content[3]]
            assert call_in("fork", read_shard, storage, path) == content
            assert reader.read(range(len(content))) == content

    def test_a_new_process_reads(self, storage: Format, tmp_path: Path) -> None:
        path = write_sample(storage, tmp_path / "s")
        assert call_in(NEW_PROCESS, read_shard, storage, path) == sample_records()


def _outcomes(storage: Format, path: Path, contents: Sequence[bytes]) -> list[str]:
    """Return the outcome of reading each of ``contents``; stop after an unacceptable one."""
    expected = sample_records()
    outcomes = []
    for content in contents:
        before = open_files()
        path.write_bytes(content)
        try:
            outcomes.append("right" if read_shard(storage, path) == expected else "wrong")
        except (ShardkitError, ValueError, OSError):
            outcomes.append("refused")
        except Exception:
            return [*outcomes, traceback.format_exc()]
        if leaves_open(before):
            return [*outcomes, f"files stay open ({outcomes[-1]})"]
    return outcomes
