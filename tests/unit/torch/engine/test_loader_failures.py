"""Failures in worker processes: a prompt error in the main process, and no process is left."""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import multiprocessing
import os
import resource
import shutil
import signal
import subprocess
import sys
import threading
import time
import tracemalloc  # noqa: F401 - pytest imports it when no file can be opened
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers import DEADLINE, encoded, make_dataset, make_tree, wait_until
from loading import METHODS, start_fork_server
from PIL import Image
from torch.utils.data import Dataset

from shardkit import ShardDataset, UsageError, collate, make_loader, open_dataset
from shardkit.errors import CorruptRecord, LoaderFailed, TransformFailed
from shardkit.torch.data import memory
from shardkit.torch.engine import ring
from shardkit.torch.loader import Loader

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning"),
]

ROWS = 24
BATCH = 4
BAD = 13
"""The row at which things go wrong: in the fourth batch, neither first nor last of it."""

SOON = 60.0
"""Seconds in which an error must arrive, and in which a process must be gone: less than those of a
process that hangs, more than those for which other processes may keep this one from the CPUs."""

Load = Callable[..., Loader]


@pytest.fixture
def patient_pytorch(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch waits long, not 5 s, for each worker that was not told to end."""
    monkeypatch.setattr("torch.utils.data._utils.MP_STATUS_CHECK_INTERVAL", 10 * SOON)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dataset in which each image has its own color; see `At`."""
    return make_plain(tmp_path_factory.mktemp("failures"))


def make_plain(root: Path) -> Path:
    """Make a dataset in tar files, whose file ``a/07.png`` is all 7."""
    files: dict[str, bytes | None] = {
        f"a/{n:02d}.png": encoded(Image.fromarray(np.full((8, 12, 3), n, np.uint8)), "PNG")
        for n in range(ROWS)
    }
    return make_dataset(make_tree(root / "photos", files), root / "made", to="webdataset")


ENGINES = ("helper", "process")


@pytest.fixture(params=ENGINES)
def load(request: pytest.FixtureRequest) -> Iterator[Load]:
    """Create loaders with processes, closed at the end of the test."""
    made: list[Loader] = []

    def load(dataset: Any, **options: Any) -> Loader:
        given = {"num_workers": 2, "start_method": "fork", **options}
        if given["start_method"] == "forkserver":
            start_fork_server()
        loader = make_loader(dataset, BATCH, engine=request.param, **given)
        made.append(loader)
        return loader

    yield load
    for loader in made:
        loader.close()


class At:
    """A transform that fails at row `BAD`, and records its callers."""

    def __init__(self, place: Path, notes: Path, action: Callable[[], object]) -> None:
        self._colour = int(Path(open_dataset(place).paths[BAD]).stem)
        self._notes = notes
        self._action = action

    def __call__(self, image: Any) -> torch.Tensor:
        (self._notes / str(os.getpid())).touch()
        if image[0, 0, 0] == self._colour:
            self._action()
        return torch.from_numpy(image)


def is_gone(pid: int) -> bool:
    """Return whether a process has ended."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text("utf-8")
    except (FileNotFoundError, ProcessLookupError):
        return True
    return status.rpartition(")")[2].split()[0] == "Z"


def assert_gone(notes: Path) -> None:
    """Assert that all recorded processes end soon."""
    pids = [int(path.name) for path in notes.iterdir()]
    assert pids
    assert os.getpid() not in pids
    end = time.monotonic() + SOON
    wait_until(lambda: all(map(is_gone, pids)) or time.monotonic() > end, "workers to end")
    assert [pid for pid in pids if not is_gone(pid)] == []


def failure_of(loader: Loader) -> tuple[BaseException, int]:
    """Return the error that ends an epoch, soon, and the number of batches before it."""
    start, count = time.monotonic(), 0
    try:
        for _ in loader:
            count += 1
    except Exception as error:
        assert time.monotonic() - start < SOON
        return error.with_traceback(None), count  # which would hold the loader
    pytest.fail(f"{count} batches, and no error")


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def crash() -> None:
    faulthandler.disable()  # it would print a page
    signal.raise_signal(signal.SIGSEGV)  # in this thread


def leave() -> None:
    os._exit(3)


def leave_quietly() -> None:
    os._exit(0)


def exit_loudly() -> None:
    sys.exit(5)


def exit_quietly() -> None:
    sys.exit()


def fail() -> None:
    raise ValueError("no such colour")


def hang() -> None:
    threading.Event().wait()


DEATHS = {
    kill: "was killed by SIGKILL",
    crash: "was killed by SIGSEGV",
    leave: "ended with exit code 3",
    leave_quietly: "ended with exit code 0",
}
"""What a transform may do to its worker, and what is said of it."""


EXCEPTIONS = {
    fail: "ValueError: no such colour",
    exit_loudly: "SystemExit: 5",
    exit_quietly: "SystemExit",
}
"""What a transform may raise, and what is said of it."""


def assert_names(error: BaseException, dataset: ShardDataset) -> None:
    for part in (repr(dataset.keys[BAD]), f"row {BAD},", dataset.paths[BAD]):
        assert part in str(error)


def assert_usable(loader: Loader, expected: int = ROWS // BATCH) -> None:
    """Assert that a loader gives an epoch after its dataset was repaired."""
    start = time.monotonic()
    assert len(list(loader)) == expected
    assert time.monotonic() - start < SOON


@pytest.mark.timeout(120)
@pytest.mark.parametrize("action", DEATHS, ids=lambda action: action.__name__)
@pytest.mark.parametrize("method", METHODS)
def test_the_death_of_a_worker_is_an_error_that_names_cause_and_sample(
    place: Path, tmp_path: Path, load: Load, method: str, action: Callable[[], None]
) -> None:
    dataset = open_dataset(place, At(place, tmp_path, action), decode="numpy")
    loader = load(dataset, start_method=method)
    error, count = failure_of(loader)
    assert type(error) is LoaderFailed
    assert DEATHS[action] in str(error)
    assert_names(error, dataset)
    assert count <= BAD // BATCH
    assert_gone(tmp_path)


@pytest.mark.timeout(120)
def test_after_a_death_the_loader_works_with_new_workers(
    place: Path, tmp_path: Path, load: Load
) -> None:
    armed = torch.ones(1).share_memory_()  # type: ignore[no-untyped-call]

    def kill_if_armed() -> None:
        if armed.item():
            kill()

    dataset = open_dataset(place, At(place, tmp_path, kill_if_armed), decode="numpy")
    loader = load(dataset)
    for _ in range(2):
        armed.fill_(1)
        assert type(failure_of(loader)[0]) is LoaderFailed
        assert_gone(tmp_path)
        armed.fill_(0)
        assert_usable(loader)
    loader.close()
    assert_gone(tmp_path)


@pytest.mark.timeout(120)
def test_a_hang_is_an_error_that_names_cause_and_sample(
    place: Path, tmp_path: Path, load: Load
) -> None:
    dataset = open_dataset(place, At(place, tmp_path, hang), decode="numpy")
    loader = load(dataset, timeout=10)  # the batches before it take long on a busy machine
    error, count = failure_of(loader)
    assert type(error) is LoaderFailed
    assert "no batch arrived for 10 s" in str(error)
    assert "timeout=" in str(error)
    assert_names(error, dataset)
    assert count == BAD // BATCH
    assert_gone(tmp_path)


@pytest.mark.timeout(120)
def test_a_hang_in_every_worker_is_an_error_each_time(
    place: Path, tmp_path: Path, load: Load
) -> None:
    dataset = open_dataset(place, hang_at_once, decode="numpy")
    loader = load(dataset, timeout=1, num_workers=3)
    for _ in range(3):
        error, count = failure_of(loader)
        assert (type(error), count) == (LoaderFailed, 0)
        wait_until(lambda: not multiprocessing.active_children(), "the end of all workers")


def hang_at_once(image: Any) -> Any:
    hang()


@pytest.mark.timeout(120)
@pytest.mark.parametrize("action", EXCEPTIONS, ids=lambda action: action.__name__)
@pytest.mark.parametrize("method", METHODS)
def test_an_exception_in_a_transform_names_the_sample_and_the_cause(
    place: Path, tmp_path: Path, load: Load, method: str, action: Callable[[], None]
) -> None:
    dataset = open_dataset(place, At(place, tmp_path, action), decode="numpy")
    loader = load(dataset, start_method=method)
    for _ in range(2):
        error, count = failure_of(loader)
        assert type(error) is TransformFailed
        assert EXCEPTIONS[action] in str(error)
        assert_names(error, dataset)
        assert count == BAD // BATCH
    loader.close()
    assert_gone(tmp_path)


def fail_with_label(label: int) -> int:
    raise ValueError("no such label")


def test_an_exception_in_a_target_transform_names_the_sample_too(place: Path, load: Load) -> None:
    dataset = open_dataset(place, None, fail_with_label, "torch")
    error, count = failure_of(load(dataset))
    assert (type(error), count) == (TransformFailed, 0)
    assert "ValueError: no such label" in str(error)
    assert repr(dataset.keys[0]) in str(error)


def cannot_collate(samples: Any) -> Any:
    raise OverflowError("too many samples")


def test_an_exception_in_a_collate_function_arrives(place: Path, load: Load) -> None:
    loader = load(open_dataset(place, decode="torch"), collate_fn=cannot_collate)
    error, count = failure_of(loader)
    assert (type(error), count) == (OverflowError, 0)
    assert str(error) == "too many samples"
    assert "cannot_collate" in str(error.__cause__)  # the worker's traceback


class Raises(Dataset[int]):
    """Another dataset that raises at one row."""

    def __init__(self, error: BaseException) -> None:
        self._error = error

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, row: int) -> int:
        if row == BAD:
            raise self._error
        return row


@pytest.mark.parametrize(
    "raised",
    [
        KeyError("gone"),
        OSError(5, "Input/output error"),
        RuntimeError("the request timed out after 3 attempts"),
        RuntimeError("DataLoader worker (pid 1) is what a user may say too"),
    ],
    ids=repr,
)
def test_an_exception_of_another_dataset_keeps_its_type(load: Load, raised: BaseException) -> None:
    error, count = failure_of(load(Raises(raised)))
    assert type(error) is type(raised)
    assert str(raised.args[-1]) in str(error)
    assert count == BAD // BATCH


def test_an_exception_that_ends_iterators_does_not_end_the_epoch_quietly(load: Load) -> None:
    error, _ = failure_of(load(Raises(StopIteration("enough"))))
    assert "StopIteration" in str(error)


@pytest.mark.timeout(120)
@pytest.mark.parametrize("raised", [SystemExit(5), SystemExit()], ids=repr)
def test_another_dataset_that_exits_is_an_error(load: Load, raised: BaseException) -> None:
    error, _ = failure_of(load(Raises(raised)))
    assert isinstance(error, Exception)


def test_a_damaged_record_keeps_its_error_type(tmp_path: Path, load: Load) -> None:
    place = make_plain(tmp_path)
    dataset = open_dataset(place, decode="torch")
    shard = place / dataset.manifest.shards[BAD // 4].name
    content = bytearray(shard.read_bytes())
    content[int(dataset._shards.rows["offset"][BAD]) + 9] ^= 1
    shard.write_bytes(content)
    error, count = failure_of(load(dataset))
    assert (type(error), count) == (CorruptRecord, BAD // BATCH)
    assert_names(error, dataset)


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
@pytest.mark.parametrize("what", ["transform", "collate"])
@pytest.mark.slow
def test_an_unpicklable_dataset_is_refused_at_once(
    place: Path, load: Load, method: str, what: str
) -> None:
    def inside(given: Any) -> Any:
        return given

    dataset = open_dataset(place, inside if what == "transform" else None, decode="torch")
    chosen = inside if what == "collate" else collate
    with pytest.raises(UsageError) as caught:
        load(dataset, start_method=method, collate_fn=chosen)
    for part in ("inside", method, "top level of a module", "start_method='fork'"):
        assert part in str(caught.value)
    assert_usable(load(dataset, start_method="fork", collate_fn=chosen))


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.usefixtures("patient_pytorch")
def test_a_garbage_collected_loader_ends_its_workers(
    place: Path, tmp_path: Path, engine: str
) -> None:
    options: dict[str, Any] = {"engine": engine, "num_workers": 2, "start_method": "fork"}
    dataset = open_dataset(place, At(place, tmp_path, bool), decode="numpy")
    loader = make_loader(dataset, BATCH, **options)
    assert len(list(loader)) == ROWS // BATCH
    del loader
    assert_gone(tmp_path)


@pytest.mark.usefixtures("patient_pytorch")
@pytest.mark.timeout(120)
@pytest.mark.parametrize("engine", ENGINES)
def test_the_collector_does_not_wait_for_the_workers_of_a_loader_that_failed(
    place: Path, tmp_path: Path, engine: str
) -> None:
    """A kept error references the loader through its traceback, often in a cycle."""
    options: dict[str, Any] = {"engine": engine, "num_workers": 2, "start_method": "fork"}
    dataset = open_dataset(place, At(place, tmp_path, fail), decode="numpy")
    kept: list[Any] = []
    try:
        list(make_loader(dataset, BATCH, **options))
    except TransformFailed as error:
        kept += [error, kept]
    del kept
    gc.collect()
    assert_gone(tmp_path)


def no_room(size: int) -> torch.Tensor:
    raise RuntimeError(f"unable to allocate shared memory of {size} bytes")


def test_lack_of_shared_memory_is_an_error_in_the_main_process(
    place: Path, load: Load, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (memory, ring):
        monkeypatch.setattr(module, "new_shared", no_room)
    error, count = failure_of(load(open_dataset(place, decode="torch")))
    assert isinstance(error, RuntimeError)
    assert count == 0
    assert f"unable to allocate shared memory of {BATCH * 8 * 12 * 3} bytes" in str(error)


SCRIPT = """
import os, sys, time
from pathlib import Path
import torch
torch.utils.data._utils.MP_STATUS_CHECK_INTERVAL = 600  # as in `patient_pytorch`
from shardkit import make_loader, open_dataset

notes = Path(sys.argv[1])

class Rows:
    def __len__(self):
        return 4000

    def __getitem__(self, row):
        (notes / str(os.getpid())).touch()
        {read}

def main():
    options = dict(engine={engine!r}, num_workers=2, {options})
    loader = make_loader({dataset}, 4, **options)
    batches = iter(loader)
    {use}

{guard}main()
"""

GUARD = "if __name__ == '__main__': "

READ = "return torch.tensor(row)"


class Script:
    """A training script in its own process group."""

    def __init__(self, folder: Path, before: tuple[str, ...], **parts: str) -> None:
        self.notes = folder / "notes"
        self.notes.mkdir(parents=True)
        path = folder / "script.py"
        given = {"dataset": "Rows()", "engine": "process", "guard": GUARD, "read": READ, **parts}
        path.write_text(SCRIPT.format(**given), "utf-8")
        self.child = subprocess.Popen(
            [*before, sys.executable, path, self.notes],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def line(self) -> str:
        assert self.child.stdout is not None
        return self.child.stdout.readline().strip()

    def workers_are_at_work(self, processes: int = 2) -> None:
        assert self.line() == "begun"
        wait_until(lambda: len(list(self.notes.iterdir())) == processes, "all workers")

    def end(self, seconds: float = DEADLINE) -> tuple[int, str]:
        """Return exit code and error output; the process must end by itself."""
        _, told = self.child.communicate(timeout=seconds)
        return self.child.returncode, told

    def clear(self) -> None:
        """Kill whatever is left of the group."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.child.pid, signal.SIGKILL)
        self.child.communicate()


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Callable[..., Script]]:
    """Start scripts, killed at the end of the test."""
    begun: list[Script] = []

    def run(*before: str, **parts: str) -> Script:
        begun.append(Script(tmp_path / f"script {len(begun)}", before, **parts))
        return begun[-1]

    yield run
    for script in begun:
        script.clear()


