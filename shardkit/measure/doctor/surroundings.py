"""The checks of the surroundings: each takes facts, and returns one finding, or None."""

from __future__ import annotations

from collections.abc import Callable

from shardkit.measure.doctor.facts import Facts
from shardkit.measure.doctor.findings import Finding, fine
from shardkit.system.formatting import percent, size
from shardkit.torch.data.memory import SHARED_MEMORY
from shardkit.torch.engine.preflight import SPARE_FILES

Check = Callable[[Facts], Finding | None]

DOCKER_SHARED_MEMORY = 64 << 20
"""Bytes of /dev/shm that Docker gives to a container that does not ask for more."""

FEW_DESCRIPTORS = 1024
"""What most systems give to a shell."""

FITS = 0.7
"""Part of the memory up to which a dataset stays in the kernel's cache beside a training run."""

_NETWORK = ("nfs", "nfs4", "cifs", "smb3", "smbfs", "9p", "ceph", "lustre", "beegfs", "gpfs", "afs")

_SLOW_TO_OPEN = ("overlay", "overlayfs", "aufs")


def check(facts: Facts) -> list[Finding]:
    """Return the findings of all checks, in the order in which they stand here."""
    found = (each(facts) for each in CHECKS)
    return [finding for finding in found if finding is not None]


def usable(facts: Facts) -> float:
    """Return how many processors' worth of time this process has."""
    return facts.affinity if facts.quota is None else min(facts.affinity, facts.quota)


def fits_in_memory(count: int, memory: int) -> bool:
    """Tell whether files of ``count`` bytes are read from the disk once, and from memory later."""
    return count <= FITS * memory


def processors(facts: Facts) -> Finding:
    """Hold workers against affinity and the control group's quota."""
    have, present = usable(facts), facts.load.present
    quota = "none" if facts.quota is None else f"{facts.quota:g} processors"
    evidence = (
        f"{facts.workers} workers; {facts.affinity} of {present} processors in the affinity, "
        f"quota of the control group: {quota}"
    )
    if facts.asked and facts.workers > 2 * have:
        return Finding(
            name="processors",
            severity="warning",
            what=f"{facts.workers} workers on {have:g} processors",
            evidence=evidence,
            remedy=f"take --workers {max(1, int(have))}, unless they wait rather than compute; "
            "`shardkit tune` measures it",
        )
    if have < present:
        return Finding(
            name="processors",
            severity="note",
            what=f"this process has {have:g} of the machine's {present} processors",
            evidence=evidence,
            remedy="more come with --cpus (Docker), --cpus-per-task (Slurm) or taskset, "
            "if the machine has them free",
        )
    return fine("processors", evidence)


def shared_memory(facts: Facts) -> Finding:
    """Hold the shared memory against the batches that travel through it."""
    if facts.shared_memory is None:
        return Finding(
            name="shared memory",
            severity="note",
            what=f"there is no {SHARED_MEMORY}",
            evidence="PyTorch shares memory in another way here",
        )
    total, free = facts.shared_memory
    needed = facts.place.shared_needed if facts.place else 0
    processes = facts.place is not None and "process" in (facts.place.engine, facts.place.wanted)
    evidence = f"{SHARED_MEMORY} has {size(free)} free of {size(total)}"
    if needed:
        evidence += f"; batches under way take {size(needed)} with worker processes"
    remedy = "raise it (Docker: --shm-size 8g or --ipc=host), or take fewer workers or batches"
    if processes and needed > free:
        return Finding(
            name="shared memory",
            severity="problem",
            what=f"{SHARED_MEMORY} is too small for the worker processes that this loader needs",
            evidence=evidence,
            remedy=remedy,
        )
    if total <= DOCKER_SHARED_MEMORY or needed > free:
        return Finding(
            name="shared memory",
            severity="warning",
            what=f"{SHARED_MEMORY} is small: worker processes may fail",
            evidence=evidence,
            remedy=f"{remedy}; threads need none",
        )
    return fine("shared memory", evidence)


