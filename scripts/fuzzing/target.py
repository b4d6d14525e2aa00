"""What a target is: something that parses, valid inputs for it, and what it promises."""

from __future__ import annotations

import abc
import random
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from scripts.fuzzing.mutate import Hint, Mutator
from shardkit.errors import ShardkitError

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
    guided = True
    """Whether it is worth while to follow the branches that an input leads to."""

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

    def hints(self, data: bytes) -> Sequence[Hint]:
        """Return where in ``data`` something stands whose change is worth more than another's."""
        return ()

    def mend(self, data: bytes, rng: random.Random) -> bytes:
        """Return ``data``, perhaps with checksums that fit again, lest they hide what is behind."""
        return data

    def mutate(self, data: bytes, rng: random.Random) -> bytes:
        """Return another input made from ``data``."""
        mutator = Mutator(rng, self.tokens, self.seeds)
        return self.mend(mutator.mutate(data, self.hints(data)), rng)


def broken(promise: str, detail: object = "") -> NoReturn:
    raise BrokenPromiseError(f"{promise}: {detail!r}"[:2000] if detail != "" else promise)
