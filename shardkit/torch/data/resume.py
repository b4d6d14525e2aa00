"""Resume state: the position of a run in its epochs, saved and loaded as JSON values."""

from __future__ import annotations

import hashlib
import itertools
import warnings
from collections.abc import Mapping
from typing import Any, NamedTuple, TypeGuard

import numpy as np
from torch.utils.data import ConcatDataset, Subset

from shardkit.dataset.parts import converted_digest
from shardkit.errors import StateMismatch
from shardkit.options import check_integer
from shardkit.system.text import quoted
from shardkit.torch.data.datasets import ShardDataset
from shardkit.torch.data.schedule import BatchSchedule

_VERSION = 1


class Run(NamedTuple):
    """A started iteration."""

    number: int
    epoch: int
    consumed: int
    """Samples of the epoch that were read before."""


class ResumeState:
    """The current epoch and how much of it was read: the content of ``state_dict``.

    Each iteration starts the next epoch, unless a state was loaded or ``set_epoch`` selected one.
    """

    def __init__(self, dataset: Any, schedule: BatchSchedule) -> None:
        self._schedule = schedule
        self._identity = {
            "version": _VERSION,
            "dataset": fingerprint(dataset),
            "order": schedule.order.describe() + schedule.epochs.describe(),
            "samples": schedule.size,
            "seed": schedule.order.seed,
        }
        self._epoch = 0
        self._consumed = 0
        self._ready = True
        """Whether the next iteration starts at this position, not at the next epoch."""
        self._selected = False
        """Whether `set_epoch` selected the epoch: it is then read even if nothing of it is left."""
        self._run = 0
        """Number of the latest iteration: one that was overtaken changes nothing."""
        self.limit: int | None = None
        """Samples after which a trainer ends an epoch; None if unknown."""

    @property
    def epoch(self) -> int:
        """The last epoch started, or the next one once it is exhausted."""
        return self._epoch + (self._ready and self._is_exhausted and not self._selected)

    def set_epoch(self, epoch: int) -> None:
        """Make the next iteration read ``epoch``, or the rest of it after `load`."""
        epoch = check_integer("epoch", epoch, 0)
        is_loaded = self._ready and epoch == self._epoch
        self._go_to(epoch, self._consumed if is_loaded else 0, selected=True)

    def restart(self, epoch: int) -> None:
        """Make the next iteration read all of ``epoch``."""
        self._go_to(epoch, 0, selected=True)

    def _go_to(self, epoch: int, consumed: int, *, selected: bool) -> None:
        """Make the next iteration start at a position."""
        self._epoch = epoch
        self._consumed = consumed
        self._ready = True
        self._selected = selected
        self._run += 1

    def follow(self, epoch: int) -> None:
        """Start at a trainer's ``epoch``, unless a position was set or loaded.

        So a loader of a new process reads the epoch with which a trainer resumes.
        """
        if self._run == 0:
            self.set_epoch(epoch)
            return
        partly = self._ready and self._consumed > 0 and not self._is_exhausted
        if self.limit is None and partly and epoch > self._epoch:
            warnings.warn(
                f"the trainer starts epoch {epoch}, but its checkpoint was saved after "
                f"{self._consumed} of {self._schedule.size} samples of epoch {self._epoch}; the "
                "rest of that epoch is read now. If limit_train_batches ended that epoch, pass a "
                "shardkit.ShardDataModule to fit instead of the loader, or call "
                f"loader.set_epoch({epoch}) in on_train_epoch_start",
                RuntimeWarning,
                stacklevel=4,
            )

    def begin(self) -> Run:
        """Start an iteration."""
        if not self._ready or (self._is_exhausted and not self._selected):
            self._epoch = self._epoch + 1
            self._consumed = 0
        self._ready = False
        self._selected = False
        self._run += 1
        return Run(self._run, self._epoch, self._consumed)

    def advance(self, run: Run, consumed: int) -> None:
        """Record that ``run`` yielded a batch, if it is the latest iteration."""
        if run.number == self._run:
            self._epoch = run.epoch
            self._consumed = consumed

    def finish(self, run: Run) -> None:
        """Record that ``run`` reached the end of its epoch, if it is the latest iteration."""
        if run.number == self._run:
            self._epoch = self._epoch + 1
            self._consumed = 0
            self._ready = True

    def state(self) -> dict[str, Any]:
        """Return the position as JSON values."""
        return {**self._identity, "epoch": self._epoch, "consumed": self._consumed}

    def keep_epoch(self) -> None:
        """Make the next iteration read the rest of the loaded epoch, even if that is empty."""
        self._selected = True

    def load(self, state: Mapping[str, Any], *, of_worker: bool = False) -> None:
        """Resume from a value of `state` in the next iteration.

        ``of_worker`` accepts the state of one of several workers. Raises StateMismatch if ``state``
        is damaged, or of another dataset, order or version.
        """
        self.check(state, of_worker=of_worker)
        self._go_to(state["epoch"], state["consumed"], selected=False)

    def check(self, state: Mapping[str, Any], *, of_worker: bool = False) -> None:
        """Raise `StateMismatch` unless `load` accepts ``state``."""
        _require_state(state, self._identity)
        if "num_workers" in state and not of_worker:
            raise StateMismatch(
                "this is the state of one worker of an iterable dataset: load it into that "
                "dataset, in a DataLoader with the same number of workers"
            )

    @property
    def _is_exhausted(self) -> bool:
        ended = self.limit is not None and self._consumed >= self.limit
        return self._consumed > 0 and (ended or self._schedule.is_exhausted(self._consumed))


