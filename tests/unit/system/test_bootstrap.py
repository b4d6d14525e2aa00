"""Commands and loaders import nothing from the working directory, in any process they start."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock

import pytest
from helpers import DEADLINE, execute, make_tree, png, wait_until

from shardkit import convert
from shardkit.system import bootstrap

PLANTED = """
_posixshmem _multiprocessing array bisect click concurrent copyreg ctypes h5py heapq json
lmdb multiprocessing numpy PIL pickle psutil queue random runpy selectors shardkit signal
simplejpeg socket statistics struct subprocess tempfile threading torch tqdm typing
warnings weakref
"""
HOSTILE = """
import os, sys
with open(os.path.join(os.path.dirname(os.path.abspath(__file__)), "was_run"), "a") as log:
    log.write(f"{__name__} by {sys.argv} with {sys.path}\\n")
raise ImportError(f"the planted {__name__} was imported")
"""

TRANSFORM = """
import numpy
import torch

def transform(image):
    return torch.zeros(3, 8, 8)
"""

SCRIPT = """
import sys

from shardkit import CenterCrop, make_loader, open_dataset

def brighten(image):
    return image.float() + 1

if __name__ == "__main__":
    dataset = open_dataset("data", decode=CenterCrop(8), transform=brighten)
    method = sys.argv[1]
    options = dict(engine="process", num_workers=2, start_method=method)
    loader = make_loader(dataset, 2, **options)
    print(sum(len(labels) for _, labels in loader))
"""


def test_a_frozen_program_starts_with_its_own_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    """It runs itself, not Python with ``-c``."""
    start = Mock(return_value=123)
    monkeypatch.setattr(bootstrap, "_usual", start)
    words = ["program", "--multiprocessing-fork", "pipe_handle=5"]
    assert bootstrap._start(b"program", words, [5]) == 123
    start.assert_called_once_with(b"program", words, [5])


@pytest.fixture
def here(tmp_path: Path) -> Path:
    """A folder with a dataset, its source, and modules that must not be imported."""
    here = tmp_path / "here"
    photos = {f"{'ab'[n % 2]}/{n}.png": png(12, 10, n) for n in range(8)}
    convert(make_tree(here / "photos", photos), here / "data", to="hdf5", workers=1)
    for name in PLANTED.split():
        (here / f"{name}.py").write_text(HOSTILE)
    (here / "augment.py").write_text(TRANSFORM)
    return here


def python(here: Path, *words: str) -> str:
    variables = {"PYTHONPATH": str(Path(__file__).parents[3])}
    done = execute(sys.executable, *words, cwd=here, env=variables, timeout=2 * DEADLINE)
    log = here / "was_run"
    assert not log.exists(), log.read_text()
    assert done.returncode == 0, done.stderr
    return done.stdout


def run(here: Path, *words: str) -> str:
    """Run the command like its console script, whose folder is first on the module path."""
    script = here.parent / "bin" / "shardkit"
    script.parent.mkdir(exist_ok=True)
    script.write_text(
        "from shardkit.cli.main import main\n\nif __name__ == '__main__':\n    main()\n"
    )
    return python(here, str(script), *words)


@pytest.mark.parametrize(
    "words",
    [
        "--version",
        *(
            pytest.param(words, marks=pytest.mark.slow)
            for words in (
                "convert imagefolder photos again --to hdf5 --workers 2 --shard-samples 2",
                "verify data --level decode --against photos --workers 2",
                "doctor data --transform augment:transform --budget 2s",
                "bench data --rounds 1 --seconds 0.1 --batch-size 2 --cache warm --loader auto "
                "--loader process:num_workers=2,start_method=forkserver "
                "--transform augment:transform",
            )
        ),
    ],
)
def test_commands_import_nothing_from_the_working_directory(here: Path, words: str) -> None:
    run(here, *words.split())


@pytest.mark.parametrize(
    "words",
    ["--version", pytest.param("verify data --workers 2", marks=pytest.mark.slow)],
)
def test_python_m_imports_nothing_from_the_working_directory(here: Path, words: str) -> None:
    # Before any code of ours Python imports the package, and what it takes to find it.
    needed = {"multiprocessing", "numpy", "PIL", "click", "psutil", "h5py"}
    for name in {*PLANTED.split()} - needed:
        (here / f"{name}.py").unlink()

    python(here, "-m", "shardkit", *words.split())


@pytest.mark.parametrize("method", ["fork", "forkserver", "spawn"])
@pytest.mark.slow
def test_loader_workers_import_nothing_from_the_working_directory(here: Path, method: str) -> None:
    script = here.parent / "train.py"
    script.write_text(SCRIPT)

    assert python(here, str(script), method) == "8\n"


KILLED = """
import multiprocessing, os, signal
from multiprocessing.resource_tracker import _resource_tracker
from shardkit.system.bootstrap import guard_helpers

guard_helpers()
queue = multiprocessing.get_context("spawn").SimpleQueue()
print(queue._rlock._semlock.name, flush=True)
while os.getsid(tracker := _resource_tracker._pid) != tracker:  # it starts
    pass
os.killpg(0, signal.SIGKILL)
"""


@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="it needs Linux")
def test_a_group_that_is_killed_leaves_no_semaphores(tmp_path: Path) -> None:
    command = [sys.executable, "-c", KILLED]
    done = subprocess.run(
        command, stdout=subprocess.PIPE, timeout=DEADLINE, start_new_session=True, check=False
    )
    assert done.returncode == -signal.SIGKILL
    name = done.stdout.decode().strip().lstrip("/")
    assert name.startswith("mp-")
    wait_until(lambda: not Path(f"/dev/shm/sem.{name}").exists(), "the removal of a semaphore")
