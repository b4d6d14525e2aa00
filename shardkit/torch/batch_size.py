"""`find_batch_size`: the largest batch whose training step fits in memory.

A separate process tries batches: a size that does not fit may end it, and memory that it used must
not count for the next one.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import resource
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

import psutil
import torch
from torch import nn

from shardkit.errors import MeasurementTimeout, UsageError
from shardkit.options import check_integer
from shardkit.system.bootstrap import guard_helpers, main_problem
from shardkit.system.processes import end_with_parent
from shardkit.system.text import parse_bytes
from shardkit.system.text import size as in_words

MARGIN = 0.1
"""Fraction of the memory to leave free: for fragmentation, the next batch on its way to the device,
and what a real step keeps in addition (metrics, an averaged model, communication buffers)."""

_MOST = 1 << 16
_STATUS = "/proc/self/status"

MakeStep = Callable[[], tuple[nn.Module, torch.Tensor | Sequence[torch.Tensor]]]
"""Returns a model and one sample of its input, without the batch axis. A model that takes a list of
views has one sample for each view."""


@dataclass(frozen=True, kw_only=True)
class FoundBatchSize:
    """The largest batch size that fits."""

    batch_size: int
    device: str
    """``cuda`` or ``cpu``."""
    memory: int
    """Bytes that a step may use: the memory less `MARGIN`."""
    used: int
    """Peak bytes of a step with this batch size, including the model."""
    limit: str
    """Why the next larger size that was tried does not fit; empty if none was."""

    def describe(self) -> str:
        """Return the result in one line."""
        used = in_words(self.used)
        memory = in_words(self.memory)
        return f"{self.batch_size}: uses {used} of {memory} on {self.device}"


def find_batch_size(
    make: MakeStep, *, memory: int | None = None, most: int = _MOST, patience: float = 600.0
) -> FoundBatchSize:
    """Find the largest batch whose forward and backward pass fits in memory.

    It doubles the batch size until a step does not fit, then bisects to within 3%. A step computes
    the model's mean output in training mode, its gradients, and an update by AdamW. The input is
    float32, or int32 or int64 if the sample is. A tenth of the memory stays free (`MARGIN`).

    With a CUDA device, the limit is the memory that is now free on the current device. Without one,
    ``memory`` limits the main memory of the whole process.

    Args:
        make: A function of a module, or a `functools.partial` of one; it runs in other processes.
            It returns a model and one sample of its input, without the batch axis; or a tuple of
            samples, one per view, for a model that accepts a list of batches.
        memory: Bytes to use at most; required without a CUDA device.
        most: Largest batch size to try.
        patience: Maximum seconds for one step.

    Raises:
        UsageError: If not even one sample fits, the model cannot be created, or a process cannot
            run the program again.
        MeasurementTimeout: If a step takes longer than ``patience``.
    """
    check_integer("most", most, 1)
    if problem := main_problem():
        raise UsageError(f"batches cannot be tried: {problem}")
    if memory is None and not torch.cuda.is_available():
        raise UsageError(
            "no CUDA device is available",
            remedy="set the amount of main memory to use, such as 4 GiB",
        )
    if memory is not None:
        memory = check_integer("memory", parse_bytes(memory, "memory"), 1)
    with contextlib.closing(_Trials(make, memory, patience)) as trials:
        size = search(trials.fits, most)
        if not size:
            raise UsageError(f"not even one sample fits: {trials.reason}")
        peak, budget, device = trials.peaks[size]
    return FoundBatchSize(
        batch_size=size, device=device, memory=budget, used=peak, limit=trials.reason
    )


def search(fits: Callable[[int], bool], most: int) -> int:
    """Return the largest number up to ``most`` that fits, to within 3%, or 0 if 1 does not fit.

    It starts with 2, as batch normalization may need.
    """
    low = 0
    high = most + 1
    while low < most:
        tried = min(max(2, 2 * low), most)
        if not fits(tried):
            high = tried
            break
        low = tried
    while high - low > 1 + low // 32:
        tried = (low + high) // 2
        if fits(tried):
            low = tried
        else:
            high = tried
    return low


@dataclass
class _Trials:
    """Tries batch sizes in a process, and starts another one after each that does not fit.

    Until then sizes ascend, so the peak of the process is that of its latest step.
    """

    make: MakeStep
    memory: int | None
    patience: float
    reason: str = ""
    """Why the latest size that did not fit does not."""
    peaks: dict[int, tuple[int, int, str]] = field(default_factory=dict)
    """Peak, budget and device of each size that fits."""
    _process: Any = None
    _connection: Any = None

    def fits(self, size: int) -> bool:
        """Return whether a step with ``size`` samples fits."""
        if self._process is None:
            self._start()
        try:
            with contextlib.suppress(OSError):  # it may have ended; the answer gives the reason
                self._connection.send(size)
            if not self._connection.poll(self.patience):
                raise MeasurementTimeout(
                    f"a step with {size} samples takes longer than {self.patience:g} s"
                )
            answer, message = self._connection.recv()
        except (EOFError, OSError):
            self._process.join()
            answer = None
            message = f"its process ended with exit code {self._process.exitcode}"
        if isinstance(answer, UsageError):
            raise answer
        if answer is not None and answer[0] <= answer[1]:
            self.peaks[size] = answer
            return True
        if answer is not None:
            message = f"it uses {in_words(answer[0])} of {in_words(answer[1])}"
        self.reason = f"a batch of {size}: {message}"
        self.close()
        return False

    def close(self) -> None:
        """End the process, whatever it is doing."""
        if self._process is not None:
            self._connection.close()
            self._process.kill()
            self._process.join()
            self._process = None

    def _start(self) -> None:
        guard_helpers()
        context = multiprocessing.get_context("spawn")
        self._connection, other = context.Pipe()
        device = torch.cuda.current_device() if torch.cuda.is_initialized() else None  # type: ignore[no-untyped-call]
        arguments = other, self.make, self.memory, device, multiprocessing.current_process().pid
        self._process = context.Process(target=_serve, args=arguments, daemon=True)
        self._process.start()
        other.close()


def _serve(
    connection: Connection, make: MakeStep, memory: int | None, device: int | None, parent: int
) -> None:
    """Answer each batch size with peak, budget and device of a step, or with an error message."""
    end_with_parent(parent)
    try:
        if device is not None:
            torch.cuda.set_device(device)
        step = _Step(make, memory)
    except Exception as error:
        is_usage = isinstance(error, UsageError)
        connection.send((error if is_usage else UsageError(f"{type(error).__name__}: {error}"), ""))
        return
    while True:
        try:
            size = connection.recv()
        except EOFError:
            return
        try:
            connection.send((step.run(size), ""))
        except Exception as error:  # out of memory has many types; the message is reported
            connection.send((None, f"{type(error).__name__}: {str(error).strip()[:300]}"))


class _Step:
    """A training step of a model."""

    def __init__(self, make: MakeStep, memory: int | None) -> None:
        model, self._sample = make()
        self._cuda = torch.cuda.is_available()
        self._device = "cuda" if self._cuda else "cpu"
        if self._cuda:
            free, total = torch.cuda.mem_get_info()  # less than total by the CUDA context
            free += torch.cuda.memory_reserved()  # a model that ``make`` put there counts as used
            self._budget = int((1 - MARGIN) * min(free, memory or free))
            torch.cuda.set_per_process_memory_fraction(self._budget / total)
        else:
            self._budget = int((1 - MARGIN) * (memory or 0))
        self._model = model.to(self._device).train()
        parameters = [p for p in self._model.parameters() if p.requires_grad]
        self._optimizer = torch.optim.AdamW(parameters, lr=1e-6) if parameters else None
        self._warm = False

    def run(self, size: int) -> tuple[int, int, str]:
        """Run a step with ``size`` samples; return peak, budget and device."""
        if not self._warm:  # threads, libraries and the optimizer take their memory
            self._run(min(size, 2))
            self._warm = True
        if not self._cuda:
            _limit_growth(self._budget)
        self._run(size)
        peak = torch.cuda.max_memory_reserved() if self._cuda else _peak_memory()
        return peak, self._budget, self._device

    def _run(self, size: int) -> None:
        if isinstance(self._sample, torch.Tensor):
            output = self._model(self._batch(self._sample, size))
        else:
            output = self._model([self._batch(view, size) for view in self._sample])
        output = output[0] if isinstance(output, (tuple, list)) else output
        loss = output.float().mean()
        if self._optimizer is not None:
            self._optimizer.zero_grad()
            loss.backward()
            self._optimizer.step()
        loss.item()  # an accelerator computes asynchronously: this waits for it

    def _batch(self, sample: torch.Tensor, size: int) -> torch.Tensor:
        is_index = sample.dtype in (torch.int32, torch.int64)  # such as the words of a text
        sample = sample.to(self._device, sample.dtype if is_index else torch.float32)
        # Repeated there: a batch that fills a GPU may be more than main memory holds.
        return sample.expand(size, *sample.shape).clone(memory_format=torch.contiguous_format)


def _limit_growth(budget: int) -> None:
    """Make allocations fail that would let this process use more than ``budget`` bytes.

    The peak decides what fits. This only protects the machine: memory that is reserved but unused,
    such as stacks of threads, counts for the limit too, so it is set relative to what there is.
    """
    used = psutil.Process().memory_info()
    if hasattr(used, "data"):  # Linux
        _, hard = resource.getrlimit(resource.RLIMIT_DATA)
        resource.setrlimit(resource.RLIMIT_DATA, (used.data + max(0, budget - used.rss), hard))


def _peak_memory() -> int:
    """Return the most bytes of main memory that this process has used.

    ``ru_maxrss`` would include the process that this one was forked from.
    """
    try:
        with open(_STATUS, encoding="ascii") as file:
            line = next(entry for entry in file if entry.startswith("VmHWM:"))
    except OSError:  # pragma: no cover - not Linux
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return int(line.split()[1]) * 1024
