"""Jobs that share only a bucket make the same files as a local conversion, or name the error."""

from __future__ import annotations

import contextlib
import copy
import errno
import fcntl
import hashlib
import io
import os
import zipfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from buckets import BUCKET, SECRET, Bucket
from helpers import invoke, make_dataset, make_folder, tree
from refusals import refused, refuses

from shardkit import ShardkitError, convert, describe, upload
from shardkit.cluster.jobs import open_jobs, receive_results
from shardkit.cluster.ledger import BucketLedger, Ledger, local_folder
from shardkit.cluster.work import commit, plan_jobs
from shardkit.conversion.plan import Plan
from shardkit.errors import BadImages, ConversionFailed, DiskFull, UsageError
from shardkit.remote import bucket as bucket_module
from shardkit.remote import objects
from shardkit.remote import upload as upload_module
from shardkit.remote.process import call
from shardkit.remote.upload import CLAIM
from shardkit.system import temporary

URL = f"s3://{BUCKET}/data"


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return make_folder(tmp_path / "photos", each=6)


def plan(source: Path, **options: object) -> int:
    made = plan_jobs(source, URL, to="lmdb", resize=16, shard_samples=4, **options)
    assert not made.manifests
    return made.jobs


def work(*numbers: int) -> None:
    with open_jobs(URL) as jobs:
        for number in numbers:
            jobs.build(number)


def local(source: Path, **options: object) -> dict[str, str]:
    """The files of an ordinary conversion, and their SHA-256."""
    target = source.parent / "local"
    convert(source, target, to="lmdb", resize=16, shard_samples=4, workers=1, **options)  # type: ignore[arg-type]
    return {name: digest for name, digest in tree(target).items() if digest != "folder"}


def held(bucket: Bucket) -> dict[str, str]:
    """All objects of the bucket, as `tree` shows files."""
    return {
        name.removeprefix("data/"): hashlib.sha256(bucket.ask("GET", name)).hexdigest()
        for name in bucket.names()
    }


def test_no_cluster_lists_a_folder_for_a_plan_in_a_bucket(bucket: Bucket, folder: Path) -> None:
    with (
        ThreadPoolExecutor(1) as executor,
        refused(UsageError, URL),
    ):
        plan_jobs(folder, URL, to="lmdb", executor=executor)

    assert not bucket.names()


@pytest.mark.slow
def test_jobs_make_the_files_of_a_local_conversion(bucket: Bucket, source: Path) -> None:
    assert plan(source) == 3
    with refused(ConversionFailed, "3 of 3", "0, 1, 2", URL):
        commit(URL)
    work(2, 0, 0)
    before = bucket.names()
    with refused(ConversionFailed, "1 of 3", ": 1 "):
        commit(URL)
    with refused(UsageError, "2 of 3", f"shardkit work {URL} --claim"):
        describe(URL)
    assert bucket.names() == before
    work(1)
    commit(URL)
    assert held(bucket) == local(source)


@pytest.mark.slow
def test_a_commit_needs_no_shard_and_may_be_repeated(
    bucket: Bucket, source: Path, tmp_path: Path
) -> None:
    plan(source)
    (tmp_path / "staging").mkdir()
    with open_jobs(URL, staging=tmp_path / "staging") as jobs:
        assert [jobs.build(number).kept for number in (0, 1, 2, 1)] == [False] * 3 + [True]
    bucket.requests.clear()

    assert commit(URL, staging=tmp_path / "staging").manifests[""].rows == 12

    assert not any(method == "GET" and ".lmdb" in path for method, path in bucket.requests)
    assert held(bucket) == local(source)
    assert not list((tmp_path / "staging").iterdir())
    with refused(UsageError):
        work()
    assert commit(URL).unchanged
    with refused(UsageError, URL):
        plan(source, force=True)
    assert held(bucket) == local(source)


