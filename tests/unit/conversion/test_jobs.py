"""A conversion in jobs: plan once, build the shards anywhere, commit once."""

from __future__ import annotations

import contextlib
import errno
import itertools
import json
import multiprocessing
import os
import shutil
import signal
import socket
import subprocess
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, ProcessPoolExecutor, ThreadPoolExecutor
from pathlib import Path

import pytest
from helpers import invoke, make_folder, make_tree, shardkit_command, tree, wait_until

from shardkit import describe
from shardkit.conversion import build, build_all
from shardkit.conversion import jobs as module
from shardkit.conversion.convert import Converted, commit, convert, plan_jobs
from shardkit.conversion.jobs import Jobs
from shardkit.conversion.ledger import Ledger
from shardkit.conversion.plan import software_of
from shardkit.errors import BadImages, ConversionFailed, NotPublished, ShardkitError, UsageError
from shardkit.record import dump_json
from shardkit.system.cluster import open_cluster
from shardkit.system.pool import Progress


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return make_folder(tmp_path / "photos", each=10)


@pytest.fixture
def local(source: Path, tmp_path: Path) -> dict[str, str]:
    """The files of an ordinary conversion."""
    convert(source, tmp_path / "local", to="lmdb", resize=16, shard_samples=4)
    return tree(tmp_path / "local")


@pytest.fixture
def planned(source: Path, tmp_path: Path) -> Path:
    """A target with a plan of five tasks."""
    return plan(source, tmp_path / "planned")


def plan(source: Path, target: Path, **options: object) -> Path:
    made = plan_jobs(source, target, to="lmdb", resize=16, shard_samples=4, **options)  # type: ignore[arg-type]
    assert not made.manifests
    return target


def test_jobs_in_any_order_make_the_same_files(planned: Path, local: dict[str, str]) -> None:
    for number in (3, 0, 4, 1, 1, 2):
        Jobs(Ledger(planned)).build(number)
    made = commit(planned)
    assert tree(planned) == local
    assert made.manifests[""].rows == 20


def test_splits_are_built_by_the_same_jobs(tmp_path: Path) -> None:
    for name in ("train", "val"):
        make_folder(tmp_path / "photos" / name, each=4)
    target = plan(tmp_path / "photos", tmp_path / "planned")
    for number in Jobs(Ledger(target)).claimed():
        Jobs(Ledger(target)).build(number)
    commit(target)
    convert(tmp_path / "photos", tmp_path / "local", to="lmdb", resize=16, shard_samples=4)
    assert tree(target) == tree(tmp_path / "local")


def test_a_divided_source_is_built_by_the_same_jobs(source: Path, tmp_path: Path) -> None:
    target = plan(source, tmp_path / "planned", val=0.3)
    for number in Jobs(Ledger(target)).claimed():
        Jobs(Ledger(target)).build(number)
    commit(target)
    convert(source, tmp_path / "local", to="lmdb", resize=16, shard_samples=4, val=0.3)
    assert tree(target) == tree(tmp_path / "local")


def test_an_ordinary_conversion_finishes_the_work_of_jobs(
    source: Path, planned: Path, local: dict[str, str]
) -> None:
    Jobs(Ledger(planned)).build(2)
    made = convert(source, planned, to="lmdb", resize=16, shard_samples=4)
    assert made.reused_shards == 1
    assert tree(planned) == local


def test_info_states_the_progress(planned: Path) -> None:
    Jobs(Ledger(planned)).build(1)
    with pytest.raises(
        NotPublished, match=r"1 of 5 tasks are done: build .* `shardkit work "
    ) as raised:
        describe(planned)
    assert (raised.value.done, raised.value.tasks) == (1, 5)
    plan = json.loads(invoke("info", planned, "--json").stdout)["plan"]
    assert plan == {"done": 1, "tasks": 5}
    for number in range(5):
        Jobs(Ledger(planned)).build(number)
    with pytest.raises(UsageError, match="5 of 5 tasks are done: publish it with `shardkit commit"):
        describe(planned)
    commit(planned)
    assert describe(planned)[""]["rows"] == 20


def test_a_commit_counts_ignored_files(source: Path, tmp_path: Path) -> None:
    (source / "cat/notes.txt").write_bytes(b"x")
    target = plan(source, tmp_path / "planned")
    for number in range(5):
        Jobs(Ledger(target)).build(number)
    assert "  ignored   1 not an image\n" in invoke("commit", target).stdout


def test_a_commit_names_the_missing_tasks(planned: Path) -> None:
    Jobs(Ledger(planned)).build(1)
    before = tree(planned)
    with pytest.raises(ConversionFailed, match=r"4 of 5 tasks are not done: 0, 2, 3, 4\."):
        commit(planned)
    assert tree(planned) == before


