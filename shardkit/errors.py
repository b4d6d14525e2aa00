"""The errors that shardkit raises on purpose.

::

    ShardkitError                 base class
    ├── UsageError                invalid request (exit code 2)
    │   ├── StateMismatch         a loader's state belongs to another dataset, order or version
    │   └── NotPublished          a dataset of which only the plan for jobs is there
    ├── ConversionFailed          a conversion that wrote no dataset
    │   ├── BadImages             because of the images it lists
    │   └── DiskFull              because the disk lacks space
    ├── BadImage                  one image that cannot be stored or decoded; also a ValueError
    ├── LoaderFailed              a loader's worker died or hangs; also a RuntimeError
    ├── TransformFailed           a user's transform raised an exception
    ├── MeasurementFailed         a loader could not be measured
    │   └── MeasurementTimeout    because it hangs or is too slow
    └── CorruptDataset            a dataset that does not match its manifest
        ├── CorruptShard          one shard file
        └── CorruptRecord         one record; never skipped or replaced

A row outside a dataset is an ``IndexError``. Every class can be made from one string, so that
PyTorch can rebuild an error from a DataLoader worker with its type: it passes only the text on.

Nothing parses a message. An error has its remedy apart, and names options by reference (`setting`).
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

_REFERENCE = re.compile("\x1e([^=\x1f]*)=([^\x1f]*)\x1f")
"""An option in a text: between characters that no text for people has."""

STOPS = (";", ":", ".")

_LONGEST = 400
"""Characters of a value that a message shows in full, such as a path."""


def setting(name: str, *value: object) -> str:
    """Return a reference to an option in a message: ``force=True``, ``--force`` in a command.

    ``name`` is its name in Python.
    """
    shown = "".join(map(repr, value)).replace("\x1f", "?")
    shown = shown if len(shown) <= _LONGEST else shown[:80]
    return f"\x1e{name}={shown}\x1f"


def spelled(text: str, spell: Callable[[str, str], str] = "{}={}".format) -> str:
    """Return a text whose references to options are spelled out.

    ``spell`` returns an option as users write it, given its name and value, which may be "".
    """
    return _REFERENCE.sub(lambda match: spell(match[1], match[2]), text)


def _neutral(name: str, value: str) -> str:
    """Return an option for stored texts, which users of Python and of the command read."""
    shown = "=" * bool(value) + value.strip("'\"")
    return f"the option {name}{shown}"


@dataclass(frozen=True, kw_only=True)
class Problem:
    """A source file that was left out or cannot be converted."""

    path: str
    """Path relative to the source."""
    reason: str
    """Why the file was left out or refused; options may be given by reference, see `setting`, and
    become ``the option pixels=keep``."""

    def __post_init__(self) -> None:
        message = self.reason
        object.__setattr__(self, "reason", spelled(message, _neutral))
        object.__setattr__(self, "_message", message)  # no field: manifests have all fields

    @property
    def message(self) -> str:
        """The reason, with options by reference."""
        return str(vars(self)["_message"])

    @property
    def settings(self) -> list[str]:
        """Names in Python of the options in the reason, in order."""
        return [match[1] for match in _REFERENCE.finditer(self.message)]

    def spelled(self, spell: Callable[[str, str], str] = _neutral) -> dict[str, str]:
        """Return path and reason as JSON values, with options as ``spell`` returns them."""
        return {"path": self.path, "reason": spelled(self.message, spell)}


class ShardkitError(Exception):
    """Base class of all errors that shardkit raises on purpose.

    Both texts may have options by reference; see `setting`.

    Args:
        message: The problem, and where it is. The remedy follows the last character if that is one
            of `STOPS`. Otherwise a colon precedes it, or, if it is a sentence, a period.
        remedy: What to do: a sentence, or the end of one.
        where: The file, folder, URL or option that it concerns, if there is exactly one.
    """

    remedy: str | None = None
    """A sentence, or the end of one."""
    where: str | None = None
    """The file, folder, URL or option that it concerns; None if `option` or only the text does."""
    lacks = ""
    """The option with which the same call succeeds, as `setting` returns it."""

    def __init__(
        self, message: str = "", *, remedy: str | None = None, where: object = None
    ) -> None:
        super().__init__(message)
        if remedy is not None:
            self.remedy = remedy
        if where is not None:
            self.where = str(where)

    @property
    def problem(self) -> str:
        """The message without the remedy."""
        return str(self.args[0]) if self.args else ""

    @property
    def option(self) -> str | None:
        """Name in Python of the option that it concerns: the one that the message starts with."""
        match = _REFERENCE.match(self.problem)
        return match[1] if match else None

    @property
    def stated(self) -> str:
        """Message and remedy, with options by reference."""
        text = self.problem
        if self.remedy is None:
            return text
        stop = "" if text.endswith(STOPS) else "." if self.remedy[:1].isupper() else ":"
        return f"{text}{stop} {self.remedy}"

    def text(self, spell: Callable[[str, str], str] = "{}={}".format) -> str:
        """Return message and remedy; see `spelled`."""
        return spelled(self.stated, spell)

    def __str__(self) -> str:
        return self.text()


class UsageError(ShardkitError):
    """Invalid request: a wrong option, path or name."""


class ConversionFailed(ShardkitError):
    """A conversion failed and wrote no dataset."""


class BadImages(ConversionFailed):
    """Some images are bad and ``on_error`` is ``fail``; no dataset was written."""

    problems: tuple[Problem, ...] = ()
    """All bad images; with splits, paths start with the split."""


class DiskFull(ConversionFailed):
    """The disk lacks space for a conversion. Finished shards are kept for the next run."""


class BadImage(ShardkitError, ValueError):
    """An image that cannot be decoded, or that the recipe cannot convert."""


CHANGED = "it changed since the scan"
"""The problem of a `BadImage` that is not what a scan has listed."""


class LoaderFailed(ShardkitError, RuntimeError):
    """A loader's worker died, hangs, or could not start."""


class StateMismatch(UsageError):
    """A loader's state cannot resume here: it belongs to another dataset, order or version."""


class NotPublished(UsageError):
    """There is no dataset yet, only a plan for jobs. The message states the progress."""

    done: int = 0
    """Tasks that are done."""
    tasks: int = 0
    """Tasks of the plan."""


class TransformFailed(ShardkitError):
    """A transform raised an exception: see ``__cause__``. The message names the sample."""


class MeasurementFailed(ShardkitError):
    """A loader could not be measured: it failed, hangs, or its process died."""


class MeasurementTimeout(MeasurementFailed):
    """A measurement did not end in time: the loader hangs, or is too slow."""


class CorruptDataset(ShardkitError):
    """A dataset directory does not match its manifest."""


def damaged_index(fault: str) -> CorruptDataset:
    """Return the error for an index that contradicts itself."""
    remedy = "to rebuild it from the shards, run `shardkit index`"
    return CorruptDataset(f"the index is damaged: {fault};", remedy=remedy)


class CorruptShard(CorruptDataset):
    """A shard file is missing, truncated, or invalid in its format."""


class CorruptRecord(CorruptDataset):
    """A record's bytes differ from those written."""


@contextlib.contextmanager
def located(where: object) -> Iterator[None]:
    """Set `ShardkitError.where` of errors in the block that have neither that nor an option."""
    try:
        yield
    except ShardkitError as error:
        if error.where is None and error.option is None:
            error.where = str(where)
        raise
