"""Disk faults: the library of faults.c, its control, and conversions that run with it."""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import select
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from helpers import DEADLINE, wait_until

HERE = Path(__file__).parent
FAULTS = HERE / "faults"

NOTHING, SIGNAL_BEFORE, SIGNAL_AFTER, TEAR, FAIL, SHORTEN = range(6)
SELF, MAIN, GROUP = range(3)
ALL, ONLY_MAIN, ONLY_OTHERS = range(3)

PROGRAM = (
    "from shardkit.system import pool; pool._WORTHWHILE = 0; "
    "from shardkit.cli.main import main; main()"
)
"""The command line, with worker processes also for the little that tests convert."""

FOREVER = 1 << 40
"""More calls than any conversion makes."""


class Control(ctypes.Structure):
    """Instructions for the library: the counterpart of ``struct control`` in faults.c."""

    count: int
    session: int
    acted: int
    _fields_ = (
        *(
            (name, ctypes.c_int64)
            for name in (
                *("count", "at", "times", "action", "code"),
                *("target", "whose", "session", "quick", "acted", "reads"),
            )
        ),
        *((name, ctypes.c_char * 1024) for name in ("root", "trace", "keep")),
    )

    @classmethod
    def of(cls, path: Path) -> Control:
        """Return the control in the file ``path``, shared by all processes; create it if needed."""
        with path.open("ab+") as file:
            file.truncate(ctypes.sizeof(cls))
            return cls.from_buffer(mmap.mmap(file.fileno(), ctypes.sizeof(cls)))

    def set(self, **values: int | bytes) -> None:
        """Change fields by their names."""
        for name, value in values.items():
            setattr(self, name, value)


@dataclass(frozen=True, kw_only=True)
class Fault:
    """A fault, and the calls it affects."""

    action: int = NOTHING
    at: int = 0
    """Number of the first call that it happens to, from 1 on."""
    times: int = 1
    code: int = signal.SIGKILL
    """The signal, or the error."""
    target: int = SELF
    whose: int = ALL
    reads: bool = False
    """Whether calls that read count, instead of those that reach the disk."""
    traced: bool = False
    """Whether all calls are written down, and what is removed is kept."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The outcome of a run of the command line."""

    code: int
    """The exit code, or less the number of the signal that it died of."""
    calls: int
    """Calls that reached the disk, as far as it came."""
    acted: int
    """Calls that something happened to."""
    stdout: str
    stderr: str
    session: int

    @property
    def killed(self) -> bool:
        """Whether it died of SIGKILL."""
        return self.code == -signal.SIGKILL

    def json(self) -> dict[str, Any]:
        """Return what it printed with ``--json``."""
        found: dict[str, Any] = json.loads(self.stdout)
        return found

    def story(self) -> str:
        """Describe the outcome for a message."""
        return f"exit {self.code} after {self.calls} calls: {self.stderr[-1500:].strip()}"


def compiler() -> str | None:
    """Return the C compiler, or None."""
    return shutil.which("gcc") if sys.platform == "linux" else None