Run = Callable[..., Script]

PROCESSES = [("helper", 1), ("process", 2)]
"""Engines, and the processes that they start for two workers."""

SLOW = "row >= 16 and time.sleep(600); return torch.tensor(row)"

WAITING = "next(batches); print('begun', flush=True); list(batches)"

BUSY = "next(batches); print('begun', flush=True); time.sleep(600)"


@pytest.mark.timeout(120)
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("use", [WAITING, BUSY], ids=["waiting", "busy"])
@pytest.mark.parametrize(("engine", "processes"), PROCESSES)
@pytest.mark.slow
def test_ctrl_c_ends_everything_at_once(
    run: Run, method: str, use: str, engine: str, processes: int
) -> None:
    """It is sent to the whole group, as a terminal does it, while all workers are asleep."""
    script = run(read=SLOW, use=use, options=f"start_method={method!r}", engine=engine)
    script.workers_are_at_work(processes)
    os.killpg(script.child.pid, signal.SIGINT)
    code, told = script.end(SOON)
    assert code == -signal.SIGINT
    assert told.count("Traceback") == 1
    assert told.endswith("KeyboardInterrupt\n")
    assert_gone(script.notes)


@pytest.mark.timeout(120)
@pytest.mark.parametrize(("engine", "processes"), PROCESSES)
@pytest.mark.slow
def test_workers_end_when_the_main_process_is_killed(run: Run, engine: str, processes: int) -> None:
    """PyTorch looks for the main process every 5 s; so all kinds are tried at once.

    The second kind fills the pipe to the main process, whose reading end every worker has too.
    """
    kinds = ("time.sleep(0.01); return torch.tensor(row)", "return torch.full((25_000,), row)")
    scripts = [
        run(
            read=read,
            use=BUSY,
            engine=engine,
            options=f"start_method={method!r}, prefetch_factor=4, collate_fn=list",
        )
        for method in ("fork", "forkserver")
        for read in kinds
    ]
    for script in scripts:
        script.workers_are_at_work(processes)
        script.child.kill()
    for script in scripts:
        assert_gone(script.notes)


