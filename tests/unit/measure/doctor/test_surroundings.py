"""The checks of the machine: each condition is planted, and found with its evidence and remedy."""

from __future__ import annotations

import os
import sys
import threading
import types
from pathlib import Path
from typing import Any

import pytest
from helpers import make_dataset, make_folder
from machines import MB, facts, place

from shardkit import UsageError
from shardkit.measure.doctor.facts import Facts, gather
from shardkit.measure.doctor.findings import SEVERITIES, Finding, ordered
from shardkit.measure.doctor.place import place_of
from shardkit.measure.doctor.surroundings import CHECKS, check, fits_in_memory, usable
from shardkit.measure.runner import page_cache as pages
from shardkit.measure.runner.environment import LIBRARIES
from shardkit.measure.runner.material import files_of, open_subject
from shardkit.measure.runner.spec import Subject
from shardkit.system.formatting import percent
from shardkit.system.machine import OtherLoad

GB = 1 << 30


def only(given: Facts, name: str) -> Finding:
    (found,) = [each for each in check(given) if each.name == name]
    return found


def test_a_machine_without_fault_has_only_what_is_ok() -> None:
    found = check(facts())

    assert {each.severity for each in found} == {"ok"}
    assert len(found) == len(CHECKS)
    assert all(each.evidence for each in found)
    assert len({each.name for each in found}) == len(found)


def test_without_data_only_the_machine_is_judged() -> None:
    names = {each.name for each in check(facts(place=None))}

    assert names == {each.name for each in check(facts())} - {"file system", "page cache"}


PLANTED: list[tuple[dict[str, Any], str, str, str]] = [
    ({"asked": True, "workers": 12, "affinity": 2}, "processors", "warning", "12 workers; 2 of 8"),
    ({"asked": True, "workers": 8, "quota": 1.5}, "processors", "warning", "1.5 processors"),
    ({"affinity": 2}, "processors", "note", "2 of 8 processors"),
    ({"quota": 3.0}, "processors", "note", "3 processors"),
    ({"shared_memory": None}, "shared memory", "note", "another way"),
    ({"shared_memory": (64 * MB, 64 * MB)}, "shared memory", "warning", "64.0 MiB"),
    (
        {"shared_memory": (16 * GB, MB), "place": place(shared_needed=GB, engine="process")},
        "shared memory",
        "problem",
        "batches under way take 1.0 GiB",
    ),
    (
        {"shared_memory": (16 * GB, MB), "place": place(shared_needed=GB, wanted="process")},
        "shared memory",
        "problem",
        "1.0 MiB free of 16.0 GiB",
    ),
    (
        {"shared_memory": (16 * GB, MB), "place": place(shared_needed=GB)},
        "shared memory",
        "warning",
        "1.0 MiB free",
    ),
    ({"descriptors": 256}, "open files", "warning", "`ulimit -n` is 256"),
    (
        {"descriptors": 2048, "place": place(files_needed=4000, engine="process")},
        "open files",
        "problem",
        "up to 4000",
    ),
    ({"descriptors": 2048, "place": place(files_needed=4000)}, "open files", "warning", "4000"),
    ({"place": place(bytes=30 * GB)}, "memory", "note", "the data are 30.0 GiB"),
    ({"place": place(worker_unique=5 * GB)}, "memory", "warning", "each of up to 5.0 GiB"),
    ({"swap_used": 8 * GB}, "memory", "warning", "8.0 GiB are in the swap"),
    ({"place": place(filesystem="nfs4")}, "file system", "note", "nfs4"),
    ({"place": place(filesystem="fuse.gcsfuse")}, "file system", "note", "fuse.gcsfuse"),
    ({"place": place(filesystem="overlay")}, "file system", "note", "overlay"),
    ({"place": place(resident=0.03)}, "page cache", "note", "3 % of 1.0 GiB"),
    ({"place": place(resident=None)}, "page cache", "note", "mincore"),
    ({"place": place(threads=["pump"])}, "start method", "warning", "the thread pump runs"),
    ({"place": place(cuda_begun=True)}, "start method", "warning", "CUDA is in use"),
    (
        {"place": place(cuda_begun=True), "default_start": "forkserver"},
        "start method",
        "note",
        "default is forkserver",
    ),
    ({"libjpeg_turbo": False}, "decoders", "warning", "a plain libjpeg"),
    ({"turbojpeg": False}, "decoders", "note", "TurboJPEG 3 is not there"),
    ({"place": place(opencv_threads=8)}, "threads", "warning", "OpenCV takes 8"),
    ({"variables": {"OMP_NUM_THREADS": "64"}}, "threads", "warning", "OMP_NUM_THREADS=64"),
    ({"load": OtherLoad(busy=6.0, present=8)}, "other load", "note", "6.0 of 8 CPUs"),
    ({"accelerator": ""}, "accelerator", "note", "no CUDA device"),
]


