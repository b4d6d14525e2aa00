"""Simulated job arrays: jobs start in random order, some are killed, some run twice."""

from __future__ import annotations

import hashlib
import itertools
import os
import random
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest
from buckets import BUCKET, FAULTS, SECRET, Bucket
from campaign import cases, draw, points
from helpers import DEADLINE, FORMATS, make_folder, shardkit_command, tree, wait_until

from shardkit import convert
from shardkit.cluster.work import commit, plan_jobs

JOBS, KILLED, TWICE = 8, 0.2, 0.1
EACH = points(10, 40)
"""Images of each of two classes; a shard has five."""

pytestmark = pytest.mark.timeout(1200)


@pytest.mark.parametrize(("seed", "to"), cases(itertools.product(range(3), FORMATS), 1))
def test_job_arrays_make_the_same_files(tmp_path: Path, to: Any, seed: int) -> None:
    chosen = draw(seed, to)
    source, target = make_folder(tmp_path / "photos", each=EACH), tmp_path / "made"
    convert(source, tmp_path / "local", to=to, resize=64, shard_samples=5)
    made = plan_jobs(source, target, to=to, resize=64, shard_samples=5)
    tasks = list(range(made.jobs))
    tasks += chosen.sample(tasks, round(TWICE * len(tasks)))
    chosen.shuffle(tasks)
    doomed = set(chosen.sample(range(len(tasks)), round(KILLED * len(tasks))))
    for start in range(0, len(tasks), JOBS):
        running = {
            number: subprocess.Popen(
                shardkit_command("work", target),
                env=_task(tasks[number]),
                stdout=subprocess.DEVNULL,
            )
            for number in range(start, min(start + JOBS, len(tasks)))
        }
        for number in doomed & running.keys():
            # At a random moment of its life: before, while, or after it builds the shard.
            _wait_for_a_shard(target, running[number])
            running[number].send_signal(signal.SIGKILL)
        for number, job in running.items():
            assert job.wait(2 * DEADLINE) == 0 or number in doomed
    # Whatever is left, a last job claims.
    subprocess.run(shardkit_command("work", target, "--claim"), check=True, timeout=2 * DEADLINE)
    commit(target)
    assert tree(target) == tree(tmp_path / "local")


def _wait_for_a_shard(target: Path, job: subprocess.Popen[bytes]) -> None:
    before = len(_shards(target))
    wait_until(lambda: len(_shards(target)) > before or job.poll() is not None, "a shard")


def _shards(target: Path) -> list[str]:
    return [name for name in os.listdir(target / ".shardkit-work" / "dataset") if name[0] != "."]


def _task(number: int) -> dict[str, str]:
    return {**os.environ, "SLURM_ARRAY_TASK_ID": str(number)}


@pytest.mark.parametrize(("seed", "rate"), cases(itertools.product(range(3), (0.05, 0.0)), 1))
def test_job_arrays_into_a_bucket_make_the_same_files(
    tmp_path: Path, bucket: Bucket, seed: int, rate: float
) -> None:
    """Also with every fault at ``rate``: then jobs may fail, with a named error, and run again."""
    chosen = draw(seed, rate)
    source, url = make_folder(tmp_path / "photos", each=EACH), f"s3://{BUCKET}/made"
    convert(source, tmp_path / "local", to="lmdb", resize=64, shard_samples=5)
    made = plan_jobs(source, url, to="lmdb", resize=64, shard_samples=5)
    bucket.random.seed(chosen.random())
    # Expired credentials end a command; the other faults are repaired.
    bucket.rates = dict.fromkeys(FAULTS, rate) | {"expired": rate / 20}
    tasks = list(range(made.jobs))
    tasks += chosen.sample(tasks, round(TWICE * len(tasks)))
    chosen.shuffle(tasks)
    doomed = set(chosen.sample(range(len(tasks)), round(KILLED * len(tasks))))
    for start in range(0, len(tasks), JOBS):
        bucket.requests.clear()
        running = {
            number: _job("work", url, "--staging", tmp_path, task=tasks[number])
            for number in range(start, min(start + JOBS, len(tasks)))
        }
        for number in doomed & running.keys():
            _wait_for_an_upload(bucket, tasks[number], chosen, running[number])
            running[number].send_signal(signal.SIGKILL)
        for job in running.values():
            _error(job, rate)
    _repeated(rate, "work", url, "--claim", "--take-over")
    rival = _job("commit", url)
    _repeated(1, "commit", url)
    _error(rival, 1)  # it commits the same, or finds no plan
    bucket.rates = {}
    _repeated(1, "commit", url)  # a commit that was too late may have left something
    _require_same(bucket, tmp_path / "local")


