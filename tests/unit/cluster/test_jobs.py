"""A conversion in jobs: plan once, claim and build the shards anywhere, commit once."""

from __future__ import annotations

import errno
import itertools
import json
import multiprocessing
import os
import shutil
import signal
import socket
import subprocess
from collections.abc import Callable
from concurrent.futures import Executor, ProcessPoolExecutor, ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from helpers import invoke, make_dataset, make_folder, make_tree, tree, wait_until
from refusals import refused, refuses
from stated import done, stated

from shardkit import ShardkitError, convert, describe
from shardkit.cluster.executors import open_cluster
from shardkit.cluster.jobs import Jobs
from shardkit.cluster.ledger import Ledger
from shardkit.cluster.work import commit, plan_jobs, work
from shardkit.conversion.task import new_result
from shardkit.errors import BadImages, NotPublished, UsageError
from shardkit.system.pool import Progress

OPTIONS: dict[str, Any] = {"to": "lmdb", "resize": 16, "shard_samples": 4}
WORDS = ("--to", "lmdb", "--resize", 16, "--shard-samples", 4, "--plan-only")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A source, its plan of five tasks, the plan with all tasks done, and the whole dataset."""
    root = tmp_path_factory.mktemp("whole")
    source = make_folder(root / "photos", each=10)
    plan(source, root / "planned")
    shutil.copytree(root / "planned", root / "built")
    build(root / "built")
    convert(source, root / "local", workers=1, **OPTIONS)
    return root


@pytest.fixture
def source(whole: Path) -> Path:
    """The source of the plans, which no test changes."""
    return whole / "photos"


@pytest.fixture
def local(whole: Path) -> dict[str, str]:
    """The files of an ordinary conversion."""
    return tree(whole / "local")


@pytest.fixture
def planned(whole: Path, tmp_path: Path) -> Path:
    """A target with a plan of five tasks."""
    return Path(shutil.copytree(whole / "planned", tmp_path / "planned"))


@pytest.fixture
def built(whole: Path, tmp_path: Path) -> Path:
    """A target whose tasks are done."""
    return Path(shutil.copytree(whole / "built", tmp_path / "built"))


@pytest.fixture
def own(tmp_path: Path) -> Path:
    """A source that its test may change."""
    return make_folder(tmp_path / "photos", each=10)


def plan(source: Path, target: Path, *words: object) -> Path:
    done("convert", "imagefolder", source, target, *WORDS, *words)
    assert not (target / "shardkit.json").exists() or "--force" in words
    return target


def build(target: Path, *numbers: int) -> None:
    for number in numbers or range(5):
        done("work", target, "--task", number)


def test_jobs_in_any_order_make_the_same_files(planned: Path, local: dict[str, str]) -> None:
    build(planned, 3, 0, 4, 1, 1, 2)
    done("commit", planned)
    assert tree(planned) == local


@pytest.mark.parametrize("val", ["folders", "0.3"])
def test_splits_are_built_by_the_same_jobs(tmp_path: Path, val: str) -> None:
    for name in ("train", "val") if val == "folders" else ("",):
        make_folder(tmp_path / "photos" / name, each=4)
    options: dict[str, Any] = {} if val == "folders" else {"val": float(val)}
    target = plan(tmp_path / "photos", tmp_path / "planned", *(("--val", val) if options else ()))
    done("work", target, "--claim")
    done("commit", target)
    convert(tmp_path / "photos", tmp_path / "local", workers=1, **OPTIONS, **options)
    assert tree(target) == tree(tmp_path / "local")


def test_an_ordinary_conversion_finishes_the_work_of_jobs(
    source: Path, planned: Path, local: dict[str, str]
) -> None:
    build(planned, 2)
    made = convert(source, planned, workers=1, **OPTIONS)
    assert made.reused_shards == 1
    assert tree(planned) == local


def test_info_states_the_progress(planned: Path) -> None:
    build(planned, 1)
    with refused(NotPublished, "1 of 5", "`shardkit work ") as raised:
        describe(planned)
    assert isinstance(raised.value, NotPublished)
    assert (raised.value.done, raised.value.tasks) == (1, 5)
    assert json.loads(done("info", planned, "--json"))["plan"] == {"done": 1, "tasks": 5}
    build(planned)
    with refused(UsageError, "5 of 5", "`shardkit commit"):
        describe(planned)
    done("commit", planned)
    assert describe(planned)[""]["rows"] == 20


def test_a_commit_names_the_missing_tasks(planned: Path) -> None:
    build(planned, 1)
    before = tree(planned)
    refuses(1, "commit", planned, facts=("4 of 5", "0, 2, 3, 4"))
    assert tree(planned) == before


def test_a_commit_reads_no_image(own: Path, tmp_path: Path) -> None:
    (own / "cat/notes.txt").write_bytes(b"x")
    target = plan(own, tmp_path / "planned")
    build(target)
    for path in own.glob("*/*"):
        path.write_bytes(b"changed")
    assert "1 not an image\n" in done("commit", target)
    assert (stated(target).rows, stated(target).ignored) == (20, {"not an image": 1})


def test_a_committed_plan_is_gone(built: Path) -> None:
    done("commit", built)
    refuses(2, "work", built, "--claim", facts=(built,))
    assert "nothing to commit" in done("commit", built)


def test_a_dataset_that_was_never_planned_is_nothing_to_commit(own: Path, tmp_path: Path) -> None:
    """The command did not make it, and does not say so."""
    place = make_dataset(own, tmp_path / "made")
    told = done("commit", place)
    assert "nothing to commit" in told
    assert "this command" not in told


@pytest.mark.slow
@pytest.mark.parametrize("how", ["new", "exchanged", "file by file"])
def test_a_commit_that_was_interrupted_anywhere_is_repeated(
    whole: Path, tmp_path: Path, local: dict[str, str], how: str
) -> None:
    ready, force = tmp_path / "ready", ("--force",) if how != "new" else ()
    if force:
        convert(whole / "photos", ready, to="hdf5", resize=4, workers=1)
        plan(whole / "photos", ready, *force)
        build(ready)
    else:
        shutil.copytree(whole / "built", ready)
    if how == "file by file":
        make_tree(ready, {"notes.txt": b"1"})
    for at in itertools.count(1, 14):
        target = Path(shutil.copytree(ready, tmp_path / f"planned-{at}"))
        with pytest.MonkeyPatch.context() as patch:
            calls = stop_at(patch, at)
            invoke("commit", target, *force)
        for _ in range(2):
            done("commit", target, *force)
        (target / "notes.txt").unlink(missing_ok=True)
        assert tree(target) == local
        if calls() < at:
            break
    assert at > 30


def stop_at(patch: pytest.MonkeyPatch, at: int) -> Callable[[], int]:
    """Interrupt this process before one of the calls that change folders; return their count."""
    count = 0

    def watched(act: Callable[..., object]) -> Callable[..., object]:
        def step(*args: object, **kwargs: object) -> object:
            nonlocal count
            count += 1
            if count == at:
                raise KeyboardInterrupt
            return act(*args, **kwargs)

        return step

    for name in ("rename", "replace", "unlink", "rmdir", "mkdir", "link"):
        patch.setattr(os, name, watched(getattr(os, name)))
    return lambda: count


def test_a_plan_replaces_a_dataset_only_if_forced(source: Path, tmp_path: Path) -> None:
    target = tmp_path / "old"
    convert(source, target, to="webdataset", workers=1)
    words = ("convert", "imagefolder", source, target, *WORDS)
    refuses(2, *words, facts=(target, "--force"))
    plan(source, target, "--force")
    assert stated(target).format == "webdataset"
    build(target)
    refuses(2, "commit", target, facts=(target, "--force"))
    done("commit", target, "--force")
    assert stated(target).format == "lmdb"


def test_other_versions_of_libraries_are_refused(
    planned: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shardkit.contracts.Format.software", lambda _: {"pillow": "0.1"})
    refuses(2, "work", planned, "--task", 0, facts=("pillow is 0.1",))


def test_bad_images_end_a_job_or_are_left_out(own: Path, tmp_path: Path) -> None:
    (own / "cat" / "000.jpg").write_bytes(b"no image")
    target = plan(own, tmp_path / "planned")
    found = [invoke("work", target, "--task", number) for number in range(5)]
    (bad,) = [each for each in found if each.exit_code]
    assert isinstance(bad.exception, BadImages)
    assert "cat/000.jpg" in bad.output
    refuses(1, "commit", target, facts=("1 of 5",))

    target = plan(own, tmp_path / "skipping", "--on-error", "skip")
    build(target)
    done("commit", target)
    assert [problem.path for problem in stated(target).skipped] == ["cat/000.jpg"]


def test_a_source_elsewhere_is_named_by_the_job(own: Path, tmp_path: Path) -> None:
    planned = plan(own, tmp_path / "planned")
    moved = own.rename(own.with_name("moved"))
    refuses(2, "work", planned, "--claim", facts=("photos", "--source"))
    assert not any(next(planned.rglob("claims")).iterdir())
    done("work", planned, "--task", 0, "--source", moved)


def test_a_damaged_plan_is_an_error(planned: Path) -> None:
    (saved,) = planned.rglob("jobs/plan.json")
    (task,) = planned.rglob("jobs/000000.json")
    intact = saved.read_bytes(), task.read_bytes()
    entries = json.dumps({"entries": [[1, "key", 0, 0, 0, 0, ""]] * 4}).encode()
    contents = (b"", b"{}", b"[1]", b'{"fingerprint": 1}', b"\xff", b'{"source": "x"}', entries)
    for content in contents:
        task.write_bytes(content)
        refuses(2, "work", planned, "--task", 0, facts=("damaged",))
        saved.write_bytes(content)
        refuses(2, "work", planned, "--task", 1, facts=(planned,))
        saved.write_bytes(intact[0])
    task.write_bytes(intact[1])
    for name in ("../out", "/out", "a/b"):  # it writes only below its target
        value = json.loads(intact[0])
        value["splits"][0]["name"] = name
        saved.write_text(json.dumps(value))
        refuses(2, "work", planned, "--task", 0, facts=("damaged",))
    saved.write_bytes(intact[0])
    (digest,) = planned.rglob("state/plan.json")
    digest.write_bytes(digest.read_bytes().replace(b'"digest":"', b'"digest":"0'))
    refuses(2, "work", planned, "--task", 0, facts=(planned,))


def test_a_damaged_list_of_ignored_files_is_an_error(own: Path, tmp_path: Path) -> None:
    for name in ("a.txt", "b.txt"):
        (own / "cat" / name).write_bytes(b"no image")
    target = plan(own, tmp_path / "planned")
    build(target)
    (saved,) = target.rglob("ignored-000.jsonl")
    before = saved.read_bytes()
    for content in (b"", b"{}\n{}\n", b"\xff\n", b"[]\n"):
        saved.write_bytes(content)
        refuses(2, "commit", target, facts=("ignored-000.jsonl",))
    saved.write_bytes(before)
    done("commit", target)
    assert stated(target).ignored == {"not an image": 2}


def test_a_claim_that_cannot_be_removed_hides_no_error(
    own: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    for path in own.glob("*/*"):
        path.write_bytes(b"no image")
    planned = plan(own, tmp_path / "planned")
    monkeypatch.setattr("shardkit.cluster.ledger.remove", fail)
    failed = invoke("work", planned, "--claim")
    assert isinstance(failed.exception, BadImages)
    assert any(next(planned.rglob("claims")).iterdir())


def test_wrong_use_of_the_commands(planned: Path) -> None:
    for words, facts in (
        (("work", planned), ("--task", "--claim")),
        (("work", planned, "--task", 0, "--take-over"), ("--take-over", "--claim")),
        (("work", planned, "--task", 0, "--claim"), ("--task", "--claim")),
        (("work", planned, "--claim", "--kind", "foo"), ("imagefolder", "'foo'")),
        (("work", "missing", "--claim"), ("missing",)),
        (("commit", "missing"), ("missing",)),
        (("work", planned, "--task", 5), ("task 5", "0 to 4")),
        (("verify", planned), (planned, "`shardkit info")),
    ):
        refuses(2, *words, facts=facts)


def test_slurm_numbers_the_tasks(planned: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(5):
        monkeypatch.setenv("SLURM_ARRAY_TASK_ID", str(number))
        assert f"task {number} of 5: shard-00000{number}.lmdb" in done("work", planned)
    assert "task 1 of 5" in done("work", planned, "--task", 1)
    monkeypatch.setenv("SLURM_ARRAY_TASK_ID", "abc")
    refuses(2, "work", planned, facts=("SLURM_ARRAY_TASK_ID", "'abc'"))
    done("work", planned, "--claim")
    assert "20 images in 2 classes" in done("commit", planned)


def test_a_killed_job_leaves_its_task_to_others(planned: Path, local: dict[str, str]) -> None:
    """Kill jobs as soon as they have claimed a task, then let others finish the work."""
    claims = next(planned.rglob("claims"))
    for number in range(3):
        job = os.fork()
        if not job:
            invoke("work", planned, "--claim")
            os._exit(0)
        wait_until((claims / f"{number:06d}").exists, "a claim")
        os.kill(job, signal.SIGKILL)
        os.waitpid(job, 0)
    assert "task" in done("work", planned, "--claim")
    done("commit", planned)
    assert tree(planned) == local


def _run(executor: Executor, source: Path, target: Path, **options: Any) -> None:
    convert(source, target, executor=executor, **OPTIONS, **options)


def test_any_executor_makes_the_same_files(
    source: Path, tmp_path: Path, local: dict[str, str]
) -> None:
    reports: list[Any] = []
    with ThreadPoolExecutor(2) as executor:
        _run(executor, source, tmp_path / "made", on_progress=reports.append)
    assert sum(report.images for report in reports) == 20
    assert tree(tmp_path / "made") == local


def _die(*_: object) -> None:
    os._exit(1)


def test_an_executor_without_processes_is_an_error_that_keeps_work(
    source: Path, tmp_path: Path, local: dict[str, str]
) -> None:
    context = multiprocessing.get_context("forkserver")
    with (
        ProcessPoolExecutor(1, mp_context=context, initializer=_die) as executor,
        refused(ShardkitError, "executor"),
    ):
        _run(executor, source, tmp_path / "made")
    with ThreadPoolExecutor(1) as executor:
        _run(executor, source, tmp_path / "made")
    assert tree(tmp_path / "made") == local


def test_an_address_without_a_cluster(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shardkit.cluster.executors._PATIENCE", "300ms")
    words = ("convert", "imagefolder", source, tmp_path / "made", "--to", "lmdb", "--cluster")
    for address in (
        *("slurm://x", "dask://", "dask://host", "ray://host", "dask://host:99999"),
        "dask://tcp://host:1",
    ):
        refuses(2, *words, address, facts=("dask://HOST:PORT",))
    refuses(2, *words, "dask://127.0.0.1:1", facts=("127.0.0.1:1",))
    monkeypatch.setitem(__import__("sys").modules, "ray", None)
    refuses(2, *words, "ray://x:1", facts=("pip install 'shardkit[ray]'",))


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_the_command_converts_and_plans_on_a_cluster(
    source: Path, tmp_path: Path, local: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    distributed = pytest.importorskip("distributed")
    with distributed.LocalCluster(
        n_workers=2, threads_per_worker=1, dashboard_address=None, processes=True
    ) as dask:
        cluster = ("--cluster", f"dask://{dask.scheduler_address.removeprefix('tcp://')}")
        words = ("convert", "imagefolder", source)
        shown = done(*words, tmp_path / "made", *WORDS[:-1], *cluster)
        assert "20 images in 2 classes" in shown
        assert tree(tmp_path / "made") == local
        monkeypatch.setattr("shardkit.conversion.build_all._FEW", 0)  # so that it lists the folder
        done(*words, tmp_path / "planned", *WORDS, *cluster)
    done(*words, tmp_path / "here", *WORDS)
    assert tree(tmp_path / "planned") == tree(tmp_path / "here")


# Claims of jobs, jobs at the same time, and a cluster whose workers die.


@pytest.fixture
def few(tmp_path: Path) -> Path:
    return make_folder(tmp_path / "photos", each=10)


@pytest.fixture
def claimable(few: Path, tmp_path: Path) -> Path:
    """A target with a plan of five tasks."""
    plan_jobs(few, tmp_path / "claimable", to="lmdb", shard_samples=4)
    return tmp_path / "claimable"


def test_python_samples_cannot_be_planned(tmp_path: Path, few: Path) -> None:
    samples = [{"image": path} for path in few.glob("*/*")]
    with refused(UsageError, "executor="):
        plan_jobs(samples, tmp_path / "x", to="lmdb")


def test_a_claimed_task_is_not_built_twice(claimable: Path) -> None:
    first, second = Jobs(Ledger(claimable)).claimed(), Jobs(Ledger(claimable)).claimed()
    assert [next(first), next(second), next(first), next(second)] == [0, 1, 2, 3]


def test_a_claimed_task_is_not_read(claimable: Path) -> None:
    first = Jobs(Ledger(claimable)).claimed()
    Jobs(Ledger(claimable)).build(next(first))
    assert next(first) == 1
    (task,) = claimable.rglob("jobs/000000.json")
    task.write_bytes(b"")
    assert next(Jobs(Ledger(claimable)).claimed()) == 2


def test_claims_of_the_dead_and_of_failures_are_void(claimable: Path) -> None:
    claims = next(claimable.rglob("claims"))
    dead = subprocess.Popen(["true"])
    dead.wait()
    here = {"machine": socket.gethostname(), "process": dead.pid}
    (claims / "000000").write_text(json.dumps(here))
    (claims / "000001").write_text(json.dumps({"machine": "elsewhere", "process": 1}))
    assert list(Jobs(Ledger(claimable)).claimed()) == [0, 2, 3, 4]
    assert list(Jobs(Ledger(claimable)).claimed(take_over=True)) == [0, 1, 2, 3, 4]


def test_two_jobs_may_build_one_shard_at_once(claimable: Path, few: Path, tmp_path: Path) -> None:
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda number: Jobs(Ledger(claimable)).build(number % 5), range(20)))
    assert all(built.result.entry for built in found)
    commit(claimable)
    convert(few, tmp_path / "local", to="lmdb", shard_samples=4, workers=1)
    assert tree(claimable) == tree(tmp_path / "local")


def test_a_job_may_save_its_part_while_another_removes_the_older_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    part = tmp_path / "parts" / "000000"
    make_tree(part, {"older": b""})
    remove = shutil.rmtree

    def remove_late(path: Path) -> None:
        """Remove a folder as `rmtree` does, in which another job saves its result meanwhile."""
        monkeypatch.setattr(shutil, "rmtree", remove)
        (path / "older").unlink()
        (path / "of another").touch()
        os.rmdir(path)

    monkeypatch.setattr(shutil, "rmtree", remove_late)
    with new_result(SimpleNamespace(result_folder=part)) as new:  # type: ignore[arg-type]
        (new / "ours").touch()

    assert [str(path.relative_to(part.parent)) for path in part.parent.rglob("*")] == [
        "000000",
        "000000/ours",
    ]


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_dask_builds_the_shards_of_killed_workers_elsewhere(few: Path, tmp_path: Path) -> None:
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

    convert(few, tmp_path / "local", to="lmdb", shard_samples=4, workers=1)
    with distributed.LocalCluster(  # it starts again those that die
        n_workers=3, threads_per_worker=1, dashboard_address=None, processes=True
    ) as dask:
        address = dask.scheduler_address.removeprefix("tcp://")
        with open_cluster(f"dask://{address}") as cluster:
            before = cluster.members()
            assert len(before) == 3
            made = convert(
                few,
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


# `work` builds the tasks of a plan from Python, as `shardkit work` does.


@pytest.fixture
def work_source(tmp_path: Path) -> Path:
    return make_folder(tmp_path / "photos", each=4)


def test_the_steps_make_the_files_of_one_conversion(work_source: Path, tmp_path: Path) -> None:
    options: dict[str, Any] = {"to": "lmdb", "shard_samples": 3}
    convert(work_source, tmp_path / "local", **options)
    target = tmp_path / "planned"
    plan_jobs(work_source, target, **options)
    opened, seen = [], []

    assert list(work(target, task=1, on_open=lambda jobs: opened.append(jobs.kind))) == [1]
    built = work(target, claim=True, on_task=lambda number, tasks, _: seen.append((number, tasks)))

    assert opened == ["imagefolder"]
    assert seen == [(0, 3), (2, 3)]
    assert sorted(built) == [0, 2]
    assert work(target, claim=True) == {}
    commit(target)
    assert tree(target) == tree(tmp_path / "local")


def test_bad_images_of_a_task_are_raised(work_source: Path, tmp_path: Path) -> None:
    plan_jobs(work_source, tmp_path / "planned", to="lmdb")
    victim = next(work_source.rglob("*.jpg"))
    victim.write_bytes(b"x" * victim.stat().st_size)
    with pytest.raises(BadImages, match="1 bad file") as caught:
        work(tmp_path / "planned", task=0)
    assert [problem.path for problem in caught.value.problems] == [
        victim.relative_to(work_source).as_posix()
    ]


def test_a_task_must_be_chosen(work_source: Path, tmp_path: Path) -> None:
    with refused(UsageError, tmp_path / "nope", "plan"):  # the choice would not help
        work(tmp_path / "nope")
    plan_jobs(work_source, tmp_path / "planned", to="lmdb")
    with refused(UsageError, "task=", "claim="):
        work(tmp_path / "planned")
    with pytest.raises(UsageError, match="take_over= requires claim="):
        work(tmp_path, task=0, take_over=True)
    with refused(UsageError, "task=-1", "0"):
        work(tmp_path, task=-1)
