"""Transport of batches from workers to the main process, through reused shared memory.

Fresh shared memory for each batch costs a quarter of the speed: the kernel clears every page, and a
file descriptor is sent with it. So a worker keeps a few slots. It sends each slot once, and later
only its number. When the main process has freed the last tensor of a slot, it sets a shared flag.
"""

from __future__ import annotations

import itertools
import os
import threading
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch

from shardkit.torch.data.memory import is_namedtuple, map_tensors, new_shared

INLINE_BYTES = 256 * 1024
"""Maximum size of a tensor sent through the pipe: a file descriptor costs 0.5 ms, the pipe 3 ms per
MB."""

_FREE = 0
_TAKEN = 1


class Ring:
    """The workers' slots, as seen by the main process. Workers receive only `flags`."""

    def __init__(self, workers: int, slots: int) -> None:
        """Create the shared flags, before any worker starts.

        Args:
            workers: Number of worker processes.
            slots: Maximum slots of each worker.
        """
        self.number = next(_NUMBERS)
        self._owner = os.getpid()
        self.flags = torch.zeros((workers, slots), dtype=torch.uint8)
        self.flags.share_memory_()  # type: ignore[no-untyped-call]
        self._slots: dict[tuple[int, int], torch.Tensor] = {}
        self._lent: dict[int, weakref.ref[Any]] = {}
        _RINGS[self.number] = self

    def receive(self, sent: _Sent) -> torch.Tensor:
        """Return the bytes of a slot; freeing their last tensor frees the slot."""
        key = sent.worker, sent.slot
        if sent.memory is not None:
            self._slots[key] = sent.memory
        flags = self.flags.numpy()[sent.worker]
        lent = self._slots[key].numpy()[:]
        number = id(lent)

        def free(_: object) -> None:
            self._lent.pop(number, None)
            if os.getpid() == self._owner:  # a fork's copy may be freed while the batch is in use
                flags[sent.slot] = _FREE

        self._lent[number] = weakref.ref(lent, free)
        return torch.from_numpy(lent)


class Slots:
    """The slots of one worker.

    A slot is reused only if the main process has freed its batch (the shared flag) and no tensor in
    this process uses it (a weak reference, as in `shardkit.torch.data.memory.BlockPool`). Several
    threads may call `new`, while one packs.
    """

    def __init__(self, ring: int, worker: int, flags: torch.Tensor) -> None:
        """Start without slots; each is created on first use.

        Args:
            ring: The number of the main process's `Ring`.
            worker: This worker's number.
            flags: The ring's flags.
        """
        self._ring = ring
        self._worker = worker
        self._flags = flags.numpy()[worker]
        self._slots: list[_Slot] = []
        self._choosing = threading.Lock()
        self._message: set[int] = set()
        """Slots in the message that is being packed."""

    def new(self, shape: tuple[int, ...]) -> torch.Tensor:
        """Return an uninitialized uint8 tensor of ``shape``, in shared memory.

        Raises:
            RuntimeError: If shared memory is full.
        """
        with self._choosing:
            return self._new(shape)

    def _new(self, shape: tuple[int, ...]) -> torch.Tensor:
        size = int(np.prod(shape))
        free = [
            (slot.memory.numel() != size, number)
            for number, slot in enumerate(self._slots)
            if self._flags[number] == _FREE and slot.lent() is None
        ]
        if not free and len(self._slots) == len(self._flags):
            return new_shared(size).view(shape)
        if not free or (free[0][0] and len(self._slots) < len(self._flags)):
            self._slots.append(_Slot(new_shared(size)))
            return self._slots[-1].lend().view(shape)
        other_size, number = min(free)
        if other_size:
            self._slots[number] = _Slot(new_shared(size))
        return self._slots[number].lend().view(shape)

    def pack(self, batches: Any) -> Any:
        """Return batches in the form to send; `unpack` reverses this.

        Unknown types are pickled as they are, and keep their slot in use meanwhile.
        """
        self._message.clear()
        return self._pack(batches)

    def _pack(self, value: Any) -> Any:
        if type(value) in (tuple, list, dict) or is_namedtuple(value):
            return map_tensors(self._pack, value)
        if type(value) is not torch.Tensor or not _is_plain(value):
            return value
        for number, slot in enumerate(self._slots):
            if value.numel() and slot.memory.data_ptr() == value.untyped_storage().data_ptr():
                return self._send(number, slot, value)
        if value.numel() * value.element_size() <= INLINE_BYTES and _is_dense(value):
            flat = value.as_strided((value.numel(),), (1,))
            return _Inline(flat.numpy(), tuple(value.shape), value.stride())
        return _shared(value)

    def _send(self, number: int, slot: _Slot, value: torch.Tensor) -> Any:
        """Return a reference to a tensor in a slot; the slot itself is sent only once."""
        fits = (
            slot.memory.numel() % value.dtype.itemsize == 0
        )  # else it cannot be viewed as this type
        if not fits or (self._flags[number] != _FREE and number not in self._message):
            return _shared(value.clone())
        self._flags[number] = _TAKEN
        self._message.add(number)
        memory = None if slot.is_known else slot.memory
        slot.is_known = True
        layout = value.dtype, tuple(value.shape), value.stride(), int(value.storage_offset())
        return _Sent(self._ring, self._worker, number, memory, *layout)


