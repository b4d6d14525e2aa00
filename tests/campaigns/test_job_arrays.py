"""Simulated job arrays: jobs start in random order, some are killed, some run twice."""

from __future__ import annotations

import os
import random
import signal
import subprocess
from pathlib import Path

import pytest
from helpers import FORMATS, make_folder, shardkit_command, tree, wait_until

from shardkit.conversion.convert import commit, convert

JOBS, KILLED, TWICE = 8, 0.2, 0.1


@pytest.mark.timeout(600)
@pytest.mark.parametrize("to", FORMATS)
@pytest.mark.parametrize("seed", range(3))
def test_job_arrays_make_the_same_files(tmp_path: Path, to: str, seed: int) -> None:
    draw = random.Random(seed)
    source, target = make_folder(tmp_path / "photos", each=40), tmp_path / "made"
    convert(source, tmp_path / "local", to=to, resize=64, shard_samples=5)
    made = convert(source, target, to=to, resize=64, shard_samples=5, plan_only=True)
    tasks = list(range(made.jobs))
    tasks += draw.sample(tasks, round(TWICE * len(tasks)))
    draw.shuffle(tasks)
    doomed = set(draw.sample(range(len(tasks)), round(KILLED * len(tasks))))
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
            assert job.wait(120) == 0 or number in doomed
    # Whatever is left, a last job claims.
    subprocess.run(shardkit_command("work", target, "--claim"), check=True, timeout=120)
    commit(target)
    assert tree(target) == tree(tmp_path / "local")


def _wait_for_a_shard(target: Path, job: subprocess.Popen[bytes]) -> None:
    before = len(_shards(target))
    wait_until(lambda: len(_shards(target)) > before or job.poll() is not None, "a shard")


def _shards(target: Path) -> list[str]:
    return [name for name in os.listdir(target / ".shardkit-work" / "dataset") if name[0] != "."]


def _task(number: int) -> dict[str, str]:
    return {**os.environ, "SLURM_ARRAY_TASK_ID": str(number)}
