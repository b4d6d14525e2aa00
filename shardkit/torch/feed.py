"""What is read in an epoch, batch by batch, and where in it a run stands; workers are no matter."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch.distributed
from torch.utils.data import ConcatDataset, Subset

from shardkit.errors import StateMismatch, UsageError
from shardkit.order import Blocks, Order, Positions, check_integer
from shardkit.share import Placed, Share, Step, count_samples, count_steps, steps
from shardkit.torch.datasets import ShardDataset

_VERSION = 1

_AT_ONCE = 8192
"""Positions whose rows are looked up together: 60 ns each then, 1 us each by batches of 64."""


class Request(NamedTuple):
    """One batch to be read."""

    epoch: int
    seed: int
    rows: Positions
    padding: int
    """As many of the last rows are repeats that only make ranks even."""
    consumed: int
    """Samples of the epoch that all ranks together have read after this batch."""
    ahead: Positions
    """Rows to announce to the kernel meanwhile."""


class Feed:
    """The batches of one rank, for any epoch.

    Args:
        order: The order of an epoch.
        batch_size: Samples in a batch.
        share: The rank's share; its rank is found out here if it is not given.

    Raises:
        UsageError: If ``batch_size`` is not a number from 1 on.
    """

    def __init__(self, order: Order, batch_size: int, share: Share) -> None:
        self.order = order
        self.batch_size = check_integer("batch_size", batch_size, 1)
        self.share: Placed = share.placed(_process_group())
        self._is_found = share.rank is None

    def __len__(self) -> int:
        """Return the number of batches in an epoch."""
        return count_steps(self.order.size, self.batch_size, self.share)

    def require_same_group(self) -> None:
        """See that the process group is still what the rank was taken from.

        Raises:
            UsageError: If it began since: all ranks would read the same samples.
        """
        group = _process_group()
        if self._is_found and group not in (None, (self.share.rank, self.share.world)):
            raise UsageError(
                f"this was made as rank {self.share.rank} of {self.share.world}, before "
                "torch.distributed began; make it afterwards, or give Share(rank=, world=)"
            )

    def is_over(self, consumed: int) -> bool:
        """Tell whether no rank has a batch left in an epoch of which ``consumed`` samples are read.

        All ranks must agree on it, also where some have one batch less: rank 0 never has.
        """
        share = self.share._replace(rank=0)
        return count_steps(self.order.size, self.batch_size, share, consumed) == 0

    @property
    def samples(self) -> int:
        """Samples in an epoch of this rank, padding among them."""
        return count_samples(self.order.size, self.batch_size, self.share)

    def requests(self, epoch: int, consumed: int = 0) -> Iterator[Request]:
        """Give the batches of the rest of an epoch, in order."""
        every = steps(self.order.size, self.batch_size, self.share, consumed)
        at_once = max(1, _AT_ONCE // self.batch_size)
        while several := list(itertools.islice(every, at_once)):
            yield from self._look_up(epoch, several)

    def _look_up(self, epoch: int, several: list[Step]) -> Iterator[Request]:
        size = self.order.size
        positions = np.concatenate([np.arange(step.start, step.stop) for step in several])
        rows = self.order.rows(epoch, positions % size)
        ends = np.cumsum([step.stop - step.start for step in several])
        for step, own in zip(several, np.split(rows, ends[:-1]), strict=True):
            real = np.arange(step.start, min(step.stop, size))
            yield Request(
                epoch=epoch,
                seed=self.order.seed,
                rows=own,
                padding=step.stop - max(step.start, min(step.stop, size)),
                consumed=step.consumed,
                ahead=self.order.ahead(epoch, real),
            )


class Run(NamedTuple):
    """An iteration that began."""

    number: int
    epoch: int
    consumed: int
    """Samples of the epoch that were read before."""


class Progress:
    """Which epoch a run is in and how much of it was read: what ``state_dict`` tells.

    Iterations count epochs by themselves: each begins the next one, unless a state was loaded or
    ``set`` names another.
    """

    def __init__(self, dataset: Any, feed: Feed) -> None:
        self._feed = feed
        self._identity = {
            "version": _VERSION,
            "dataset": fingerprint(dataset),
            "samples": feed.order.size,
            "seed": feed.order.seed,
            "shuffle": _describe(feed.order.shuffle),
        }
        self._epoch = 0
        self._consumed = 0
        self._ready = True
        """Whether the next iteration begins where this stands, and not with the next epoch."""
        self._named = False
        """Whether `set` named the epoch: then it is read even if nothing is left of it."""
        self._run = 0
        """Counts whatever begins anew: an iteration that was overtaken changes nothing more."""

    @property
    def epoch(self) -> int:
        """The epoch that was begun last, or once it is read to its end, the one that comes next."""
        return self._epoch + (self._ready and self._is_over and not self._named)

    def set(self, epoch: int) -> None:
        """Let the next iteration read ``epoch``: from where a loaded state left it, if it did.

        Raises:
            UsageError: If it is not an integer from 0 on.
        """
        epoch = check_integer("epoch", epoch, 0)
        if not (self._ready and epoch == self._epoch):
            self._epoch, self._consumed = epoch, 0
        self._ready, self._named = True, True
        self._run += 1

    def restart(self, epoch: int) -> None:
        """Let the next iteration read all of ``epoch``."""
        self._epoch, self._consumed, self._ready, self._named = epoch, 0, True, True
        self._run += 1

    def begin(self) -> Run:
        """Begin an iteration."""
        if not self._ready or (self._is_over and not self._named):
            self._epoch, self._consumed = self._epoch + 1, 0
        self._ready, self._named = False, False
        self._run += 1
        return Run(self._run, self._epoch, self._consumed)

    def advance(self, run: Run, consumed: int) -> None:
        """Note that a batch of an iteration was given out, if it is still the latest."""
        if run.number == self._run:
            self._consumed = consumed

    def finish(self, run: Run) -> None:
        """Note that an iteration came to the end of its epoch, if it is still the latest."""
        if run.number == self._run:
            self._epoch, self._consumed, self._ready = self._epoch + 1, 0, True

    def state(self) -> dict[str, Any]:
        """Return where the run stands, as JSON values."""
        return {**self._identity, "epoch": self._epoch, "consumed": self._consumed}

    def stay(self) -> None:
        """Let the next iteration read what is left of the loaded epoch, even if that is nothing."""
        self._named = True

    def load(self, state: Mapping[str, Any], *, of_worker: bool = False) -> None:
        """Go on where ``state`` stood.

        Args:
            state: What `state` returned.
            of_worker: Whether it may be that of one of several workers of an iterable dataset.

        Raises:
            StateMismatch: If it is of another dataset, order or version, or is no state.
        """
        _require_state(state, self._identity)
        if "workers" in state and not of_worker:
            raise StateMismatch(
                "this is the state of one worker's part of an iterable dataset; only that part, "
                "in a DataLoader with as many workers, can go on from it"
            )
        self._epoch, self._consumed = state["epoch"], state["consumed"]
        self._ready, self._named = True, False
        self._run += 1

    @property
    def _is_over(self) -> bool:
        return self._consumed > 0 and self._feed.is_over(self._consumed)


def fingerprint(dataset: Any) -> str:
    """Return what tells datasets apart, as far as they can be told apart: for states.

    For shardkit's datasets it is the digest of the manifest, and with it of every byte; for a
    ``Subset`` or ``ConcatDataset`` it is made of those of its parts. For any other dataset only
    its type and length are known.
    """
    if isinstance(dataset, ShardDataset):
        return dataset.manifest.digest[:32]
    parts: list[str]
    if isinstance(dataset, Subset):
        rows = np.asarray(dataset.indices, np.int64)
        parts = ["subset", fingerprint(dataset.dataset), hashlib.sha256(rows.tobytes()).hexdigest()]
    elif isinstance(dataset, ConcatDataset):
        parts = ["concat", *map(fingerprint, dataset.datasets)]
    else:
        return f"{type(dataset).__name__} of {len(dataset)}"
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:32]


def _describe(shuffle: bool | Blocks) -> bool | list[int]:
    return [shuffle.rows, shuffle.buffer] if isinstance(shuffle, Blocks) else shuffle


def _require_state(state: Mapping[str, Any], identity: Mapping[str, Any]) -> None:
    numbers = ("epoch", "consumed")
    if not isinstance(state, Mapping) or not all(
        type(state.get(name)) is int and state[name] >= 0 for name in numbers
    ):
        raise StateMismatch(
            f"this is no state of a shardkit loader: {_show(state)}. Give what its state_dict() "
            "returned: not a whole checkpoint, and not its JSON text."
        )
    if state.get("version") != identity["version"]:
        raise StateMismatch(
            f"the state has version {state.get('version')!r}, and this shardkit reads version "
            f"{identity['version']}: go on with the shardkit that saved it"
        )
    for name, ours in identity.items():
        if state.get(name) != ours:
            raise StateMismatch(
                f"the state cannot go on here: its {name} is {state.get(name)!r}, this loader's "
                f"is {ours!r}. A state needs the dataset, shuffle and seed that it was saved with; "
                "ranks, workers, engine and batch size may differ."
            )
    if state["consumed"] > identity["samples"]:
        raise StateMismatch(
            f"the state has read {state['consumed']} of {identity['samples']} samples: "
            "it is damaged"
        )


def _show(state: object) -> str:
    """Return what something is in a few words; it may be a checkpoint with all of a model in it."""
    if isinstance(state, Mapping):
        return f"a mapping with {', '.join(map(repr, list(state)[:6])) or 'nothing'}"
    return repr(state)[:80]


def _process_group() -> tuple[int, int] | None:
    """Return this process's rank and their number, if ``torch.distributed`` is running."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank(), torch.distributed.get_world_size()
    return None
