"""Settings for all tests."""

from __future__ import annotations

import gc
import importlib
import os
import signal
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest
from buckets import Bucket, running
from forked import fork_workers, load_everything, start_server, stop_server
from helpers import make_folder
from hypothesis import settings
from hypothesis import strategies as st
from tqdm import tqdm

from shardkit.system import compiled, native

pytest_plugins = ["campaign", "cpu", "refusals"]

# Small pictures and small machines: no deadline, and the same examples in every run.
settings.register_profile("shardkit", deadline=None, derandomize=True, max_examples=60)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "shardkit"))

# A shell that starts this in the background has it ignore Ctrl-C, and nohup the end of the
# terminal; children would inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)

# Nothing that tests make shardkit remember belongs to the user.
_STATE = tempfile.TemporaryDirectory(prefix="shardkit-state-")
os.environ["XDG_STATE_HOME"] = os.environ["XDG_CACHE_HOME"] = _STATE.name

# A fifth of the tests' time, and nobody pulls the plug; child processes that are not forks do sync.
os.fsync = lambda fd: None

# Its thread would live on in this process, from which tests fork workers.
tqdm.monitor_interval = 0


def pytest_configure(config: pytest.Config) -> None:
    """Load everything once, in the processes that run tests, and fork from there."""
    if hasattr(config, "workerinput") or not config.getoption("numprocesses", None):
        load_everything()
        start_server()
        fork_workers()


def pytest_sessionfinish() -> None:
    """End the fork server."""
    stop_server()


def pytest_collection_finish() -> None:
    """Keep the garbage collector from visiting what stays anyway: a sixth of the time of tests."""
    hypothesis.find(st.text(min_size=1), bool)  # reads a table, which no test should count
    gc.collect()
    gc.freeze()


@pytest.fixture
def without_native(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No compiled module, here and in child processes: for tests that watch Python read."""
    monkeypatch.setenv(native.VARIABLE, "off")
    native._load.cache_clear()
    yield
    native._load.cache_clear()


@pytest.fixture(scope="session")
def with_native() -> None:
    """Skip a test where there is no compiled module."""
    if not compiled.is_available():
        pytest.skip("no compiled module")


@pytest.fixture
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder in which shardkit remembers things, such as what the user attached."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return tmp_path / "state"


@pytest.fixture
def in_tmp_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Work in the folder of the test: others, in other processes, also write to DST."""
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def third_party(monkeypatch: pytest.MonkeyPatch, state: Path) -> Iterator[str]:
    """Make the packages of tests/support/thirdparty importable here and in child processes."""
    path = str(Path(__file__).parent / "support/thirdparty")
    monkeypatch.syspath_prepend(path)
    inherited = [path for path in (os.environ.get("PYTHONPATH"),) if path]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([path, *inherited]))
    yield path
    for name in ("shardkit_csv", "shardkit_pack", "shardkit_zip"):
        sys.modules.pop(name, None)
    importlib.invalidate_caches()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """An image folder with the classes cat and dog, three images each."""
    return make_folder(tmp_path / "photos")


@pytest.fixture(scope="session")
def server() -> Iterator[Bucket]:
    """An S3 server for all tests of a process; use `bucket`."""
    pytest.importorskip("moto", reason="needs the extra dev")
    with running() as bucket:
        yield bucket


@pytest.fixture
def bucket(server: Bucket, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bucket]:
    """An empty bucket of an S3 server without faults, whose variables are set."""
    for name, value in server.environment.items():
        monkeypatch.setenv(name, value)
    yield server
    server.clear()
