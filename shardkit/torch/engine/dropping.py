"""``on_bad="drop"``: batches without the samples that cannot be read."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from shardkit.errors import BadImage, CorruptRecord, LoaderFailed
from shardkit.torch.data import nested
from shardkit.torch.data.read_context import Allocate
from shardkit.torch.data.schedule import BatchSchedule, Request
from shardkit.torch.engine.fetch import Batches, Fetch

_LOG = logging.getLogger(__name__)

_BAD = (CorruptRecord, BadImage)
"""Errors of one record. A missing shard or a failing disk concerns many, and is raised."""


class Answer(NamedTuple):
    """A batch, and the samples that were left out."""

    batch: Any
    """None if all samples were left out."""
    bad: list[tuple[int, str]]
    """Rows as ``with_rows`` gives them, and why they cannot be read."""
    size: int
    """Number of samples in the batch."""


class DroppingFetch(Fetch):
    """Leaves samples that cannot be read out of their batches; all others stay the same."""

    def __init__(self, dataset: Any, collate: Any, **options: Any) -> None:
        super().__init__(dataset, collate, **options)
        # A user's function may refuse a single sample.
        self._alone = Fetch(dataset, list, with_rows=False, op=self.op, views=self.ops)

    def __call__(self, request: Request, **options: Any) -> Answer:
        """Return the batch of ``request`` without its bad samples."""
        try:
            return Answer(super().__call__(request, **options), [], len(request.rows))
        except _BAD:
            reasons = [self._why_bad(request.at([n])) for n in range(len(request.rows))]
        good = [number for number, reason in enumerate(reasons) if reason is None]
        rows = nested.dataset_rows(self.dataset, request.rows).tolist()
        bad = [(row, why) for row, why in zip(rows, reasons, strict=True) if why is not None]
        batch = super().__call__(request.at(good), **options) if good else None
        return Answer(batch, bad, len(good))

    def read_several(
        self,
        requests: Sequence[Request],
        *,
        allocate: Allocate | None,
        alone: bool = False,
        mark: npt.NDArray[np.int64] | None = None,
    ) -> Iterator[Any]:
        """Yield the answer to each request; see `Fetch.read_several`."""
        read = super().read_several(requests, allocate=allocate, alone=alone, mark=mark)
        for request, batch in zip(requests, read, strict=True):
            is_answer = isinstance(batch, Answer)
            yield batch if is_answer else Answer(batch, [], len(request.rows))

    def accepted(
        self, batches: Batches, bad: dict[int, str], most: int, schedule: BatchSchedule
    ) -> Batches:
        """Yield the batches of answers, and collect the samples left out; see `Fetch.accepted`."""
        for request, answer in batches:
            for row, reason in answer.bad:
                if row not in bad:
                    _LOG.warning("left out row %d: %s", row, reason)
                    bad[row] = reason
            if len(bad) > most:
                row, reason = next(iter(bad.items()))
                raise LoaderFailed(
                    f"bad rows: {len(bad)}, more than max_bad={most}; the first is row {row}: "
                    f"{reason}"
                )
            if answer.size:
                yield request, answer.batch
            elif schedule.rank.world_size > 1:
                row, reason = answer.bad[0]
                raise LoaderFailed(
                    f"none of the {len(request.rows)} samples of a batch can be read, but the "
                    f"other ranks wait for this batch; the first is row {row}: {reason}"
                )

    def _why_bad(self, request: Request) -> str | None:
        """Return why the only sample of a request is bad, or None."""
        try:
            self._alone(request)
        except _BAD as error:
            return str(error)
        return None
