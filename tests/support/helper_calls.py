"""What tests call in a child process of `shardkit.system.helper`; imports little, as it does."""

from __future__ import annotations

import os
import resource
import threading
import time
from pathlib import Path
from typing import Any

from shardkit.errors import BadImage, UsageError


class Special(UsageError):
    """An error that the parent does not know."""


class Evil:
    """An object whose pickle would run code."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, ("ran",)


def double(number: int, *, plus: int = 0) -> list[int]:
    return [2 * number + plus]


def fail(error: str) -> None:
    raise {"bad": BadImage, "special": Special, "key": KeyError}[error]("planted")


def cpu_left() -> int:
    """Return the seconds of CPU time until the limit, rounded up."""
    return resource.getrlimit(resource.RLIMIT_CPU)[0] - int(time.process_time())


def evil() -> Evil:
    return Evil()


def shout() -> bytes:
    os.write(1, b"not an answer")
    return b"\0" * (1 << 20)


def variable(name: str) -> str | None:
    return os.environ.get(name)


def guarded(function: Any, *arguments: Any) -> Any:
    try:
        return function(*arguments)
    except KeyError as error:
        raise BadImage("guarded") from error


def main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()


def wait_for(path: str) -> bool:
    """Wait until a file exists; the caller's deadline is the limit."""
    while not Path(path).exists():
        time.sleep(0.002)
    return True


def touch(path: str) -> None:
    Path(path).touch()
