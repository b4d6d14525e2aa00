"""Tasks in worker processes: they end with the work, with an error, or with their parent."""

from __future__ import annotations

import errno
import gc
import itertools
import multiprocessing
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from multiprocessing.synchronize import SemLock
from pathlib import Path
from unittest.mock import Mock

import pool_tasks
import psutil
import pytest
from helpers import DEADLINE, execute, make_dataset, make_tree, png, python, wait_until
from pool_tasks import ERRORS, Task, work
from refusals import refused

from shardkit import ShardkitError, convert, verify
from shardkit.errors import BadImage, CorruptRecord
from shardkit.system import pool
from shardkit.system import processes as worker_processes
from shardkit.system.pool import Meter, Progress, run_tasks, team, worthwhile


def processes(folder: Path) -> set[int]:
    """Return the processes that tasks ran in and that are still alive."""
    alive = set()
    for path in folder.iterdir():
        number = int(path.name.rpartition("-")[2])
        try:
            if psutil.Process(number).status() != psutil.STATUS_ZOMBIE:
                alive.add(number)
        except psutil.NoSuchProcess:
            continue
    return alive


@pytest.fixture(params=[1, 2])
def workers(request: pytest.FixtureRequest) -> int:
    return int(request.param)


def test_ctrl_c_while_futures_are_locked_leaves_none_locked() -> None:
    """Python would wait at exit for the executor's thread, and that thread for the lock."""
    futures = [Future[None]() for _ in range(4)]
    last = max(futures, key=id)  # `wait` locks them in this order
    last._condition = Mock(
        acquire=Mock(side_effect=KeyboardInterrupt), release=Mock(side_effect=RuntimeError)
    )
    with pytest.raises(KeyboardInterrupt), worker_processes._unlocking(futures):
        wait(futures)
    free: list[bool] = []
    others = [future._condition for future in futures if future is not last]
    thread = threading.Thread(
        target=lambda: free.extend(lock.acquire(blocking=False) for lock in others)
    )
    thread.start()
    thread.join()
    assert free == [True] * 3


def test_nothing_of_an_ended_executor_runs(tmp_path: Path) -> None:
    """Python's exit would wake its thread up through a pipe that the thread just closes."""
    before = set(threading.enumerate())
    for _ in range(5):
        executor = ProcessPoolExecutor(2, multiprocessing.get_context("fork"))
        executor.submit(time.sleep, DEADLINE)
        worker_processes._end(executor)
        assert set(threading.enumerate()) <= before


def total(reports: list[Progress]) -> Progress:
    return Progress(*(sum(column) for column in zip(*reports, strict=True)))


def test_each_task_is_returned_with_its_result_and_all_progress_arrives(workers: int) -> None:
    reports: list[Progress] = []
    tasks = [*(Task(number) for number in range(8)), Task(3)]
    found = list(run_tasks(work, tasks, workers=workers, on_progress=reports.append))
    assert sorted(found) == sorted((task, task.number**2) for task in tasks)
    assert total(reports) == Progress(31, 310, 31)


def test_progress_reports_are_optional_and_there_may_be_no_task(workers: int) -> None:
    assert list(run_tasks(work, [Task(3)] * 2, workers=workers)) == [(Task(3), 9)] * 2
    assert list(run_tasks(work, [], workers=workers)) == []


@pytest.mark.parametrize("act", ERRORS)
def test_an_error_comes_with_its_type_and_message(workers: int, tmp_path: Path, act: str) -> None:
    tasks = [Task(1, act=act), *(Task(n, str(tmp_path)) for n in range(2, 5))]
    with pytest.raises(ERRORS[act], match="task 1") as caught:
        list(run_tasks(work, tasks, workers=workers))
    assert caught.type is ERRORS[act]
    assert processes(tmp_path) <= {os.getpid()}


@pytest.mark.parametrize("count", [1, 3])
def test_one_worker_is_this_process_and_several_are_others_that_end(
    tmp_path: Path, count: int
) -> None:
    list(run_tasks(work, [Task(n, str(tmp_path)) for n in range(6)], workers=count))
    used = {int(path.name.rpartition("-")[2]) for path in tmp_path.iterdir()}
    assert (used == {os.getpid()}) == (count == 1)
    assert (os.getpid() in used) == (count == 1)
    assert 1 <= len(used) <= count
    assert processes(tmp_path) <= {os.getpid()}


@pytest.mark.parametrize("order", [("stay", "die"), ("die", "stay")])
def test_a_killed_worker_is_an_immediate_error(tmp_path: Path, order: tuple[str, str]) -> None:
    tasks = [Task(number, str(tmp_path), act) for number, act in enumerate(order)]
    with refused(ShardkitError):
        list(run_tasks(work, tasks, workers=2))
    assert processes(tmp_path) == set()


