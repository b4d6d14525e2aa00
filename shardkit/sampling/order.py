"""The order of rows in an epoch: a pure function of seed, epoch and size.

It does not depend on formats, workers or ranks, nor on random numbers of a library, whose streams
change between versions: it uses only `mix`, division and remainder. docs/order.md specifies it.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, ClassVar, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from shardkit.errors import UsageError, setting
from shardkit.options import check_integer

Positions = npt.NDArray[np.int64]
"""Positions in an epoch, from 0 on; int64 of shape (N,)."""

Hashes = npt.NDArray[np.uint64]
"""Values of 64 bits; uint64 of shape (N,)."""

_SORTED_SIZE = 4096
"""Maximum size of a permutation that is sorted by hash, which is exactly uniform. Larger ones use a
Feistel network, which computes any range without memory: the first batch of 10 million rows takes
0.1 ms."""

_ROUNDS = 8
"""Rounds of the Feistel network; tests/unit/sampling/test_order.py tests the statistics."""


@dataclass(frozen=True, kw_only=True)
class BlockShuffle:
    """Shuffle blocks of rows, for disks with slow random access and data larger than memory.

    Blocks of neighboring rows are read in random order, and the rows of all blocks that fit the
    buffer are mixed. The buffer holds row numbers; the page cache holds their bytes.

    Raises:
        UsageError: If a number is below 1, or a block does not fit in the buffer.
    """

    rows: int = 16
    """Number of neighboring rows in a block, which are read sequentially."""
    buffer: int = 16384
    """Number of rows to mix. With the default, batches of 64 are as varied as with full shuffling,
    even if neighbors are similar; it corresponds to 500 MB of 30 KB images."""

    def __post_init__(self) -> None:
        for name, value in (("rows", self.rows), ("buffer", self.buffer)):
            if not isinstance(value, int) or value < 1:
                raise UsageError(
                    f"BlockShuffle({setting(name, value)}) must be a positive number of rows"
                )
        if self.buffer < self.rows:
            raise UsageError(f"a block of {self.rows} rows exceeds the buffer of {self.buffer}")

    @property
    def window(self) -> int:
        """Rows that are mixed with each other: the full blocks that fit the buffer."""
        return self.buffer // self.rows * self.rows


@dataclass(frozen=True, kw_only=True)
class Order:
    """The row at each position of each epoch.

    Raises:
        UsageError: If ``seed`` is not an integer.
    """

    size: int
    """Number of rows."""
    shuffle: bool | BlockShuffle = False
    """False keeps the stored order; True makes all orders equally likely."""
    seed: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "seed", check_integer("seed", self.seed, -(2**63)))

    recurs: ClassVar[bool] = False
    """Whether an epoch may hold a row several times. If so, random numbers depend on positions."""

    def in_batches(self, step: int) -> Order:
        """Return the order for steps of ``step`` samples, of all ranks together: mostly itself."""
        return self

    def describe(self) -> str:
        """Return a text that identifies the order, apart from its size and seed, in a state."""
        return f"shuffle={self.shuffle!r}"

    def rows(self, epoch: int, positions: Positions) -> Positions:
        """Return the rows at ``positions`` of ``epoch``, in constant time for each."""
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
            mixed[inside] = start + permute(size, step_key(key, number), positions[inside] - start)
        return self._in_blocks(epoch, self.shuffle, mixed)

    def ahead(self, epoch: int, positions: Positions) -> Positions:
        """Return rows to issue readahead for while ``positions`` are read.

        They are blocks of the next window, so that it is in the page cache when it is needed. Empty
        unless the shuffle is `BlockShuffle`.
        """
        if not isinstance(self.shuffle, BlockShuffle) or not len(positions):
            return positions[:0]
        rows = self.shuffle.rows
        window = self.shuffle.window
        first = int(positions.min()) // rows
        last = -(-(int(positions.max()) + 1) // rows)
        start = first * rows + window
        stop = min(last * rows + window, self.size)
        return self._in_blocks(epoch, self.shuffle, np.arange(start, max(start, stop)))

    def _in_blocks(self, epoch: int, blocks: BlockShuffle, positions: Positions) -> Positions:
        """Return the rows at ``positions`` of the epoch's sequence of blocks."""
        key = derive_key("blocks", self.seed, epoch)
        full_blocks = self.size // blocks.rows
        slots = positions // blocks.rows
        numbers = slots.copy()  # the rest after the full blocks stays last ...
        full = slots < full_blocks
        numbers[full] = permute(full_blocks, key, slots[full])
        shift = _hash(key) % max(1, self.size)  # ... but has different rows in each epoch
        return (numbers * blocks.rows + positions % blocks.rows + shift) % max(1, self.size)


