"""Transport of batches from workers to the main process, through reused shared memory.

Fresh shared memory for each batch costs a quarter of the speed: the kernel clears every page, and a
file descriptor is sent with it. So a worker keeps a few slots. It sends each slot once, and later
only its number. When the main process has freed the last tensor of a slot, it sets a shared flag.
"""

from __future__ import annotations

import itertools
import math
import os
import pickle
import threading
import weakref
from collections.abc import Callable
from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch

from shardkit.errors import LoaderFailed
from shardkit.torch.data.memory import ROOM, is_namedtuple, map_tensors, new_shared

INLINE_BYTES = 256 * 1024
"""Maximum size of a tensor sent through the pipe: a file descriptor costs 0.5 ms, the pipe 3 ms per
MB."""

_FREE = 0
_TAKEN = 1


class Ring:
    """The workers' slots, as seen by the main process. Workers receive only `flags`."""

    def __init__(self, workers: int, slots: int) -> None:
        """Create the shared flags, of ``slots`` slots of each worker, before any worker starts."""
        self.number = next(_NUMBERS)
        self._owner = os.getpid()
        self.flags = torch.zeros((workers, slots), dtype=torch.uint8)
        self.flags.share_memory_()  # type: ignore[no-untyped-call]
        self._slots: dict[tuple[int, int], torch.Tensor] = {}
        self._lent: dict[int, weakref.ref[Any]] = {}
        _RINGS[self.number] = self

    def receive(self, worker: int, slot: int, memory: torch.Tensor | None) -> torch.Tensor:
        """Return the bytes of a slot, whose ``memory`` comes the first time.

        Freeing their last tensor frees the slot.
        """
        memory = self._slots[worker, slot] if memory is None else memory
        self._slots[worker, slot] = memory
        flags = self.flags.numpy()[worker]
        lent = memory.numpy()[:]
        number = id(lent)

        def free(_: object) -> None:
            self._lent.pop(number, None)
            if os.getpid() == self._owner:  # a fork's copy may be freed while the batch is in use
                flags[slot] = _FREE

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

        ``ring`` is the number of the main process's `Ring`, ``flags`` are its flags.
        """
        self._ring = ring
        self._worker = worker
        self._flags = flags.numpy()[worker]
        self._slots: list[_Slot] = []
        self._choosing = threading.Lock()
        self._message: dict[int, Call] = {}
        """Slots in the message that is being packed."""

    def new(self, shape: tuple[int, ...]) -> torch.Tensor:
        """Return an uninitialized uint8 tensor in shared memory; RuntimeError if that is full."""
        with self._choosing:
            return self._new(shape)

    def _new(self, shape: tuple[int, ...]) -> torch.Tensor:
        size = math.prod(shape)
        free = [
            (slot.memory.numel(), number)
            for number, slot in enumerate(self._slots)
            if self._flags[number] == _FREE and slot.lent() is None
        ]
        fitting = min((slot for slot in free if slot[0] >= size), default=None)
        may_grow = len(self._slots) < len(self._flags)
        if fitting is not None and (fitting[0] <= ROOM * size or not may_grow):
            number = fitting[1]
        elif may_grow:
            number = len(self._slots)
            self._slots.append(_Slot(size))
        elif free:
            number = min(free)[1]
            self._slots[number] = _Slot(size)
        else:
            return new_shared(size).view(shape)
        return self._slots[number].lend(size).view(shape)

    def pack(self, batches: Any) -> Call:
        """Return batches in the form to send, pickled: what cannot be sent is an error here.

        PyTorch's queue pickles in a thread, where an error would be lost with its batch. Raises
        LoaderFailed if they hold what cannot be pickled, RuntimeError if shared memory is full.
        """
        self._message.clear()
        try:
            return Call(pickle.loads, bytes(ForkingPickler.dumps(self._pack(batches))))
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            raise LoaderFailed(
                f"a batch cannot be sent from its worker process: {error}",
                remedy="Return only values that can be pickled from a transform or the collate "
                "function; or use threads: engine='thread'",
            ) from error

    def _pack(self, value: Any) -> Any:
        """Replace tensors that NumPy can represent; PyTorch shares the memory of others."""
        if type(value) is torch.Tensor:
            return self._pack_tensor(value) if _is_plain(value) else value
        if type(value) in (tuple, list, dict) or is_namedtuple(value):
            return map_tensors(self._pack, value)
        return value

    def _pack_tensor(self, value: torch.Tensor) -> Any:
        start = value.untyped_storage().data_ptr()
        for number, slot in enumerate(self._slots):
            if value.numel() and slot.memory.data_ptr() == start:
                return self._send(number, slot, value)
        # A new tensor has the strides of one without gaps or overlaps.
        if value.nbytes <= INLINE_BYTES and torch.empty_like(value).stride() == value.stride():
            flat = value.as_strided((value.numel(),), (1,))
            return Call(_laid_out, flat.numpy(), tuple(value.shape), value.stride())
        return value

    def _send(self, number: int, slot: _Slot, value: torch.Tensor) -> Any:
        """Return a reference to a tensor in a slot; the slot itself is sent only once."""
        fits = slot.memory.numel() % value.dtype.itemsize == 0  # else it has no view of this type
        if not fits or (self._flags[number] != _FREE and number not in self._message):
            return value.clone()
        self._flags[number] = _TAKEN
        if number not in self._message:
            memory = None if slot.is_known else slot.memory
            self._message[number] = Call(_received, self._ring, self._worker, number, memory)
            slot.is_known = True
        layout = tuple(value.shape), value.stride(), int(value.storage_offset())
        return Call(_viewed, self._message[number], value.dtype, *layout)


class _Slot:
    """A block of shared memory, and the array lent out over its start."""

    def __init__(self, size: int) -> None:
        self.memory = new_shared(size)
        self.is_known = False
        """Whether it was sent to the main process."""
        self.lent: Callable[[], Any] = lambda: None

    def lend(self, size: int) -> torch.Tensor:
        lent = self.memory.numpy()[:size]
        self.lent = weakref.ref(lent)
        return torch.from_numpy(lent)


class Call:
    """Pickled as a call, and unpickled as its result: one, wherever the message has this object."""

    def __init__(self, function: Callable[..., Any], *values: Any) -> None:
        self._call = function, values

    def __reduce__(self) -> tuple[Any, ...]:
        return self._call


def _received(ring: int, *block: Any) -> torch.Tensor:
    return _RINGS[ring].receive(*block)


def _viewed(block: torch.Tensor, dtype: torch.dtype, *layout: Any) -> torch.Tensor:
    return block.view(dtype).as_strided(*layout)


def _laid_out(values: Any, *layout: Any) -> torch.Tensor:
    return torch.from_numpy(values).as_strided(*layout)


def _is_plain(value: torch.Tensor) -> bool:
    """Return whether NumPy can represent a tensor."""
    on_cpu = value.device.type == "cpu" and value.layout == torch.strided
    return on_cpu and value.dtype in _PLAIN and not value.requires_grad


_PLAIN = {torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.bool} | {
    torch.float16,
    torch.float32,
    torch.float64,
}
"""Types that NumPy has too."""


_NUMBERS = itertools.count()
_RINGS: weakref.WeakValueDictionary[int, Ring] = weakref.WeakValueDictionary()
