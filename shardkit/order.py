"""The order in which an epoch visits its rows: one pure function of seed, epoch and size.

It knows neither formats nor workers nor ranks, and uses no library's random numbers, whose streams
change between versions: the order is made of `mix`, division and remainder alone. docs/order.md
states it in full.
"""

from __future__ import annotations

import hashlib
import math
import operator
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from shardkit.errors import UsageError

Positions = npt.NDArray[np.int64]
"""Places in an epoch, from 0 on; int64 of shape (N,)."""

_SORTED_SIZE = 4096
"""Up to here a permutation is a sort by hash, uniform to the last bit; above, a Feistel network,
which needs no memory and gives any part of it: the first batch of 10 million rows takes 0.1 ms."""

_ROUNDS = 8
"""Each half of a position is changed four times; tests/test_order.py holds the statistics."""


@dataclass(frozen=True, kw_only=True)
class Blocks:
    """Shuffling that reads forwards: for disks that dislike jumps, and data larger than memory.

    Blocks of neighbouring rows are taken in random order; as many as fill the buffer are mixed
    with each other, row by row. The buffer holds row numbers, and the page cache their bytes.

    Raises:
        UsageError: If a number is below 1, or a block does not fit into the buffer.
    """

    rows: int = 16
    """Neighbouring rows in a block: what is read in one piece."""
    buffer: int = 16384
    """Rows that are mixed; the default keeps batches of 64 as varied as full shuffling does, even
    if neighbours are alike (docs/benchmarks.md), with 500 MB of 30 KB images."""

    def __post_init__(self) -> None:
        for name, value in (("rows", self.rows), ("buffer", self.buffer)):
            if not isinstance(value, int) or value < 1:
                raise UsageError(f"Blocks({name}={value!r}) is not a number of rows, from 1 on")
        if self.buffer < self.rows:
            raise UsageError(f"a block of {self.rows} rows does not fit a buffer of {self.buffer}")

    @property
    def window(self) -> int:
        """Rows that are mixed with each other: the whole blocks that the buffer holds."""
        return self.buffer // self.rows * self.rows


@dataclass(frozen=True, kw_only=True)
class Order:
    """Which row stands at which position of each epoch.

    Raises:
        UsageError: If ``seed`` is no integer, or ``shuffle`` neither a bool nor `Blocks`.
    """

    size: int
    """Number of rows."""
    shuffle: bool | Blocks = False
    """False keeps the stored order; True makes any order as likely as any other."""
    seed: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "seed", check_integer("seed", self.seed, -(2**63)))
        if not isinstance(self.shuffle, (bool, Blocks)):
            raise UsageError(f"shuffle={self.shuffle!r} is neither True, False nor Blocks(...)")

    def rows(self, epoch: int, positions: Positions) -> Positions:
        """Return the rows at ``positions`` of ``epoch``; each costs the same, wherever it is."""
        if self.shuffle is False:
            return positions
        if self.shuffle is True:
            return permute(self.size, derive_key("rows", self.seed, epoch), positions)
        window = self.shuffle.window
        key = derive_key("window", self.seed, epoch)
        mixed = np.empty_like(positions)
        windows = positions // window
        for number in np.unique(windows).tolist():
            start = number * window
            inside = windows == number
            size = min(window, self.size - start)
            mixed[inside] = start + permute(size, _step(key, number), positions[inside] - start)
        return self._in_blocks(epoch, self.shuffle, mixed)

    def ahead(self, epoch: int, positions: Positions) -> Positions:
        """Return rows to announce while ``positions`` are read: a part of the next window's blocks.

        Announced block by block, a window is in the page cache, read forwards, when its turn comes.
        Empty unless the shuffle is `Blocks`.
        """
        if not isinstance(self.shuffle, Blocks) or not len(positions):
            return positions[:0]
        rows, window = self.shuffle.rows, self.shuffle.window
        first, last = int(positions.min()) // rows, -(-(int(positions.max()) + 1) // rows)
        start, stop = first * rows + window, min(last * rows + window, self.size)
        return self._in_blocks(epoch, self.shuffle, np.arange(start, max(start, stop)))

    def _in_blocks(self, epoch: int, blocks: Blocks, places: Positions) -> Positions:
        """Return the rows at ``places`` of the epoch's sequence of blocks."""
        key = derive_key("blocks", self.seed, epoch)
        whole = self.size // blocks.rows
        slots = places // blocks.rows
        numbers = slots.copy()  # what is left over beside whole blocks stays last ...
        full = slots < whole
        numbers[full] = permute(whole, key, slots[full])
        shift = _hash(key) % max(1, self.size)  # ... but is other rows in each epoch
        return (numbers * blocks.rows + places % blocks.rows + shift) % max(1, self.size)