def test_a_commit_reads_no_image(planned: Path, source: Path) -> None:
    for number in range(5):
        Jobs(Ledger(planned)).build(number)
    for path in source.glob("*/*"):
        path.write_bytes(b"changed")
    assert commit(planned).manifests[""].rows == 20


def test_a_committed_plan_is_gone(planned: Path) -> None:
    for number in range(5):
        Jobs(Ledger(planned)).build(number)
    commit(planned)
    with pytest.raises(UsageError, match="holds no plan: its dataset is complete"):
        Jobs(Ledger(planned))
    again = invoke("commit", planned)
    assert again.exit_code == 0
    assert "already holds the result" in again.output


@pytest.mark.parametrize("how", ["new", "exchanged", "file by file"])
def test_a_commit_that_was_killed_anywhere_is_repeated(
    source: Path, tmp_path: Path, local: dict[str, str], monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    ready, older = tmp_path / "ready", how != "new"
    if older:
        convert(source, ready, to="hdf5")
    plan(source, ready, force=older)
    for number in range(5):
        Jobs(Ledger(ready)).build(number)
    if how == "file by file":
        make_tree(ready, {"notes.txt": b"1"})
    for at in itertools.count(1, 5):
        target = Path(shutil.copytree(ready, tmp_path / f"planned-{at}"))
        with monkeypatch.context() as patch:
            calls = stop_at(patch, at)
            with contextlib.suppress(KeyboardInterrupt):
                commit(target, force=older)
        for _ in range(2):
            assert commit(target, force=older).manifests[""].rows == 20
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


def test_a_plan_replaces_a_dataset_only_if_forced(
    source: Path, planned: Path, tmp_path: Path
) -> None:
    target = tmp_path / "old"
    convert(source, target, to="webdataset")
    with pytest.raises(UsageError, match="force=True replaces it"):
        plan(source, target)
    plan(source, target, force=True)
    assert (target / "shardkit.json").exists()
    for number in range(5):
        Jobs(Ledger(target)).build(number)
    with pytest.raises(UsageError, match="force=True replaces it"):
        commit(target)
    assert commit(target, force=True).manifests[""].format == "lmdb"


def test_an_unknown_task_is_refused(planned: Path) -> None:
    with pytest.raises(UsageError, match=r"there is no task 5; .* has tasks 0 to 4"):
        Jobs(Ledger(planned)).build(5)


def test_other_versions_of_libraries_are_refused(
    planned: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build, "software_of", lambda *a: {**software_of(*a), "pillow": "0.1"})
    with pytest.raises(UsageError, match=r"would write other bytes: pillow is 0\.1, and .* was"):
        Jobs(Ledger(planned)).build(0)


def test_bad_images_end_a_job_and_are_named(source: Path, planned: Path) -> None:
    (source / "cat" / "000.jpg").write_bytes(b"no image")
    found = [invoke("work", planned, "--task", number) for number in range(5)]
    (bad,) = [each for each in found if each.exit_code]
    assert isinstance(bad.exception, BadImages)
    assert "cat/000.jpg" in bad.output
    with pytest.raises(ConversionFailed, match="1 of 5 tasks"):
        commit(planned)


def test_bad_images_may_be_left_out(source: Path, tmp_path: Path) -> None:
    (source / "cat" / "000.jpg").write_bytes(b"no image")
    target = plan(source, tmp_path / "planned", on_error="skip")
    for number in range(5):
        Jobs(Ledger(target)).build(number)
    (problem,) = commit(target).manifests[""].skipped
    assert problem.path == "cat/000.jpg"


def test_a_source_elsewhere_is_named_by_the_job(source: Path, planned: Path) -> None:
    moved = source.rename(source.with_name("moved"))
    with pytest.raises(UsageError, match=r"photos is not on .* --source"):
        next(Jobs(Ledger(planned)).claimed())
    assert not any(next(planned.rglob("claims")).iterdir())
    assert Jobs(Ledger(planned), moved).build(0).result.entry


@pytest.mark.parametrize(
    "content",
    [
        *(b"", b"{}", b"[1]", b'{"fingerprint": 1}', b"\xff", b'{"source": "x"}'),
        dump_json({"entries": [[1, "key", 0, 0, 0, 0, ""]] * 4}),
    ],
)
def test_a_damaged_plan_is_an_error(planned: Path, content: bytes) -> None:
    (saved,) = planned.rglob("jobs/plan.json")
    (task,) = planned.rglob("jobs/000000.json")
    task.write_bytes(content)
    with pytest.raises(UsageError, match="damaged"):
        Jobs(Ledger(planned)).build(0)
    saved.write_bytes(content)
    with pytest.raises(UsageError, match=r"damaged|another conversion"):
        Jobs(Ledger(planned))


@pytest.mark.parametrize("name", ["../out", "/out", "a/b"])
def test_a_plan_writes_only_below_its_target(planned: Path, name: str) -> None:
    (saved,) = planned.rglob("jobs/plan.json")
    value = json.loads(saved.read_bytes())
    value["splits"][0]["name"] = name
    saved.write_text(json.dumps(value))
    with pytest.raises(UsageError, match="damaged"):
        Jobs(Ledger(planned))


@pytest.mark.parametrize("content", [b"", b"{}\n{}\n", b"\xff\n", b"[]\n"])
def test_a_damaged_list_of_ignored_files_is_an_error(
    source: Path, tmp_path: Path, content: bytes
) -> None:
    for name in ("a.txt", "b.txt"):
        (source / "cat" / name).write_bytes(b"no image")
    target = plan(source, tmp_path / "planned")
    for number in range(5):
        Jobs(Ledger(target)).build(number)
    (saved,) = target.rglob("ignored-000.jsonl")
    before = saved.read_bytes()
    saved.write_bytes(content)
    with pytest.raises(UsageError, match=r"ignored-000.jsonl is damaged"):
        commit(target)
    saved.write_bytes(before)
    assert commit(target).manifests[""].ignored == {"not an image": 2}


def test_another_conversion_in_the_target_voids_the_plan(source: Path, planned: Path) -> None:
    (saved,) = planned.rglob("state/plan.json")
    saved.write_bytes(saved.read_bytes().replace(b'"digest":"', b'"digest":"0'))
    with pytest.raises(UsageError, match="another conversion was started"):
        Jobs(Ledger(planned))


def test_python_samples_cannot_be_planned(tmp_path: Path, source: Path) -> None:
    samples = [{"image": path} for path in source.glob("*/*")]
    with pytest.raises(UsageError, match="executor="):
        plan_jobs(samples, tmp_path / "x", to="lmdb")


def test_a_claimed_task_is_not_built_twice(planned: Path) -> None:
    first, second = Jobs(Ledger(planned)).claimed(), Jobs(Ledger(planned)).claimed()
    assert [next(first), next(second), next(first), next(second)] == [0, 1, 2, 3]


def test_a_claim_that_cannot_be_removed_hides_no_error(
    planned: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise OSError(errno.EIO, "Input/output error")

    claimed = Jobs(Ledger(planned)).claimed()
    next(claimed)
    monkeypatch.setattr(module, "remove", fail)
    claimed.close()


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


def test_two_jobs_may_build_one_shard_at_once(planned: Path, local: dict[str, str]) -> None:
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda number: Jobs(Ledger(planned)).build(number % 5), range(20)))
    assert all(built.result.entry for built in found)
    commit(planned)
    assert tree(planned) == local


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["work", "DST"], "choose --task or --claim"),
        (["work", "DST", "--task", "0", "--take-over"], "--take-over requires --claim"),
        (["work", "DST", "--task", "0", "--claim"], "--task and --claim exclude each other"),
        (["work", "DST", "--claim", "--kind", "foo"], "reads imagefolder, not 'foo'"),
        (["work", "missing", "--claim"], "missing holds no plan"),
        (["commit", "missing"], "missing holds no plan"),
        (["work", "DST", "--task", "77"], "there is no task 77"),
        (["verify", "DST"], "it is planned, but not built: `shardkit info"),
    ],
)
def test_wrong_use_of_the_commands(planned: Path, arguments: list[str], message: str) -> None:
    found = invoke(*(planned if each == "DST" else each for each in arguments))
    assert isinstance(found.exception, UsageError)
    assert message in str(found.exception)


