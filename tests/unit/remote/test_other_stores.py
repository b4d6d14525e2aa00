"""Google's and Azure's stores work like S3: uploads, conditions, ranges, lists and errors.

No emulator on PyPI has Google's XML API, which obstore uses. moto's server behind a proxy that
translates the names of headers shows that our side works, not that Google's server agrees.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import azurite
import pytest
from buckets import BUCKET
from helpers import make_dataset
from refusals import refused

from shardkit import UsageError, download, open_dataset, upload, verify
from shardkit.cluster.jobs import open_jobs
from shardkit.cluster.work import commit, plan_jobs
from shardkit.remote import objects
from shardkit.remote.process import call

AZURITE = pytest.mark.skipif(not azurite.PROGRAM, reason="needs azurite: npm install -g azurite")


@pytest.fixture(params=["gs", pytest.param("az", marks=[pytest.mark.slow, AZURITE])])
def scheme(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A scheme whose server runs and has an empty bucket."""
    if request.param == "gs":
        request.getfixturevalue("bucket")
        yield "gs"
        return
    with azurite.running(BUCKET) as environment:
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        yield "az"


def test_a_dataset_is_written_read_and_verified(scheme: str, folder: Path, tmp_path: Path) -> None:
    url, dataset = f"{scheme}://{BUCKET}/data", make_dataset(folder, tmp_path / "data", to="hdf5")

    assert upload(dataset, url)
    assert not upload(dataset, url)
    with refused(UsageError):
        upload(make_dataset(folder, tmp_path / "other", to="lmdb"), url)
    assert not [name for name in call(objects.sizes, url) if name.startswith(".")]
    assert verify(url, against=folder).ok
    near = open_dataset(dataset, decode="bytes")
    far = open_dataset(url, decode="bytes", cache=tmp_path / "cache")
    assert [far[row] for row in range(len(far))] == [near[row] for row in range(len(near))]
    copies = download(f"{url}/shard-*.h5", tmp_path / "copies")
    assert {path.read_bytes() for path in copies.parent.iterdir()} == {
        path.read_bytes() for path in dataset.glob("shard-*")
    }
    fake = tmp_path / "fake"
    fake.write_bytes(bytes((dataset / "shard-000001.h5").stat().st_size))
    call(objects.put, url, "shard-000001.h5", fake, "0" * 64)
    assert [finding.file for finding in verify(url, "quick").findings] == ["shard-000001.h5"]


@pytest.mark.slow
def test_jobs_share_a_bucket(scheme: str, folder: Path, tmp_path: Path) -> None:
    url = f"{scheme}://{BUCKET}/jobs"
    plan_jobs(folder, url, to="lmdb", shard_samples=4)
    with refused(UsageError):
        plan_jobs(folder, url, to="lmdb", shard_samples=2)
    with open_jobs(url) as jobs:
        for number in jobs.claimed():
            jobs.build(number)

    commit(url)

    made = make_dataset(folder, tmp_path / "made")
    files = {str(path.relative_to(made)) for path in made.rglob("*") if path.is_file()}
    assert call(objects.sizes, url).keys() == files
    assert verify(url, against=folder).ok


@pytest.mark.slow
def test_large_files_are_sent_in_parts(scheme: str, tmp_path: Path) -> None:
    url, content, file = f"{scheme}://{BUCKET}/x", bytes(range(256)) * 80_000, tmp_path / "x"
    file.write_bytes(content)

    call(objects.put, url, "x.tar", file, "1" * 64)
    call(objects.put, url, "x.tar", file, "2" * 64)  # replaces it

    assert call(objects.digests, url, ["x.tar"]) == {"x.tar": "2" * 64}
    assert download(f"{url}/x.tar", tmp_path).read_bytes() == content


def test_errors_are_one_line(scheme: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with refused(UsageError, "://nobucket/x"):
        open_dataset(f"{scheme}://nobucket/x", cache=tmp_path / "cache")
    with refused(UsageError):
        open_dataset(f"{scheme}://{BUCKET}/x", cache=tmp_path / "cache")
    if scheme == "az":
        monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_KEY", "d3Jvbmc=")
        with refused(UsageError, "403"):
            open_dataset(f"{scheme}://{BUCKET}/x", cache=tmp_path / "cache")


def test_missing_credentials_name_the_variables(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("AZURE_STORAGE_ACCOUNT_NAME", raising=False)
    with pytest.raises(UsageError, match="no credentials; set AZURE_STORAGE_ACCOUNT_NAME"):
        open_dataset("az://nobody/x", cache=tmp_path / "cache")


def test_a_time_limit_is_a_number(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHARDKIT_STORE_TIMEOUT", "soon")
    with refused(UsageError, "SHARDKIT_STORE_TIMEOUT", "'soon'"):
        open_dataset("s3://nobody/x", cache=tmp_path / "cache")
