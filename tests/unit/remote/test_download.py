"""Sources by URL: what is copied, when, and that everything then works on the copies."""

from __future__ import annotations

import io
import os
import tarfile
from pathlib import Path
from typing import Any

import pytest
from buckets import BUCKET, SECRET, Bucket
from helpers import contents, jpeg, make_tree, run_main, tree
from refusals import refused, refuses

from shardkit import convert, download, open_source
from shardkit.errors import UsageError

URL = f"s3://{BUCKET}/in/x-{{00..02}}.tar"


def archive(number: int) -> bytes:
    """Return a tar of two samples."""
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w") as tar:
        for sample in range(2):
            for suffix, data in (("jpg", jpeg(seed=9 * number + sample)), ("cls", b"1")):
                info = tarfile.TarInfo(f"{number}-{sample}.{suffix}")
                info.size = len(data)
                tar.addfile(info, io.BytesIO(data))
    return made.getvalue()


@pytest.fixture
def archives(bucket: Bucket) -> dict[str, bytes]:
    """Archives in the bucket, by the path of their copy."""
    made = {f"x-{number:02d}.tar": archive(number) for number in range(3)}
    for name, content in made.items():
        bucket.put(f"in/{name}", content)
    bucket.put("in/deeper/x-09.tar", archive(9))
    bucket.put("in/notes.txt", b"other")
    bucket.requests.clear()
    return {f"s3/{BUCKET}/in/{name}": content for name, content in made.items()}


@pytest.mark.parametrize("name", ["x-{00..02}.tar", "x-*.tar", "x-{00,0[1-2]}.tar"])
def test_every_named_file_is_copied_once(
    bucket: Bucket, archives: dict[str, bytes], tmp_path: Path, name: str
) -> None:
    reports: list[Any] = []

    found = download(f"s3://{BUCKET}/in/{name}", tmp_path, on_progress=reports.append)

    assert found == tmp_path / "s3" / BUCKET / "in" / name
    assert contents(tmp_path) == archives
    assert len(list(open_source("webdataset", found).paths())) == reports[0].total == 3
    assert sum(each.bytes for each in reports) == sum(map(len, archives.values()))
    bucket.requests.clear()
    assert download(f"s3://{BUCKET}/in/{name}", tmp_path) == found
    assert not bucket.count("GET").keys() & {os.path.basename(path) for path in archives}


def test_files_of_a_web_server_are_copied(
    bucket: Bucket, archives: dict[str, bytes], tmp_path: Path
) -> None:
    url = f"{bucket.environment['AWS_ENDPOINT_URL']}/{BUCKET}/in/x-{{00..02}}.tar"

    for _ in range(2):
        found = download(url, tmp_path)

    assert sorted(contents(tmp_path).values()) == sorted(archives.values())
    assert len(list(open_source("webdataset", found).paths())) == 3
    assert max(bucket.count("GET").values()) == 1


def test_a_new_version_of_the_same_size_is_copied(
    bucket: Bucket, archives: dict[str, bytes], tmp_path: Path
) -> None:
    download(URL, tmp_path)
    (path, content), *_ = archives.items()
    bucket.put("in/x-00.tar", content[::-1])
    bucket.requests.clear()

    download(URL, tmp_path)

    assert contents(tmp_path) == {**archives, path: content[::-1]}
    assert {*bucket.count("GET")} == {"x-00.tar"}


def test_faults_on_the_way_and_what_a_killed_process_left_do_no_harm(
    bucket: Bucket, archives: dict[str, bytes], tmp_path: Path
) -> None:
    left = tmp_path / "s3" / BUCKET / "in" / ".x-01.tar.part"
    make_tree(left.parent, {left.name: b"part" * 10_000})
    bucket.planned = {"x-00.tar": ["short"], "x-01.tar": ["busy"], "x-02.tar": ["reset"]}

    download(URL, tmp_path)

    assert contents(tmp_path) == archives


