"""Failures of worker processes: a prompt error in the main process, and no process is left.

Failures of samples are laws of `test_engine_conformance.py`.
"""

from __future__ import annotations

import contextlib
import faulthandler
import itertools
import multiprocessing
import os
import resource
import shutil
import signal
import subprocess
import sys
import tracemalloc  # noqa: F401 - pytest imports it when no file can be opened
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from engines import WITH_PROCESSES, failure_of, make_even
from forked import start_script
from helpers import DEADLINE, encoded, in_fork, make_dataset, make_tree, wait_until
from loading import BATCH, ROWS
from pairwise import pairwise
from PIL import Image
from refusals import refused

from shardkit import collate, make_loader, open_dataset
from shardkit.errors import LoaderFailed, TransformFailed, UsageError

BAD = 13
"""The row at which things go wrong: neither the first of its batch nor in the first batches."""

engines = pytest.mark.parametrize("engine", WITH_PROCESSES)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_even(tmp_path_factory.mktemp("failures")) / "webdataset"


def load(engine: Any, dataset: Any, **options: Any) -> Any:
    given = {"num_workers": 2, "start_method": "fork", "timeout": DEADLINE / 2, **options}
    return make_loader(dataset, BATCH, engine=engine, **given)


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


DEATHS: dict[Callable[[], None], str] = {
    kill: "was killed by SIGKILL",
    crash: "was killed by SIGSEGV",
    leave: "ended with exit code 3",
    leave_quietly: "ended with exit code 0",
}
"""What a transform may do to its worker, and what is said of it."""

EXITS: dict[Callable[[], None], str] = {exit_loudly: "SystemExit: 5", exit_quietly: "SystemExit"}
"""What it may raise that would end a worker."""

ACTIONS = {action.__name__: action for action in (*DEATHS, *EXITS)}


class At:
    """A transform that acts at row `BAD`, as a file says, and records its processes."""

    def __init__(self, place: Path, notes: Path) -> None:
        self._image = open_dataset(place, decode="numpy")[BAD][0]
        self._notes = notes
        self._action = notes.parent / "action"
        self.will(None)
        notes.mkdir()

    def will(self, action: Callable[[], None] | None) -> None:
        """Set what it does."""
        self._action.write_text(action.__name__ if action else "")

    def __call__(self, image: Any) -> torch.Tensor:
        (self._notes / str(os.getpid())).touch()
        if np.array_equal(image, self._image) and (name := self._action.read_text()):
            ACTIONS[name]()
        return torch.from_numpy(image)


