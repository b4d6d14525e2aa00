"""Transport of batches from workers to the main process, through reused shared memory.

Fresh shared memory for each batch costs a quarter of the speed: the kernel clears every page, and a
file descriptor is sent with it. So a worker keeps a few slots. It sends each slot once, and later
only its number. When the main process has freed the last tensor of a slot, it sets a shared flag.
"""

from __future__ import annotations

import marshal
import math
import os
import pickle
import threading
import weakref
from collections.abc import Callable
from multiprocessing.reduction import ForkingPickler
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from shardkit.errors import LoaderFailed
from shardkit.torch.data.memory import ROOM, is_namedtuple, new_shared

INLINE_BYTES = 256 * 1024
"""Maximum size of a tensor sent through the pipe: a file descriptor costs 0.5 ms, the pipe 3 ms per
MB."""

_FREE = 0
_TAKEN = 1

_SLOT, _INLINE, _OBJECT, _NAMED = range(4)
"""How a value is packed: a tensor in a slot, a tensor as bytes, a pickled object, a named tuple."""


class Ring:
    """The workers' slots, as seen by the main process. Workers receive only `flags`."""

    def __init__(self, workers: int, slots: int) -> None:
        """Create the shared flags, of ``slots`` slots of each worker, before any worker starts."""
        self._owner = os.getpid()
        self.flags = torch.zeros((workers, slots), dtype=torch.uint8)
        self.flags.share_memory_()  # type: ignore[no-untyped-call]
        self._flags = self.flags.numpy()
        self._slots: dict[tuple[int, int], npt.NDArray[np.uint8]] = {}
        self._lent: dict[int, weakref.ref[Any]] = {}

    def unpack(self, message: bytes | bytearray) -> Any:
        """Return what `Slots.pack` has packed."""
        worker, slots, packed, size = marshal.loads(message)  # noqa: S302 - from our worker
        objects = pickle.loads(memoryview(message)[-size:]) if size else []  # noqa: S301
        blocks = {
            slot: self.receive(worker, slot, None if new is None else objects[new])
            for slot, new in slots.items()
        }
        return _unpacked(packed, blocks, objects)

    def receive(self, worker: int, slot: int, memory: torch.Tensor | None) -> torch.Tensor:
        """Return the bytes of a slot, whose ``memory`` comes the first time.

        Freeing their last tensor frees the slot.
        """
        if memory is not None:
            self._slots[worker, slot] = memory.numpy()
        flags = self._flags
        lent = self._slots[worker, slot][:]
        number = id(lent)

        def free(_: object) -> None:
            self._lent.pop(number, None)
            if os.getpid() == self._owner:  # a fork's copy may be freed while the batch is in use
                flags[worker, slot] = _FREE

        self._lent[number] = weakref.ref(lent, free)
        return torch.from_numpy(lent)


def _unpacked(value: Any, blocks: dict[int, torch.Tensor], objects: list[Any]) -> Any:
    """Return the value that `Slots` has packed; ``blocks`` are the slots of the message."""
    kind = type(value)
    if kind is list:
        return [_unpacked(item, blocks, objects) for item in value]
    if kind is dict:
        return {name: _unpacked(item, blocks, objects) for name, item in value.items()}
    if kind is not tuple:
        return value
    if value and value[0] is ...:
        return _unpacked_leaf(value, blocks, objects)
    return tuple(_unpacked(item, blocks, objects) for item in value)


def _unpacked_leaf(
    value: tuple[Any, ...], blocks: dict[int, torch.Tensor], objects: list[Any]
) -> Any:
    """Return the tensor or object that a tuple after ``...`` stands for."""
    _, form, source, *layout = value
    if form == _OBJECT:
        return objects[source]
    if form == _NAMED:
        return objects[source](*_unpacked(layout, blocks, objects))
    dtype, shape, *strides = layout
    if form == _SLOT:
        block = blocks[source]
        tensor = block if dtype == _BYTE else block.view(_PLAIN[dtype])
    elif source:
        tensor = torch.frombuffer(bytearray(source), dtype=_PLAIN[dtype])
    else:
        tensor = torch.empty(0, dtype=_PLAIN[dtype])
    return tensor.as_strided(shape, *strides) if strides else tensor


