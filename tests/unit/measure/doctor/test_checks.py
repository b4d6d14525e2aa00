"""The checks of the machine: each planted condition is found, with its evidence and remedy."""

from __future__ import annotations

from typing import Any

import pytest
from diagnoses import GB, MB, facts, place

from shardkit.measure.doctor.checks import CHECKS, SEVERITIES, run_checks
from shardkit.measure.doctor.machine import gather
from shardkit.system.machine import OtherLoad

NEEDS = {"shared_needed": GB, "files_needed": 4000}

PLANTED: list[tuple[dict[str, Any], str, str, str]] = [
    ({"affinity": 2}, "processors", "note", "affinity 2 of 8"),
    ({"quota": 3.0}, "processors", "note", "3 CPUs"),
    ({"shared_memory": (64 * MB, 64 * MB)}, "shared memory", "warning", "64.0 MiB"),
    (
        {"shared_memory": (16 * GB, MB), "place": place(**NEEDS, processes=True)},
        "shared memory",
        "problem",
        "1.0 MiB free of 16.0 GiB; worker processes need 1.0 GiB",
    ),
    ({"shared_memory": (16 * GB, MB), "place": place(**NEEDS)}, "shared memory", "warning", "1.0"),
    ({"open_files": 256}, "open files", "warning", "`ulimit -n` is 256"),
    (
        {"open_files": 2048, "place": place(**NEEDS, processes=True)},
        "open files",
        "problem",
        "worker processes need 4000",
    ),
    ({"open_files": 2048, "place": place(**NEEDS)}, "open files", "warning", "4000"),
    ({"place": place(bytes=30 * GB)}, "memory", "note", "data 30.0 GiB"),
    ({"swap_used": 8 * GB}, "memory", "warning", "swapped 8.0 GiB"),
    ({"place": place(filesystem="nfs4")}, "file system", "note", "nfs4"),
    ({"place": place(filesystem="fuse.gcsfuse")}, "file system", "note", "fuse.gcsfuse"),
    ({"place": place(filesystem="overlay")}, "file system", "note", "overlay"),
    ({"place": place(resident=0.03)}, "page cache", "note", "3"),
    ({"libjpeg_turbo": False}, "decoders", "warning", "plain libjpeg"),
    ({"turbojpeg": False}, "decoders", "note", "TurboJPEG 3 not found"),
    ({"place": place(opencv_threads=8)}, "threads", "warning", "8 OpenCV threads"),
    ({"variables": {"OMP_NUM_THREADS": "64"}}, "threads", "warning", "OMP_NUM_THREADS=64"),
]


@pytest.mark.parametrize(("planted", "name", "severity", "evidence"), PLANTED)
def test_a_planted_condition_is_found(
    planted: dict[str, Any], name: str, severity: str, evidence: str
) -> None:
    found = {each.name: each for each in run_checks(facts(**planted))}

    assert found[name].severity == severity
    assert evidence in found[name].evidence
    assert found[name].remedy or severity == "note"
    assert {each.severity for each in found.values() if each.name != name} <= {"ok"}


def test_a_machine_without_faults_passes_all_checks() -> None:
    found = run_checks(facts())

    assert [each.name for each in found] == list(CHECKS)
    assert {each.severity for each in found} == {"ok"}
    assert not {"file system", "page cache"} & {e.name for e in run_checks(facts(place=None))}


def test_the_worst_comes_first() -> None:
    planted = facts(
        turbojpeg=False, swap_used=8 * GB, place=place(**NEEDS, processes=True), open_files=99
    )
    found = [SEVERITIES.index(each.severity) for each in run_checks(planted)]

    assert found == sorted(found)
    assert len(set(found)) == 4


def test_this_machine_can_be_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    idle = OtherLoad(busy=0.0, present=2)
    monkeypatch.setattr("shardkit.system.machine.other_load", lambda: idle)
    found = gather(workers=5)

    assert found.workers == 5
    assert found.variables == {"OMP_NUM_THREADS": "3"}
    assert found.load is idle
    assert run_checks(found)
