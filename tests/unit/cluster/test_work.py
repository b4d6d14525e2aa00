"""`work` builds the tasks of a plan from Python, as `shardkit work` does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from helpers import make_folder, tree
from refusals import refused

from shardkit import UsageError, convert
from shardkit.cluster.work import commit, plan_jobs, work
from shardkit.errors import BadImages


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return make_folder(tmp_path / "photos", each=4)


def test_the_steps_make_the_files_of_one_conversion(source: Path, tmp_path: Path) -> None:
    options: dict[str, Any] = {"to": "lmdb", "shard_samples": 3}
    convert(source, tmp_path / "local", **options)
    target = tmp_path / "planned"
    plan_jobs(source, target, **options)
    opened, seen = [], []

    assert list(work(target, task=1, on_open=lambda jobs: opened.append(jobs.kind))) == [1]
    built = work(target, claim=True, on_task=lambda number, tasks, _: seen.append((number, tasks)))

    assert opened == ["imagefolder"]
    assert seen == [(0, 3), (2, 3)]
    assert sorted(built) == [0, 2]
    assert work(target, claim=True) == {}
    commit(target)
    assert tree(target) == tree(tmp_path / "local")


def test_bad_images_of_a_task_are_raised(source: Path, tmp_path: Path) -> None:
    plan_jobs(source, tmp_path / "planned", to="lmdb")
    victim = next(source.rglob("*.jpg"))
    victim.write_bytes(b"x" * victim.stat().st_size)
    with pytest.raises(BadImages, match="1 bad file") as caught:
        work(tmp_path / "planned", task=0)
    assert [problem.path for problem in caught.value.problems] == [
        victim.relative_to(source).as_posix()
    ]


def test_a_task_must_be_chosen(source: Path, tmp_path: Path) -> None:
    with refused(UsageError, tmp_path / "nope", "plan"):  # the choice would not help
        work(tmp_path / "nope")
    plan_jobs(source, tmp_path / "planned", to="lmdb")
    with refused(UsageError, "task=", "claim="):
        work(tmp_path / "planned")
    with pytest.raises(UsageError, match="take_over= requires claim="):
        work(tmp_path, task=0, take_over=True)
    with refused(UsageError, "task=-1", "0"):
        work(tmp_path, task=-1)
