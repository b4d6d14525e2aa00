"""The checks of the machine: a table of rules, each of which judges the facts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from shardkit.measure.doctor.machine import Facts, fits_in_memory
from shardkit.system.formatting import percent, size
from shardkit.torch.data.memory import SHARED_MEMORY
from shardkit.torch.engine.preflight import SPARE_FILES

SEVERITIES = ("problem", "warning", "note", "ok")
"""``problem``: loading fails or a setting cannot work. ``warning``: it costs speed. ``note``:
information. ``ok``: passed."""

DOCKER_SHARED_MEMORY = 64 << 20
"""Default size of /dev/shm in Docker, in bytes."""

_FEW_FILES = 1024
"""Default limit of open files on most systems."""

_NETWORK = ["nfs", "nfs4", "cifs", "smb3", "smbfs", "9p", "ceph", "lustre", "beegfs", "gpfs", "afs"]

_SLOW_PLACES = {
    "on a network": _NETWORK,
    "served by a program": ["fuse", "fuseblk"],
    "in a container's layers": ["overlay", "overlayfs", "aufs"],
}


@dataclass(frozen=True, kw_only=True)
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
    """What helps; empty if nothing is needed."""


Verdict = tuple[str, str, str]
"""Severity, finding and remedy."""

Checked = tuple[str, Verdict | None] | None
"""Evidence, and a verdict unless the check passed; None if it does not apply."""


def run_checks(facts: Facts) -> list[Finding]:
    """Return the findings of all checks that apply, the worst first."""
    findings = []
    for name, check in CHECKS.items():
        checked = check(facts)
        if checked is not None:
            severity, what, remedy = checked[1] or ("ok", name, "")
            findings.append(
                Finding(name=name, severity=severity, what=what, evidence=checked[0], remedy=remedy)
            )
    return sorted(findings, key=lambda each: SEVERITIES.index(each.severity))


def _processors(facts: Facts) -> Checked:
    quota = "none" if facts.quota is None else f"{facts.quota:g} CPUs"
    present = facts.load.present
    evidence = f"{facts.workers} workers; affinity {facts.affinity} of {present}; quota {quota}"
    if facts.cpus >= present:
        return evidence, None
    what = f"this process may use {facts.cpus:g} of {present} CPUs"
    return evidence, ("note", what, "raise --cpus (Docker) or --cpus-per-task (Slurm)")


def _shared_memory(facts: Facts) -> Checked:
    if facts.shared_memory is None:
        return f"PyTorch does without {SHARED_MEMORY}", None
    total, free = facts.shared_memory
    needed = facts.place.shared_needed if facts.place else 0
    evidence = f"{size(free)} free of {size(total)}; worker processes need {size(needed)}"
    remedy = "enlarge it (Docker: --shm-size 8g or --ipc=host), or use fewer workers or threads"
    if needed > free and facts.place is not None and facts.place.processes:
        what = f"{SHARED_MEMORY} is too small for this loader's worker processes"
        return evidence, ("problem", what, remedy)
    if total <= DOCKER_SHARED_MEMORY or needed > free:
        what = f"{SHARED_MEMORY} is small: worker processes may fail"
        return evidence, ("warning", what, remedy)
    return evidence, None


def _open_files(facts: Facts) -> Checked:
    if facts.open_files is None:
        return "no limit", None
    needed = facts.place.files_needed if facts.place else 0
    evidence = f"`ulimit -n` is {facts.open_files}; worker processes need {needed}"
    if needed + SPARE_FILES > facts.open_files:
        severity = "problem" if facts.place is not None and facts.place.processes else "warning"
        what = "too few open files for the batches in flight"
        return evidence, (severity, what, f"run `ulimit -n {max(4096, 2 * needed)}` first")
    if facts.open_files < _FEW_FILES:
        remedy = "run `ulimit -n 4096` first: otherwise shards are reopened"
        return evidence, ("warning", "few open files allowed", remedy)
    return evidence, None


def _memory(facts: Facts) -> Checked:
    data = facts.place.bytes if facts.place else 0
    evidence = f"{size(facts.memory)}; data {size(data)}; swapped {size(facts.swap_used)}"
    if not fits_in_memory(data, facts.memory):
        what = "the data do not fit in memory: every epoch reads the disk"
        return evidence, ("note", what, "store smaller images, or read with BlockShuffle")
    if facts.swap_used > facts.memory // 10:
        return evidence, ("warning", "memory is swapped out", "end the processes that use it")
    return evidence, None


def _file_system(facts: Facts) -> Checked:
    if facts.place is None or not facts.place.filesystem:
        return None
    kind = facts.place.filesystem
    for where, kinds in _SLOW_PLACES.items():
        if kind.partition(".")[0] in kinds:
            remedy = "copy them to a local disk or a volume if reading is slow"
            return f"{facts.place.path}: {kind}", ("note", f"the data are {where} ({kind})", remedy)
    return f"{facts.place.path}: {kind}", None


def _page_cache(facts: Facts) -> Checked:
    if facts.place is None or facts.place.resident is None or not facts.place.bytes:
        return None
    evidence = f"{percent(facts.place.resident)} of the data cached at the start"
    if facts.place.resident < 0.5:
        what = "most of the data were not cached: the next epoch starts at disk speed"
        return evidence, ("note", what, "")
    return evidence, None


def _decoders(facts: Facts) -> Checked:
    jpeg = "libjpeg-turbo" if facts.libjpeg_turbo else "plain libjpeg"
    evidence = f"Pillow has {jpeg}; TurboJPEG 3 {'' if facts.turbojpeg else 'not '}found"
    evidence += f"; compiled module: {facts.compiled}" if facts.compiled else ""
    if not facts.libjpeg_turbo:
        what = "Pillow lacks libjpeg-turbo, the fast JPEG decoder"
        return evidence, ("warning", what, "pip install --force-reinstall pillow")
    if not facts.turbojpeg and "libjpeg-turbo" not in facts.compiled:  # it crops, too
        what = "no TurboJPEG 3, which decodes only the cropped part of a JPEG"
        return evidence, ("note", what, "pip install 'shardkit[turbo]'")
    return evidence, None


def _threads(facts: Facts) -> Checked:
    opencv = facts.place.opencv_threads if facts.place else 0
    named = [f"{name}={value}" for name, value in facts.variables.items()]
    evidence = ", ".join([*named, f"{opencv} OpenCV threads"])
    processes = facts.place is not None and facts.place.processes  # there OpenCV uses one thread
    if opencv > 1 and not processes and opencv * facts.workers > 2 * facts.cpus:
        what = f"{facts.workers} workers with {opencv} OpenCV threads each on {facts.cpus:g} CPUs"
        return evidence, ("warning", what, "call cv2.setNumThreads(0) in the transform's module")
    most = max((int(v) for v in facts.variables.values() if v.isdecimal()), default=1)
    if most > facts.cpus:
        what = f"libraries are set to {most} threads on {facts.cpus:g} CPUs"
        return evidence, ("warning", what, "unset the variable, or set OMP_NUM_THREADS=1")
    return evidence, None


CHECKS: dict[str, Callable[[Facts], Checked]] = {
    "processors": _processors,
    "shared memory": _shared_memory,
    "open files": _open_files,
    "memory": _memory,
    "file system": _file_system,
    "page cache": _page_cache,
    "decoders": _decoders,
    "threads": _threads,
}
