"""Ranks of a real process group, in forks."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed
from helpers import DEADLINE
from torch.multiprocessing.spawn import start_processes

Work = Callable[[Path, dict[str, Any]], Any]
"""What a rank does with a dataset and what it is told; its answer is written as JSON."""


def in_ranks(
    world_size: int, place: Path, work: Work, path: Path, told: dict[str, Any]
) -> list[Any]:
    """Run ``work`` in as many processes of one group; return their answers, by rank.

    Processes that are not done at the deadline are killed, and that is a failure.
    """
    place.mkdir()
    context = start_processes(  # type: ignore[no-untyped-call]
        _be_a_rank,
        (world_size, place, partial(work, path, told)),
        world_size,
        join=False,
        start_method="fork",
    )
    assert context is not None
    end = time.monotonic() + DEADLINE
    try:
        while not context.join(timeout=1):
            assert time.monotonic() < end, "the ranks wait for each other for ever"
    finally:
        for process in context.processes:
            process.kill()
            process.join()
    return [json.loads((place / f"{rank}.json").read_text()) for rank in range(world_size)]


def _be_a_rank(rank: int, world_size: int, place: Path, work: Callable[[], Any]) -> None:
    torch.set_num_threads(1)  # a forked child must not use the threads of its parent
    torch.distributed.init_process_group(
        "gloo",
        init_method=f"file://{place}/meeting",
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=DEADLINE / 2),
    )
    answer = work()
    torch.distributed.barrier()
    (place / f"{rank}.json").write_text(json.dumps(answer))
    torch.distributed.destroy_process_group()