def is_gone(pid: int) -> bool:
    """Return whether a process has ended."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text("utf-8")
    except (FileNotFoundError, ProcessLookupError):
        return True
    return status.rpartition(")")[2].split()[0] == "Z"


def assert_gone(notes: Path) -> None:
    """Assert that all recorded processes end."""
    pids = [int(path.name) for path in notes.iterdir()]
    assert pids
    assert os.getpid() not in pids
    wait_until(lambda: all(map(is_gone, pids)), "workers to end")


@engines
@pytest.mark.parametrize("method", ["fork", "forkserver"])
def test_the_death_of_a_worker_names_cause_and_sample_and_new_ones_work(
    place: Path, tmp_path: Path, engine: str, method: str
) -> None:
    at = At(place, tmp_path / "notes")
    dataset = open_dataset(place, at, decode="numpy")
    with closing(load(engine, dataset, start_method=method, num_workers=1)) as loader:
        for action, said in [*DEATHS.items()][WITH_PROCESSES.index(engine) :: 2]:
            at.will(action)
            found, error = failure_of(loader)
            assert type(error) is LoaderFailed
            for fact in (said, dataset.keys[BAD], f"row {BAD},", dataset.paths[BAD]):
                assert fact in str(error)
            assert len(found) <= BAD // BATCH
            assert_gone(tmp_path / "notes")
        at.will(None)
        assert len(list(loader)) == len(loader)
    assert_gone(tmp_path / "notes")


@engines
def test_a_transform_that_exits_is_an_error_of_its_sample(
    place: Path, tmp_path: Path, engine: str
) -> None:
    at = At(place, tmp_path / "notes")
    dataset = open_dataset(place, at, decode="numpy")
    with closing(load(engine, dataset)) as loader:
        for action, said in EXITS.items():
            at.will(action)
            found, error = failure_of(loader)
            assert type(error) is TransformFailed
            for fact in (said, dataset.keys[BAD], f"row {BAD},", dataset.paths[BAD]):
                assert fact in str(error)
            assert len(found) == BAD // BATCH
    assert_gone(tmp_path / "notes")


@engines
def test_an_unpicklable_dataset_is_refused_at_once(place: Path, engine: str) -> None:
    def inside(given: Any) -> Any:
        return given

    for method in ("spawn", "forkserver"):
        for transform, chosen in ((inside, collate), (None, inside)):
            dataset = open_dataset(place, transform, decode="torch")
            facts = ("inside", method, "start_method='fork'")
            with refused(UsageError, *facts):
                load(engine, dataset, start_method=method, collate_fn=chosen)
            load(engine, dataset, collate_fn=chosen)


def with_a_function(samples: Any) -> Any:
    return collate(samples), lambda: None


@engines
def test_a_batch_that_cannot_be_sent_is_an_error_at_once(place: Path, engine: str) -> None:
    dataset = open_dataset(place, decode="torch")
    loader = load(engine, dataset, collate_fn=with_a_function)
    with refused(LoaderFailed, "with_a_function.<locals>.<lambda>", "engine='thread'"):
        next(iter(loader))


def no_room(size: int) -> torch.Tensor:
    raise RuntimeError(f"unable to allocate shared memory of {size} bytes")


@engines
def test_lack_of_shared_memory_is_an_error_in_the_main_process(
    place: Path, engine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("data.memory", "engine.ring"):
        monkeypatch.setattr(f"shardkit.torch.{module}.new_shared", no_room)
    with closing(load(engine, open_dataset(place, decode="torch"), prefetch_factor=1)) as loader:
        found, error = failure_of(loader)
    assert isinstance(error, RuntimeError)
    assert found == []
    assert f"unable to allocate shared memory of {BATCH * 10 * 12 * 3} bytes" in str(error)


SCRIPT = """
import os, sys, time
from pathlib import Path
import torch
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


def write_script(folder: Path, **parts: str) -> list[str]:
    """Return the command that runs a script, which is given a folder for notes."""
    (folder / "notes").mkdir(parents=True)
    path = folder / "script.py"
    given = {"dataset": "Rows()", "engine": "process", "guard": GUARD, "read": READ, **parts}
    path.write_text(SCRIPT.format(**given), "utf-8")
    return [sys.executable, str(path), str(folder / "notes")]


