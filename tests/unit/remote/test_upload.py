"""An upload is complete or invisible; of several datasets for one place, one arrives."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from buckets import BUCKET, SECRET, Bucket
from helpers import copy_dataset, make_dataset, make_folder, run_main
from refusals import refused, refuses

from shardkit import ShardkitError, convert, upload
from shardkit.errors import CorruptDataset, UsageError

URL = f"s3://{BUCKET}/data"
CLAIM = ".shardkit-upload.json"


@pytest.fixture
def dataset(folder: Path, tmp_path: Path) -> Path:
    return copy_dataset(folder, tmp_path / "data")


def held(bucket: Bucket, dataset: Path) -> bool:
    """Return whether the bucket holds exactly this dataset."""
    names = sorted(str(path.relative_to(dataset)) for path in dataset.rglob("*") if path.is_file())
    return bucket.names() == [f"data/{name}" for name in names] and all(
        bucket.ask("GET", f"data/{name}") == (dataset / name).read_bytes() for name in names
    )


def test_an_upload_holds_the_same_files_and_can_be_repeated(bucket: Bucket, dataset: Path) -> None:
    reports: list[Any] = []

    assert upload(dataset, URL, on_progress=reports.append)

    assert held(bucket, dataset)
    assert sum(report.images for report in reports) == reports[0].total == 6
    puts = [path for method, path in bucket.requests if method == "PUT"]
    assert puts[-1].endswith("shardkit.json")
    assert not upload(dataset, URL)
    assert held(bucket, dataset)


def test_an_interrupted_upload_is_invisible_and_resumes(bucket: Bucket, dataset: Path) -> None:
    def stop(report: Any) -> None:
        if report.images:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        upload(dataset, URL, on_progress=stop)
    assert bucket.names() == [f"data/{CLAIM}", "data/shard-000000.lmdb"]

    assert upload(dataset, URL)

    assert held(bucket, dataset)
    assert bucket.count("PUT")["shard-000000.lmdb"] == 1


def test_of_two_datasets_one_succeeds(bucket: Bucket, folder: Path, dataset: Path) -> None:
    other = make_dataset(folder, dataset.parent / "other", to="webdataset")

    def second(report: Any) -> None:
        if report.images:
            with refused(UsageError, URL, CLAIM):
                upload(other, URL)

    assert upload(dataset, URL, on_progress=second)
    with refused(UsageError, URL):
        upload(other, URL)

    assert held(bucket, dataset)


def test_a_damaged_dataset_is_not_uploaded(bucket: Bucket, dataset: Path) -> None:
    path = dataset / "shard-000001.lmdb"
    os.truncate(path, path.stat().st_size - 1)

    with refused(CorruptDataset, "shard-000001.lmdb"):
        upload(dataset, URL)

    assert "data/shardkit.json" not in bucket.names()


@pytest.mark.parametrize("fault", ["busy", "reset"])
def test_faults_are_repaired(fault: str, bucket: Bucket, dataset: Path) -> None:
    bucket.rates = {fault: 0.2}

    assert upload(dataset, URL)

    bucket.rates = {}
    assert held(bucket, dataset)


def test_an_error_shows_no_secret(bucket: Bucket, dataset: Path) -> None:
    bucket.rates = {"denied": 1.0}

    with pytest.raises(ShardkitError, match="permission") as error:
        upload(dataset, URL)

    assert SECRET not in str(error.value)


@pytest.mark.parametrize("url", ["https://host/data", "data", "s3://me:word@bucket/x"])
def test_other_places_are_refused(url: str, dataset: Path) -> None:
    with pytest.raises(UsageError):
        upload(dataset, url)


def test_a_conversion_writes_to_a_url(bucket: Bucket, folder: Path, tmp_path: Path) -> None:
    arguments = ("convert", "imagefolder", folder, URL, "--to", "lmdb", "--workers", 1)
    staging = tmp_path / "staging"

    first = run_main(*arguments, "--staging", staging)
    again = run_main(*arguments, "--staging", staging)

    assert (first.returncode, again.returncode) == (0, 0), first.stderr
    assert f"converted {folder} to {URL}" in first.stdout
    assert f"{URL} already contains the result" in again.stdout
    assert held(bucket, staging)
    refuses(2, *arguments, facts=("--staging",))
    with refused(UsageError, "staging="):
        convert(folder, tmp_path / "other", to="lmdb", staging=staging)


def test_a_url_that_is_taken_is_refused_before_the_work(
    bucket: Bucket, folder: Path, dataset: Path, tmp_path: Path
) -> None:
    assert upload(dataset, URL)

    with refused(UsageError, URL):
        convert(folder, URL, to="hdf5", staging=tmp_path / "staging")

    assert not (tmp_path / "staging").exists()


def test_splits_are_uploaded(bucket: Bucket, tmp_path: Path) -> None:
    make_folder(tmp_path / "photos" / "train")
    make_folder(tmp_path / "photos" / "val")
    convert(tmp_path / "photos", URL, to="webdataset", staging=tmp_path / "staging")

    assert held(bucket, tmp_path / "staging")


def test_a_split_of_another_dataset_is_not_uploaded(bucket: Bucket, tmp_path: Path) -> None:
    for split in ("train", "val"):
        make_folder(tmp_path / "photos" / split)
    place = copy_dataset(tmp_path / "photos", tmp_path / "splits")
    copy_dataset(tmp_path / "photos" / "train", tmp_path / "other")
    shutil.rmtree(place / "val")
    shutil.copytree(tmp_path / "other", place / "val")
    with refused(CorruptDataset, place / "val" / "shardkit.json"):
        upload(place, URL)
    assert bucket.names() == []


def test_the_command(bucket: Bucket, dataset: Path) -> None:
    assert "uploaded" in run_main("upload", dataset, URL).stdout
    assert run_main("upload", dataset, URL, "--json").stdout.count('"uploaded": false') == 1