@pytest.mark.timeout(120)
@pytest.mark.parametrize("method", ["spawn", "forkserver"])
@pytest.mark.slow
def test_an_unguarded_script_gets_the_remedy(run: Run, method: str) -> None:
    script = run(guard="", use="list(batches)", options=f"start_method={method!r}")
    code, told = script.end()
    assert code == 1
    # Python's resource tracker may have a last word of its own.
    said = [line for line in told.splitlines() if line.startswith("shardkit.errors.")]
    assert "if __name__ == '__main__':" in said[-1], told


SMALL_MEMORY = (
    "unshare",
    "--mount",
    "sh",
    "-c",
    'mount -t tmpfs -o size=1m tmpfs /dev/shm && exec "$0" "$@"',
)
"""Runs a command that has 1 MB of shared memory and does not disturb others."""

can_mount = pytest.mark.skipif(
    shutil.which("unshare") is None
    or subprocess.run([*SMALL_MEMORY, "true"], capture_output=True, check=False).returncode != 0,
    reason="only root may mount a file system; a simulation stands above",
)


@can_mount
@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    "parts",
    [
        {"read": "return torch.full((100_000,), row)"},
        {"read": "return torch.full((100_000,), row)", "options": "collate_fn=torch.stack"},
        {"dataset": "open_dataset({place!r}, decode='torch')"},
        {"dataset": "open_dataset({place!r}, lambda i: torch.from_numpy(i) / 255, None, 'numpy')"},
    ],
    ids=["collated", "stacked", "block", "transform"],
)
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.slow
def test_a_full_shared_memory_is_an_error_in_the_main_process(
    tmp_path: Path, run: Run, parts: dict[str, str], engine: str
) -> None:
    files: dict[str, bytes | None] = {
        f"a/{n}.png": encoded(Image.new("RGB", (400, 300))) for n in range(12)
    }
    made = make_dataset(make_tree(tmp_path / "photos", files), tmp_path / "made")
    parts = {name: value.replace("{place!r}", repr(str(made))) for name, value in parts.items()}
    options = f"start_method='fork', {parts.pop('options', '')}"
    use = (
        "import atexit; atexit.register(lambda: (loader.close(), print(os.listdir('/dev/shm')))); "
        "list(batches)"
    )
    script = run(*SMALL_MEMORY, use=use, options=options, **parts)
    start = time.monotonic()
    left = script.line()
    code, told = script.end(30.0)
    assert time.monotonic() - start < 2 * SOON  # importing torch is a part of it
    assert code == 1
    assert "shardkit.errors.LoaderFailed: " in told
    assert "shared memory is full" in told
    assert "--shm-size" in told
    assert left == "[]"