def test_a_job_names_bad_images_and_is_not_done(bucket: Bucket, source: Path) -> None:
    (source / "cat" / "000.jpg").write_bytes(b"no image")
    plan(source)
    found = invoke("work", URL, "--claim")
    assert isinstance(found.exception, BadImages)
    assert "cat/000.jpg" in found.output
    done = [name for name in bucket.names() if "/results/" in name]
    assert len([name for name in bucket.names() if "/claims/" in name]) == len(done) < 3
    with refused(ConversionFailed, "of 3"):
        commit(URL)


@pytest.mark.slow
def test_splits_and_left_out_images(bucket: Bucket, tmp_path: Path) -> None:
    source = tmp_path / "photos"
    for name in ("train", "val"):
        make_folder(source / name, each=2)
    (source / "val" / "cat" / "000.jpg").write_bytes(b"no image")
    plan(source, on_error="skip")
    work(0, 1)
    commit(URL)

    assert held(bucket) == local(source, on_error="skip")


def test_what_killed_jobs_left_here_is_removed(tmp_path: Path) -> None:
    with local_folder(tmp_path) as used:
        digit = "10"[used.name[-1] == "1"]
        abandoned, theirs = (used.with_name(used.name[:-1] + end) for end in (digit, "-mine"))
        for folder in (abandoned, theirs):
            (folder / "jobs").mkdir(parents=True)  # a moment ago
        os.utime(used, (0, 0))
        with local_folder(tmp_path) as other:
            assert set(tmp_path.iterdir()) == {used, other, theirs}


def test_a_folder_that_is_taken_for_abandoned_is_created_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    created: list[Path] = []
    real = fcntl.flock

    def flock(descriptor: int, kind: int) -> None:
        """Before the lock of the first two folders, another job removes them."""
        if kind == fcntl.LOCK_EX and len(created) < 2:
            (folder,) = tmp_path.iterdir()
            created.append(folder)
            temporary._remove_abandoned(folder.parent, folder.name)
        real(descriptor, kind)

    monkeypatch.setattr(fcntl, "flock", flock)
    with local_folder(tmp_path) as place:
        assert list(tmp_path.iterdir()) == [place]
        assert len({place, *created}) == 3
    assert not list(tmp_path.iterdir())