def build(folder: Path) -> Path:
    """Compile the library into ``folder`` and return its path."""
    library = folder / "faults.so"
    flags = ["-std=c99", "-O1", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC"]
    command = [compiler() or "gcc", *flags, "-o", str(library), str(FAULTS / "faults.c"), "-ldl"]
    subprocess.run(command, check=True, timeout=DEADLINE)
    return library


class Bench:
    """A folder for conversions with faults, one after another."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder = folder.resolve()
        """The place of all that belongs to it."""
        self.root = folder / "root"
        """Calls count that are about this folder or what is below it."""
        self.keep = folder / "keep"
        """Links to what was removed, by inode, after a traced run."""
        self.trace = folder / "trace"
        self._prints = folder / "prints"
        for path in (self.root, self.keep, self._prints):
            path.mkdir(parents=True)
        self._control_path = folder / "control"
        self.control = Control.of(self._control_path)
        self._environment = {
            **os.environ,
            "LD_PRELOAD": str(build(folder)),
            "FAULTS_CONTROL": str(self._control_path),
            "OPENBLAS_NUM_THREADS": "1",  # a thread would not come along through a fork
            "PYTHONPATH": os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")]),
        }
        self._driver: subprocess.Popen[str] | None = None

    def close(self) -> None:
        """End the driver."""
        if self._driver is not None:
            self._driver.communicate(timeout=DEADLINE)

    def run(
        self, *arguments: object, fault: Fault | None = None, mistake: str | None = None
    ) -> Outcome:
        """Run ``shardkit`` with ``arguments`` in a forked child."""
        self._arm(fault or Fault())
        driver = self._start()
        assert driver.stdin is not None
        assert driver.stdout is not None
        order = {
            "arguments": [os.fspath(a) if isinstance(a, Path) else str(a) for a in arguments],
            "folder": str(self._prints),
            "mistake": mistake,
        }
        driver.stdin.write(json.dumps(order) + "\n")
        driver.stdin.flush()
        answers = select.poll()  # unlike select, it takes descriptors above 1,023
        answers.register(driver.stdout, select.POLLIN)
        if not answers.poll(1000 * DEADLINE):
            with suppress(ProcessLookupError):
                os.killpg(self.control.session, signal.SIGKILL)
            raise AssertionError(f"it hangs: shardkit {order['arguments']}, {fault}")
        session, code = json.loads(driver.stdout.readline())
        prints = [(self._prints / name).read_text("utf-8") for name in ("stdout", "stderr")]
        return self._outcome(session, code, *prints)

    @contextmanager
    def start(self, *arguments: object, fault: Fault | None = None) -> Iterator[Running]:
        """Start ``shardkit`` as a separate process; kill its remaining processes at the end."""
        self._arm(fault or Fault())
        words = [os.fspath(a) if isinstance(a, Path) else str(a) for a in arguments]
        process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM, *words],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="backslashreplace",
            start_new_session=True,
            env=self._environment,
        )
        self.control.session = process.pid  # long before Python has begun
        try:
            yield Running(self, process)
        finally:
            end_session(process.pid)
            process.communicate()

    def _start(self) -> subprocess.Popen[str]:
        if self._driver is None:
            self._driver = subprocess.Popen(
                [sys.executable, str(FAULTS / "driver.py")],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                env=self._environment,
            )
        return self._driver

    def _arm(self, fault: Fault) -> None:
        shutil.rmtree(self.keep)
        self.keep.mkdir()
        self.trace.write_bytes(b"")
        self.control.set(
            session=0,
            count=0,
            acted=0,
            at=fault.at,
            times=fault.times,
            action=fault.action,
            code=fault.code,
            target=fault.target,
            whose=fault.whose,
            quick=1,
            reads=int(fault.reads),
            root=os.fsencode(self.root),
            trace=os.fsencode(self.trace) if fault.traced else b"",
            keep=os.fsencode(self.keep) if fault.traced else b"",
        )

    def _outcome(self, session: int, code: int, stdout: str, stderr: str) -> Outcome:
        control = self.control
        return Outcome(
            code=code,
            calls=control.count,
            acted=control.acted,
            stdout=stdout,
            stderr=stderr,
            session=session,
        )


class Running:
    """A running ``shardkit`` process."""

    def __init__(self, bench: Bench, process: subprocess.Popen[str]) -> None:
        self._bench = bench
        self.process = process

    def others(self) -> list[int]:
        """Return the other processes of its session."""
        return [number for number in session_of(self.process.pid) if number != self.process.pid]

    def end(self) -> Outcome:
        """Wait for its end."""
        stdout, stderr = self.process.communicate(timeout=DEADLINE)
        process = self.process
        return self._bench._outcome(process.pid, process.returncode, stdout, stderr)


def session_of(leader: int) -> list[int]:
    """Return the processes of a session, without zombies."""
    found = []
    for entry in Path("/proc").iterdir():
        with suppress(OSError, ValueError):
            status = (entry / "stat").read_text("utf-8", "replace").rpartition(")")[2].split()
            if int(status[3]) == leader and status[0] not in ("Z", "X"):
                found.append(int(entry.name))
    return found


def end_session(leader: int) -> None:
    """Kill the remaining processes of a session."""
    for process in session_of(leader):
        with suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)
    wait_until(lambda: not session_of(leader), "the end of a session")