def test_an_error_does_not_wait_for_other_tasks(tmp_path: Path) -> None:
    tasks = [Task(0, str(tmp_path), "stay"), Task(1, act="fail")]
    with pytest.raises(CorruptRecord):
        list(run_tasks(work, tasks, workers=2))
    assert processes(tmp_path) == set()


def test_an_interruption_leaves_no_worker(tmp_path: Path) -> None:
    """Of the consumer of results, or of the one of reports."""
    tasks = [Task(3), Task(1, str(tmp_path), "stay")]

    def interrupt(progress: object) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        deque(map(interrupt, run_tasks(work, tasks, workers=2)))
    gc.collect()
    assert processes(tmp_path) == set()
    with pytest.raises(KeyboardInterrupt):
        list(run_tasks(work, tasks, workers=2, on_progress=interrupt))
    assert processes(tmp_path) == set()


def test_a_consumer_that_stops_early_leaves_no_worker(tmp_path: Path) -> None:
    results = run_tasks(work, [Task(0), Task(1, str(tmp_path), "stay")], workers=2)
    assert next(results) == (Task(0), 0)
    results.close()  # type: ignore[attr-defined]
    assert processes(tmp_path) == set()


def test_small_work_starts_no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool, "_WORTHWHILE", 100)

    assert [worthwhile(4, sizes) for sizes in ([], [99], [150, 60], [400])] == [1, 1, 2, 4]
    assert worthwhile(4, itertools.repeat(90)) == 4  # not all are counted


@pytest.mark.skipif(sys.platform != "linux", reason="others cannot fork safely")
def test_workers_of_a_command_fork_unless_a_library_has_threads() -> None:
    code = (
        "import sys\n"
        "from shardkit.system import pool\n"
        "pool.fork_workers()\n"
        "sys.mark = 'here'  # a new Python does not have it\n"
        "found = [*pool.run_tasks(eval, ['__import__(\"sys\").mark'] * 2, workers=2)]\n"
        "sys.modules['torch'] = sys\n"
        "print([mark for _, mark in found], pool.start_method())"
    )
    done = python(code)
    assert (done.stdout.strip(), done.stderr) == ("['here', 'here'] spawn", "")


def test_progress_reporting_ends_with_the_tasks() -> None:
    reports: list[Progress] = []
    list(run_tasks(work, [Task(2)], workers=1, on_progress=reports.append))
    before = len(reports)
    meter = Meter()  # nobody listens
    meter.add(images=5)
    meter.flush()
    assert len(reports) == before
    with pytest.raises(CorruptRecord):
        list(run_tasks(work, [Task(2, act="fail")], workers=1, on_progress=reports.append))
    meter.add(images=5)
    meter.flush()
    assert len(reports) == before


def test_tasks_run_from_a_thread() -> None:
    found: list[tuple[Task, int]] = []
    thread = threading.Thread(
        target=lambda: found.extend(run_tasks(work, [Task(1), Task(2)], workers=2))
    )
    thread.start()
    thread.join()
    assert sorted(found) == [(Task(1), 1), (Task(2), 4)]


@pytest.mark.parametrize(
    ("how", "reason"),
    [
        ("stdin", "the program has no file (<stdin>) that worker processes can run"),
        ("script", "script.py again, which has no `if __name__ == '__main__':` guard"),
    ],
)
def test_a_program_that_workers_cannot_import_is_refused(
    tmp_path: Path, how: str, reason: str
) -> None:
    code = "from shardkit.system.pool import run_tasks\nlist(run_tasks(print, [1, 2], workers=2))\n"
    (tmp_path / "script.py").write_text(code)
    name, given = ("-", code) if how == "stdin" else ("script.py", "")
    done = execute(sys.executable, name, cwd=tmp_path, input=given)
    assert done.returncode == 1
    last = done.stderr.splitlines()[-1]
    assert last.startswith("shardkit.errors.UsageError: more than one worker cannot be used: ")
    assert reason in last
    assert last.endswith("; or use workers=1")