def descriptors(facts: Facts) -> Finding:
    """Hold the limit of open files against what batches need."""
    if facts.descriptors is None:
        return fine("open files", "no limit")
    needed = facts.place.files_needed if facts.place else 0
    evidence = f"`ulimit -n` is {facts.descriptors}"
    if needed:
        evidence += f"; batches under way take up to {needed} with worker processes"
    if facts.place is not None and needed + SPARE_FILES > facts.descriptors:
        wanted = "process" in (facts.place.engine, facts.place.wanted)
        return Finding(
            name="open files",
            severity="problem" if wanted else "warning",
            what="too few files may be open at once for the batches under way",
            evidence=evidence,
            remedy=f"run `ulimit -n {max(4096, 2 * needed)}` before it",
        )
    if facts.descriptors < FEW_DESCRIPTORS:
        return Finding(
            name="open files",
            severity="warning",
            what="few files may be open at once",
            evidence=evidence,
            remedy="run `ulimit -n 4096` before it: a dataset of many shards is reopened otherwise",
        )
    return fine("open files", evidence)


def memory(facts: Facts) -> Finding:
    """Hold memory against the dataset and against the workers."""
    evidence = f"{size(facts.available)} available of {size(facts.memory)}"
    place = facts.place
    if place and place.worker_unique * facts.workers > facts.available:
        return Finding(
            name="memory",
            severity="warning",  # and no problem: they were at work, and did not fail
            what="the worker processes take more memory than was free",
            evidence=f"{evidence}; {facts.workers} workers, each of up to "
            f"{size(place.worker_unique)} that it shares with none",
            remedy="take fewer workers, or a smaller batch",
        )
    if place and not fits_in_memory(place.bytes, facts.memory):
        return Finding(
            name="memory",
            severity="note",
            what="the data do not fit in memory: every epoch reads the disk, and rates are the "
            "disk's",
            evidence=f"{evidence}; the data are {size(place.bytes)}",
            remedy="make them smaller (--resize, --encode jpeg), add memory, or read forwards: "
            "make_loader(..., shuffle=shardkit.BlockShuffle())",
        )
    if place:
        evidence += f"; the data are {size(place.bytes)} and stay in memory after one epoch"
    if facts.swap_used > facts.memory // 10:
        return Finding(
            name="memory",
            severity="warning",
            what="memory is swapped out",
            evidence=f"{evidence}; {size(facts.swap_used)} are in the swap space",
            remedy="end what takes the memory",
        )
    return fine("memory", evidence)


def file_system(facts: Facts) -> Finding | None:
    """Tell what kind of file system the data lie on."""
    if facts.place is None:
        return None
    kind, path = facts.place.filesystem, facts.place.path
    evidence = f"{path} lies on {kind or 'an unknown kind'}, mounted at {facts.place.mount or '?'}"
    if kind in _NETWORK:
        return Finding(
            name="file system",
            severity="note",
            what=f"the data come over a network ({kind})",
            evidence=evidence,
            remedy="copy the dataset to a local disk if reading limits",
        )
    if kind.startswith("fuse"):
        return Finding(
            name="file system",
            severity="note",
            what=f"the data come through a program ({kind})",
            evidence=evidence,
            remedy="copy the dataset to a local disk if reading limits: each read asks a process",
        )
    if kind in _SLOW_TO_OPEN:
        return Finding(
            name="file system",
            severity="note",
            what=f"the data lie in a container's layers ({kind})",
            evidence=evidence,
            remedy="mount a volume for them: opening many files is slow here",
        )
    return fine("file system", evidence)


def page_cache(facts: Facts) -> Finding | None:
    """Tell how much of the data the kernel had in memory before anything was read."""
    place = facts.place
    if place is None:
        return None
    if place.resident is None:
        return Finding(
            name="page cache",
            severity="note",
            what="it cannot be told what is in the page cache",
            evidence="the system tells it of files that you own or may write, and not on all file "
            "systems (mincore)",
        )
    evidence = f"{percent(place.resident)} of {size(place.bytes)} were in memory when this began"
    if place.resident < 0.5:
        return Finding(
            name="page cache",
            severity="note",
            what="most of the data were not in memory: the next epoch begins at the disk's speed",
            evidence=evidence,
        )
    return fine("page cache", evidence)


