"""The checks of the machine: each planted condition is found, with its evidence and remedy."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from shardkit.measure.doctor import checks
from shardkit.measure.doctor.checks import CHECKS, SEVERITIES, Finding, Plan, run_checks

GB, MB = 1 << 30, 1 << 20

MACHINE: dict[str, Any] = {
    "machine.affinity": 8,
    "machine.cpu_quota": None,
    "machine.memory_limit": 32 * GB,
    "machine.filesystem": ("ext4", "/"),
    "preflight.shared_memory": (16 * GB, 16 * GB),
    "preflight.open_files_limit": 65536,
    "features.check": True,
    "native.describe": "libjpeg-turbo",
    "os.cpu_count": 8,
}
"""What a machine without faults returns."""

PLANTED: list[tuple[dict[str, Any], str, str, str]] = [
    ({"machine.affinity": 2}, "processors", "note", "affinity 2 of 8"),
    ({"machine.cpu_quota": 3.0}, "processors", "note", "3 CPUs"),
    ({"preflight.shared_memory": (64 * MB, 64 * MB)}, "shared memory", "warning", "64.0 MiB"),
    ({"preflight.shared_memory": (16 * GB, MB)}, "shared memory", "problem", "1.0 MiB free of"),
    ({"preflight.open_files_limit": 256}, "open files", "warning", "`ulimit -n` is 256"),
    ({"preflight.open_files_limit": 99}, "open files", "problem", "worker processes need 80"),
    ({"machine.memory_limit": GB}, "memory", "note", "data 1.0 GiB"),
    ({"machine.filesystem": ("nfs4", "/data")}, "file system", "note", "nfs4 at /data"),
    ({"machine.filesystem": ("fuse.gcsfuse", "/data")}, "file system", "note", "fuse.gcsfuse"),
    ({"machine.filesystem": ("overlay", "/")}, "file system", "note", "overlay"),
    ({"features.check": False}, "libraries", "warning", "libjpeg-turbo in Pillow: no"),
    ({"native.describe": "not built"}, "libraries", "note", "compiled module: not built"),
]


@pytest.fixture
def found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """Run the checks on a machine with planted conditions."""
    for name in checks._THREAD_VARIABLES:
        monkeypatch.delenv(name, raising=False)

    def run(planted: dict[str, Any], **plan: Any) -> dict[str, Finding]:
        for place, value in (MACHINE | planted).items():
            monkeypatch.setattr(
                f"shardkit.measure.doctor.checks.{place}", lambda *_, value=value: value
            )
        data = {"workers": 8, "processes": True, "files": [tmp_path], "bytes": GB}
        given = Plan(**{**data, "batch_bytes": MB, **plan})
        return {each.name: each for each in run_checks(given)}

    return run


@pytest.mark.parametrize(("planted", "name", "severity", "evidence"), PLANTED)
def test_a_planted_condition_is_found(
    found: Any, planted: dict[str, Any], name: str, severity: str, evidence: str
) -> None:
    findings = found(planted)

    assert findings[name].severity == severity
    assert evidence in findings[name].evidence
    assert findings[name].remedy or severity == "note"
    assert {each.severity for each in findings.values() if each.name != name} <= {"ok"}


def test_too_many_threads_are_found(found: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "64")
    assert found({})["threads"].what == "libraries are set to 64 threads on 8 CPUs"
    monkeypatch.setitem(sys.modules, "cv2", SimpleNamespace(getNumThreads=lambda: 8))
    assert "8 OpenCV threads each" in found({}, processes=False)["threads"].what


def test_a_machine_without_faults_passes_all_checks(found: Any) -> None:
    assert [*found({})] == [*CHECKS]
    assert {each.severity for each in found({}).values()} == {"ok"}
    assert [*found({}, files=[], bytes=0)] == [name for name in CHECKS if name != "file system"]


def test_the_worst_comes_first(found: Any) -> None:
    planted = {
        "native.describe": "not built",
        "machine.affinity": 2,
        "features.check": False,
        "preflight.open_files_limit": 99,
    }
    order = [SEVERITIES.index(each.severity) for each in found(planted).values()]

    assert order == sorted(order)
    assert len(set(order)) == 4


def test_this_machine_can_be_checked() -> None:
    assert {each.name for each in run_checks(Plan())} >= {"processors", "libraries"}
