"""Calls of functions in a child process: answers, errors, limits, forks and its end."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import forked
import helper_calls
import psutil
import pytest
from helper_calls import (
    cpu_left,
    double,
    evil,
    fail,
    guarded,
    main_thread,
    shout,
    touch,
    variable,
    wait_for,
)
from helpers import DEADLINE, wait_until
from refusals import refused

from shardkit import ShardkitError
from shardkit.errors import BadImage, UsageError
from shardkit.system.helper import Helper, HelperEnded, HelperLate, Library


@pytest.fixture
def helper(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(sys, "path", [str(Path(helper_calls.__file__).parent), *sys.path])
    monkeypatch.setattr("shardkit.system.helper._launch", forked.launch)
    made = Helper(guarded, follows=("PLANTED_",))
    yield made
    made.end()


def test_answers_are_bytes_or_json_and_errors_keep_their_type(helper: Helper) -> None:
    assert helper.process is None
    assert helper.call(double, 21, plus=1) == [43]
    assert helper.call(shout) == b"\0" * (1 << 20)
    assert helper.call(variable, "missing") is None
    assert helper.call(main_thread)
    with pytest.raises(ShardkitError, match="not JSON serializable"):
        helper.call(evil)
    with pytest.raises(BadImage, match=r"^planted$"):
        helper.call(fail, "bad")
    with pytest.raises(UsageError, match=r"^planted$"):
        helper.call(fail, "special")
    with pytest.raises(BadImage, match=r"^guarded$"):
        helper.call(fail, "key")


@pytest.mark.slow
def test_it_is_started_again(helper: Helper, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(HelperEnded, match=r"crashed \(SIGABRT\)"):
        helper.call(os.abort)
    with refused(HelperEnded, "3") as ended:
        helper.call(sys.exit, 3)
    assert ended.value.status == 3
    helper.seconds = 0.2
    with refused(HelperLate):
        helper.call(time.sleep, 60)
    helper.seconds = None
    assert helper.call(double, 1) == [2]
    process = helper.process
    assert process is not None
    monkeypatch.setenv("PLANTED_TOKEN", "new")
    assert helper.call(variable, "PLANTED_TOKEN") == "new"
    assert process.poll() == -signal.SIGKILL


def test_a_call_is_limited_by_its_own_cpu_time_not_by_that_of_others(helper: Helper) -> None:
    helper.cpu_seconds = 70
    assert helper.call(cpu_left) == 71
    assert helper.seconds is None
    with pytest.raises(HelperEnded, match="70 s of CPU time"):
        helper.call(signal.raise_signal, signal.SIGXCPU)
    assert helper.call(cpu_left) == 71


def test_advice_runs_while_a_call_does(helper: Helper, tmp_path: Path) -> None:
    path = str(tmp_path / "touched")
    with ThreadPoolExecutor() as threads:
        call = threads.submit(helper.call, wait_for, path)
        helper.send(touch, path)
        assert call.result(DEADLINE)


def in_fork(helper: Helper, sender: Any) -> None:
    sender.send((helper.call(double, 1), helper.process.pid))  # type: ignore[union-attr]


def test_a_fork_has_a_child_of_its_own(helper: Helper) -> None:
    helper.call(double, 1)
    assert helper.process is not None
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    forked = context.Process(target=in_fork, args=(helper, sender))
    forked.start()
    answer, pid = receiver.recv()
    forked.join()
    assert answer == [2]
    assert pid != helper.process.pid
    wait_until(lambda: not psutil.pid_exists(pid), "the end of the fork's child")
    assert helper.call(double, 2) == [4]


def test_a_call_that_hangs_ends_with_its_parent(helper: Helper) -> None:
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    forked = context.Process(target=hang_in_fork, args=(helper, sender))
    forked.start()
    pid = receiver.recv()
    forked.kill()
    forked.join()
    wait_until(lambda: not psutil.pid_exists(pid), "the end of the fork's child")


def hang_in_fork(helper: Helper, sender: Any) -> None:
    helper.start()
    assert helper.process is not None
    sender.send(helper.process.pid)
    helper.call(time.sleep, 600)


def test_a_library_is_imported_at_its_first_use() -> None:
    sys.modules.pop("colorsys", None)
    library = Library("colorsys")
    assert "colorsys" not in sys.modules
    assert library.rgb_to_hsv(0, 0, 0) == (0, 0, 0)
    assert "colorsys" in sys.modules