def test_slurm_numbers_the_tasks(planned: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(5):
        monkeypatch.setenv("SLURM_ARRAY_TASK_ID", str(number))
        assert f"task {number} of 5: shard-00000{number}.lmdb" in invoke("work", planned).output
    assert "task 1 of 5" in invoke("work", planned, "--task", 1).output
    monkeypatch.setenv("SLURM_ARRAY_TASK_ID", "abc")
    failed = invoke("work", planned)
    assert failed.exit_code == 2
    assert "SLURM_ARRAY_TASK_ID is 'abc', not the number of a task" in failed.stderr
    assert invoke("work", planned, "--claim").exit_code == 0
    assert "20 images in 2 classes" in invoke("commit", planned).output


def test_a_killed_job_leaves_its_task_to_others(planned: Path, local: dict[str, str]) -> None:
    """Kill jobs as soon as they have claimed a task, then let others finish the work."""
    claims = next(planned.rglob("claims"))
    for number in range(3):
        job = subprocess.Popen(shardkit_command("work", planned, "--claim"))
        claim = claims / f"{number:06d}"
        wait_until(claim.exists, "a claim")
        job.send_signal(signal.SIGKILL)
        job.wait()
    assert "task" in invoke("work", planned, "--claim").output
    commit(planned)
    assert tree(planned) == local


def _run(executor: Executor, source: Path, target: Path) -> Converted:
    return convert(source, target, to="lmdb", resize=16, shard_samples=4, executor=executor)


def test_any_executor_makes_the_same_files(
    source: Path, tmp_path: Path, local: dict[str, str]
) -> None:
    with ThreadPoolExecutor(2) as executor:
        images = 0

        def count(progress: Progress) -> None:
            nonlocal images
            images += progress.images

        convert(
            source,
            tmp_path / "made",
            to="lmdb",
            resize=16,
            shard_samples=4,
            executor=executor,
            on_progress=count,
        )
    assert images == 20
    assert tree(tmp_path / "made") == local


def _die(*_: object) -> None:
    os._exit(1)


def test_an_executor_without_processes_is_an_error_that_keeps_work(
    source: Path, tmp_path: Path, local: dict[str, str]
) -> None:
    spawn = multiprocessing.get_context("spawn")
    with (
        ProcessPoolExecutor(1, mp_context=spawn, initializer=_die) as executor,
        pytest.raises(ShardkitError, match="a worker of the executor died"),
    ):
        _run(executor, source, tmp_path / "made")
    with ThreadPoolExecutor(1) as executor:
        _run(executor, source, tmp_path / "made")
    assert tree(tmp_path / "made") == local


@pytest.mark.parametrize(
    ("address", "message"),
    [
        ("slurm://x", "is not dask://HOST:PORT"),
        ("dask://", "is not dask://HOST:PORT"),
        ("dask://host", "is not dask://HOST:PORT"),
        ("ray://host", "is not dask://HOST:PORT"),
        ("dask://host:99999", "is not dask://HOST:PORT"),
        ("dask://tcp://host:1", "is not dask://HOST:PORT"),
        ("dask://127.0.0.1:1", "no Dask scheduler answers at 127.0.0.1:1"),
    ],
)
def test_an_address_without_a_cluster(
    address: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shardkit.system.cluster._PATIENCE", "300ms")
    with pytest.raises(UsageError, match=message), open_cluster(address):
        pass


def test_a_missing_library_names_its_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "ray", None)
    with (
        pytest.raises(UsageError, match=r"pip install 'shardkit\[ray\]'"),
        open_cluster("ray://x:1"),
    ):
        pass


@pytest.fixture
def dask() -> Iterator[str]:
    """A scheduler with three processes; each is restarted when it dies."""
    distributed = pytest.importorskip("distributed")
    with distributed.LocalCluster(
        n_workers=3, threads_per_worker=1, dashboard_address=None, processes=True
    ) as cluster:
        yield cluster.scheduler_address.removeprefix("tcp://")


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_dask_builds_the_shards_of_killed_workers_elsewhere(
    source: Path, tmp_path: Path, dask: str, local: dict[str, str]
) -> None:
    import psutil

    with open_cluster(f"dask://{dask}") as cluster:
        before = cluster.members()
        assert len(before) == 3
        killed: list[int] = []

        def kill(progress: Progress) -> None:
            if progress.images and not killed:
                workers = [
                    each
                    for each in psutil.Process().children(recursive=True)
                    if not each.children() and "spawn_main" in " ".join(each.cmdline())
                ]
                killed.append(workers[0].pid)
                workers[0].kill()

        made = convert(
            source,
            tmp_path / "made",
            to="lmdb",
            resize=16,
            shard_samples=4,
            executor=cluster.executor,
            on_progress=kill,
        )
        assert killed
        wait_until(lambda: before - cluster.members(), "Dask to notice")
    assert made.manifests[""].rows == 20
    assert tree(tmp_path / "made") == local


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_the_command_converts_on_a_cluster(
    source: Path, tmp_path: Path, dask: str, local: dict[str, str]
) -> None:
    options = ("--to", "lmdb", "--resize", 16, "--shard-samples", 4)
    target = tmp_path / "made"
    found = invoke(
        "convert", "imagefolder", source, target, *options, "--cluster", f"dask://{dask}"
    )
    assert found.exit_code == 0, found.exception
    assert "20 images in 2 classes" in found.output
    assert tree(target) == local


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_a_cluster_lists_the_folder_of_a_plan(
    source: Path, tmp_path: Path, dask: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = ("--to", "lmdb", "--shard-samples", 4, "--plan-only")
    for name, cluster in (("local", ()), ("cluster", ("--cluster", f"dask://{dask}"))):
        found = invoke("convert", "imagefolder", source, tmp_path / name, *options, *cluster)
        assert found.exit_code == 0, found.exception
        monkeypatch.setattr(build_all, "_FEW", 0)
    assert tree(tmp_path / "cluster") == tree(tmp_path / "local")
