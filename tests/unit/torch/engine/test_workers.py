"""How worker processes stop."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from multiprocessing.synchronize import Event

from shardkit.torch.engine import workers


def miss_one_signal(ready: Event) -> None:
    """Block as a worker does whose first SIGTERM arrives just before the call that blocks."""
    signal.signal(signal.SIGTERM, lambda *_: signal.signal(signal.SIGTERM, lambda *_: os._exit(0)))
    ready.set()
    time.sleep(60)


def test_a_worker_that_misses_a_signal_still_stops_by_itself() -> None:
    context = multiprocessing.get_context("fork")
    ready = context.Event()
    process = context.Process(target=miss_one_signal, args=(ready,))
    process.start()
    assert ready.wait(60)

    workers.end([process])

    assert process.exitcode == 0  # -9 if it was killed
