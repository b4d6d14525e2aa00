"""A target: a parser, valid inputs for it, and its promises."""

from __future__ import annotations

import abc
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

from shardkit.errors import ShardkitError

MAX_BYTES = 1 << 17
"""Maximum size of an input."""

Change = Callable[[bytes], bytes]
"""Mutates bytes without knowing their format."""

SECRET = b"this stands in a file outside of the dataset "
"""The content of a file beside the target's folder: it must never come out."""


class BrokenPromiseError(Exception):
    """A target gave a wrong answer; the message begins with the promise that was broken."""


class Target(abc.ABC):
    """Something that parses bytes.

    It works in ``folder``; `SECRET` stands, in several forms, in the folder above. Nothing outside
    of ``folder`` may be opened while an input is tried.
    """

    name: str
    allowed: tuple[type[BaseException], ...] = (ShardkitError,)
    """The exceptions that are documented, and so no findings."""
    tokens: Sequence[bytes] = ()
    """Pieces of bytes that mean something to the parser."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.seeds: list[bytes] = []
        """Valid inputs, and some that are not quite; they are all tried first."""

    @abc.abstractmethod
    def check(self, data: bytes) -> str:
        """Have ``data`` parsed; return in a word what came of it.

        Raises:
            BrokenPromiseError: If the answer is wrong.
        """

    def mend(self, data: bytes, rng: random.Random) -> bytes:
        """Return ``data``, usually with correct checksums, so that parsing gets past them."""
        return data

    def mutate(self, data: bytes, rng: random.Random, change: Change) -> bytes:
        """Return another input made from ``data``: with a token put in, or with a change."""
        if self.tokens and rng.random() < 0.3:
            token, start = rng.choice(self.tokens), rng.randrange(len(data) + 1)
            end = start + rng.choice((0, len(token)))
            return self.mend(data[:start] + token + data[end:], rng)
        return self.mend(change(data), rng)


def put(path: Path, data: bytes) -> None:
    """Put another file in the place of one, which may be mapped, and must not be cut then."""
    beside = path.with_suffix(".new")
    beside.write_bytes(data)
    beside.replace(path)


def broken(promise: str, detail: object = "") -> NoReturn:
    raise BrokenPromiseError(f"{promise}: {detail!r}"[:2000] if detail != "" else promise)
