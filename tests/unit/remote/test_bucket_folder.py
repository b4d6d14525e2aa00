"""Folders of images in a store give the dataset of a local copy, and notice every change."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
from buckets import BUCKET, SECRET, Bucket
from helpers import contents, encoded, invoke, png
from PIL import Image
from refusals import refused

from shardkit import ShardkitError, convert, open_source, repair, verify
from shardkit.errors import BadImage, BadImages, UsageError

URL = f"s3://{BUCKET}/photos"
IMAGES = {
    "cat/1.png": png(seed=1),
    "cat/inner/2.png": png(seed=2),
    "cat/inner.png": png(seed=3),
    "dog/a b%20.png": png(seed=4),
    "dog/Straße.png": png(seed=5),
}
OTHERS = {"dog/notes.txt": b"text", "dog/.hidden.png": b"", "README": b"text"}


@pytest.fixture
def photos(bucket: Bucket, tmp_path: Path) -> Path:
    """A folder of images in the bucket; its local copy."""
    for name, content in {**IMAGES, **OTHERS}.items():
        path = tmp_path / "photos" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
        put(bucket, name, content)
    return tmp_path / "photos"


def scanned(place: str | Path) -> Any:
    return open_source("imagefolder", place).scan()


def put(bucket: Bucket, name: str, content: bytes) -> None:
    bucket.put(quote(f"photos/{name}"), content)


def test_the_dataset_equals_that_of_a_local_copy(photos: Path, tmp_path: Path) -> None:
    convert(photos, tmp_path / "local", to="webdataset")
    convert(URL, tmp_path / "remote", to="webdataset", workers=2)

    assert contents(tmp_path / "remote") == contents(tmp_path / "local")


def test_a_scan_lists_images_in_the_order_of_a_local_copy(photos: Path) -> None:
    local, remote = scanned(photos), scanned(URL)

    facts = [
        [(e.path, e.key, e.label, e.bytes) for e in scan.splits[""].entries]
        for scan in (local, remote)
    ]
    assert facts[0] == facts[1]
    assert remote.classes == local.classes
    assert {p.path for p in remote.ignored[""]} == {p.path for p in local.ignored[""]}


def test_a_dataset_is_verified_and_repaired_from_the_url(photos: Path, tmp_path: Path) -> None:
    convert(URL, tmp_path / "made", to="webdataset")
    (shard,) = (tmp_path / "made").glob("*.tar")
    before = shard.read_bytes()

    assert verify(tmp_path / "made", against=URL).ok
    shard.unlink()
    assert repair(tmp_path / "made", URL).ok
    assert shard.read_bytes() == before


def test_the_command_needs_no_cache(photos: Path, tmp_path: Path) -> None:
    assert invoke("convert", "imagefolder", URL, tmp_path / "made", "--to", "lmdb").exit_code == 0
    assert invoke("verify", tmp_path / "made", "--against", URL).exit_code == 0
    assert not any(SECRET.encode() in data for data in contents(tmp_path / "made").values())


@pytest.mark.parametrize("change", ["replaced", "deleted"])
def test_a_change_since_the_scan_is_a_bad_image(bucket: Bucket, photos: Path, change: str) -> None:
    images = scanned(URL).splits[""]
    if change == "replaced":
        put(bucket, "cat/1.png", png(seed=1)[:-1] + b"x")  # of the same size
    else:
        bucket.ask("DELETE", "photos/cat/1.png")

    row = [entry.path for entry in images.entries].index("cat/1.png")
    with refused(BadImage, "changed" if change == "replaced" else "no longer"):
        images.read([row])


def test_objects_read_ahead_are_those_that_are_read(bucket: Bucket, photos: Path) -> None:
    images = scanned(URL).splits[""]
    bucket.requests.clear()

    images.ahead()
    records = images.read(range(len(images)))

    assert [record.fields[record.image_field or ""] for record in records] == [
        IMAGES[entry.path] for entry in images.entries
    ]
    assert sum(bucket.count("GET").values()) == len(images)


@pytest.mark.parametrize("fault", ["expired", "denied"])
def test_an_error_of_the_store_leaves_out_no_image(
    bucket: Bucket, photos: Path, tmp_path: Path, fault: str
) -> None:
    bucket.planned["1.png"] = [fault] * 20

    with refused(ShardkitError) as error:
        convert(URL, tmp_path / "made", to="webdataset", on_error="skip")

    assert not isinstance(error.value, BadImages)
    assert SECRET not in str(error.value)


@pytest.mark.parametrize(
    "url",
    [
        "s3://other-bucket/photos",
        f"s3://{BUCKET}/absent",
        f"s3://{BUCKET}/made",
        "http://127.0.0.1/photos",
    ],
)
def test_a_wrong_url_has_one_message(bucket: Bucket, url: str) -> None:
    bucket.put("made/shardkit.json", b"{}")

    with refused(UsageError):
        scanned(url)


@pytest.mark.parametrize(
    ("name", "path"),
    [
        ("cat/%FF.png", "cat/\N{REPLACEMENT CHARACTER}.png"),
        ("cat/%25FF%252F.png", "cat/%FF%2F.png"),
        ("cat/a%23b%3Fc%26%3C.png", "cat/a#b?c&<.png"),
        ("cat/a%5Cb.png", "cat/a\\b.png"),
        ("cat/%20.png", "cat/ .png"),
    ],
)
def test_an_unusual_name_is_listed_and_read(bucket: Bucket, name: str, path: str) -> None:
    bucket.put(f"photos/{name}", png(seed=3))

    images = scanned(URL).splits[""]

    assert [entry.path for entry in images.entries] == [path]
    (record,) = images.read([0])
    assert record.fields["png"] == png(seed=3)


@pytest.mark.parametrize(
    "name", ["cat//3.png", "cat/../3.png", "cat/./3.png", "cat/%01.png", "cat/1.png/"]
)
def test_a_name_that_cannot_be_read_is_refused(bucket: Bucket, photos: Path, name: str) -> None:
    bucket.put(f"photos/{name}", png(seed=3))

    with refused(UsageError):
        scanned(URL)


def test_markers_of_folders_are_ignored(bucket: Bucket, photos: Path) -> None:
    for name in ("", "cat/", "dog/inner/", "empty.png/"):
        bucket.put(f"photos/{name}", b"")

    scan = scanned(URL)

    assert [entry.path for entry in scan.splits[""].entries] == [
        entry.path for entry in scanned(photos).splits[""].entries
    ]
    ignored = {problem.path: problem.reason for problem in scan.ignored[""]}
    assert {name for name, reason in ignored.items() if reason == "an empty object"} >= {
        "cat",
        "dog/inner",
        "empty.png",
    }


def test_an_image_whose_name_ends_with_a_slash_is_a_bad_image(bucket: Bucket, photos: Path) -> None:
    bucket.put("photos/cat/3.png/", png(seed=3))
    images = scanned(URL).splits[""]

    row = [entry.path for entry in images.entries].index("cat/3.png")
    with refused(BadImage):
        images.read([row])


@pytest.mark.parametrize("check", ["none", "decode"])
def test_damage_on_the_way_is_noticed(
    bucket: Bucket, photos: Path, tmp_path: Path, check: Any
) -> None:
    bucket.planned["1.png"] = ["wrong"]

    convert(URL, tmp_path / "made", to="webdataset", check=check)

    assert verify(tmp_path / "made", against=photos).ok
    assert bucket.count("GET")["1.png"] == 2


def test_an_etag_that_is_no_md5_is_not_compared(bucket: Bucket, photos: Path) -> None:
    bucket.planned["1.png"] = ["wrong", "wrong"]  # as a store that encrypts: always the same
    images = scanned(URL).splits[""]

    row = [entry.path for entry in images.entries].index("cat/1.png")
    (record,) = images.read([row])
    assert record.fields["png"] != IMAGES["cat/1.png"]


def test_a_large_object_is_read_in_parts(bucket: Bucket) -> None:
    data = encoded(Image.frombytes("RGB", (2048, 1536), bytes(range(256)) * (9 << 12)), "BMP")
    bucket.put("photos/cat/1.png", data)
    images = scanned(URL).splits[""]
    bucket.planned["1.png"] = ["reset", "short"]

    (record,) = images.read([0])
    assert record.fields["bmp"] == data
    bucket.put("photos/cat/1.png", data[:-1] + b"x")
    with pytest.raises(BadImage, match="changed"):
        images.read([0])


def test_a_comparison_reads_several_objects_at_once(
    bucket: Bucket, photos: Path, tmp_path: Path
) -> None:
    convert(URL, tmp_path / "made", to="webdataset", workers=1)
    bucket.stalled, bucket.most_at_once = 0.1, 0
    bucket.planned |= {name: ["stall"] for name in ("1.png", "2.png", "inner.png")}

    assert verify(tmp_path / "made", against=URL, workers=1).ok
    assert bucket.most_at_once > 1


def test_renewed_credentials_resume_a_conversion(
    bucket: Bucket, photos: Path, tmp_path: Path
) -> None:
    def make() -> None:
        convert(URL, tmp_path / "made", to="webdataset", shard_samples=1, workers=1)

    bucket.planned["1.png"] = ["expired"]
    with refused(UsageError):
        make()
    bucket.requests.clear()

    make()

    read = sum(count for name, count in bucket.count("GET").items() if name.endswith(".png"))
    assert 0 < read < len(IMAGES)
    assert verify(tmp_path / "made", against=photos).ok


def test_a_rerun_names_the_objects_that_changed(
    bucket: Bucket, photos: Path, tmp_path: Path
) -> None:
    put(bucket, "cat/1.png", b"bad")
    with pytest.raises(BadImages):
        convert(URL, tmp_path / "made", to="webdataset", shard_samples=1, workers=1)
    put(bucket, "dog/a b%20.png", png(seed=4)[:-1] + b"x")  # of the same size

    with pytest.raises(UsageError, match="1 file changed"):
        convert(URL, tmp_path / "made", to="webdataset", shard_samples=1, workers=1)


def test_a_change_after_the_plan_is_a_bad_image_of_the_job(
    bucket: Bucket, photos: Path, tmp_path: Path
) -> None:
    target = tmp_path / "jobs"
    invoke("convert", "imagefolder", URL, target, "--to", "webdataset", "--plan-only")
    put(bucket, "cat/1.png", png(seed=1)[:-1] + b"x")

    worked = invoke("work", target, "--claim")

    assert worked.exit_code == 1
    assert "cat/1.png: it changed since the scan" in worked.output
    assert f"reading imagefolder {URL}" in worked.output
    assert "unfinished tasks: " in str(invoke("commit", target).exception)


def test_requests_say_that_the_reader_pays(
    bucket: Bucket, photos: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bucket.payers.clear()
    monkeypatch.setenv("AWS_REQUEST_PAYER", "true")

    images = scanned(URL).splits[""]
    images.read([0])

    assert bucket.payers == {"requester"}


def _stating(old: str, new: str) -> Callable[[bytes], bytes]:
    return lambda listing: re.sub(old.encode(), new.encode(), listing)


_LIES = {
    "small": _stating(r"<Size>\d+<", "<Size>3<"),
    "large": _stating(r"<Size>\d+<", "<Size>20000000<"),
    "huge": _stating(r"<Size>\d+<", "<Size>18446744073709551615<"),
    "negative": _stating(r"<Size>\d+<", "<Size>-1<"),
    "year 9999": _stating(r"<LastModified>\d+", "<LastModified>9999"),
    "year 1": _stating(r"<LastModified>\d+", "<LastModified>0001"),
    "tag": _stating(r"<ETag>[^<]*<", "<ETag>other<"),
    "other names": _stating("<Key>photos/cat/", "<Key>photos/dog/"),
    "outside": _stating("<Key>photos/", "<Key>elsewhere/"),
    "one name": _stating(r"<Key>[^<]*<", "<Key>photos/cat/1.png<"),
    "another element": _stating("<ListBucketResult", "<Other"),
    "cut": lambda listing: listing[: len(listing) // 2],
    "empty": lambda listing: b"",
}


@pytest.mark.parametrize("edit", _LIES.values(), ids=_LIES)
def test_a_listing_that_lies_is_one_message(
    bucket: Bucket, photos: Path, tmp_path: Path, edit: Callable[[bytes], bytes]
) -> None:
    bucket.edit = edit

    with pytest.raises(ShardkitError) as error:
        convert(URL, tmp_path / "made", to="webdataset", workers=1)

    assert "\n" not in str(error.value)
    assert not (tmp_path / "made" / "shardkit.json").exists()
