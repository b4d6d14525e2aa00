"""The priority of a thread: lowered for it and for threads that it starts, and for no other."""

from __future__ import annotations

import errno
import os
import sys
import threading
from collections.abc import Callable

import pytest

from shardkit.system.priority import LOW, lower_priority, priority_problem

linux = pytest.mark.skipif(sys.platform != "linux", reason="only Linux has threads' priorities")


def nice() -> int:
    return os.getpriority(os.PRIO_PROCESS, 0)


def in_thread(call: Callable[[], None]) -> None:
    thread = threading.Thread(target=call)
    thread.start()
    thread.join()


@linux
def test_a_thread_lowers_itself_and_its_threads_only() -> None:
    before, values = nice(), list[int]()

    def call() -> None:
        lower_priority()
        values.append(nice())
        in_thread(lambda: values.append(nice()))

    in_thread(call)
    assert values == [LOW, LOW]
    assert nice() == before


@linux
def test_asking_changes_nothing() -> None:
    before = nice()
    assert priority_problem() is None
    assert nice() == before


def test_other_systems_and_sandboxes_are_problems(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(which: int, who: int, value: int) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    with monkeypatch.context() as patch:
        patch.setattr(sys, "platform", "linux")
        patch.setattr(os, "setpriority", refuse)
        assert "Operation not permitted" in str(priority_problem())
    monkeypatch.setattr(sys, "platform", "darwin")
    assert "only Linux" in str(priority_problem())
