"""The checks of the machine: a table of rules, each of which reads and judges one property."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from PIL import features

from shardkit.measure.doctor.pipeline import Loading, Pipeline
from shardkit.measure.runner.environment import library_versions
from shardkit.measure.runner.session import Session
from shardkit.system import machine, native
from shardkit.system.text import size
from shardkit.torch.data.memory import SHARED_MEMORY
from shardkit.torch.engine import preflight
from shardkit.torch.engine.processes import FILES_PER_BATCH, SPARE_SLOTS

SEVERITIES = ("problem", "warning", "note", "ok")
"""Loading fails or a setting cannot work; it costs speed; information; passed."""

_FITS = 0.7
"""Fraction of the memory that files may fill and still stay cached during training."""

_DOCKER_SHARED_MEMORY = 64 << 20
_FEW_FILES = 1024
"""Default size of /dev/shm in Docker, and default limit of open files on most systems."""

_THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
_SLOW_STORAGE = {
    "on a network": "nfs nfs4 cifs smb3 smbfs 9p ceph lustre beegfs gpfs afs",
    "in a user-space (FUSE) file system": "fuse fuseblk",
    "in a container's layers": "overlay overlayfs aufs",
}


@dataclass(frozen=True)
class Finding:
    """Result of a check."""

    name: str
    """Name of the check."""
    severity: str
    """One of `SEVERITIES`."""
    what: str
    """The finding in a few words; the name of a check that passed."""
    evidence: str
    """Measured values."""
    remedy: str = ""
    """Remedy; empty if none is needed."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The data to load, and the needs of worker processes."""

    workers: int = field(default_factory=preflight.default_workers)
    processes: bool = False
    """Whether the loader uses, or should use, worker processes."""
    files: Sequence[Path] = ()
    """Files of the data; none without data, or if unknown."""
    bytes: int = 0
    """Size of all files."""
    batch_bytes: int = 0
    """Size of a batch; 0 if unknown."""

    @property
    def in_flight(self) -> int:
        """Batches that worker processes prepare at a time."""
        return (2 + SPARE_SLOTS) * self.workers


Checked = tuple[str, list[tuple[bool, str, str, str]]]
"""Evidence, empty if there is nothing to check; and verdicts (the first that applies counts):
whether it does, severity, finding and remedy."""


def check_data(session: Session, *, loading: Loading) -> list[Finding]:
    """Return the findings for a loader."""
    pipeline = Pipeline(session, loading)
    setup = pipeline.setup
    wants = preflight.why_processes(pipeline.dataset) is not None
    plan = Plan(
        workers=setup.workers,
        processes=(setup.kind is not None and setup.kind.starts_processes)
        or (wants and not setup.stock),
        files=session.files,
        bytes=sum(path.stat().st_size for path in session.files),
        batch_bytes=preflight.batch_bytes(pipeline.dataset, setup.batch_size) or 0,
    )
    return run_checks(plan)


def run_checks(plan: Plan) -> list[Finding]:
    """Return the findings of all checks that apply, the worst first."""
    findings = []
    for name, check in CHECKS.items():
        evidence, verdicts = check(plan)
        applies = (verdict[1:] for verdict in verdicts if verdict[0])
        severity, problem, remedy = next(applies, ("ok", name, ""))
        if evidence:
            findings.append(Finding(name, severity, problem, evidence, remedy))
    return sorted(findings, key=lambda finding: SEVERITIES.index(finding.severity))


def fits_in_memory(count: int) -> bool:
    """Return whether files of ``count`` bytes stay cached after the first epoch."""
    return count <= _FITS * machine.memory_limit()


def _cpus() -> float:
    """Return the CPUs that this process may use, a fraction if its quota is one."""
    return min(machine.affinity(), machine.cpu_quota() or machine.affinity())


def _processors(plan: Plan) -> Checked:
    present = os.cpu_count() or 1
    quota = machine.cpu_quota()
    limit = "none" if quota is None else f"{quota:g} CPUs"
    evidence = f"{plan.workers} workers; affinity {machine.affinity()} of {present}; quota {limit}"
    problem = f"this process may use {_cpus():g} of {present} CPUs"
    remedy = "raise --cpus (Docker) or --cpus-per-task (Slurm)"
    return evidence, [(_cpus() < present, "note", problem, remedy)]


