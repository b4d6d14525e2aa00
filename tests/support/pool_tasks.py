"""Tasks for worker processes; imports little, as these do."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import NamedTuple

from shardkit.errors import BadImage, CorruptRecord
from shardkit.system.pool import Meter

ERRORS: dict[str, type[Exception]] = {"fail": CorruptRecord, "bad": BadImage, "key": KeyError}


class Task(NamedTuple):
    """A task; it leaves its process ID in ``folder``."""

    number: int
    folder: str = ""
    act: str = "square"


def work(task: Task) -> int:
    if task.folder:
        (Path(task.folder) / f"{task.number}-{os.getpid()}").touch()
    if task.act == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    if task.act in ERRORS:
        raise ERRORS[task.act](f"task {task.number}")
    if task.act == "stay":
        time.sleep(600)  # ended by the parent, or the test fails
    meter = Meter()
    for _ in range(task.number):
        meter.add(images=1, size=10, bad=1)
    meter.flush()
    return task.number**2
