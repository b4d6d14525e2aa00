"""What must hold on a GPU: right pixels, complete copies, overlap, memory; each check by itself."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from gpu_parts.job import ENGINES, Job, pause
from gpu_parts.resnet import ResNet
from isolation import NotAvailable, Progress
from torch import nn

from shardkit import (
    CenterCrop,
    DevicePrefetcher,
    Normalize,
    RandomCrop,
    find_batch_size,
    make_loader,
)

_BATCH = 64

_CROWD_BYTES = 1 << 28
"""Bytes of a copy that keeps the bus busy, so that the copies of batches end late."""

_LEAST_OVERLAP = 0.5
"""Fraction of the shorter one of copying and computing that must be hidden."""


class Wrong(Exception):
    """A check failed; the message says how."""


Result = tuple[float | None, str, str]
"""A value with its unit, and a remark."""


def run(values: dict[str, Any], progress: Progress) -> None:
    """Run all checks; one that fails ends no other.

    Raises:
        NotAvailable: If there is no device, or no dataset.
    """
    job = Job.of(values)
    job.dataset("raw")
    pause(job.device)
    for name, check in checks(job).items():
        if not progress.left:
            progress.add(name, remark="no time left")
            continue
        with progress.case(name):
            value, unit, remark = check()
            progress.add(name, value, unit, remark=remark)


def checks(job: Job) -> dict[str, Callable[[], Result]]:
    """Return all checks by name, some of them for each engine."""
    result: dict[str, Callable[[], Result]] = {}
    for engine in ENGINES:
        for pinned in (True, False) if job.device_name == "cuda" else (False,):
            options: dict[str, Any] = {"engine": engine, "pin_memory": pinned}
            case = f"{engine}, {'pinned' if pinned else 'not pinned'}"
            result[f"pixels, {case}"] = partial(pixels, job, **options)
            result[f"complete copies, {case}"] = partial(complete, job, **options)
            result[f"copying, {case}"] = partial(bandwidth, job, **options)
    result["complete copies, batches kept by nobody"] = partial(plain_copies, job)
    result["normalized pixels"] = partial(normalized, job)
    result["overlap of copying and computing"] = partial(overlap, job)
    result[f'pixels, resident="{job.device_name}"'] = partial(resident, job)
    result[f'no waiting, resident="{job.device_name}"'] = partial(resident_waits, job)
    return result


def pixels(job: Job, **options: Any) -> Result:
    """Compare an epoch on the device with the same epoch in main memory, bit by bit."""
    loader = _loader(job, **options)
    count = _require_equal(DevicePrefetcher(loader, job.device), _expected(job), job.device)
    loader.close()
    return count, "batches", "equal"


def complete(job: Job, **options: Any) -> Result:
    """Use each batch at once on the device, while the bus is busy; compare checksums afterwards.

    Nothing here waits for the device, so a batch that is used before its copy has ended, or
    overwritten by the next one during the copy, has another checksum.
    """
    sums: list[torch.Tensor] = []
    loader = _loader(job, **options)
    with _crowd(job.device) as crowd:
        for _ in range(2):
            for images, _ in DevicePrefetcher(loader, job.device):
                sums.append(checksum(images))
                crowd()
    loader.close()
    pause(job.device)
    return _compare(job, sums, 2)


def plain_copies(job: Job) -> Result:
    """As `complete`, for a loop that copies batches itself and keeps none."""
    sums: list[torch.Tensor] = []
    loader = _loader(job)
    with _crowd(job.device) as crowd:
        for images, _ in loader:
            crowd()
            moved = images.to(job.device, non_blocking=True)
            del images  # its memory may be reused once it is copied
            sums.append(checksum(moved))
    loader.close()
    pause(job.device)
    return _compare(job, sums, 1)


def bandwidth(job: Job, **options: Any) -> Result:
    """Measure the copy of a batch from a loader's memory."""
    loader = _loader(job, **options)
    images, _ = next(iter(loader))
    loader.close()
    if job.device.type == "cuda" and images.is_pinned() != options["pin_memory"]:
        raise Wrong(f"pin_memory={options['pin_memory']}, and is_pinned() is {images.is_pinned()}")
    images.to(job.device, non_blocking=True)
    pause(job.device)
    start, repeats = time.perf_counter(), 20
    for _ in range(repeats):
        images.to(job.device, non_blocking=True)
    issued = time.perf_counter() - start
    pause(job.device)
    seconds = time.perf_counter() - start
    remark = f"{1000 * issued / repeats:.2f} ms until the call returns"
    return repeats * images.nbytes / seconds / 1e9, "GB/s", remark