def test_a_wrong_url_is_one_line(archives: dict[str, bytes], tmp_path: Path) -> None:
    place = f"s3://{BUCKET}"
    for url, facts in (
        (f"{place}/in/x-{{00..03}}.tar", (f"{place}/in", "x-03.tar")),
        (f"{place}/in/y-*.tar", (f"{place}/in", "y-*.tar")),
        (f"{place}/*/x-00.tar", (f"{place}/*/x-00.tar",)),
        (f"{place}/../x-00.tar", ("../x-00.tar",)),
        (place, ("s3://BUCKET/PATH",)),
        ("http://127.0.0.1:1/in/*.tar", ("{000..999}",)),
        ("in/x-00.tar", ("in/x-00.tar", "s3://")),
    ):
        with refused(UsageError, *facts) as caught:
            download(url, tmp_path / "copy")
        assert "\n" not in str(caught.value)
        assert SECRET not in str(caught.value)


def test_copies_of_files_that_are_gone_are_refused_and_kept(
    bucket: Bucket, archives: dict[str, bytes], tmp_path: Path
) -> None:
    old = make_tree(tmp_path / "s3" / BUCKET / "in", {"x-77.tar": b"old"}) / "x-77.tar"

    with refused(UsageError, f"s3://{BUCKET}/in", "x-77.tar"):
        download(f"s3://{BUCKET}/in/x-*.tar", tmp_path)

    assert old.read_bytes() == b"old"


def test_a_link_in_the_folder_is_not_followed(archives: dict[str, bytes], tmp_path: Path) -> None:
    outside = make_tree(tmp_path / "outside", {})
    make_tree(tmp_path / "copy", {})
    (tmp_path / "copy" / "s3").symlink_to(outside)

    with refused(UsageError, tmp_path / "copy"):
        download(URL, tmp_path / "copy")

    assert tree(outside) == {}


def test_a_url_converts_verifies_and_repairs_like_its_files(
    bucket: Bucket, archives: dict[str, bytes], tmp_path: Path
) -> None:
    local = make_tree(tmp_path, archives) / "s3" / BUCKET / "in" / "x-{00..02}.tar"
    convert(open_source("webdataset", local), tmp_path / "expected", to="lmdb", seed=0, workers=1)
    where, cache = tmp_path / "out", ("--cache", tmp_path / "cache", "--workers", 1)

    made = run_main("convert", "webdataset", URL, where, "--to", "lmdb", *cache)
    assert (made.returncode, made.stderr) == (0, "")
    assert tree(where) == tree(tmp_path / "expected")

    assert run_main("verify", where, "--against", URL, *cache).returncode == 0
    (where / "shard-000000.lmdb").write_bytes(b"")
    assert run_main("repair", where, "--from", URL, *cache).returncode == 0
    assert tree(where) == tree(tmp_path / "expected")
    assert max(bucket.count("GET").values()) == 1

    refuses(2, "verify", where, "--against", URL, facts=(URL, "--cache"))


def test_a_table_by_url_names_files_of_a_local_folder(bucket: Bucket, tmp_path: Path) -> None:
    photos = make_tree(tmp_path / "photos", {"a.jpg": jpeg(seed=1), "b.jpg": jpeg(seed=2)})
    bucket.put("list.csv", b"file_name,label\na.jpg,cat\nb.jpg,dog\n")
    url, where = f"s3://{BUCKET}/list.csv", tmp_path / "out"
    cache = ("--cache", tmp_path / "cache", "--workers", 1)

    refuses(2, "convert", "table", url, where, "--to", "lmdb", *cache, facts=(url,))
    made = run_main(
        "convert", "table", url, where, "--to", "lmdb", "--root", photos, "--label", "label", *cache
    )

    assert (made.returncode, made.stderr) == (0, "")
    checked = run_main("verify", where, "--against", f"{url}@{photos}", *cache)
    assert checked.returncode == 0, checked.stderr