class Resumable:
    """What has a position in its epochs: a loader, or a sampler of batches."""

    _resume: ResumeState

    @property
    def epoch(self) -> int:
        """The last epoch started, or the next one once it is exhausted."""
        return self._resume.epoch

    def set_epoch(self, epoch: int) -> None:
        """Make the next iteration read ``epoch``, or the rest of it after `load_state_dict`.

        Raises:
            UsageError: If ``epoch`` is not an integer of at least 0.
        """
        self._resume.set_epoch(epoch)

    def state_dict(self) -> dict[str, Any]:
        """Return the position of the next batch, as JSON values.

        The state is the same on all ranks, and a run with any number of ranks and workers and any
        batch size can resume from it.
        """
        return self._resume.state()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from ``state`` in the next iteration.

        Raises:
            StateMismatch: If ``state`` is damaged, or belongs to another dataset, order or version.
        """
        self._resume.load(state)


def fingerprint(dataset: Any) -> str:
    """Return a text that identifies a dataset in a state.

    For shardkit's datasets it is the content digest, so a state fits any format and shard size of
    the same records: no order depends on shards. Fields that were changed later do not count: an
    order that depends on labels describes them itself. For a ``Subset`` or ``ConcatDataset`` it is
    derived from its parts. For any other dataset it is only the type and length.
    """
    lines: list[str]
    if isinstance(dataset, ShardDataset):
        if dataset.selected is None:
            return converted_digest(dataset.manifest)[:32]
        rows = hashlib.sha256(dataset.selected.tobytes()).hexdigest()
        lines = ["selection", converted_digest(dataset.manifest), rows]
    elif isinstance(dataset, Subset):
        indices = np.asarray(dataset.indices, np.int64).tobytes()
        lines = ["subset", fingerprint(dataset.dataset), hashlib.sha256(indices).hexdigest()]
    elif isinstance(dataset, ConcatDataset):
        lines = ["concat", *map(fingerprint, dataset.datasets)]
    else:
        return f"{type(dataset).__name__} of {len(dataset)}"
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:32]


def is_count(value: object) -> TypeGuard[int]:
    """Return whether a value of a state is an integer from 0 on that fits 64 bits."""
    return type(value) is int and 0 <= value < 2**63


def _require_state(state: object, identity: Mapping[str, Any]) -> None:
    if not isinstance(state, Mapping) or not all(
        is_count(state.get(name)) for name in ("epoch", "consumed")
    ):
        raise StateMismatch(
            f"this is not the state of a shardkit loader: {_show(state)}",
            remedy="Pass the value that the loader's state_dict() returned, not a whole "
            "checkpoint or JSON text.",
        )
    # Values of other types may be arrays, whose comparisons have no truth value.
    wrong = [
        name
        for name, value in identity.items()
        if type(state.get(name)) is not type(value) or state[name] != value
    ]
    if "version" in wrong:
        raise StateMismatch(
            f"the state has version {quoted(state.get('version'))}, but this shardkit reads "
            f"version {identity['version']}: resume with the shardkit version that saved it"
        )
    if wrong:
        name = wrong[0]
        raise StateMismatch(
            f"the state does not match: {name} is {quoted(state.get(name))} in the state and "
            f"{identity[name]!r} in this loader. Dataset, order and seed must be the same; ranks, "
            "workers, engine and batch size may differ."
        )
    if state["consumed"] > identity["samples"]:
        raise StateMismatch(
            f"the state is damaged: it counts {state['consumed']} of {identity['samples']} samples "
            "as read"
        )


def _show(state: object) -> str:
    """Return a short description of a value, which may be a checkpoint with a whole model."""
    if isinstance(state, Mapping):
        names = ", ".join(quoted(name) for name in itertools.islice(state, 6))
        return f"a mapping with {names or 'nothing'}"
    return quoted(state)
