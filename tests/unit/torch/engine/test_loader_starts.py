"""Starting workers from notebooks, standard input, unguarded scripts and other threads."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from helpers import execute, make_dataset, make_tree, png

ROWS = 8

BEFORE = """
import threading, torch
from shardkit import make_loader, open_dataset
from shardkit.errors import UsageError

def augment(image):
    return torch.from_numpy(image).float() + 1

def loader(**options):
    dataset = open_dataset({place!r}, decode="numpy", transform=augment)
    return make_loader(dataset, 2, num_workers=2, **options)

def count(loader):
    return sum(len(labels) for _, labels in loader)

def others():
    threading.Thread(target=threading.Event().wait, daemon=True).start()

def refused(**options):
    try:
        count(loader(engine="process", **options))
    except UsageError as error:
        print(error)
"""

SAFE = """
from tqdm import tqdm
first, second = loader(), loader()  # the queues of the first have threads when the second starts
print(count(first), count(second), second.engine)
found = loader()
print(count(tqdm(found, mininterval=0)), count(tqdm(found)), found.engine)
"""

UNSAFE = """
found = loader()
others()
print(count(found), count(found), found.engine)
found = loader()
print(count(found), count(found), found.engine)
refused(start_method="spawn")
refused(start_method="forkserver")
refused()
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


def run(folder: Path, code: str, how: str) -> tuple[list[str], str]:
    """Run a program; return its output and warnings."""
    if how == "notebook":
        code = NOTEBOOK.replace("{code!r}", repr(code))
    path = folder / "unguarded.py"
    path.write_text(code)
    name, given = ("-", code) if how == "stdin" else (path, "")
    done = execute(sys.executable, name, input=given)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines(), done.stderr


@pytest.mark.parametrize("how", ["stdin", "script"])
@pytest.mark.slow
def test_workers_are_forked_if_that_is_safe(tmp_path: Path, code: str, how: str) -> None:
    told, warned = run(tmp_path, code + SAFE, how)

    assert told == [f"{ROWS} {ROWS} process"] * 2
    assert "RuntimeWarning" not in warned


@pytest.mark.parametrize(
    ("how", "reason"),
    [
        ("stdin", "the program has no file (<stdin>)"),
        ("notebook", "in a notebook, at a prompt or on standard input"),
        ("script", "has no `if __name__ == '__main__':` guard"),
    ],
)
@pytest.mark.slow
def test_threads_are_used_if_workers_cannot_start_and_requested_ones_refused(
    tmp_path: Path, code: str, how: str, reason: str
) -> None:
    told, warned = run(tmp_path, code + UNSAFE, how)

    assert told[:2] == [f"{ROWS} {ROWS} thread"] * 2
    assert "using threads, because " in warned
    assert reason in warned
    assert ("if __name__" in warned) == (how == "script")
    assert len(told) == 5
    for method, refusal in zip(("spawn", "forkserver", "forkserver"), told[2:], strict=True):
        assert method in refusal
        assert reason in refusal
        assert "engine='thread'" in refusal or how != "notebook"