@pytest.mark.parametrize(("planted", "name", "severity", "evidence"), PLANTED)
def test_what_is_planted_is_found(
    planted: dict[str, Any], name: str, severity: str, evidence: str
) -> None:
    given = facts(**planted)
    found = only(given, name)

    assert found.severity == severity
    assert evidence in found.evidence
    assert found.what
    others = [each for each in check(given) if each.name != name]
    assert {each.severity for each in others} == {"ok"}
    if severity in ("problem", "warning"):
        assert found.remedy


def test_what_is_harmless_is_not_blamed() -> None:
    cured = place(opencv_threads=1)  # by the module of the transform
    assert only(facts(place=cured), "threads").severity == "ok"
    kept = place(opencv_threads=8, engine="process")  # worker processes keep it to one
    assert only(facts(place=kept), "threads").severity == "ok"
    assert only(facts(variables={"OMP_NUM_THREADS": "many"}), "threads").severity == "ok"
    assert only(facts(variables={"OMP_NUM_THREADS": "1"}), "threads").severity == "ok"
    assert only(facts(descriptors=None), "open files").severity == "ok"
    assert only(facts(asked=True, workers=16), "processors").severity == "ok"
    assert only(facts(place=None), "start method").severity == "ok"


def test_the_least_limit_counts() -> None:
    assert usable(facts(affinity=4, quota=2.5)) == 2.5
    assert usable(facts(affinity=2, quota=4.0)) == 2
    assert usable(facts()) == 8
    assert fits_in_memory(6 * GB, 10 * GB)
    assert not fits_in_memory(8 * GB, 10 * GB)


def test_findings_are_ordered_by_severity_and_else_kept() -> None:
    made = [
        Finding(name=f"{severity}{number}", severity=severity, what="w", evidence="e")
        for number in range(2)
        for severity in reversed(SEVERITIES)
    ]

    assert [each.name for each in ordered(made)] == [
        f"{severity}{number}" for severity in SEVERITIES for number in range(2)
    ]
    with pytest.raises(UsageError, match="severity 'bad' is unknown; known are problem, "):
        Finding(name="x", severity="bad", what="w", evidence="e")
    assert percent(0.784) == "78 %"


def test_the_facts_are_those_of_this_machine() -> None:
    found = gather()

    assert 1 <= found.affinity <= found.load.present == (os.cpu_count() or 1)
    assert found.memory >= found.available > 0
    assert found.versions["torch"]
    assert not found.asked
    assert gather(3).workers == 3
    assert gather(3).asked
    assert check(found)


def test_what_the_system_does_not_tell_is_left_open(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*_: object) -> Any:
        raise OSError

    monkeypatch.setitem(LIBRARIES, "no-such-package", "no_such_package")
    monkeypatch.setattr("os.statvfs", missing)
    monkeypatch.setattr("psutil.swap_memory", missing)
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    found = gather()

    assert found.versions["no-such-package"] == ""
    assert found.shared_memory is None
    assert found.swap_used == 0
    assert found.variables["OMP_NUM_THREADS"] == "7"


def test_opencv_is_asked_where_the_transform_is_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, "cv2", raising=False)
    dataset = open_subject(Subject(path=str(make_folder(tmp_path / "photos"))))
    assert place_of(dataset, [])["opencv_threads"] is None

    opencv = types.ModuleType("cv2")
    opencv.getNumThreads = lambda: 5  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "cv2", opencv)
    assert place_of(dataset, [])["opencv_threads"] == 5


def test_a_folder_is_blamed_on_no_transform() -> None:
    starved = facts(shared_memory=(16 * GB, MB), place=place(shared_needed=GB, wanted="process"))

    assert "transform" not in only(starved, "shared memory").what


def test_a_place_tells_what_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    photos = make_folder(tmp_path / "photos")
    made = make_dataset(photos, tmp_path / "made", to="hdf5")
    dataset = open_subject(Subject(path=str(made)))
    folder = open_subject(Subject(path=str(photos)))

    stop = threading.Event()
    thread = threading.Thread(target=stop.wait, name="beside")
    thread.start()
    try:
        found = place_of(dataset, files_of(dataset))
    finally:
        stop.set()
        thread.join()
    assert found["made"]["format"] == "hdf5"
    assert found["made"]["source"]["name"] == "photos"
    assert found["made"]["recipe"]["encode"] == "keep"
    assert not found["made"]["splits"]
    assert "beside" in found["threads"]
    assert found["start"] != "fork"
    assert found["filesystem"]

    found = place_of(folder, files_of(folder))
    assert found["made"] is None
    assert 0 <= found["resident"] <= 1

    monkeypatch.setattr(pages, "resident", lambda _: None)
    assert place_of(folder, files_of(folder))["resident"] is None