class _Slot:
    """A block of shared memory, and the array lent out over it."""

    def __init__(self, memory: torch.Tensor) -> None:
        self.memory = memory
        self.is_known = False
        """Whether it was sent to the main process."""
        self.lent: Callable[[], Any] = lambda: None

    def lend(self) -> torch.Tensor:
        lent = self.memory.numpy()[:]
        self.lent = weakref.ref(lent)
        return torch.from_numpy(lent)


class Packed(NamedTuple):
    """Packed batches; unpickling them returns the batches themselves."""

    batches: Any

    def __reduce__(self) -> tuple[Any, ...]:
        return unpack, (self.batches,)


def unpack(batches: Any) -> Any:
    """Return the batch that `Slots.pack` packed; call this in the main process."""
    return _unpack({}, batches)


def _unpack(blocks: dict[tuple[int, int], torch.Tensor], value: Any) -> Any:
    if isinstance(value, _Sent):
        key = value.worker, value.slot
        if key not in blocks:
            blocks[key] = _RINGS[value.ring].receive(value)
        return blocks[key].view(value.dtype).as_strided(value.size, value.stride, value.offset)
    if isinstance(value, _Inline):
        return torch.from_numpy(value.values).as_strided(value.size, value.stride)
    return map_tensors(partial(_unpack, blocks), value)


class _Sent(NamedTuple):
    """A block in a slot."""

    ring: int
    worker: int
    slot: int
    memory: torch.Tensor | None
    """The slot itself, the first time."""
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


class _Inline(NamedTuple):
    """A small tensor: its values in memory order."""

    values: Any
    size: tuple[int, ...]
    stride: tuple[int, ...]


def _is_plain(value: torch.Tensor) -> bool:
    """Return whether NumPy can represent a tensor."""
    on_cpu = value.device.type == "cpu" and value.layout == torch.strided
    return on_cpu and value.dtype in _PLAIN and not value.requires_grad


def _is_dense(value: torch.Tensor) -> bool:
    """Return whether a tensor fills one range of memory without gaps or overlaps."""
    expected = 1
    for stride, size in sorted(zip(value.stride(), value.shape, strict=True)):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True


_PLAIN = {torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.bool} | {
    torch.float16,
    torch.float32,
    torch.float64,
}
"""Types that NumPy has too."""


def _shared(value: torch.Tensor) -> torch.Tensor:
    """Return a tensor in shared memory: a failure raises here and does not block a queue."""
    if not value.is_shared():  # type: ignore[no-untyped-call]
        value.share_memory_()  # type: ignore[no-untyped-call]
    return value


_NUMBERS = itertools.count()
_RINGS: weakref.WeakValueDictionary[int, Ring] = weakref.WeakValueDictionary()
