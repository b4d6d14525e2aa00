"""Run the command line in forked children of a process that has imported everything.

A line of JSON comes in for each run: ``arguments`` of shardkit, ``folder`` for what it prints, and
a ``mistake`` (a function of mistakes.py) or null. What goes out is the status that waiting for the
child gave. The child leads a session of its own, whose calls faults.c then counts.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import signal
import sys
import traceback
from contextlib import closing
from pathlib import Path
from typing import NoReturn

from faulty import Control
from mistakes import MISTAKES
from PIL import Image
from tqdm import tqdm

import shardkit
from shardkit.cli.main import main
from shardkit.system import pool

COMMANDS = (
    *("append", "attach", "commit", "convert", "export", "fields", "info", "repair", "report"),
    *("split", "verify", "work"),
)
LOADED = (
    *("conversion", "dataset", "exporting", "formats", "sources", "reporting", "verification"),
)
"""What these commands import when they begin; with PyTorch, it would take seconds."""


def serve() -> None:
    """Run the commands on standard input until it ends."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # not inherited from a background job
    tqdm.monitor_interval = 0  # it would start a thread
    Image.init()
    load_everything()
    pool._WORTHWHILE = 0  # as in `faulty.PROGRAM`
    control = Control.of(Path(os.environ["FAULTS_CONTROL"]))
    gc.freeze()
    for line in sys.stdin:
        order = json.loads(line)
        if order["arguments"][0] == "load":
            _ = shardkit.make_loader  # imports PyTorch
        child = os.fork()
        if child == 0:
            run(control, Path(order["folder"]), order["arguments"], order["mistake"])
        status = os.waitpid(child, 0)[1]
        sys.stdout.write(json.dumps([child, os.waitstatus_to_exitcode(status)]) + "\n")
        sys.stdout.flush()


def load_everything() -> None:
    """Import what the forks would."""
    root = Path(shardkit.__file__).parent
    for name in LOADED:
        for path in sorted(root.joinpath(name).rglob("*.py")):
            parts = path.relative_to(root.parent).with_suffix("").parts
            importlib.import_module(".".join(parts).removesuffix(".__init__"))
    for command in COMMANDS:
        importlib.import_module(f"shardkit.cli.{command}")


def run(control: Control, folder: Path, arguments: list[str], mistake: str | None) -> None:
    """Run the command line; never return."""
    os.setsid()
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        path = folder / name if number else Path(os.devnull)
        os.dup2(os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o644), number)
    code: object = 1
    try:
        if mistake:
            MISTAKES[mistake]()
        sys.argv = ["shardkit", *arguments]
        control.session = os.getpid()
        if arguments[0] == "load":
            load(Path(arguments[1]))
        main()
    except SystemExit as end:
        code = end.code
    except BaseException:
        traceback.print_exc()
    finally:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os._exit(code if isinstance(code, int) else 1)


def load(dataset: Path) -> NoReturn:
    """Read an epoch of a dataset; an error becomes a line and an exit code, as in the commands."""
    try:
        with closing(
            shardkit.make_loader(shardkit.open_dataset(dataset), 4, num_workers=0, collate_fn=list)
        ) as rows:
            sys.stdout.write(f"{sum(map(len, rows))}\n")
    except Exception as error:
        sys.stderr.write(f"shardkit: error: {type(error).__name__}: {error}\n")
        sys.exit(1)
    sys.exit(0)


if __name__ == "__main__":
    serve()
