"""Changes to bytes: small, seeded, and most often at places that mean something."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

MAX_BYTES = 1 << 17
"""No input becomes longer."""

Hint = tuple[int, int]
"""Offset and length of a piece that means something: a number, a name, a pointer."""

_NUMBERS = (
    *(0, 1, 2, 3, 4, 7, 8, 15, 16, 31, 32, 63, 64, 100, 127, 128, 129, 255, 256, 511, 512, 513),
    *(4095, 4096, 4097, 32767, 32768, 65535, 65536, 1 << 20, 1 << 24, (1 << 31) - 1, 1 << 31),
    *((1 << 32) - 1, 1 << 32, 1 << 40, 1 << 53, (1 << 63) - 1, 1 << 63, (1 << 64) - 1),
    *((1 << 64) - 2, (1 << 64) - 8, (1 << 64) - 512, (1 << 64) - 4096),
)

_Change = Callable[["Mutator", bytearray], None]


class Mutator:
    """Changes one input after another; the same seed and inputs give the same changes."""

    def __init__(self, rng: random.Random, tokens: Sequence[bytes], pool: Sequence[bytes]) -> None:
        self._rng = rng
        self._tokens = tokens
        self._pool = pool
        self._hints: Sequence[Hint] = ()

    def mutate(self, data: bytes, hints: Sequence[Hint] = ()) -> bytes:
        """Return ``data`` with one to eight changes, at ``hints`` more often than elsewhere."""
        self._hints = hints
        changed = bytearray(data)
        count = self._rng.choice((1, 1, 1, 1, 2, 2, 3, 4, 8))
        for _ in range(count):
            self._rng.choice(_CHANGES)(self, changed)
        return bytes(changed[:MAX_BYTES])

    def _place(self, data: bytearray) -> Hint:
        """Return where to change something, and how many bytes of it belong together."""
        if self._hints and self._rng.random() < 0.6:
            start, length = self._rng.choice(self._hints)
            if start < len(data):
                return start, max(1, min(length, len(data) - start))
        size = self._rng.choice((1, 1, 2, 4, 8))
        start = self._rng.randrange(max(1, len(data)))
        if self._rng.random() < 0.5:
            start -= start % size
        return start, max(1, min(size, len(data) - start))

    def _span(self, data: bytearray) -> slice:
        start = self._rng.randrange(len(data) + 1)
        longest = self._rng.choice((4, 16, 64, 512, 4096, len(data) + 1))
        return slice(start, min(len(data), start + self._rng.randrange(1, longest + 1)))

    def flip_bit(self, data: bytearray) -> None:
        start, length = self._place(data)
        if data:
            data[start + self._rng.randrange(length)] ^= 1 << self._rng.randrange(8)

    def set_byte(self, data: bytearray) -> None:
        start, length = self._place(data)
        if data:
            data[start + self._rng.randrange(length)] = self._rng.choice((0, 255, 128, 127, 32, 47))

    def set_number(self, data: bytearray) -> None:
        start, length = self._place(data)
        number = self._rng.choice((*_NUMBERS, len(data), len(data) // 2, start, start // 512))
        order = "little" if self._rng.random() < 0.7 else "big"
        number &= (1 << 8 * length) - 1
        data[start : start + length] = number.to_bytes(length, order)  # type: ignore[arg-type]

    def add_to_number(self, data: bytearray) -> None:
        start, length = self._place(data)
        order = "little" if self._rng.random() < 0.7 else "big"
        number = int.from_bytes(data[start : start + length], order)  # type: ignore[arg-type]
        number += self._rng.choice((-1, 1)) * self._rng.choice((1, 2, 8, 16, 512, 4096))
        number &= (1 << 8 * length) - 1
        data[start : start + length] = number.to_bytes(length, order)  # type: ignore[arg-type]

    def copy_within(self, data: bytearray) -> None:
        """Copy a number to the place of another: a pointer that leads back makes a circle."""
        start, length = self._place(data)
        source, _ = self._place(data)
        piece = data[source : source + length]
        data[start : start + len(piece)] = piece

    def overwrite_with_token(self, data: bytearray) -> None:
        if self._tokens:
            start, _ = self._place(data)
            token = self._rng.choice(self._tokens)
            data[start : start + len(token)] = token

    def insert_token(self, data: bytearray) -> None:
        if self._tokens:
            start, _ = self._place(data)
            data[start:start] = self._rng.choice(self._tokens)

    def insert_junk(self, data: bytearray) -> None:
        start, _ = self._place(data)
        data[start:start] = self._rng.randbytes(self._rng.choice((1, 2, 8, 64, 512)))

    def delete(self, data: bytearray) -> None:
        del data[self._span(data)]

    def repeat(self, data: bytearray) -> None:
        span = self._span(data)
        if len(data) < MAX_BYTES:
            data[span.start : span.start] = data[span] * self._rng.choice((1, 1, 2, 16))

    def clear(self, data: bytearray) -> None:
        span = self._span(data)
        data[span] = bytes((self._rng.choice((0, 0, 255)),)) * len(data[span])

    def swap(self, data: bytearray) -> None:
        """Exchange two pieces of one length, often whole blocks."""
        size = self._rng.choice((8, 32, 512, 512, 4096))
        places = max(1, len(data) // size)
        first, second = (self._rng.randrange(places) * size for _ in range(2))
        one, other = data[first : first + size], data[second : second + size]
        if len(one) == len(other):
            data[first : first + size], data[second : second + size] = other, one

    def cut(self, data: bytearray) -> None:
        del data[self._rng.randrange(len(data) + 1) :]

    def extend(self, data: bytearray) -> None:
        data += bytes(self._rng.choice((1, 7, 512, 1024, 4096)))

    def splice(self, data: bytearray) -> None:
        if self._pool:
            other = self._rng.choice(self._pool)
            start = self._rng.randrange(len(data) + 1)
            if self._rng.random() < 0.5:
                data[start:] = other[start:]
            else:
                begin = self._rng.randrange(len(other) + 1)
                data[start:start] = other[begin : begin + self._rng.choice((8, 64, 512, 4096))]


_CHANGES: tuple[_Change, ...] = (
    Mutator.flip_bit,
    Mutator.flip_bit,
    Mutator.set_byte,
    Mutator.set_number,
    Mutator.set_number,
    Mutator.set_number,
    Mutator.add_to_number,
    Mutator.copy_within,
    Mutator.copy_within,
    Mutator.overwrite_with_token,
    Mutator.overwrite_with_token,
    Mutator.insert_token,
    Mutator.insert_junk,
    Mutator.delete,
    Mutator.repeat,
    Mutator.clear,
    Mutator.swap,
    Mutator.cut,
    Mutator.extend,
    Mutator.splice,
)
