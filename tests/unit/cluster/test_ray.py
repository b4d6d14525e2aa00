"""A conversion on a Ray cluster survives the death of a worker, with the same files.

Ray's client runs in processes of its own: its gRPC starts threads, and what other tests fork from a
process with these may crash at any line, as gRPC then skips its own handling of forks.
"""

from __future__ import annotations

import fcntl
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import psutil
import pytest
from helpers import make_folder, run, tree, wait_until
from refusals import refused

from shardkit import convert
from shardkit.cluster.executors import open_cluster
from shardkit.errors import UsageError
from shardkit.testing.tools import call_in

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(240),
    pytest.mark.filterwarnings("ignore"),  # those of Ray
]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """One cluster at a time: each uses the ports from 23000 on for its clients."""
    folder = tmp_path_factory.getbasetemp()
    parallel = "PYTEST_XDIST_WORKER" in os.environ
    with ((folder.parent if parallel else folder) / "ray.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


@pytest.fixture(scope="module")
def ray(alone: None) -> Iterator[tuple[str, psutil.Process]]:
    """The address and the process of a cluster of one machine with two workers."""
    if find_spec("ray") is None:
        pytest.skip("needs the extra dev")
    # Ray's sockets need a short path.
    with tempfile.TemporaryDirectory(prefix="ray", ignore_cleanup_errors=True) as folder:
        head, port = _started(folder)
        try:
            address = f"127.0.0.1:{port}"
            call_in("spawn", _wait_for, address)
            yield address, psutil.Process(head.pid)
        finally:
            for each in psutil.Process(head.pid).children(recursive=True):
                each.kill()
            os.killpg(head.pid, signal.SIGKILL)
            head.wait()


def _started(folder: str) -> tuple[subprocess.Popen[bytes], int]:
    """Start a cluster; return its process and its port for clients.

    Another process may take a free port before Ray does: then Ray ends, and others are tried.
    """
    command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block"]
    command += ["--num-cpus=2", "--include-dashboard=false", "--disable-usage-stats"]
    command += ["--min-worker-port=0", "--max-worker-port=0", "--object-store-memory=100000000"]
    for _ in range(5):
        with socket.create_server(("127.0.0.1", 0)) as one, socket.create_server(("", 0)) as two:
            ports = [each.getsockname()[1] for each in (one, two)]
        own = [f"--port={ports[0]}", f"--ray-client-server-port={ports[1]}"]
        head = subprocess.Popen(
            [*command, *own, f"--temp-dir={folder}"],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        wait_until(lambda: head.poll() is not None or _listens(ports[1]), "Ray")  # noqa: B023
        if head.poll() is None:
            return head, ports[1]
    raise AssertionError("Ray does not start")


def _listens(port: int) -> bool:
    with socket.socket() as client:
        return client.connect_ex(("127.0.0.1", port)) == 0


def _wait_for(address: str) -> None:
    wait_until(lambda: _answers(address), "Ray")


def _answers(address: str) -> bool:
    """Return whether the cluster accepts clients, which it does only some time after it listens."""
    try:
        with open_cluster(f"ray://{address}"):
            return True
    except UsageError:
        return False


def test_ray_builds_the_shards_of_a_killed_worker_again(
    tmp_path: Path, ray: tuple[str, psutil.Process]
) -> None:
    address, head = ray
    source = make_folder(tmp_path / "photos", each=10)
    convert(source, tmp_path / "local", to="lmdb", resize=16, shard_samples=4)
    with ThreadPoolExecutor(1) as other:
        killed = other.submit(_kill_a_worker, head)
        assert call_in("spawn", _convert_on, address, source, tmp_path / "made") == 1

    assert killed.result()
    assert tree(tmp_path / "made") == tree(tmp_path / "local")


def _convert_on(address: str, source: Path, made: Path) -> int:
    """Convert on a cluster; return the number of its machines."""
    with open_cluster(f"ray://{address}") as cluster:
        machines = len(cluster.members())
        executor = cluster.executor
        convert(source, made, to="lmdb", resize=16, shard_samples=4, executor=executor)
        return machines


def _kill_a_worker(head: psutil.Process) -> int:
    """Kill the first worker that builds a shard; return its number."""
    found: list[psutil.Process] = []

    def find() -> bool:
        found.extend(filter(_is_busy, head.children(recursive=True)))
        return bool(found)

    wait_until(find, "a worker")
    found[0].kill()
    return found[0].pid


def _is_busy(process: psutil.Process) -> bool:
    """Return whether this is a worker that builds a shard: Ray changes its title."""
    try:
        return process.cmdline()[:1] == ["ray::_call"]
    except psutil.NoSuchProcess:
        return False


def test_the_command_converts_on_ray(tmp_path: Path, ray: tuple[str, psutil.Process]) -> None:
    source = make_folder(tmp_path / "photos", each=5)
    options = ("--to", "lmdb", "--resize", 16, "--shard-samples", 4)
    for target, more in (("made", ("--cluster", f"ray://{ray[0]}")), ("local", ())):
        done = run("convert", "imagefolder", source, tmp_path / target, *options, *more)
        assert done.returncode == 0, done.stderr
    assert tree(tmp_path / "made") == tree(tmp_path / "local")


def test_no_cluster_is_a_usage_error(ray: object) -> None:
    message = call_in("spawn", _refusal)
    with refused(UsageError):
        raise UsageError(message)


def _refusal() -> str:
    """Return the message about an address where nobody answers."""
    worker: Any = import_module("ray.util.client.worker")
    worker.INITIAL_TIMEOUT_SEC = worker.MAX_TIMEOUT_SEC = 0.1
    try:
        with open_cluster("ray://127.0.0.1:1"):
            raise AssertionError("it is no error")
    except UsageError as error:
        return str(error)
