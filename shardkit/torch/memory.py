"""Memory for batches, used again: fresh pages cost more than filling them with raw pixels."""

from __future__ import annotations

import contextlib
import copy
import weakref
from collections import defaultdict
from collections.abc import Callable, MutableMapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

_Buffer = npt.NDArray[np.uint8]


class BlockPool:
    """Blocks of uint8 that return when the last tensor over them is gone.

    A tensor holds the array it was made of, and nothing else does: so when the array goes, nobody
    can see the memory any more, and the next batch may have it. Nobody has to give anything back,
    and a batch that its user keeps is never written to.
    """

    def __init__(self, keep: int) -> None:
        """Make an empty pool.

        Args:
            keep: Free blocks that are kept.
        """
        # No lock: a forked child could inherit it locked. Lists and dicts need none for what is
        # done here, and at worst a block too many is kept.
        self._keep = keep
        self._free: defaultdict[int, list[_Buffer]] = defaultdict(list)
        self._lent: dict[int, tuple[weakref.ref[_Buffer], _Buffer]] = {}

    def new(self, shape: tuple[int, ...]) -> torch.Tensor:
        """Return an uninitialised uint8 tensor of ``shape``."""
        size = int(np.prod(shape))
        try:
            buffer = self._free[size].pop()
        except IndexError:
            buffer = np.empty(size, np.uint8)
        lent, number = buffer[:], id(buffer)
        self._lent[number] = weakref.ref(lent, lambda _: self._take_back(number)), buffer
        return torch.from_numpy(lent).view(shape)

    def _take_back(self, number: int) -> None:
        _, buffer = self._lent.pop(number)
        self._free[buffer.size].append(buffer)
        if sum(map(len, self._free.values())) <= self._keep:
            return
        for size in sorted(self._free, key=buffer.size.__eq__):  # others' sizes first
            with contextlib.suppress(IndexError):
                self._free[size].pop()
                return


class OwnedBlocks:
    """The blocks of one batch whose end its loader decides, not its user (``reuse_buffers``)."""

    def __init__(self, free: dict[int, list[torch.Tensor]]) -> None:
        """Make blocks that come from ``free``, free ones by their size in bytes."""
        self._free = free
        self._held: list[torch.Tensor] = []

    def new(self, shape: tuple[int, ...]) -> torch.Tensor:
        """Return an uninitialised uint8 tensor of ``shape``."""
        size = int(np.prod(shape))
        try:
            block = self._free.setdefault(size, []).pop()
        except IndexError:
            block = torch.empty(size, dtype=torch.uint8)
        self._held.append(block)
        return block.view(shape)

    def release(self) -> None:
        """Let the blocks be written again."""
        while self._held:
            block = self._held.pop()
            self._free[block.numel()].append(block)


def new_pinned(shape: tuple[int, ...]) -> torch.Tensor:
    """Return an uninitialised tensor in page-locked memory.

    PyTorch keeps such memory itself, and knows when a copy that is under way has ended.
    """
    return torch.empty(shape, dtype=torch.uint8, pin_memory=True)


def new_shared(size: int) -> torch.Tensor:
    """Return an uninitialised uint8 tensor of ``size`` bytes that other processes can be sent.

    Raises:
        RuntimeError: If there is no room for it in shared memory.
    """
    storage = torch.UntypedStorage._new_shared(size)  # type: ignore[no-untyped-call]
    return torch.empty(0, dtype=torch.uint8).set_(storage, 0, (size,))  # type: ignore[call-overload, no-any-return]


def pin(batch: Any) -> Any:
    """Return ``batch`` with its tensors in page-locked memory; those that lie there stay."""
    if isinstance(batch, torch.Tensor):
        return batch if batch.is_pinned() else batch.pin_memory()
    return map_tensors(pin, batch)


def map_tensors(function: Callable[[Any], Any], batch: Any) -> Any:
    """Apply ``function`` to the items of a container and keep its type; all else stays as it is."""
    if is_namedtuple(batch):
        return type(batch)(*map(function, batch))
    if type(batch) in (tuple, list):
        return type(batch)(map(function, batch))
    if isinstance(batch, (MutableMapping, list)):
        changed: Any = copy.copy(batch)  # a subclass keeps its attributes
        for place in batch if isinstance(batch, MutableMapping) else range(len(batch)):
            changed[place] = function(batch[place])
        return changed
    return batch


def is_namedtuple(batch: Any) -> bool:
    """Tell whether this is a tuple with named fields, which are its constructor's arguments."""
    return isinstance(batch, tuple) and hasattr(batch, "_fields")
