"""Conversions on full and failing disks, and interrupted ones: they can be repeated."""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import shutil
from pathlib import Path
from typing import Any

import pytest
from helpers import jpeg, make_folder, run_main, tree
from interrupted import converted, is_whole, made, stopped
from refusals import refused

from shardkit import ShardkitError
from shardkit.contracts import Entry
from shardkit.conversion import disk as space_module
from shardkit.conversion.build_all import Builder
from shardkit.conversion.convert import convert_scan, plan_conversion
from shardkit.conversion.disk import DiskReservation, as_failure
from shardkit.conversion.plan import ConvertOptions
from shardkit.errors import ConversionFailed, DiskFull, UsageError
from shardkit.sources.imagefolder import ImageFolder, scan_imagefolder
from shardkit.system.files import Reservation
from shardkit.testing.tools import call_in

SAVE_OBSERVED = "shardkit.conversion.engine.save_observed"


@pytest.mark.parametrize(
    ("workers", "shares"),
    [(1, [1] * 5), (2, [1, 1, 1, 1, 2]), (3, [1, 1, 1, 2, 1]), (7, [2, 2, 1, 1, 1])],
)
def test_idle_workers_help_with_the_last_shards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, workers: int, shares: list[int]
) -> None:
    def refuse(_: Any, tasks: list[Any], **__: Any) -> None:
        raise RuntimeError([task.workers for task in tasks])

    monkeypatch.setattr("shardkit.conversion.build_all.run_tasks", refuse)
    source = make_folder(tmp_path / "photos", ["cat"], each=5)
    with pytest.raises(RuntimeError) as found:
        convert_scan(
            scan_imagefolder(source),
            tmp_path / "out",
            ConvertOptions(to="lmdb", shard_samples=1),
            Builder(workers=workers),
        )
    assert found.value.args[0] == shares