def start_method(facts: Facts) -> Finding:
    """Tell how workers begin, and what stands against a fork."""
    evidence = f"Python's default is {facts.default_start}"
    place = facts.place
    if place is None:
        return fine("start method", evidence)
    evidence += f"; a loader takes {place.start}"
    hazards = [f"the thread {name} runs" for name in place.threads]
    hazards += ["CUDA is in use"] if place.cuda_begun else []
    if hazards:
        return Finding(
            name="start method",
            severity="warning" if facts.default_start == "fork" else "note",
            what="with this transform a fork is unsafe, and PyTorch's own DataLoader may fork",
            evidence=f"{evidence}; {', '.join(hazards)} once it is imported",
            remedy="make_loader takes a fork server by itself; to a DataLoader give "
            "multiprocessing_context='forkserver'",
        )
    return fine("start method", evidence)


def decoders(facts: Facts) -> Finding:
    """Tell what decodes images."""
    jpeg = "libjpeg-turbo" if facts.libjpeg_turbo else "a plain libjpeg"
    has = "there" if facts.turbojpeg else "not there"
    evidence = f"Pillow has {jpeg}; TurboJPEG 3 is {has}"
    if not facts.libjpeg_turbo:
        return Finding(
            name="decoders",
            severity="warning",
            what="Pillow was built without libjpeg-turbo, the fast decoder of JPEGs",
            evidence=evidence,
            remedy="install Pillow's own wheel (pip install --force-reinstall pillow)",
        )
    if not facts.turbojpeg:
        return Finding(
            name="decoders",
            severity="note",
            what="TurboJPEG 3 is not there, which decodes only the part of a JPEG that is cropped",
            evidence=evidence,
            remedy="pip install 'shardkit[turbo]', or libjpeg-turbo 3 from conda-forge or Homebrew",
        )
    return fine("decoders", evidence)


def threads(facts: Facts) -> Finding:
    """Hold the threads of libraries, multiplied by the workers, against the processors."""
    have = usable(facts)
    opencv = facts.place.opencv_threads if facts.place is not None else None
    threading = facts.place is not None and facts.place.engine == "thread"
    named = "".join(f"; {name}={value}" for name, value in facts.variables.items())
    evidence = f"PyTorch takes {facts.torch_threads} threads for an operation{named}"
    if opencv is not None:
        evidence += f"; OpenCV takes {opencv}"
    # A worker process keeps OpenCV to its one thread.
    if opencv is not None and threading and opencv > 1 and opencv * facts.workers > 2 * have:
        return Finding(
            name="threads",
            severity="warning",
            what=f"{facts.workers} workers of {opencv} OpenCV threads on {have:g} processors",
            evidence=evidence,
            remedy="call cv2.setNumThreads(0) in the module of the transform",
        )
    asked = [int(value) for value in facts.variables.values() if value.isdecimal()]
    if max(asked, default=1) > have:
        return Finding(
            name="threads",
            severity="warning",
            what=f"libraries are told to take {max(asked)} threads on {have:g} processors",
            evidence=evidence,
            remedy="unset it, or set OMP_NUM_THREADS=1 where worker processes do the work",
        )
    return fine("threads", evidence)


def others(facts: Facts) -> Finding:
    """Tell whether others use the processors, so that everything measured here is too low."""
    if facts.load.disturbs:
        return Finding(
            name="other load",
            severity="note",
            what="others use the processors: what is measured here is lower than it could be",
            evidence=str(facts.load),
            remedy="measure again when the machine is idle",
        )
    return fine("other load", str(facts.load))


def accelerator(facts: Facts) -> Finding:
    """Tell whether there is an accelerator."""
    if facts.accelerator:
        return fine("accelerator", facts.accelerator)
    return Finding(
        name="accelerator",
        severity="note",
        what="no accelerator",
        evidence="PyTorch sees no CUDA device: the copy to one cannot be measured",
    )


CHECKS: tuple[Check, ...] = (
    processors,
    shared_memory,
    descriptors,
    memory,
    file_system,
    page_cache,
    start_method,
    decoders,
    threads,
    others,
    accelerator,
)