def test_a_claim_that_cannot_be_removed_hides_no_error(
    bucket: Bucket, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        bucket.rates = {"denied": 1.0}
        raise ConversionFailed("the disk is gone")

    plan(source)
    monkeypatch.setattr(BucketLedger, "put_result", fail)
    bucket.requests.clear()
    failed = invoke("work", URL, "--claim")  # an error of a generator would be a warning, too
    assert isinstance(failed.exception, ConversionFailed)
    assert bucket.requests[-1][0] in ("POST", "DELETE")  # it was tried, before the command ended


def test_a_full_disk_is_named(tmp_path: Path) -> None:
    with refused(DiskFull, tmp_path), local_folder(tmp_path):
        raise OSError(errno.ENOSPC, "No space left on device")
    assert not list(tmp_path.iterdir())


def test_a_task_is_claimed_once(bucket: Bucket, source: Path) -> None:
    plan(source)
    with open_jobs(URL) as one, open_jobs(URL) as two:
        first, second = one.claimed(), two.claimed()
        number = next(first)
        rest = {0, 1, 2} - {number}
        assert {two.build(next(second)).kept, two.build(next(second)).kept} == {False}
        assert next(second, None) is None
        assert list(two.claimed(take_over=True)) == [number]
        del first  # its claim is void
        assert list(one.claimed()) == [number]
        assert {int(name[-6:]) for name in bucket.names() if "/results/" in name} == rest


def test_a_job_that_is_slower_looks_for_other_tasks(bucket: Bucket, source: Path) -> None:
    plan(source)
    with open_jobs(URL) as one, open_jobs(URL) as two:
        first = one.claimed()
        one.build(next(first))  # it has seen two more
        for number in two.claimed():
            two.build(number)
        assert list(first) == []


@pytest.mark.slow
def test_another_plan_is_discarded_only_if_forced(bucket: Bucket, source: Path) -> None:
    plan(source)
    assert plan(source) == 3  # an interrupted plan is repeated
    with open_jobs(URL) as late:
        late.build(1)
        with refused(UsageError, URL, "--force"):
            plan(source, seed=1)
        with refused(UsageError, URL, CLAIM):
            upload(make_dataset(source, source.parent / "other"), URL)
        plan(source, seed=1, force=True)
        assert not [name for name in bucket.names() if name.endswith(".lmdb")]
        with refused(UsageError):
            late.build(2)
    work(1)


@pytest.mark.slow
def test_a_plan_that_is_being_committed_cannot_be_discarded(bucket: Bucket, source: Path) -> None:
    plan(source)
    work(0, 1, 2)
    assert BucketLedger.open(URL, Path()).end(b"commit")
    with refused(UsageError, URL):
        plan(source, seed=1, force=True)
    commit(URL)
    assert held(bucket) == local(source)


def _discard_in_part(bucket: Bucket, source: Path) -> None:
    assert BucketLedger.open(URL, Path()).end(b"discard")


def _discard_and_forget(bucket: Bucket, source: Path) -> None:
    plan(source, seed=1, force=True)
    for name in bucket.names():
        if name.endswith("/end"):
            bucket.ask("DELETE", name)


@pytest.mark.slow
@pytest.mark.parametrize("meanwhile", [_discard_in_part, _discard_and_forget])
def test_a_discarded_plan_cannot_be_committed(
    bucket: Bucket,
    source: Path,
    monkeypatch: pytest.MonkeyPatch,
    meanwhile: Callable[[Bucket, Path], None],
) -> None:
    plan(source)
    work(0, 1, 2)

    def receive_then(ledger: Ledger) -> Plan:
        received = receive_results(ledger)
        meanwhile(bucket, source)
        return received

    monkeypatch.setattr("shardkit.cluster.work.receive_results", receive_then)
    with refused(UsageError):
        commit(URL)
    assert not {"data/shardkit.json", "data/index/rows.npy"} & set(bucket.names())


def test_a_split_that_holds_a_dataset_is_refused(bucket: Bucket, tmp_path: Path) -> None:
    made = make_dataset(make_folder(tmp_path / "other"), tmp_path / "made")
    upload(made, f"{URL}/val")
    for name in ("train", "val"):
        make_folder(tmp_path / "photos" / name)
    before = bucket.names()
    with refused(UsageError, f"{URL}/val"):
        plan(tmp_path / "photos")
    assert bucket.names() == before


def test_an_upload_is_not_discarded(bucket: Bucket, source: Path) -> None:
    bucket.put(f"data/{CLAIM}", b'{"manifest":"of another upload"}')
    with pytest.raises(UsageError, match="another upload"):
        plan(source, force=True)


def test_a_plan_is_complete_before_jobs_start(bucket: Bucket, source: Path) -> None:
    plan(source)
    (task,) = [name for name in bucket.names() if name.endswith("/000002.json")]
    (head,) = [name for name in bucket.names() if name.endswith("/jobs/plan.json")]
    bucket.ask("DELETE", task)
    bucket.ask("DELETE", head)
    with refused(UsageError):
        work(0)
    plan(source)
    work(2)


@pytest.mark.slow
def test_a_shard_that_differs_is_built_again(bucket: Bucket, source: Path, tmp_path: Path) -> None:
    plan(source)
    work(0, 1, 2)
    bucket.put("data/shard-000001.lmdb", b"of another plan")
    (result,) = [name for name in bucket.names() if name.endswith("results/000002")]
    (tmp_path / "000002").write_bytes(b"PK no zip")
    call(objects.send, f"s3://{BUCKET}/{Path(result).parent}", tmp_path, ["000002"])
    with refused(ConversionFailed, "2 of 3", "1, 2"):
        commit(URL)
    with open_jobs(URL) as jobs:
        assert {number for number in jobs.claimed() if not jobs.build(number).kept} == {1, 2}
    commit(URL)
    assert held(bucket) == local(source)


@pytest.mark.slow
def test_a_killed_commit_leaves_a_dataset(
    bucket: Bucket, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan(source)
    work(0, 1, 2)

    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as during:
        during.setattr(bucket_module, "_remove_waste", stop)
        with pytest.raises(KeyboardInterrupt):
            commit(URL)
    assert any(".shardkit-jobs" in name for name in bucket.names())
    found = invoke("commit", URL)
    assert (found.exit_code, "nothing to commit" in found.output) == (0, True)
    assert held(bucket) == local(source)


@pytest.mark.parametrize(
    ("splits", "points"),
    [(False, (4,)), pytest.param(True, range(1, 999, 2), marks=pytest.mark.slow)],
)
def test_a_commit_to_a_bucket_that_was_interrupted_anywhere_is_repeated(
    bucket: Bucket,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    splits: bool,
    points: Sequence[int],
) -> None:
    source = tmp_path / "photos"
    for name in ("train", "val") if splits else ("",):
        make_folder(source / name, each=2)
    expected = local(source)
    for at in points:
        plan(source)
        with open_jobs(URL) as jobs:
            work(*range(len(jobs)))
        calls = 0

        def stop(function: Callable[..., object], *arguments: object) -> object:
            nonlocal calls
            writing = (objects.create, objects.put, objects.send, objects.delete)
            calls += function in writing
            if calls == at:  # noqa: B023
                raise KeyboardInterrupt
            return call(function, *arguments)

        with monkeypatch.context() as during:
            for place in (bucket_module, upload_module):
                during.setattr(place, "call", stop)
            with contextlib.suppress(KeyboardInterrupt):
                commit(URL)
        for _ in range(2):
            rows = {name: each.rows for name, each in commit(URL).manifests.items()}
            assert rows == ({"train": 4, "val": 4} if splits else {"": 4})
        assert held(bucket) == expected
        for name in bucket.names():
            bucket.ask("DELETE", name)
        if calls < at:
            break
    assert at > 5 or not splits


def test_wrong_bytes_are_fetched_again_or_refused(bucket: Bucket, source: Path) -> None:
    plan(source)
    bucket.planned = {"000000.json": ["wrong", "short"], CLAIM: ["wrong"]}
    work(0)
    bucket.rates = {"wrong": 1.0}
    with pytest.raises(ShardkitError) as error:
        work(1)
    assert SECRET not in str(error.value)


def test_wrong_use(bucket: Bucket, source: Path) -> None:
    plan(source)
    empty = f"s3://{BUCKET}/empty"
    for arguments, facts in (
        (("work", empty, "--claim"), (empty,)),
        (("work", "s3://absent/x", "--claim"), ("absent",)),
        (("work", URL, "--claim", "--staging", "/dev/null/x"), ("--staging", "/dev/null/x")),
        (("work", URL, "--task", "9"), ("task 9", URL, "0 to 2")),
        (("work", "local", "--claim", "--staging", "."), ("--staging",)),
        (("commit", "https://host/x"), ("https://host/x",)),
        (("commit", URL, "--force"), ("--force",)),
    ):
        refuses(2, *arguments, facts=facts)


def archive_of(*names: str) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name in names:
            archive.writestr(zipfile.ZipInfo(name), b"x")
    return buffer.getvalue()


def overlapping() -> bytes:
    """A small file whose entries all have the same megabyte."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr(zipfile.ZipInfo("a"), bytes(1 << 20))
        for number in range(100):
            other = copy.copy(archive.filelist[0])
            other.filename = other.orig_filename = f"{number}"
            archive.filelist.append(other)
    return buffer.getvalue()


def test_a_forged_result_counts_as_not_done(tmp_path: Path) -> None:
    archives = (("a", "a/b"), ("a/b", "a"), ("../a",), ("a//b",), ("/".join(["x" * 250] * 20),))
    for content in (*(archive_of(*names) for names in archives), archive_of("a" * 256)):
        _forged(tmp_path, content)
    for content in (overlapping(), b"PK"):
        _forged(tmp_path, content)


def _forged(folder: Path, content: bytes) -> None:
    (folder / "result").write_bytes(content)
    bucket_module._unpack(folder / "result", folder / "part")
    assert tree(folder) == {}