class Slots:
    """The slots of one worker.

    A slot is reused only if the main process has freed its batch (the shared flag) and no tensor in
    this process uses it (a weak reference, as in `shardkit.torch.data.memory.BlockPool`). Several
    threads may call `new`, while one packs.
    """

    def __init__(self, worker: int, flags: torch.Tensor) -> None:
        """Start without slots; each is created on first use. ``flags`` are those of the `Ring`."""
        self.worker = worker
        self._flags = flags.numpy()[worker]
        self._slots: list[_Slot] = []
        self._choosing = threading.Lock()
        self._sent: dict[int, int | None] = {}
        """Slots in the message that is being packed, and for a new one the position of its memory
        among the objects."""
        self._objects: list[Any] = []
        """What the message must pickle."""

    def new(self, shape: tuple[int, ...]) -> torch.Tensor:
        """Return an uninitialized uint8 tensor in shared memory; RuntimeError if that is full."""
        with self._choosing:
            return self._new(shape)

    def _new(self, shape: tuple[int, ...]) -> torch.Tensor:
        size = math.prod(shape)
        flags = self._flags.tolist()
        free = [
            (slot.size, number)
            for number, slot in enumerate(self._slots)
            if flags[number] == _FREE and slot.lent() is None
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

    def pack(self, batches: Any) -> bytes:
        """Return a message with batches, whose slots are taken until the main process frees them.

        Usually, it has only values of types that ``marshal`` knows: it is ten times as fast as
        ``pickle``. Raises LoaderFailed if they hold what cannot be pickled, RuntimeError if shared
        memory is full.
        """
        self._sent = {}
        self._objects = []
        try:
            packed = self._pack(batches)
            pickled = bytes(ForkingPickler.dumps(self._objects)) if self._objects else b""
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            raise LoaderFailed(
                f"a batch cannot be sent from its worker process: {error}",
                remedy="Return only values that can be pickled from a transform or the collate "
                "function; or use threads: engine='thread'",
            ) from error
        return marshal.dumps((self.worker, self._sent, packed, len(pickled))) + pickled

    def _pack(self, value: Any) -> Any:
        """Return a value of types that ``marshal`` knows; a tuple with ``...`` is not itself."""
        kind = type(value)
        if kind is torch.Tensor:
            return self._pack_tensor(value) if _is_plain(value) else self._object(value)
        if kind is list or (kind is tuple and not (value and value[0] is ...)):
            return kind(map(self._pack, value))
        if kind is dict and all(type(name) in _SIMPLE for name in value):
            return {name: self._pack(item) for name, item in value.items()}
        if is_namedtuple(value):
            return (*self._object(kind, _NAMED), *map(self._pack, value))
        return value if kind in _SIMPLE else self._object(value)

    def _object(self, value: Any, form: int = _OBJECT) -> tuple[Any, ...]:
        self._objects.append(value)
        return ..., form, len(self._objects) - 1

    def _pack_tensor(self, value: torch.Tensor) -> Any:
        dtype = _CODES[value.dtype]
        shape = tuple(value.shape)
        start = value.untyped_storage().data_ptr()
        for number, slot in enumerate(self._slots):
            if slot.start == start and value.numel():
                if not self._send(number, slot, value):
                    return self._object(value.clone())
                return ..., _SLOT, number, dtype, shape, value.stride(), value.storage_offset()
        if value.nbytes > INLINE_BYTES:
            return self._object(value)
        if value.dim() == 1 and value.is_contiguous() and shape[0]:
            return ..., _INLINE, value.numpy().tobytes(), dtype, shape
        # A new tensor has the strides of one without gaps or overlaps.
        if torch.empty_like(value).stride() != value.stride():
            return self._object(value)
        flat = value.as_strided((value.numel(),), (1,))
        return ..., _INLINE, flat.numpy().tobytes(), dtype, shape, value.stride()

    def _send(self, number: int, slot: _Slot, value: torch.Tensor) -> bool:
        """Return whether a slot can be sent; its memory is, once."""
        if number in self._sent or self._flags[number] == _FREE:
            if slot.size % value.dtype.itemsize:  # it has no view of this type
                return False
            self._flags[number] = _TAKEN
            if number not in self._sent:
                self._sent[number] = None if slot.is_known else self._object(slot.memory)[-1]
                slot.is_known = True
            return True
        return False


class _Slot:
    """A block of shared memory, and the array lent out over its start."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.memory = new_shared(size)
        self.start = self.memory.data_ptr()
        self.is_known = False
        """Whether it was sent to the main process."""
        self.lent: Callable[[], Any] = lambda: None

    def lend(self, size: int) -> torch.Tensor:
        lent = self.memory.numpy()[:size]
        self.lent = weakref.ref(lent)
        return torch.from_numpy(lent)


def _is_plain(value: torch.Tensor) -> bool:
    """Return whether NumPy can represent a tensor."""
    on_cpu = value.device.type == "cpu" and value.layout == torch.strided
    return on_cpu and value.dtype in _CODES and not value.requires_grad


_PLAIN = (
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.bool,
    torch.float16,
    torch.float32,
    torch.float64,
)
"""Types that NumPy has too."""

_CODES = {dtype: code for code, dtype in enumerate(_PLAIN)}
_BYTE = _CODES[torch.uint8]

_SIMPLE = {int, float, bool, str, bytes, type(None)}
"""Types that ``marshal`` and this module pass on unchanged, exactly these."""
