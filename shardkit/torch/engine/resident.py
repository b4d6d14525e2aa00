"""A dataset in memory: decoded once; batches are then selected, cropped and flipped at once.

PyTorch does this on the device that holds the rows. Only the crops, a few numbers for each sample,
are drawn on the CPU, as for any other loader.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np
import torch

from shardkit.errors import UsageError
from shardkit.sampling.ranks import Rank
from shardkit.torch.data.collate import BatchView, collate
from shardkit.torch.data.ops import ImageOp
from shardkit.torch.data.order_options import OrderOptions
from shardkit.torch.data.read_context import Allocate, ReadContext, reading
from shardkit.torch.data.schedule import Request
from shardkit.torch.engine.fetch import Fetch, seeded_for_collate
from shardkit.torch.engine.options import ENGINE_KINDS, LoaderOptions
from shardkit.torch.engine.preflight import default_workers
from shardkit.torch.engine.resident_rows import (
    Member,
    members_of,
    on_device,
    require_memory,
    require_same_fields,
)
from shardkit.torch.engine.threads import ThreadEngine

_FILL_BYTES = 8 << 20
"""Bytes to decode in one batch."""


class ResidentFetch(Fetch):
    """Reads batches of rows that this process holds decoded.

    Batches equal those of `Fetch`. They are copies: changing one changes no other.
    """

    memory: ClassVar[str] = "cpu"
    """The value of ``resident``."""

    @classmethod
    def suited(cls, options: LoaderOptions, reason: str) -> tuple[LoaderOptions, str]:
        """Return options for the threads of this process, of which there are none by default."""
        kind = ENGINE_KINDS.get(options.engine)
        if kind is not None and kind.starts_processes:
            raise UsageError(
                "resident= reads the memory of this process",
                remedy=f"leave out engine={options.engine!r}",
            )
        if options.on_bad != "raise":
            raise UsageError(
                "resident= decodes all samples when the loader is created",
                remedy=f"leave out on_bad={options.on_bad!r}",
            )
        options = replace(options, engine="thread", num_workers=options.num_workers or 0)
        return options, f"the decoded dataset is in memory ({cls.memory})"

    def __init__(
        self,
        dataset: Any,
        collate: Callable[[Sequence[Any]], Any],
        *,
        with_rows: bool,
        op: ImageOp | None = None,
        views: Sequence[ImageOp | None] = (),
    ) -> None:
        """Decode the dataset, a `ShardDataset`, or a ``Subset`` or ``ConcatDataset`` of some.

        Raises UsageError if the dataset does not fit, its batches cannot be made of tensors, or an
        operation is set for all samples.
        """
        if op is not None:
            raise UsageError(
                "resident= stores images of one size, but sampler=Buckets(...) produces several "
                "sizes",
                remedy="leave out resident=",
            )
        if any(view is not None for view in views):
            raise UsageError(
                "resident= stores images of one size, but the operations in views= produce "
                "different sizes",
                remedy="set views=2 with decode=RandomCrop(...), or leave out resident=",
            )
        super().__init__(dataset, collate, with_rows=with_rows, views=views)
        self._device = device = _device(self.memory)
        self._members: list[Member] = []
        self._member_of, self._position_of = np.zeros((2, len(dataset)), np.int64)
        for portion, member, positions in members_of(dataset, device):
            self._member_of[portion.positions] = len(self._members)
            self._position_of[portion.positions] = positions
            self._members.append(member)
        require_same_fields(self._members)
        require_memory(sum(member.bytes for member in self._members), device)
        for member in self._members:
            _fill(member)

    def __call__(
        self,
        request: Request,
        *,
        allocate: Allocate | None = None,
        alone: bool = True,
        mark: object = None,
    ) -> Any:
        """Return the batch of ``request``."""
        views = [request.of_view(view, self.views) for view in range(self.views)]
        with reading(ReadContext(request.seed, request.epoch, allocate, alone)):
            batches = [self._batch(view, alone=alone) for view in views]
        return tuple(batches) if self.ops else batches[0]

    def batches_at_once(self, batch_size: int) -> int:
        """Return 1: reading several batches at once saves nothing."""
        return 1

    def _batch(self, request: Request, *, alone: bool) -> Any:
        is_default = self.collate is collate
        samples = self._samples(request, is_default=is_default)
        with nullcontext() if is_default else seeded_for_collate(request, alone=alone):
            batch = self.collate(samples)
        return self._with_rows_added(batch, request)

    def _samples(self, request: Request, *, is_default: bool) -> BatchView:
        """Return the samples of a batch; those of several datasets are put in order."""
        member_of = self._member_of[request.rows]
        positions = self._position_of[request.rows]
        if len(self._members) == 1:
            columns = self._members[0].read(request, positions, slice(None))
        else:
            order = np.argsort(member_of, kind="stable")
            groups = np.split(order, np.flatnonzero(np.diff(member_of[order])) + 1)
            blocks = [self._members[member_of[g[0]]].read(request, positions[g], g) for g in groups]
            back = on_device(np.argsort(order), self._device)
            columns = [
                torch.cat(column).index_select(0, back) for column in zip(*blocks, strict=True)
            ]
        return self._members[0].view(columns, is_default=is_default)


class CudaFetch(ResidentFetch):
    """Holds the rows on the current CUDA device."""

    memory = "cuda"

    @classmethod
    def suited(cls, options: LoaderOptions, reason: str) -> tuple[LoaderOptions, str]:
        """Return options for the training thread."""
        options, reason = super().suited(options, reason)
        if options.num_workers:
            raise UsageError(
                "resident='cuda' makes batches on the current stream, which other threads do "
                "not share",
                remedy="leave out num_workers=",
            )
        if options.pin_memory:
            raise UsageError(
                "resident='cuda' creates no batches in main memory", remedy="leave out pin_memory="
            )
        return replace(options, pin_memory=False), reason


def _fill(member: Member) -> None:
    """Decode the rows of a member dataset, with the threads and the readahead of another loader."""
    member.allocate()
    at_once = min(len(member.whole), _FILL_BYTES // max(1, member.row_bytes) + 1)
    schedule = OrderOptions(rank=Rank(rank=0, world_size=1)).schedule(member.whole, at_once)
    schedule.lookahead = member.whole.shards.files.lookahead
    settings = LoaderOptions().resolved(default_workers(), pinned=False)
    engine = ThreadEngine(Fetch(member.whole, collate, with_rows=False), settings)
    start = 0
    for request, batch in engine.run(schedule.requests(0)):
        member.put(start, batch)
        start += len(request.rows)


def _device(resident: str) -> torch.device:
    """Return the device that ``resident`` names; of several GPUs, the current one."""
    if resident == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise UsageError(
            "resident='cuda' needs a CUDA device, but none is available", remedy="use 'cpu'"
        )
    return torch.device("cuda", torch.cuda.current_device())
