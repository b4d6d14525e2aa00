"""A measurement process from inside: its requests, and the subject that it has open."""

from __future__ import annotations

import dataclasses
import itertools
import pickle
import re
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Concatenate

import numpy as np
from torch.utils.data import Subset

from shardkit.errors import MeasurementFailed, ShardkitError, UsageError
from shardkit.measure.runner import loaders, material, page_cache, steps, timing
from shardkit.measure.runner.clock import Cost, timed
from shardkit.measure.runner.gil import held_fraction
from shardkit.measure.runner.material import SubjectInfo
from shardkit.measure.runner.own_code import raised_at
from shardkit.measure.runner.spec import LoadCost, LoaderSpec, StepSpec, StopCondition, Subject
from shardkit.torch.data.read_context import ReadContext, reading
from shardkit.torch.prefetch import DevicePrefetcher

_EPOCH_TURNS = 16
"""Least length of an epoch, in turns of the workers."""
_MOST_TOGETHER = 64
_TOGETHER_SECONDS = 0.05
"""Most rows that are loaded together to learn what they cost, and how long that may take."""
_DROPS = 5
_PAUSE = 0.1
_DROPPED = 0.01
"""Drops, seconds between them (threads may still read), and the fraction of pages that may stay."""


@dataclass
class Session:
    """The subject that a process has open."""

    subject: Subject = field(default_factory=Subject)
    dataset: Any = None
    """None if `Subject.loader` returned something without a dataset."""
    loader: Any = None
    """Result of `Subject.loader`; None without one."""
    files: list[Path] = field(default_factory=list)
    measured: int = 0
    """Measurements so far, which seed the order."""


def open_subject(session: Session, *, subject: Subject) -> SubjectInfo:
    """Open what is to be read."""
    session.subject = subject
    session.loader = None
    if subject.loader is not None:
        session.loader = material.load_object(
            subject.loader, "loader", lambda value: not callable(value)
        )
        session.dataset = getattr(session.loader, "dataset", None)
    else:
        session.dataset = material.open_subject(subject)
    opened, session.files = material.describe(session.dataset, subject.path)
    return opened


def load_cost(session: Session, *, seconds: float) -> LoadCost:
    """Load random rows in this thread for ``seconds``, and longer to learn how it holds the GIL.

    They are loaded together as a worker does, which takes half the time of one row after the other.
    """
    dataset = session.dataset
    together = getattr(dataset, "__getitems__", lambda rows: [dataset[row] for row in rows])
    rows = itertools.cycle(np.random.default_rng(0).permutation(len(dataset)).tolist())
    costs = list[Cost]()
    count = 1

    def load() -> None:
        batch = [next(rows) for _ in range(count)]
        costs.append(timed(lambda: together(batch))[0] / count)

    with reading(ReadContext(seed=0, epoch=0)):
        load()  # with imports
        load()
        count = max(1, min(_MOST_TOGETHER, int(_TOGETHER_SECONDS / max(costs[1][0], 1e-9))))
        held = held_fraction(load, seconds / 2)  # too much on a busy machine
        costs.clear()  # those with imports and the probe of the GIL
        end = time.perf_counter() + seconds
        while not costs or time.perf_counter() < end:
            load()
    wall, busy = np.mean(costs, axis=0).tolist()
    computing = min(max(wall, 1e-9), busy)
    return LoadCost(wall, computing, held=min(computing, held * wall))


def measure(
    session: Session, *, loader: LoaderSpec, stop: StopCondition, step: StepSpec
) -> timing.Measurement:
    """Build a loader, measure it, and close it."""
    session.measured += 1
    use = steps.make_step(step)
    dataset = session.dataset
    if stop.turn > 1 and isinstance(dataset, Subset):  # an epoch of all rows would rarely end
        all_rows: Any = dataset.dataset
        least = min(len(all_rows), _EPOCH_TURNS * stop.turn * loader.batch_size)
        dataset = Subset(all_rows, [*dataset.indices] * -(-least // len(dataset)))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        built = loaders.build_loader(dataset, loader, seed=session.measured)
        batches = DevicePrefetcher(built, loader.device) if loader.device else built
        try:
            measurement = timing.measure(batches, stop, use)
        finally:
            loaders.close_loader(built)
    messages = [
        str(warning.message)
        for warning in caught
        if warning.category in (UserWarning, RuntimeWarning)
    ]
    return dataclasses.replace(
        measurement,
        engine=getattr(built, "engine", loader.engine),
        workers=built.num_workers,
        warnings=tuple(dict.fromkeys(messages)),
    )


def step_seconds(session: Session, *, loader: LoaderSpec, step: StepSpec) -> float:
    """Return the time of a step on a batch that is ready."""
    alone = dataclasses.replace(loader, num_workers=0, prefetch_factor=None)
    built = loaders.build_loader(session.dataset, alone)
    try:
        batch = next(iter(built))
    finally:
        loaders.close_loader(built)
    return steps.step_seconds(steps.make_step(step), batch)


def warm(session: Session) -> None:
    """Read the stored bytes of every row, so that they are cached."""
    if session.subject.path:
        stored = dataclasses.replace(session.subject, decode="bytes", transform=None)
        dataset: Any = material.open_subject(stored)
        for row in range(len(dataset)):
            dataset[row]


def drop(session: Session) -> float | None:
    """Drop the files' pages; return the fraction that stayed, None if unknown."""
    for _ in range(_DROPS):
        page_cache.drop(session.files)
        stayed = page_cache.resident(session.files)
        if stayed is None or stayed < _DROPPED:
            break
        time.sleep(_PAUSE)
    return stayed


_SESSION = Session()


def answer(
    function: Callable[Concatenate[Session, ...], Any], args: Sequence[Any], kwargs: dict[str, Any]
) -> bytes:
    """Call a function with the session of this process; return its result, pickled.

    UsageError if the function raises it; MeasurementFailed for other errors, and results that
    cannot be pickled.
    """
    try:
        result = function(_SESSION, *args, **kwargs)
    except UsageError:
        raise
    except ShardkitError as error:
        raise MeasurementFailed(last_words(error.problem), remedy=error.remedy) from error
    except Exception as error:
        traceback.print_exc()  # into the log, for whoever debugs this
        origin = raised_at(error)
        words = last_words(f"{type(error).__name__}: {error}") + (f" ({origin})" if origin else "")
        raise MeasurementFailed(words) from error
    try:
        return pickle.dumps(result)
    except (pickle.PicklingError, TypeError, AttributeError) as error:
        raise MeasurementFailed(f"the result cannot be sent: {error}") from error


def last_words(message: str) -> str:
    """Return an error's message; of one from a PyTorch worker, without the traceback in it."""
    if "\nOriginal Traceback" not in message:
        return message
    return re.sub(r"(?s).*\n [^\n]*\n", "", message.strip())  # the traceback is indented
