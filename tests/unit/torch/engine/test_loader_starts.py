"""Starting workers from notebooks, standard input, unguarded scripts and other threads."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from helpers import DEADLINE, make_dataset, make_tree, png

ROWS = 8

BEFORE = """
import threading, torch
from shardkit import UsageError, make_loader, open_dataset

def augment(image):
    return torch.from_numpy(image).float() + 1

def loader(**options):
    dataset = open_dataset({place!r}, decode="numpy", transform=augment)
    return make_loader(dataset, 2, num_workers=2, **options)

def count(loader):
    return sum(len(labels) for _, labels in loader)

def others():
    threading.Thread(target=threading.Event().wait, daemon=True).start()
"""

ALONE = "first, second = loader(), loader(); print(count(first), count(second), second.engine)"
"""The queues of the first loader have threads when the second starts."""

WITH_OTHERS = "others(); found = loader(); print(count(found), count(found), found.engine)"

OTHERS_LATER = "found = loader(); others(); print(count(found), count(found), found.engine)"

PROGRESS = """
from tqdm import tqdm
found = loader()
print(count(tqdm(found, mininterval=0)), count(tqdm(found)), found.engine)
"""

NOTEBOOK = """
import builtins, sys, threading, types
threading.Thread(target=threading.Event().wait, daemon=True).start()  # as a kernel has several
sys.modules["__main__"] = cell = types.ModuleType("__main__")
builtins.exec({code!r}, cell.__dict__)
"""


@pytest.fixture
def code(tmp_path: Path) -> str:
    files: dict[str, bytes | None] = {f"a/{n}.png": png(12, 10, n) for n in range(ROWS)}
    made = make_dataset(make_tree(tmp_path / "photos", files), tmp_path / "made")
    return BEFORE.replace("{place!r}", repr(str(made)))


def run(folder: Path, code: str, how: str) -> tuple[str, str]:
    """Run a program; return its output and warnings."""
    if how == "notebook":
        code = NOTEBOOK.replace("{code!r}", repr(code))
    path = folder / "unguarded.py"
    path.write_text(code)
    done = subprocess.run(
        [sys.executable, "-" if how == "stdin" else str(path)],
        input=code if how == "stdin" else "",
        capture_output=True,
        text=True,
        timeout=2 * DEADLINE,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip(), done.stderr


@pytest.mark.timeout(300)
@pytest.mark.parametrize("use", [ALONE, PROGRESS], ids=["alone", "progress"])
@pytest.mark.parametrize("how", ["stdin", "script"])
@pytest.mark.slow
def test_workers_are_forked_if_that_is_safe(tmp_path: Path, code: str, how: str, use: str) -> None:
    told, warned = run(tmp_path, code + use, how)

    assert told == f"{ROWS} {ROWS} process"
    assert "RuntimeWarning" not in warned


@pytest.mark.timeout(300)
@pytest.mark.parametrize("use", [WITH_OTHERS, OTHERS_LATER], ids=["others", "others later"])
@pytest.mark.parametrize(
    ("how", "reason"),
    [
        ("stdin", "the program has no file (<stdin>) that worker processes can run"),
        ("notebook", "in a notebook, at a prompt or on standard input"),
        ("script", "has no `if __name__ == '__main__':` guard"),
    ],
)
@pytest.mark.slow
def test_threads_are_used_if_workers_cannot_start(
    tmp_path: Path, code: str, how: str, use: str, reason: str
) -> None:
    told, warned = run(tmp_path, code + use, how)

    assert told == f"{ROWS} {ROWS} thread"
    assert "using threads, since " in warned
    assert reason in warned
    assert ("if __name__" in warned) == (how == "script")


@pytest.mark.timeout(300)
@pytest.mark.parametrize("method", ["spawn", "forkserver"])
@pytest.mark.parametrize(
    ("how", "reason"),
    [("stdin", "has no file (<stdin>)"), ("script", "has no `if __name__ == '__main__':` guard")],
)
@pytest.mark.slow
def test_a_start_method_that_needs_the_main_file_is_refused(
    tmp_path: Path, code: str, how: str, reason: str, method: str
) -> None:
    use = f"""
    try:
        count(loader(engine="process", start_method={method!r}))
    except UsageError as error:
        print(error)
    """
    told, _ = run(tmp_path, code + textwrap.dedent(use), how)

    assert told.startswith(f"workers would be started by {method}, but ")
    assert reason in told


@pytest.mark.timeout(300)
@pytest.mark.slow
def test_requested_processes_that_cannot_start_are_refused(tmp_path: Path, code: str) -> None:
    use = """
    try:
        count(loader(engine="process"))
    except UsageError as error:
        print(error)
    """
    told, _ = run(tmp_path, code + textwrap.dedent(use), "notebook")

    assert "worker processes cannot import it" in told
    assert "engine='thread'" in told
    assert "if __name__" not in told