def normalized(job: Job) -> Result:
    """Compare normalized images with those of the CPU."""
    normalize, worst, loader = Normalize(), 0.0, _loader(job)
    for (images, _), (expected, _) in zip(
        DevicePrefetcher(loader, job.device, normalize), _expected(job), strict=True
    ):
        _require_place(images, job.device)
        difference = (images.cpu() - normalize(expected)).abs().max()
        worst = max(worst, float(difference))
    if worst > 1e-5:
        raise Wrong(f"values differ by up to {worst:.2g} from those of the CPU")
    return worst, "largest difference", "float32"


def overlap(job: Job) -> Result:
    """Measure the fraction of copying that computing hides, with the times of events.

    Both are made equally long; without overlap they would take twice as long as one of them.
    """
    if job.device.type != "cuda":
        raise NotAvailable("copies and computations overlap on CUDA devices only")
    images = next(iter(_loader(job)))[0]
    batches = [images.repeat(4, 1, 1, 1).pin_memory() for _ in range(20)]
    weights = torch.randn(4096, 4096, device=job.device, dtype=torch.bfloat16)

    def compute(repeats: int) -> None:
        for _ in range(repeats):
            torch.mm(weights, weights)

    def copy() -> None:
        for batch in batches:
            batch.to(job.device, non_blocking=True)

    def both() -> None:
        for _ in DevicePrefetcher(batches, job.device):
            compute(repeats)

    copy()
    compute(10)
    copying = _milliseconds(copy)
    repeats = max(1, round(copying / len(batches) / (_milliseconds(partial(compute, 50)) / 50)))
    computing = _milliseconds(partial(compute, repeats * len(batches)))
    both()
    together = min(_milliseconds(both) for _ in range(3))
    hidden = (copying + computing - together) / min(copying, computing)
    remark = f"copying {copying:.1f} ms, computing {computing:.1f} ms, together {together:.1f} ms"
    if hidden < _LEAST_OVERLAP:
        raise Wrong(f"{hidden:.0%} is hidden; {remark}")
    return hidden, "of the shorter one is hidden", remark


def resident(job: Job) -> Result:
    """Compare batches of a dataset on the device with those of an ordinary loader; time them."""
    dataset = job.dataset("raw", RandomCrop(job.side - 8, padding=4, flip=0.5))
    options: dict[str, Any] = {"shuffle": True, "seed": 1}
    loader = make_loader(dataset, _BATCH, resident=job.device_name, **options)  # type: ignore[arg-type]
    plain = make_loader(dataset, _BATCH, engine="thread", pin_memory=None, **options)
    _require_equal(loader, plain, job.device)
    pause(job.device)
    start = time.perf_counter()
    count = sum(len(labels) for _, labels in loader)
    pause(job.device)
    return count / (time.perf_counter() - start), "images/s", f"{count} images equal"


def resident_waits(job: Job) -> Result:
    """Check that making a batch never waits for the device: PyTorch reports calls that do."""
    if job.device.type != "cuda":
        raise NotAvailable("PyTorch reports waiting on CUDA devices only")
    dataset = job.dataset("raw", RandomCrop(job.side - 8, padding=4, flip=0.5))
    loader = make_loader(dataset, _BATCH, shuffle=True, resident="cuda")
    next(iter(loader))
    torch.cuda.set_sync_debug_mode("error")
    try:
        count = sum(1 for _ in loader)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return count, "batches", "none waited"