def test_a_disk_that_is_too_small_is_noticed_before_writing(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(space_module, "free_bytes", lambda _: 1000)
    with refused(DiskFull, "0.0 MiB", "1.0 MiB"):
        made(folder, tmp_path / "out")
    assert os.listdir(tmp_path) == ["photos"]


def test_a_disk_too_small_for_a_few_large_files_names_them(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("a", "b"):
        with (folder / f"cat/{name}.jpg").open("wb") as file:
            file.truncate(1 << 30)  # sparse, so it takes no space
    monkeypatch.setattr(space_module, "free_bytes", lambda _: 1 << 29)
    with refused(DiskFull, "cat/a.jpg (1.0 GiB)", "cat/b.jpg"):
        made(folder, tmp_path / "out")


@pytest.mark.parametrize(("to", "enough"), [("hdf5", False), ("lmdb", True), ("webdataset", True)])
def test_hdf5_temporarily_needs_twice_the_space_of_a_shard(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, to: str, enough: bool
) -> None:
    plan = plan_conversion(folder, tmp_path / "out", to=to)
    room = plan.splits[0].estimated_bytes * 3 // 2
    monkeypatch.setattr(space_module, "free_bytes", lambda _: room)
    with contextlib.nullcontext() if enough else pytest.raises(DiskFull, match="temporarily"):
        made(folder, tmp_path / "out", to)


def test_a_full_disk_reports_the_space_needed_and_a_rerun_resumes(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options: dict[str, Any] = {"shard_samples": 2}
    made(folder, tmp_path / "expected", **options)
    read = ImageFolder.read

    def fail(source: ImageFolder, split: str, entry: Entry) -> Any:
        if entry == plan.splits[0].source.entries[4]:
            raise OSError(errno.ENOSPC, "No space left on device")
        return read(source, split, entry)

    plan = plan_conversion(folder, tmp_path / "out", to="webdataset")
    with monkeypatch.context() as patch:
        patch.setattr(ImageFolder, "read", fail)
        with refused(DiskFull, "0.0 MiB"):
            made(folder, tmp_path / "out", **options)
    assert converted(folder, tmp_path / "out", **options).reused_shards == 2
    assert tree(tmp_path / "out") == tree(tmp_path / "expected")


def test_space_of_finished_shards_is_not_reserved_again(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with stopped(SAVE_OBSERVED), pytest.raises(KeyboardInterrupt):
        made(folder, tmp_path / "out", shard_samples=1)
    monkeypatch.setattr(space_module, "free_bytes", lambda _: 3000)
    made(folder, tmp_path / "out", shard_samples=1)
    assert is_whole(tmp_path / "out")


@pytest.mark.parametrize(
    ("options", "held"),
    [({}, True), ({"quality": 50}, False)],
    ids=["known sizes", "guessed sizes"],
)
def test_space_is_reserved_if_sizes_are_known(
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    options: dict[str, Any],
    held: bool,
) -> None:
    """Six shards, one in work: space for five is reserved at first, for none in the end."""
    sizes: list[int] = []

    class Noted(Reservation):
        def __init__(self, folder: Path, size: int) -> None:
            super().__init__(folder, size)
            sizes.append(os.fstat(self._file.fileno()).st_size)

        def shrink(self, size: int) -> None:
            super().shrink(size)
            sizes.append(os.fstat(self._file.fileno()).st_size)

    monkeypatch.setattr(space_module, "Reservation", Noted)
    made(folder, tmp_path / "out", shard_samples=1, **options)
    assert len(sizes) == (7 if held else 0)
    if held and any(sizes):  # else the file system cannot reserve
        assert sizes == [*sorted(set(sizes[:5]), reverse=True), 0, 0]
        images = sorted(path.stat().st_size for path in folder.rglob("*.*"))
        assert sizes[0] > sum(images[:5])


def test_a_failed_reservation_is_refused_at_once(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(space_module, "Reservation", refuse)
    with pytest.raises(DiskFull):
        made(folder, tmp_path / "out")
    assert os.listdir(tmp_path) == ["photos"]


@pytest.mark.parametrize(
    "name",
    ["assemble.save_index", "convert.save_manifests", "assemble._file_entry", "staging.sync"],
)
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO])
def test_a_disk_that_fails_at_the_end_fails_the_conversion(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, code: int
) -> None:
    made(folder, tmp_path / "expected")

    def fail(*_: object) -> None:
        raise OSError(code, os.strerror(code), "some file")

    with monkeypatch.context() as patch:
        patch.setattr(f"shardkit.conversion.{name}", fail)
        with pytest.raises(ConversionFailed):
            made(folder, tmp_path / "out")
    assert not (tmp_path / "out" / "shardkit.json").exists()
    made(folder, tmp_path / "out")
    assert tree(tmp_path / "out") == tree(tmp_path / "expected")


def limited(size: int, *words: object) -> tuple[int, str]:
    """Call the command where the kernel writes at most so many bytes into any file."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))
    done = run_main(*words)
    return done.returncode, done.stderr


@pytest.mark.parametrize(
    ("to", "size"),
    [
        *(("lmdb", 100), ("hdf5", 5_000), ("webdataset", 12_000)),
        *(("lmdb", 20_000), ("hdf5", 22_000), ("webdataset", 22_000)),
    ],
)
def test_a_write_that_the_kernel_refuses_fails_the_conversion(
    tmp_path: Path, to: str, size: int
) -> None:
    """At any position, in spools or shards, there is one message and nothing worse."""
    source = make_folder(tmp_path / "photos", each=8)
    out = tmp_path / "out"
    words = ("convert", "imagefolder", source, out, "--to", to, "--workers", 1)
    code, said = call_in("fork", limited, size, *words)
    assert code == 1, said[-500:]
    assert "Traceback" not in said
    assert is_whole(out)
    made(source, out, to)
    made(source, tmp_path / "expected", to)
    assert tree(out) == tree(tmp_path / "expected")


@pytest.mark.parametrize(("to", "counts"), [("lmdb", (1, 4)), ("hdf5", (3,)), ("webdataset", (2,))])
def test_finished_shards_are_kept_and_the_result_is_the_same(
    tmp_path: Path, to: str, counts: tuple[int, ...]
) -> None:
    source = make_folder(tmp_path / "photos", each=4)
    options: dict[str, Any] = {"shard_samples": 2}
    made(source, tmp_path / "expected", to, **options)
    for after in counts:
        out = tmp_path / f"out {after}"
        with (
            stopped("shardkit.sources.imagefolder.ImageFolder.read", after),
            pytest.raises(KeyboardInterrupt),
        ):
            made(source, out, to, **options)
        result = converted(source, out, to, **options)
        assert result.reused_shards == after // 2
        assert tree(out) == tree(tmp_path / "expected")


@pytest.fixture(scope="module")
def scenes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two sources, one of them with splits."""
    root = tmp_path_factory.mktemp("scenes")
    make_folder(root / "single", ["cat"], each=2)
    make_folder(root / "splits/train", ["cat"], each=1)
    make_folder(root / "splits/val", ["dog"], each=1)
    return root


@pytest.mark.parametrize("force", [False, True])
def test_any_command_finishes_an_interrupted_publication(
    folder: Path, tmp_path: Path, force: bool
) -> None:
    made(folder, tmp_path / "out", "lmdb")
    with (
        stopped("shardkit.conversion.staging.StagingDirectory._move"),
        pytest.raises(KeyboardInterrupt),
    ):
        made(folder, tmp_path / "out", "hdf5", force=True)
    if force:
        made(folder, tmp_path / "out", "lmdb", force=True)
    else:
        with refused(UsageError, tmp_path / "out"):
            made(folder, tmp_path / "out", "lmdb")
    made(folder, tmp_path / "expected", "lmdb" if force else "hdf5")
    assert tree(tmp_path / "out") == tree(tmp_path / "expected")


def test_an_unfinished_run_is_not_resumed_after_the_source_changed(
    folder: Path, tmp_path: Path
) -> None:
    with stopped(SAVE_OBSERVED), pytest.raises(KeyboardInterrupt):
        made(folder, tmp_path / "out")
    (folder / "cat/000.jpg").write_bytes(jpeg(30, 30))
    with refused(UsageError, "(cat/000.jpg)", "force=True"):
        made(folder, tmp_path / "out")
    with refused(UsageError, "quality=", "7", "resize="):
        made(folder, tmp_path / "out", quality=7, resize="8x9")
    made(folder, tmp_path / "out", force=True)
    made(folder, tmp_path / "expected")
    assert tree(tmp_path / "out") == tree(tmp_path / "expected")


def test_a_folder_that_vanishes_is_no_list_of_bad_files(folder: Path, tmp_path: Path) -> None:
    scan = scan_imagefolder(folder)
    shutil.rmtree(folder / "cat")
    with refused(ConversionFailed, folder / "cat"):
        convert_scan(scan, tmp_path / "out", ConvertOptions(to="lmdb"))


def test_a_source_with_wrong_records_is_detected(folder: Path, tmp_path: Path) -> None:
    """Two records of one key would overwrite each other in a tar or an LMDB."""
    scan = scan_imagefolder(folder)
    images = scan.splits[""]
    scan.splits[""] = images.of([entry._replace(key="same") for entry in images.entries])
    with pytest.raises(ShardkitError):
        convert_scan(scan, tmp_path / "out", ConvertOptions(to="webdataset"))


# Errors of a disk: those of too little space, and all others.


@pytest.mark.parametrize(
    ("code", "kind", "said"),
    [
        (errno.ENOSPC, DiskFull, ()),
        (errno.EDQUOT, DiskFull, ()),
        (errno.EMFILE, ConversionFailed, ()),
        (errno.ENFILE, ConversionFailed, ()),
        (errno.EIO, ConversionFailed, ("a/b",)),
    ],
)
def test_an_error_names_its_remedy(
    tmp_path: Path, code: int, kind: type[ConversionFailed], said: tuple[str, ...]
) -> None:
    found = as_failure(OSError(code, os.strerror(code), "a/b"), tmp_path)
    assert type(found) is kind
    with refused(kind, *said):
        raise found


@pytest.mark.parametrize(("code", "kind"), [(errno.ENOSPC, DiskFull), (errno.EIO, OSError)])
def test_only_a_lack_of_space_is_a_shortage(
    tmp_path: Path, code: int, kind: type[Exception]
) -> None:
    space = DiskReservation(tmp_path, [1], ahead=1)
    with pytest.raises(kind), space.reserved(exact=False):
        raise OSError(code, os.strerror(code))