def permute(size: int, key: int, positions: Positions) -> Positions:
    """Return the images of ``positions`` under a pseudo-random permutation of ``range(size)``.

    The 64 bits of ``key`` select it. Positions are below ``size``, in any order.
    """
    if size <= _SORTED_SIZE:
        return _sorted_permutation(size, key)[positions]
    left_size = math.isqrt(size - 1) + 1
    right_size = -(-size // left_size)
    sides = np.uint64(left_size), np.uint64(right_size)
    round_keys = [np.uint64(step_key(key, number)) for number in range(_ROUNDS)]
    values = positions.astype(np.uint64)
    outside = np.arange(len(values))
    while len(outside):  # the rectangle is slightly larger than ``size``: repeat until inside
        values[outside] = _feistel(values[outside], round_keys, *sides)
        outside = outside[values[outside] >= size]
    return values.astype(np.int64)


def permute_each(sizes: Positions, keys: Hashes, positions: Positions) -> Positions:
    """Map each position by a permutation of its own.

    It is the Feistel network for any size, so it takes the same time for many small permutations as
    for one large one. Sizes are below 2^50. All arguments have the shape (N,).
    """
    lefts = np.ceil(np.sqrt(sizes)).astype(np.uint64)
    rights = (sizes.astype(np.uint64) + lefts - np.uint64(1)) // lefts
    round_keys = [step_keys(keys, np.array([number], np.uint64)) for number in range(_ROUNDS)]
    values = positions.astype(np.uint64)
    outside = np.arange(len(values))
    while len(outside):
        open_keys = [round_key[outside] for round_key in round_keys]
        values[outside] = _feistel(values[outside], open_keys, lefts[outside], rights[outside])
        outside = outside[values[outside] >= sizes[outside].astype(np.uint64)]
    return values.astype(np.int64)


def derive_key(purpose: str, seed: int, epoch: int) -> int:
    """Return the 64-bit key of a purpose in an epoch: an 8-byte BLAKE2b digest."""
    text = f"shardkit {purpose} {seed} {epoch}".encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")


def digest(*arrays: npt.NDArray[Any]) -> str:
    """Return a text that identifies the values of arrays in a state."""
    hasher = hashlib.sha256()
    for array in arrays:
        hasher.update(array.astype(array.dtype.newbyteorder("<")).tobytes())
    return hasher.hexdigest()[:16]


_Number = TypeVar("_Number", int, Positions)


def sample_number(row: _Number, repeats: _Number) -> _Number:
    """Return the number of a sample, which determines its `Draws`; of several, modulo 2^64.

    ``repeats`` is how often the row came earlier in the epoch.
    """
    return row + (repeats << 40)


class Draws:
    """Random numbers of one sample: a pure function of a key and its number.

    The generator is SplitMix64 (Steele, Lea, Flood, 2014), seeded with a hash of both.
    """

    def __init__(self, key: int, sample: int) -> None:
        self._state = _hash(key ^ _hash(sample + 1))

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


class BatchDraws(NamedTuple):
    """The random numbers of the samples of a batch: the arguments of their `Draws`."""

    key: int
    samples: Sequence[int] | Positions

    @property
    def numbers(self) -> Hashes:
        """The number of each sample, modulo 2^64."""
        if isinstance(self.samples, np.ndarray):
            return self.samples.astype(np.uint64)
        return np.array([sample & _MASK for sample in self.samples], np.uint64)

    def bits(self, count: int) -> Hashes:
        """Return the first ``count`` of `Draws.bits` of each sample: uint64 of shape (count, N)."""
        states = mix(np.uint64(self.key) ^ mix(self.numbers + np.uint64(1)))
        return step_keys(states, np.arange(1, count + 1, dtype=np.uint64)[:, None])


_GOLDEN = 0x9E3779B97F4A7C15
_FIRST = 0xBF58476D1CE4E5B9
_SECOND = 0x94D049BB133111EB
_MASK = 2**64 - 1
_HALF = np.uint64(32)


def uniform(bits: Hashes) -> npt.NDArray[np.float64]:
    """Return `Draws.uniform`, from 0 to 1, of values of 64 bits."""
    return (bits >> np.uint64(11)).astype(np.float64) * 2.0**-53


def below(bits: Hashes, limits: Positions) -> Positions:
    """Return `Draws.below` of values of 64 bits, for limits below 2^32."""
    high = bits >> _HALF
    low = bits & np.uint64(0xFFFFFFFF)
    factors = limits.astype(np.uint64)
    return ((high * factors + (low * factors >> _HALF)) >> _HALF).astype(np.int64)


def mix(values: Hashes) -> Hashes:
    """Return a hash of each value: the output function of SplitMix64."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(_FIRST)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(_SECOND)
    return values ^ (values >> np.uint64(31))


def _hash(value: int) -> int:
    """Return `mix` of one integer."""
    value &= _MASK
    value = (value ^ (value >> 30)) * _FIRST & _MASK
    value = (value ^ (value >> 27)) * _SECOND & _MASK
    return value ^ (value >> 31)


def step_key(key: int, number: int) -> int:
    """Return the key of step ``number``."""
    return _hash(key + number * _GOLDEN)


def step_keys(keys: Hashes, numbers: Hashes) -> Hashes:
    """Return `step_key` of each key and number."""
    return mix(keys + numbers * np.uint64(_GOLDEN))


@lru_cache(maxsize=8)
def _sorted_permutation(size: int, key: int) -> Positions:
    hashes = mix(np.uint64(key) + np.arange(1, size + 1, dtype=np.uint64) * np.uint64(_GOLDEN))
    return np.argsort(hashes, kind="stable").astype(np.int64)


def _feistel(
    values: Hashes,
    round_keys: Sequence[Hashes | np.uint64],
    left_size: Hashes | np.uint64,
    right_size: Hashes | np.uint64,
) -> Hashes:
    """Permute ``range(left_size * right_size)``: each half is shifted by a hash of the other.

    (Black and Rogaway, Ciphers with Arbitrary Finite Domains, 2002: the generalized Feistel
    network with cycle walking.)
    """
    left, right = np.divmod(values, right_size)
    for number, round_key in enumerate(round_keys):
        if number % 2:
            right = (right + mix(left + round_key) % right_size) % right_size
        else:
            left = (left + mix(right + round_key) % left_size) % left_size
    return left * right_size + right