def memory(values: dict[str, Any], progress: Progress) -> None:
    """Find the largest batch of ResNet-50 in a given memory; a part, since it takes long."""
    job = Job.of(values)
    size = 1 << 30 if job.is_small else 4 << 30
    make = partial(_small_sample if job.is_small else _sample, job.side)
    most = 64 if job.is_small else 1024
    device = job.device.type
    limits = find_batch_size(make, memory=size, most=most, patience=max(1.0, progress.left))
    is_right = limits.device == device and limits.used <= limits.memory <= size
    progress.add(
        "find_batch_size",
        limits.batch_size,
        "images",
        remark=f"{'' if is_right else 'WRONG: '}{limits.describe()}",
        is_failure=not is_right,
    )


def checksum(images: torch.Tensor) -> torch.Tensor:
    """Return an int64 number that depends on all bytes and their order, on the images' device."""
    flat = images.permute(0, 2, 3, 1).reshape(-1).to(torch.int64)
    weights = torch.arange(len(flat), device=flat.device) % 8191 + 1
    return (flat * weights).sum()


def _sample(side: int) -> tuple[nn.Module, torch.Tensor]:
    return ResNet(), torch.zeros(3, side, side)


def _small_sample(side: int) -> tuple[nn.Module, torch.Tensor]:
    return nn.Sequential(nn.Flatten(), nn.Linear(3 * side * side, 8)), torch.zeros(3, side, side)


def _loader(job: Job, engine: str = "thread", **options: Any) -> Any:
    """Return a loader of center crops: the same pixels for any engine."""
    workers = {"num_workers": 2, **options}
    return job.loader(job.dataset("jpeg", CenterCrop(job.side)), _batch(job), engine, **workers)


def _expected(job: Job) -> Any:
    """Return the same batches in main memory, made without any worker."""
    return _loader(job, num_workers=0, pin_memory=False)


def _batch(job: Job) -> int:
    return 8 if job.is_small else _BATCH


def _compare(job: Job, sums: list[torch.Tensor], epochs: int) -> Result:
    """Compare checksums with those of epochs in main memory."""
    loader = _expected(job)
    expected = [int(checksum(images)) for _ in range(epochs) for images, _ in loader]
    values = [int(value) for value in sums]
    wrong = [
        number
        for number, pair in enumerate(zip(values, expected, strict=True))
        if pair[0] != pair[1]
    ]
    if wrong:
        raise Wrong(f"{len(wrong)} of {len(values)} checksums, first that of batch {wrong[0]}")
    return len(values), "batches", "all checksums equal"


@contextmanager
def _crowd(device: torch.device) -> Iterator[Callable[[], None]]:
    """Yield a function that occupies the bus with a copy on a stream of its own."""
    if device.type != "cuda":
        yield lambda: None
        return
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    source = torch.empty(_CROWD_BYTES, dtype=torch.uint8, pin_memory=True)
    target = torch.empty(_CROWD_BYTES, dtype=torch.uint8, device=device)

    def copy() -> None:
        with torch.cuda.stream(stream):
            target.copy_(source, non_blocking=True)

    yield copy
    stream.synchronize()


def _require_equal(batches: Any, expected: Any, device: torch.device) -> int:
    """Require batches on the device to equal those in main memory; return their number."""
    count = 0
    for (images, labels), (others, numbers) in zip(batches, expected, strict=True):
        _require_place(images, device)
        _require_place(labels, device)
        if not images.is_contiguous(memory_format=torch.channels_last):
            raise Wrong(f"images are not in channels-last memory: strides {images.stride()}")
        if not torch.equal(images.cpu(), others) or not torch.equal(labels.cpu(), numbers):
            raise Wrong(f"batch {count} differs from that of a loader in main memory")
        count += 1
    return count


def _milliseconds(work: Callable[[], object]) -> float:
    """Return the time between events before and after some work."""
    before = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    after = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    torch.cuda.synchronize()
    before.record()
    work()
    after.record()
    torch.cuda.synchronize()
    return float(before.elapsed_time(after))


def _require_place(tensor: torch.Tensor, device: torch.device) -> None:
    if tensor.device.type != device.type:
        raise Wrong(f"a tensor is on {tensor.device}")
