"""Claims of jobs, jobs at the same time, and a cluster whose workers die."""

from __future__ import annotations

import json
import socket
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from helpers import make_folder, tree, wait_until
from refusals import refused

from shardkit import UsageError, convert
from shardkit.cluster.executors import open_cluster
from shardkit.cluster.jobs import Jobs
from shardkit.cluster.ledger import Ledger
from shardkit.cluster.work import commit, plan_jobs
from shardkit.system.pool import Progress


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return make_folder(tmp_path / "photos", each=10)


@pytest.fixture
def planned(source: Path, tmp_path: Path) -> Path:
    """A target with a plan of five tasks."""
    plan_jobs(source, tmp_path / "planned", to="lmdb", shard_samples=4)
    return tmp_path / "planned"


def test_python_samples_cannot_be_planned(tmp_path: Path, source: Path) -> None:
    samples = [{"image": path} for path in source.glob("*/*")]
    with refused(UsageError, "executor="):
        plan_jobs(samples, tmp_path / "x", to="lmdb")


def test_a_claimed_task_is_not_built_twice(planned: Path) -> None:
    first, second = Jobs(Ledger(planned)).claimed(), Jobs(Ledger(planned)).claimed()
    assert [next(first), next(second), next(first), next(second)] == [0, 1, 2, 3]


def test_a_claimed_task_is_not_read(planned: Path) -> None:
    first = Jobs(Ledger(planned)).claimed()
    Jobs(Ledger(planned)).build(next(first))
    assert next(first) == 1
    (task,) = planned.rglob("jobs/000000.json")
    task.write_bytes(b"")
    assert next(Jobs(Ledger(planned)).claimed()) == 2


def test_claims_of_the_dead_and_of_failures_are_void(planned: Path) -> None:
    claims = next(planned.rglob("claims"))
    dead = subprocess.Popen(["true"])
    dead.wait()
    here = {"machine": socket.gethostname(), "process": dead.pid}
    (claims / "000000").write_text(json.dumps(here))
    (claims / "000001").write_text(json.dumps({"machine": "elsewhere", "process": 1}))
    assert list(Jobs(Ledger(planned)).claimed()) == [0, 2, 3, 4]
    assert list(Jobs(Ledger(planned)).claimed(take_over=True)) == [0, 1, 2, 3, 4]


def test_two_jobs_may_build_one_shard_at_once(planned: Path, source: Path, tmp_path: Path) -> None:
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda number: Jobs(Ledger(planned)).build(number % 5), range(20)))
    assert all(built.result.entry for built in found)
    commit(planned)
    convert(source, tmp_path / "local", to="lmdb", shard_samples=4, workers=1)
    assert tree(planned) == tree(tmp_path / "local")


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_dask_builds_the_shards_of_killed_workers_elsewhere(source: Path, tmp_path: Path) -> None:
    import psutil

    distributed = pytest.importorskip("distributed")
    killed: list[int] = []

    def kill(progress: Progress) -> None:
        if progress.images and not killed:
            workers = [
                each
                for each in psutil.Process().children(recursive=True)
                if each.status() != psutil.STATUS_ZOMBIE
                and not each.children()
                and "spawn_main" in " ".join(each.cmdline())
            ]
            killed.append(workers[0].pid)
            workers[0].kill()

    convert(source, tmp_path / "local", to="lmdb", shard_samples=4, workers=1)
    with distributed.LocalCluster(  # it starts again those that die
        n_workers=3, threads_per_worker=1, dashboard_address=None, processes=True
    ) as dask:
        address = dask.scheduler_address.removeprefix("tcp://")
        with open_cluster(f"dask://{address}") as cluster:
            before = cluster.members()
            assert len(before) == 3
            made = convert(
                source,
                tmp_path / "made",
                to="lmdb",
                shard_samples=4,
                executor=cluster.executor,
                on_progress=kill,
            )
            assert killed
            wait_until(lambda: before - cluster.members(), "Dask to notice")
    assert made.manifests[""].rows == 20
    assert tree(tmp_path / "made") == tree(tmp_path / "local")