def test_a_job_killed_between_the_parts_of_its_shard_leaves_its_task(
    tmp_path: Path, bucket: Bucket
) -> None:
    source, url = make_folder(tmp_path / "photos", each=20), f"s3://{BUCKET}/made"
    options: Any = {"to": "hdf5", "encode": "raw", "resize": (512, 512), "enlarge": True}
    convert(source, tmp_path / "local", **options)
    assert plan_jobs(source, url, **options).jobs == 1
    job = _job("work", url, "--claim")
    wait_until(lambda: any("partNumber=" in path for _, path in bucket.requests), "a part")
    job.send_signal(signal.SIGKILL)
    _error(job, 0)
    assert not [name for name in bucket.names() if name.endswith(".h5")]
    _repeated(0, "work", url, "--claim", "--take-over")
    _repeated(0, "commit", url)
    _require_same(bucket, tmp_path / "local")


def test_of_plans_for_one_bucket_one_is_carried_out(tmp_path: Path, bucket: Bucket) -> None:
    source, url = make_folder(tmp_path / "photos"), f"s3://{BUCKET}/made"
    command = ("convert", "imagefolder", source, url, "--to", "lmdb", "--plan-only", "--seed")
    rivals = [_job(*command, seed) for seed in range(4)]
    errors = [_error(job, 1) for job in rivals]
    (seed,) = [number for number, job in enumerate(rivals) if job.returncode == 0]
    assert all(f"{url} " in error for number, error in enumerate(errors) if number != seed)
    _repeated(0, "work", url, "--claim")
    _repeated(0, "commit", url)
    convert(source, tmp_path / "local", to="lmdb", seed=seed)
    _require_same(bucket, tmp_path / "local")


def _require_same(bucket: Bucket, local: Path) -> None:
    expected = {name: digest for name, digest in tree(local).items() if digest != "folder"}
    assert {
        name.removeprefix("made/"): hashlib.sha256(bucket.ask("GET", name)).hexdigest()
        for name in bucket.names()
    } == expected


def _job(*arguments: object, task: int | None = None) -> subprocess.Popen[str]:
    return subprocess.Popen(
        shardkit_command(*arguments),
        env=os.environ.copy() if task is None else _task(task),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )


def _wait_for_an_upload(
    bucket: Bucket, task: int, chosen: random.Random, job: subprocess.Popen[str]
) -> None:
    """Wait until a job has fetched its task, or has started to upload its shard or its result."""
    end = chosen.choice([f"jobs/{task:06d}.json", f"shard-{task:06d}.lmdb", f"results/{task:06d}"])
    seen = f"{BUCKET}/made/{end}" if end.startswith("shard") else end
    wait_until(
        lambda: any(path.endswith(seen) for _, path in bucket.requests) or job.poll() is not None,
        "a request",
    )


def _error(job: subprocess.Popen[str], rate: float) -> str:
    """Return what a job prints; it succeeds, or was killed, or with faults fails with one line.

    Before it, `work` names the source that it will read.
    """
    error: str = job.communicate(timeout=2 * DEADLINE)[1]
    assert SECRET not in error
    assert "Traceback" not in error
    said = error.splitlines()
    assert len(said) <= 2
    failed = rate and said and said[-1].startswith("shardkit: error:")
    assert job.returncode in (0, -signal.SIGKILL) or failed, error
    return error


def _repeated(rate: float, *arguments: object) -> None:
    """Run a command until it succeeds; without faults, it must at once."""
    errors: list[str] = []
    for _ in range(10 if rate else 1):
        job = _job(*arguments)
        errors.append(_error(job, rate))
        # Of a commit that failed when it removed the plan, the next one finds a dataset.
        if job.returncode == 0 or "its dataset is complete" in errors[-1]:
            return
    raise AssertionError(errors)
