"""A worker's batches on their way to the main process: through shared memory that is used again.

Fresh shared memory for each batch costs a quarter of the speed: the kernel clears every page, and a
descriptor travels with it. So a worker keeps a few slots. The main process is sent a slot once,
and later only its number; when the last tensor over it is gone there, a shared flag says so.
"""

from __future__ import annotations

import itertools
import weakref
from typing import Any, NamedTuple

import numpy as np
import torch

from shardkit.torch.memory import map_tensors, new_shared

INLINE_BYTES = 256 * 1024
"""A smaller tensor goes through the pipe as plain bytes: a descriptor for each costs 0.5 ms, the
pipe 3 ms for each MB."""

_FREE, _TAKEN = 0, 1


class Ring:
    """What the main process knows of its workers' slots. Its picklable part is `flags`."""

    def __init__(self, workers: int, slots: int) -> None:
        """Make the shared flags, before any worker begins.

        Args:
            workers: Number of worker processes.
            slots: Slots that each may have.
        """
        self.number = next(_NUMBERS)
        self.flags = torch.zeros((workers, slots), dtype=torch.uint8)
        self.flags.share_memory_()  # type: ignore[no-untyped-call]
        self._slots: dict[tuple[int, int], torch.Tensor] = {}
        self._lent: dict[int, weakref.ref[Any]] = {}
        _RINGS[self.number] = self

    def receive(self, sent: _Sent) -> torch.Tensor:
        """Return a batch's block over the slot it came in; the slot is free when it is gone."""
        place = sent.worker, sent.slot
        if sent.memory is not None:
            self._slots[place] = sent.memory
        flags, lent = self.flags.numpy()[sent.worker], self._slots[place].numpy()[:]
        number = id(lent)

        def free(_: object) -> None:
            flags[sent.slot] = _FREE
            self._lent.pop(number, None)

        self._lent[number] = weakref.ref(lent, free)
        return torch.from_numpy(lent).as_strided(sent.size, sent.stride, sent.offset)


class Slots:
    """A worker's own slots."""

    def __init__(self, ring: int, worker: int, flags: torch.Tensor) -> None:
        """Begin without any; each is made when it is needed first.

        Args:
            ring: The number of the main process's `Ring`.
            worker: This worker's number.
            flags: The ring's flags.
        """
        self._ring = ring
        self._worker = worker
        self._flags = flags.numpy()[worker]
        self._memory: list[torch.Tensor] = []
        self._known: set[int] = set()
        """Slots that the main process was sent."""
        self._current: dict[int, int] = {}
        """Slots taken for the batch being made, by their address."""

    def new(self, shape: tuple[int, ...]) -> torch.Tensor:
        """Return an uninitialised uint8 tensor of ``shape``, in shared memory.

        Raises:
            RuntimeError: If there is no room for it in shared memory.
        """
        size = int(np.prod(shape))
        for slot, memory in enumerate(self._memory):
            if memory.numel() == size and self._flags[slot] == _FREE:
                return self._take(slot).view(shape)
        memory = new_shared(size)
        if len(self._memory) < len(self._flags):
            self._memory.append(memory)
            return self._take(len(self._memory) - 1).view(shape)
        return memory.view(shape)

    def pack(self, batch: Any) -> Any:
        """Return ``batch`` as it is to be sent; `unpack` makes it the batch again.

        What is in a slot is sent by number only if every part of the batch can be seen: a slot that
        some object holds unseen must never be written again.
        """
        packed = self._pack(batch) if _is_plain(batch) else batch
        for slot in self._current.values():  # not sent, or unseen: left to whoever has it
            self._memory[slot] = new_shared(self._memory[slot].numel())
            self._known.discard(slot)
            self._flags[slot] = _FREE
        self._current.clear()
        return packed

    def give_up(self) -> None:
        """Take back what was taken for a batch that failed."""
        for slot in self._current.values():
            self._flags[slot] = _FREE
        self._current.clear()

    def _take(self, slot: int) -> torch.Tensor:
        self._flags[slot] = _TAKEN
        self._current[self._memory[slot].data_ptr()] = slot
        return self._memory[slot]

    def _pack(self, part: Any) -> Any:
        if not isinstance(part, torch.Tensor):
            return map_tensors(self._pack, part)
        address = part.untyped_storage().data_ptr()
        slot = self._current.pop(address, None)
        if slot is not None:
            memory = None if slot in self._known else self._memory[slot]
            self._known.add(slot)
            offset = int(part.storage_offset())
            return _Sent(
                self._ring, self._worker, slot, memory, tuple(part.shape), part.stride(), offset
            )
        if any(memory.data_ptr() == address for memory in self._memory):
            part = part.clone()  # another view of a slot that is sent already
        if part.numel() * part.element_size() <= INLINE_BYTES:
            return _Inline(part.detach().numpy())
        return part if part.is_shared() else part.share_memory_()


class Packed(NamedTuple):
    """A batch that was sent; unpickling gives the batch itself."""

    batch: Any

    def __reduce__(self) -> tuple[Any, ...]:
        return unpack, (self.batch,)


def unpack(batch: Any) -> Any:
    """Return the batch that `Slots.pack` made ready, in the main process."""
    if isinstance(batch, _Sent):
        return _RINGS[batch.ring].receive(batch)
    if isinstance(batch, _Inline):
        return torch.from_numpy(batch.values)
    return map_tensors(unpack, batch)


class _Sent(NamedTuple):
    """A block in a slot."""

    ring: int
    worker: int
    slot: int
    memory: torch.Tensor | None
    """The slot itself, when it is sent first."""
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


class _Inline(NamedTuple):
    """A small tensor."""

    values: Any


def _is_plain(batch: Any) -> bool:
    """Tell whether a batch is made of nothing but containers, plain values and plain tensors."""
    if type(batch) is torch.Tensor:
        return batch.device.type == "cpu" and batch.dtype in _PLAIN and not batch.requires_grad
    if isinstance(batch, (tuple, list)):
        return all(map(_is_plain, batch))
    if isinstance(batch, dict):
        return all(map(_is_plain, batch.values()))
    return batch is None or isinstance(batch, (bool, int, float, str, bytes))


_PLAIN = {torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.bool} | {
    torch.float16,
    torch.float32,
    torch.float64,
}
"""Types that NumPy has too."""

_NUMBERS = itertools.count()
_RINGS: weakref.WeakValueDictionary[int, Ring] = weakref.WeakValueDictionary()
