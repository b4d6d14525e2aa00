"""Executors of clusters: Dask and Ray, each an optional dependency."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future
from importlib import import_module
from typing import Any, NamedTuple

from shardkit.errors import ShardkitError, UsageError

_PLACE = re.compile(r"(?:[\w.-]+|\[[0-9A-Fa-f:.]+\]):([0-9]{1,5})", re.ASCII)
"""A host or an IPv6 address, and a port."""

_PATIENCE = "10s"
"""Time for a scheduler to answer."""


class Cluster(NamedTuple):
    """A cluster to which this process is connected."""

    executor: Executor
    members: Callable[[], set[str]]
    """Returns the names of the workers, or machines, that are there now."""


@contextlib.contextmanager
def open_cluster(address: str) -> Iterator[Cluster]:
    """Connect to ``dask://HOST:PORT`` or ``ray://HOST:PORT`` within the block.

    ShardkitError if the cluster gives up a task.
    """
    engine, _, place = address.partition("://")
    match = _PLACE.fullmatch(place)
    if engine not in _ENGINES or match is None or not 0 < int(match[1]) < 1 << 16:
        raise UsageError(f"{address!r} is not dask://HOST:PORT or ray://HOST:PORT")
    module = {"dask": "distributed"}.get(engine, engine)
    try:
        library = import_module(module)
    except ImportError as error:
        raise UsageError(
            f"{address} needs {module}", remedy=f"pip install 'shardkit[{engine}]'"
        ) from error
    with _ENGINES[engine](library, place) as cluster:
        yield cluster


@contextlib.contextmanager
def _dask(distributed: Any, address: str) -> Iterator[Cluster]:
    try:
        client = distributed.Client(f"tcp://{address}", timeout=_PATIENCE, set_as_default=False)
    except (OSError, ValueError) as error:
        raise UsageError(f"no Dask scheduler answers at {address}: {error}") from error
    with client:
        try:
            # A shard is a task of minutes; Dask would keep the result of a pure function.
            executor = client.get_executor(pure=False)
            yield Cluster(executor, lambda: set(client.scheduler_info(n_workers=-1)["workers"]))
        except distributed.scheduler.KilledWorker as error:
            raise ShardkitError(
                f"Dask gave up a shard whose workers died again and again: {error}",
                remedy="Give them more memory, or use smaller shards; then rerun: finished "
                "work is kept.",
            ) from error


@contextlib.contextmanager
def _ray(ray: Any, address: str) -> Iterator[Cluster]:
    try:
        ray.init(address=f"ray://{address}", log_to_driver=False)
    except (ConnectionError, RuntimeError) as error:
        raise UsageError(f"no Ray cluster answers at {address}: {error}") from error
    try:
        yield Cluster(_RayExecutor(ray), lambda: _alive(ray))
    except ray.exceptions.WorkerCrashedError as error:
        raise ShardkitError(
            f"Ray gave up a shard whose workers died again and again: {error}",
            remedy="Rerun with smaller shards: finished work is kept.",
        ) from error
    finally:
        ray.shutdown()


def _alive(ray: Any) -> set[str]:
    return {node["NodeManagerAddress"] for node in ray.nodes() if node["Alive"]}


def _call(function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    return function(*args)


class _RayExecutor(Executor):
    """Ray's tasks as an executor; Ray repeats a task whose process died."""

    def __init__(self, ray: Any) -> None:
        self._run = ray.remote(_call)

    def submit(self, fn: Callable[..., Any], /, *args: Any, **_: Any) -> Future[Any]:
        future: Future[Any] = self._run.remote(fn, args).future()
        return future


_ENGINES = {"dask": _dask, "ray": _ray}