@can_mount
@pytest.mark.timeout(120)
@pytest.mark.slow
def test_threads_are_chosen_if_shared_memory_is_small(place: Path, run: Run) -> None:
    script = run(
        *SMALL_MEMORY,
        dataset=f"open_dataset({str(place)!r}, lambda i: torch.zeros(9), None, 'numpy')",
        engine="auto",
        use="print(loader.engine, len(list(batches)), flush=True)",
        options="prefetch_factor=500",
    )
    engine = script.line()
    assert script.end()[0] == 0
    assert engine == f"thread {ROWS // BATCH}"


@pytest.mark.timeout(120)
@pytest.mark.slow
def test_too_few_file_file_descriptors_are_an_error_or_a_warning(run: Run) -> None:
    """All batches are kept, and each has a descriptor: more than this process may have."""
    use = (
        "import resource; limit = len(os.listdir('/proc/self/fd')) + 16; "
        "next(batches); resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit)); "
        "kept = list(batches)"
    )
    script = run(read="return torch.full((100_000,), row)", use=use, options="start_method='fork'")
    code, told = script.end(30.0)
    assert code == 1
    assert "Too many open files" in told


@pytest.mark.timeout(60)
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # in PyTorch's del
def test_more_workers_than_the_system_permits_are_an_error(place: Path) -> None:
    """The limit permits a few workers only; those that have started end."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    options: dict[str, Any] = {"engine": "process", "start_method": "fork", "num_workers": 30}
    loader = make_loader(open_dataset(place), BATCH, **options)
    before = set(multiprocessing.active_children())
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/dev/fd")) + 30, limits[1]))
        with pytest.raises(LoaderFailed, match="30 worker processes cannot be started"):
            next(iter(loader))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    for process in set(multiprocessing.active_children()) - before:
        process.join(SOON)
        assert not process.is_alive()
