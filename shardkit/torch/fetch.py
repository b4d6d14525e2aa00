"""From a request to a batch, wherever it runs: the one way in which both engines read."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from shardkit.order import Draws, derive_key
from shardkit.torch.feed import Request
from shardkit.torch.preflight import parts
from shardkit.torch.reading import Allocate, Reading, globals_kept, reading, seed_globals


class Fetch:
    """Reads batches of a dataset; picklable if the dataset and the collate function are."""

    def __init__(
        self, dataset: Any, collate: Callable[[Sequence[Any]], Any], *, with_rows: bool
    ) -> None:
        """Make a reader of batches.

        Args:
            dataset: Anything with ``__getitem__``, best with ``__getitems__``.
            collate: Makes a batch of samples.
            with_rows: Whether a batch ends with its rows, -1 for padding.
        """
        self.dataset = dataset
        self.collate = collate
        self._with_rows = with_rows
        # A Subset has __getitems__ in any case; what it is a part of may read one by one.
        self._reads_batches = all(
            getattr(each, "__getitems__", None) for each in (dataset, *parts(dataset))
        )

    def __call__(
        self,
        request: Request,
        *,
        allocate: Allocate | None = None,
        alone: bool = True,
        mark: npt.NDArray[np.int64] | None = None,
    ) -> Any:
        """Return the batch of ``request``; the other arguments are those of `Reading`."""
        announce = getattr(self.dataset, "announce", None)
        if announce is not None and len(request.ahead):
            announce(request.ahead)
        stated = Reading(request.seed, request.epoch, allocate, alone, mark)
        with reading(stated), globals_kept() if alone else nullcontext():
            batch = self._read(request, alone=alone)
        return self._add_rows(batch, request) if self._with_rows else batch

    def _read(self, request: Request, *, alone: bool) -> Any:
        """Return the collated batch; whatever draws from global generators repeats exactly.

        A dataset of shardkit seeds them for each sample. Here it is done for other datasets, and
        for the collate function, such as one that mixes images.
        """
        rows, key = request.rows.tolist(), derive_key("fetch", request.seed, request.epoch)
        if self._reads_batches:
            if alone:
                seed_globals(Draws(key, rows[0]).bits())
            samples = self.dataset.__getitems__(rows)
        else:
            samples = []
            for row in rows:
                if alone:
                    seed_globals(Draws(key, row).bits())
                samples.append(self.dataset[row])
        if alone:
            seed_globals(Draws(~key, rows[0]).bits())
        return self.collate(samples)

    def _add_rows(self, batch: Any, request: Request) -> Any:
        rows = torch.from_numpy(request.rows.copy())
        if request.padding:
            rows[-request.padding :] = -1
        if isinstance(batch, dict):
            return {**batch, "rows": rows}
        return (*batch, rows) if isinstance(batch, (tuple, list)) else (batch, rows)

    def name(self, row: int) -> str:
        """Return how to call the sample at ``row`` in an error."""
        name = getattr(self.dataset, "describe_row", None)
        return str(name(row)) if name is not None else f"row {row}"