def _shared_memory(plan: Plan) -> Checked:
    total, free = preflight.shared_memory() or (0, 0)  # without any, PyTorch does without it
    needed = plan.in_flight * plan.batch_bytes
    evidence = f"{size(free)} free of {size(total)}; worker processes need {size(needed)}"
    small = 0 < total <= _DOCKER_SHARED_MEMORY or (total > 0 and free < needed)
    severity = "problem" if needed > free and plan.processes else "warning"
    problem = f"{SHARED_MEMORY} is {'too ' if needed > free else ''}small for worker processes"
    remedy = "enlarge it (Docker: --shm-size 8g or --ipc=host), or use fewer workers or threads"
    return evidence, [(small, severity, problem, remedy)]


def _open_files(plan: Plan) -> Checked:
    needed = plan.in_flight * FILES_PER_BATCH
    limit = preflight.open_files_limit() or sys.maxsize
    evidence = f"`ulimit -n` is {limit}; worker processes need {needed}"
    over = needed + preflight.SPARE_FILES > limit
    severity = "problem" if plan.processes and over else "warning"
    problem = f"{'too ' if over else ''}few open files are allowed"
    remedy = f"run `ulimit -n {max(4096, 2 * needed)}` first"
    return evidence, [(over or limit < _FEW_FILES, severity, problem, remedy)]


def _memory(plan: Plan) -> Checked:
    evidence = f"{size(machine.memory_limit())}; data {size(plan.bytes)}"
    large = "the data does not fit in memory, so every epoch reads from disk"
    smaller = "store smaller images, or read with BlockShuffle"
    return evidence, [(not fits_in_memory(plan.bytes), "note", large, smaller)]


def _file_system(plan: Plan) -> Checked:
    kind, mount = machine.filesystem(plan.files[0]) if plan.files else ("", "")
    family = kind.partition(".")[0]
    where = next((name for name, kinds in _SLOW_STORAGE.items() if family in kinds.split()), "")
    remedy = "copy it to a local disk or a volume if reading is slow"
    evidence = f"{kind} at {mount}" if kind else ""
    return evidence, [(bool(where), "note", f"the data is {where} ({kind})", remedy)]


def _libraries(_: Plan) -> Checked:
    compiled = native.describe()
    fast = bool(features.check("libjpeg_turbo"))
    evidence = ", ".join(f"{name} {version or '?'}" for name, version in library_versions().items())
    evidence += f"; libjpeg-turbo in Pillow: {'yes' if fast else 'no'}"
    evidence += f"; compiled module: {compiled}"
    slow = "Pillow lacks libjpeg-turbo, the fast JPEG decoder"
    lacks = "libjpeg-turbo" not in compiled
    problem = "no compiled module, which decodes only the cropped part of a JPEG"
    return evidence, [
        (not fast, "warning", slow, "pip install --force-reinstall pillow"),
        (lacks, "note", problem, "`shardkit --version` shows why"),
    ]


def _threads(plan: Plan) -> Checked:
    cv2 = sys.modules.get("cv2")
    cpus = _cpus()
    opencv = 0 if cv2 is None else int(cv2.getNumThreads())
    set_to = {name: os.environ[name] for name in _THREAD_VARIABLES if name in os.environ}
    evidence = ", ".join([*map("=".join, set_to.items()), f"{opencv} OpenCV threads"])
    # In worker processes, OpenCV uses one thread.
    many = opencv > 1 and not plan.processes and opencv * plan.workers > 2 * cpus
    problem = f"{plan.workers} workers with {opencv} OpenCV threads each on {cpus:g} CPUs"
    most = max((int(value) for value in set_to.values() if value.isdecimal()), default=1)
    too_many = f"libraries are set to use {most} threads on {cpus:g} CPUs"
    return evidence, [
        (many, "warning", problem, "call cv2.setNumThreads(0) in the transform's module"),
        (most > cpus, "warning", too_many, "unset the variable, or set OMP_NUM_THREADS=1"),
    ]


CHECKS: dict[str, Callable[[Plan], Checked]] = {
    "processors": _processors,
    "shared memory": _shared_memory,
    "open files": _open_files,
    "memory": _memory,
    "file system": _file_system,
    "libraries": _libraries,
    "threads": _threads,
}