def permute(size: int, key: int, positions: Positions) -> Positions:
    """Return where a pseudo-random permutation of ``range(size)`` sends ``positions``.

    Args:
        size: Numbers permuted.
        key: 64 bits that choose the permutation.
        positions: Numbers below ``size``, any of them, in any order.
    """
    if size <= _SORTED_SIZE:
        return _sorted_permutation(size, key)[positions]
    left_size = math.isqrt(size - 1) + 1
    right_size = -(-size // left_size)
    values = positions.astype(np.uint64)
    outside = np.arange(len(values))
    while len(outside):  # the rectangle is a little larger than ``size``: go on until back inside
        values[outside] = _feistel(values[outside], key, left_size, right_size)
        outside = outside[values[outside] >= size]
    return values.astype(np.int64)


def derive_key(purpose: str, seed: int, epoch: int) -> int:
    """Return the 64 bits that a purpose has in an epoch: the start of a BLAKE2b digest."""
    text = f"shardkit {purpose} {seed} {epoch}".encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")


def check_integer(name: str, value: object, least: int) -> int:
    """Return ``value`` as an int of 64 bits, whatever kind of integer it is.

    Raises:
        UsageError: If it is no integer, below ``least``, or needs more bits.
    """
    try:
        number = operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        number = least - 1
    if isinstance(value, bool) or not least <= number < 2**63:
        start = "of 64 bits" if least < 0 else f"from {least} on"
        raise UsageError(f"{name}={value!r} is not an integer {start}")
    return number


class Draws:
    """Random numbers of one sample: a pure function of a key and the row, the same everywhere.

    They are those of SplitMix64 (Steele, Lea, Flood, 2014), whose state begins at a hash of both.
    """

    def __init__(self, key: int, row: int) -> None:
        self._state = _hash(key ^ _hash(row + 1))

    def bits(self) -> int:
        """Return the next 64 bits."""
        self._state = (self._state + _GOLDEN) & _MASK
        return _hash(self._state)

    def uniform(self, low: float = 0.0, high: float = 1.0) -> float:
        """Return a number from ``low`` on, below ``high``."""
        return low + (high - low) * ((self.bits() >> 11) * 2.0**-53)

    def below(self, limit: int) -> int:
        """Return an integer from 0 on, below ``limit``."""
        return self.bits() * limit >> 64


_GOLDEN = 0x9E3779B97F4A7C15
_FIRST = 0xBF58476D1CE4E5B9
_SECOND = 0x94D049BB133111EB
_MASK = 2**64 - 1


def mix(values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Return a hash of each value: the output function of SplitMix64."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(_FIRST)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(_SECOND)
    return values ^ (values >> np.uint64(31))


def _hash(value: int) -> int:
    """Return what `mix` gives for one integer."""
    value &= _MASK
    value = (value ^ (value >> 30)) * _FIRST & _MASK
    value = (value ^ (value >> 27)) * _SECOND & _MASK
    return value ^ (value >> 31)


def _step(key: int, number: int) -> int:
    """Return the key of the part of the given number."""
    return _hash(key + number * _GOLDEN)


@lru_cache(maxsize=8)
def _sorted_permutation(size: int, key: int) -> Positions:
    hashes = mix(np.uint64(key) + np.arange(1, size + 1, dtype=np.uint64) * np.uint64(_GOLDEN))
    return np.argsort(hashes, kind="stable").astype(np.int64)


def _feistel(
    values: npt.NDArray[np.uint64], key: int, left_size: int, right_size: int
) -> npt.NDArray[np.uint64]:
    """Permute ``range(left_size * right_size)``: each half in turn is moved by a hash of the other.

    (Black and Rogaway, Ciphers with Arbitrary Finite Domains, 2002: the generalised Feistel
    network, and walking on along a cycle that leaves the domain.)
    """
    left, right = np.divmod(values, np.uint64(right_size))
    for number in range(_ROUNDS):
        round_key = np.uint64(_step(key, number))
        if number % 2:
            right = (right + mix(left + round_key) % np.uint64(right_size)) % np.uint64(right_size)
        else:
            left = (left + mix(right + round_key) % np.uint64(left_size)) % np.uint64(left_size)
    return left * np.uint64(right_size) + right