@pytest.mark.parametrize("library", ["the C library", "one without prctl"])
@pytest.mark.slow
def test_workers_die_with_a_parent_that_is_killed(tmp_path: Path, library: str) -> None:
    code = textwrap.dedent(
        f"""
        import ctypes, sys
        if {library!r} == "one without prctl":  # in the workers, too: they run this file again
            ctypes.CDLL = lambda *_, **__: object()
        sys.path.insert(0, {str(Path(pool_tasks.__file__).parent)!r})
        from pool_tasks import Task, work
        from shardkit.system.pool import run_tasks
        if __name__ == "__main__":
            tasks = [Task(n, sys.argv[1], "stay") for n in range(2)]
            list(run_tasks(work, tasks, workers=2))
        """
    )
    (tmp_path / "script.py").write_text(code)
    (tmp_path / "left").mkdir()
    parent = subprocess.Popen([sys.executable, tmp_path / "script.py", tmp_path / "left"])
    try:
        wait_until(lambda: len(list((tmp_path / "left").iterdir())) == 2, "the tasks")
    finally:
        parent.kill()
        parent.wait()
    wait_until(lambda: not processes(tmp_path / "left"), "the end of the workers")


def where(number: int) -> tuple[int, int]:
    return number, os.getpid()


def until_others_work(seen: set[int], *, then: int) -> Iterator[int]:
    """Yield numbers until another process has handled one, and a few more."""
    numbers = itertools.count()
    while len(seen) < 2:
        yield next(numbers)
    yield from itertools.islice(numbers, then)


@pytest.mark.parametrize("workers", [2, 3])
def test_results_of_several_processes_come_in_order(workers: int) -> None:
    seen: set[int] = set()
    found = []
    with team(workers) as processes:
        for number, process in processes.map_in_order(where, until_others_work(seen, then=500)):
            found.append(number)
            seen.add(process)
    assert found == list(range(len(found)))
    assert os.getpid() in seen
    assert len(seen) >= 2


def test_one_worker_and_no_task_need_no_process() -> None:
    with team(1) as processes:
        assert processes.ready == 1
        here = [(1, os.getpid()), (2, os.getpid())]
        assert list(processes.map_in_order(where, [1, 2])) == here
        assert processes.map_at_once(where, [1]) == here[:1]
    with team(3) as processes:
        assert list(processes.map_in_order(where, [])) == []
        assert processes.map_at_once(where, []) == []


def test_one_task_for_each_process_is_done_at_once() -> None:
    with team(2) as processes:
        wait_until(lambda: processes.ready == 2, "the second process")
        (first, here), (second, elsewhere) = processes.map_at_once(where, [1, 2])
    assert (first, second) == (1, 2)
    assert here == os.getpid() != elsewhere


def fail_elsewhere(parent: int) -> None:
    if os.getpid() != parent:
        raise BadImage(f"image in {os.getpid()}")


def die_elsewhere(parent: int) -> None:
    if os.getpid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("at_once", [False, True])
@pytest.mark.parametrize(
    ("function", "error", "message"),
    [
        (fail_elsewhere, BadImage, "image in"),
        (die_elsewhere, ShardkitError, "died"),
    ],
)
def test_errors_in_another_process_are_raised_here(
    at_once: bool,
    function: Callable[[int], None],
    error: type[ShardkitError],
    message: str,
) -> None:
    def call() -> None:
        with team(2) as processes:
            if at_once:
                wait_until(lambda: processes.ready == 2, "the second process")
                processes.map_at_once(function, [os.getpid()] * 2)
            else:
                tasks = itertools.repeat(os.getpid())
                deque(processes.map_in_order(function, tasks), maxlen=0)

    with pytest.raises(error, match=message):
        call()


def test_a_dead_process_that_its_executor_has_not_noticed_is_an_error() -> None:
    executor = Mock(_processes={1: Mock(exitcode=-signal.SIGKILL)})
    executor.submit.return_value = Future()  # never done
    with pytest.raises(BrokenProcessPool):
        worker_processes._HelpedTeam(2, executor).map_at_once(where, [1, 2])


def test_processes_end_when_their_results_are_abandoned() -> None:
    seen: set[int] = set()
    with team(2) as processes:
        for _, process in processes.map_in_order(where, itertools.count()):
            seen.add(process)
            if len(seen) > 1:
                break
    (other,) = seen - {os.getpid()}
    with pytest.raises(ProcessLookupError):
        os.kill(other, 0)


def test_full_shared_memory_is_not_blamed_on_a_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    photos = make_tree(tmp_path / "photos", {f"a/{n}.png": png(8, 8, n) for n in range(3)})
    made = make_dataset(photos, tmp_path / "made", to="webdataset", shard_samples=1)

    def full(*_: object, **__: object) -> None:  # as sem_open(3) fails
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(SemLock, "__init__", full)
    with refused(ShardkitError, "/dev/shm", "workers=1"):
        verify(made, workers=2)
    with refused(ShardkitError, "/dev/shm", "workers=1"):
        convert(photos, tmp_path / "out", to="webdataset", shard_samples=1, workers=2)
    convert(photos, tmp_path / "out", to="webdataset", shard_samples=1, workers=1)
    assert verify(tmp_path / "out", workers=1).ok
