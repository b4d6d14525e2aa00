"""The error tree: every error that shardkit raises on purpose, drawn once.

::

    ShardkitError                 anything below
    ├── UsageError                what was asked for cannot be done as asked (the CLI exits with 2)
    │   └── StateMismatch         a loader's state is of another dataset, order or version
    ├── ConversionFailed          a conversion that committed nothing
    │   ├── BadImages             because of the images that it lists
    │   └── DiskFull              because there is no more room, or would not be
    ├── BadImage                  one image that cannot be stored or decoded; also a ValueError
    ├── LoaderFailed              a loader's worker died or hangs; also a RuntimeError
    ├── TransformFailed           a user's transform raised an exception for a sample
    ├── MeasurementFailed         a loader could not be measured: it failed, hangs or died
    └── CorruptDataset            a dataset that is not what its manifest says
        ├── CorruptShard          one shard file
        └── CorruptRecord         one record; never skipped, never replaced by another

A row outside a dataset is an ``IndexError``, as everywhere in Python. Every class takes exactly one
string, so that an error raised in a DataLoader worker arrives in the main process with its type
(torch rebuilds a worker's exception from its message alone).
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Problem:
    """A source file that was left out, or cannot be converted, and why."""

    path: str
    """Relative to the source."""
    reason: str


class ShardkitError(Exception):
    """Base of all errors that shardkit raises on purpose."""


class UsageError(ShardkitError):
    """What was asked for cannot be done as asked: a wrong option, path or name."""


class ConversionFailed(ShardkitError):
    """A conversion ended without committing anything."""


class BadImages(ConversionFailed):
    """Some images are bad and were not to be skipped; nothing was committed."""

    problems: tuple[Problem, ...] = ()
    """All of them; where there are splits, paths begin with the split."""


class DiskFull(ConversionFailed):
    """A disk has not the room that a conversion needs; what is done is kept for the next run."""


class BadImage(ShardkitError, ValueError):
    """One image that cannot be decoded, or that the recipe cannot turn into what was asked for."""


class LoaderFailed(ShardkitError, RuntimeError):
    """A worker of a loader died, hangs, or could not begin."""


class StateMismatch(UsageError):
    """The state of a loader cannot go on here: it is of another dataset, order or version."""


class TransformFailed(ShardkitError):
    """A transform raised an exception; it is the cause, and the message names the sample."""


class MeasurementFailed(ShardkitError):
    """A loader could not be measured: it failed, hangs, or its process died."""


class CorruptDataset(ShardkitError):
    """A dataset directory is not what its manifest says."""


class CorruptShard(CorruptDataset):
    """A shard file is missing, cut, or not what its format promises."""


class CorruptRecord(CorruptDataset):
    """A record's bytes differ from those that were written."""
