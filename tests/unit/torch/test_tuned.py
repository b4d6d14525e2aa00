"""Tuned files, written by `shardkit tune --out`: loading and validation."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path
from typing import Any

import pytest
from helpers import make_dataset, make_folder
from refusals import refused

from shardkit import ShardkitError, UsageError, make_loader, open_dataset
from shardkit.system.machine import usable_cpus
from shardkit.torch.engine.options import LoaderOptions
from shardkit.torch.tuned import VERSION, Tuned, load_tuned, require_replaceable

GOOD: dict[str, Any] = {
    "shardkit_tuned": VERSION,
    "batch_size": 4,
    "settings": {"engine": "thread", "num_workers": 3, "prefetch_factor": 5},
    "processors": usable_cpus(),
    "measured": {},
}


def written(folder: Path, **changed: Any) -> Path:
    path = folder / "tuned.json"
    path.write_text(json.dumps({**GOOD, **changed}), "utf-8")
    return path


def test_saved_settings_are_loaded(tmp_path: Path) -> None:
    tuned = Tuned(
        batch_size=32,
        settings={"engine": "process", "num_workers": 4, "sharing_strategy": "file_system"},
        processors=usable_cpus(),
        ranks=4,
        measured={"images_per_second": 1000.5},
    )

    tuned.save(tmp_path / "tuned.json")

    assert load_tuned(tmp_path / "tuned.json") == tuned


def test_a_loader_uses_settings_and_batch_size(tmp_path: Path) -> None:
    dataset = open_dataset(make_dataset(make_folder(tmp_path / "a"), tmp_path / "made"))

    loader = make_loader(dataset, tuned=written(tmp_path))

    assert (loader.batch_size, loader.engine, loader.num_workers) == (4, "thread", 3)
    assert loader.options.prefetch_factor == 5
    assert make_loader(dataset, 2, tuned=written(tmp_path)).batch_size == 2


def test_options_override_and_contradictions_are_refused(tmp_path: Path) -> None:
    tuned = load_tuned(written(tmp_path))

    options = tuned.options(LoaderOptions(pin_memory=False, num_workers=3))

    assert options == LoaderOptions(
        engine="thread", num_workers=3, prefetch_factor=5, pin_memory=False
    )
    with refused(UsageError, "num_workers", "2", "3", "tuned="):
        tuned.options(LoaderOptions(num_workers=2))


def test_ranks_that_share_a_machine_share_the_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight ranks do not take eight times what was measured for one."""
    settings = {"engine": "thread", "num_workers": 12, "prefetch_factor": 3}
    for ranks, now, expected in ((1, 1, 12), (1, 8, 1), (1, 3, 4), (2, 8, 3), (8, 1, 12)):
        monkeypatch.setenv("LOCAL_WORLD_SIZE", str(now))
        tuned = Tuned(batch_size=4, settings=settings, processors=1, ranks=ranks)
        options = tuned.options(LoaderOptions())
        assert (options.num_workers, options.prefetch_factor) == (expected, 3)
        with refused(UsageError, f"and {expected} in tuned="):
            tuned.options(LoaderOptions(num_workers=99))


def test_another_machine_warns(tmp_path: Path) -> None:
    dataset = open_dataset(make_dataset(make_folder(tmp_path / "a"), tmp_path / "made"))
    path = written(tmp_path, processors=usable_cpus() + 1)

    with pytest.warns(
        RuntimeWarning, match=f"measured with {usable_cpus() + 1} processors"
    ) as told:
        make_loader(dataset, tuned=path)

    assert [warning.filename for warning in told] == [__file__]


def test_settings_that_tune_does_not_write_are_refused(tmp_path: Path) -> None:
    settings: dict[str, tuple[Any, ...]] = {
        "engine": ("warp", ["thread"]),
        "num_workers": (-1, True, 1e9),
        "prefetch_factor": (0,),
        "start_method": ("__import__", None),
        "sharing_strategy": ("carrier pigeon",),
        "collate_fn": ("os:system",),
        "pin_memory": ("yes", 1, [True], "x" * 100_000),
        "rank": (None,),
    }
    wrong: dict[str, tuple[Any, ...]] = {
        "shardkit_tuned": (VERSION + 1, True),
        "batch_size": (0, True, "64"),
        "processors": (-1, 1.5),
        "ranks": (0, "8", "x" * 100_000),
        "settings": ([], *({name: v} for name, values in settings.items() for v in values)),
        "measured": (None,),
    }
    for name, values in wrong.items():
        for value in values:
            path = written(tmp_path, **{name: value})
            with refused(UsageError, path, "shardkit tune --out") as caught:
                load_tuned(path)
            assert len(str(caught.value)) < 1000


def test_hostile_files_are_refused(tmp_path: Path) -> None:
    for content in (
        b"",
        b"null",
        b"[]",
        b"{",
        b"\xff\xfe\x00",
        b"[" * 100_000,
        b'{"shardkit_tuned": 1}',
        b'{"a": ' * 50_000,
        b'{"shardkit_tuned": 1, "batch_size": ' + b"9" * 10_000 + b"}",
        b" " * ((1 << 20) + 2),
    ):
        (tmp_path / "file").write_bytes(content)
        with refused(UsageError, tmp_path / "file"):
            load_tuned(tmp_path / "file")


def test_too_many_workers_are_refused(tmp_path: Path) -> None:
    path = written(tmp_path, settings={"engine": "process", "num_workers": 20_000})

    with refused(UsageError, "num_workers=20000", "1024"):
        load_tuned(path)


def test_a_missing_file_and_a_folder_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="`shardkit tune --out` writes it"):
        load_tuned(tmp_path / "missing.json")
    with refused(UsageError):
        load_tuned(tmp_path)


def test_a_pipe_does_not_hang(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")

    with refused(UsageError):
        load_tuned(tmp_path / "pipe")


def test_only_tuned_files_are_replaced(tmp_path: Path) -> None:
    require_replaceable(tmp_path / "new.json")
    require_replaceable(written(tmp_path, processors=usable_cpus() + 1))
    notes = tmp_path / "notes.txt"
    notes.write_text("precious")

    with refused(UsageError):
        require_replaceable(notes)
    with refused(UsageError):
        require_replaceable(tmp_path / "missing" / "tuned.json")
    with pytest.raises(UsageError):
        require_replaceable(tmp_path)


def test_a_file_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    tuned = load_tuned(written(tmp_path))

    with refused(ShardkitError):
        tuned.save(tmp_path / "missing" / "tuned.json")


def test_threads_tuned_for_another_dataset_warn(tmp_path: Path) -> None:
    tuned = dataclasses.replace(load_tuned(written(tmp_path)), settings={"engine": "thread"})

    tuned.warn_of_threads(None)
    with pytest.warns(RuntimeWarning, match="threads .* transform flip"):
        tuned.warn_of_threads("the transform flip may hold the GIL")
    dataclasses.replace(tuned, measured={"processes": "the transform"}).warn_of_threads("another")
    dataclasses.replace(tuned, settings={"engine": "process"}).warn_of_threads("another")