class Script:
    """A training script in its own process group."""

    def __init__(self, folder: Path, before: tuple[str, ...], **parts: str) -> None:
        self.notes = folder / "notes"
        self.child = subprocess.Popen(
            [*before, *write_script(folder, **parts)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def line(self) -> str:
        assert self.child.stdout is not None
        return self.child.stdout.readline().strip()

    def workers_are_at_work(self, processes: int) -> None:
        assert self.line() == "begun"
        wait_until(lambda: len(list(self.notes.iterdir())) == processes, "all workers")

    def end(self) -> tuple[int, str]:
        """Return exit code and error output; the process must end by itself."""
        _, told = self.child.communicate(timeout=DEADLINE)
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

PROCESSES = {"helper": 1, "process": 2}
"""Engines, and the processes that they start for two workers."""

SLOW = "row >= 16 and time.sleep(600); return torch.tensor(row)"

WAITING = "next(batches); print('begun', flush=True); list(batches)"

BUSY = "next(batches); print('begun', flush=True); time.sleep(600)"


@pytest.mark.parametrize(
    ("engine", "use", "method"),
    pairwise(PROCESSES, [WAITING, BUSY], ["fork", "forkserver"]),
    ids=[*range(4)],
)
@pytest.mark.slow
def test_ctrl_c_ends_everything_at_once(run: Run, method: str, use: str, engine: str) -> None:
    """It is sent to the whole group, as a terminal does it, while all workers are asleep."""
    script = run(read=SLOW, use=use, options=f"start_method={method!r}", engine=engine)
    script.workers_are_at_work(PROCESSES[engine])
    os.killpg(script.child.pid, signal.SIGINT)
    code, told = script.end()
    assert code == -signal.SIGINT
    assert told.count("Traceback") == 1
    assert told.endswith("KeyboardInterrupt\n")
    assert_gone(script.notes)


@engines
@pytest.mark.slow
def test_workers_end_when_the_main_process_is_killed(tmp_path: Path, engine: str) -> None:
    """PyTorch looks for the main process every 5 s; so all kinds are tried at once.

    The second kind fills the pipe to the main process, whose reading end every worker has too.
    """
    kinds = ("time.sleep(0.01); return torch.tensor(row)", "return torch.full((25_000,), row)")
    given = "prefetch_factor=4, collate_fn=list"
    children: dict[Path, Any] = {}
    for number, (method, read) in enumerate(itertools.product(("fork", "forkserver"), kinds)):
        options = f"start_method={method!r}, {given}"
        folder = tmp_path / str(number)
        command = write_script(folder, read=read, use=BUSY, engine=engine, options=options)
        with (folder / "said").open("wb") as said:
            children[folder] = start_script(command, stdout=said)
    for folder, child in children.items():
        wait_until(partial(is_at_work, folder, PROCESSES[engine]), "all workers")
        os.kill(child.pid, signal.SIGKILL)
        child.wait(DEADLINE)
    for folder in children:
        assert_gone(folder / "notes")


def is_at_work(folder: Path, processes: int) -> bool:
    has_begun = (folder / "said").read_bytes() == b"begun\n"
    return has_begun and len([*(folder / "notes").iterdir()]) == processes


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
@pytest.mark.parametrize(
    ("engine", "parts"),
    [
        ("process", {"read": "return torch.full((100_000,), row)"}),
        (
            "helper",
            {"read": "return torch.full((100_000,), row)", "options": "collate_fn=torch.stack"},
        ),
        ("process", {"dataset": "open_dataset({place!r}, decode='torch')"}),
        (
            "process",
            {"dataset": "open_dataset({place!r}, lambda i: torch.zeros(270_000), None, 'numpy')"},
        ),
    ],
    ids=["collated", "stacked", "block", "transform"],
)
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
    script = run(*SMALL_MEMORY, use=use, options=options, engine=engine, **parts)
    left = script.line()
    code, told = script.end()
    assert code == 1
    for fact in ("shardkit.errors.LoaderFailed: ", "shared memory is full", "--shm-size"):
        assert fact in told
    assert left == "[]"


@can_mount
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
    assert engine == f"thread {-(-ROWS // 4)}"


@pytest.mark.slow
def test_too_few_file_file_descriptors_are_an_error_or_a_warning(run: Run) -> None:
    """All batches are kept, and each has a descriptor: more than this process may have."""
    use = (
        "import resource; limit = len(os.listdir('/proc/self/fd')) + 16; "
        "next(batches); resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit)); "
        "kept = list(batches)"
    )
    script = run(read="return torch.full((100_000,), row)", use=use, options="start_method='fork'")
    code, told = script.end()
    assert code == 1
    assert "Too many open files" in told


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # in PyTorch's del
def test_more_workers_than_the_system_permits_are_an_error(place: Path) -> None:
    """The limit permits a few workers only; those that have started end."""

    def start_too_many() -> bool:
        loader = load("process", open_dataset(place), num_workers=30)
        most = len(os.listdir("/dev/fd")) + 30
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
        with pytest.raises(LoaderFailed, match="30 worker"):
            next(iter(loader))
        for process in multiprocessing.active_children():
            process.join(DEADLINE / 2)
        return not multiprocessing.active_children()

    assert in_fork(start_too_many) == 0
