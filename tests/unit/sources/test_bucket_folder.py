"""Folders of images in a store give the dataset of a local copy, and notice every change."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote

import pytest
from buckets import BUCKET, SECRET, Bucket
from helpers import invoke, png

from shardkit.conversion.convert import convert
from shardkit.errors import BadImage, BadImages, ShardkitError, UsageError
from shardkit.sources.imagefolder import ImageFolder, scan_imagefolder
from shardkit.stores import whole
from shardkit.stores.store import Listed
from shardkit.verification.repair import repair
from shardkit.verification.verify import verify

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


def put(bucket: Bucket, name: str, content: bytes) -> None:
    bucket.put(quote(f"photos/{name}"), content)


def content(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


def test_the_dataset_equals_that_of_a_local_copy(photos: Path, tmp_path: Path) -> None:
    convert(photos, tmp_path / "local", to="webdataset")
    convert(URL, tmp_path / "remote", to="webdataset", workers=2)

    assert content(tmp_path / "remote") == content(tmp_path / "local")


def test_a_scan_lists_images_in_the_order_of_a_local_copy(photos: Path) -> None:
    local, remote = scan_imagefolder(photos), scan_imagefolder(URL)

    facts = [
        [(e.path, e.key, e.label, e.bytes) for e in scan.splits[""].entries]
        for scan in (local, remote)
    ]
    assert facts[0] == facts[1]
    assert remote.classes == local.classes
    assert {p.path for p in remote.ignored[""]} == {p.path for p in local.ignored[""]}


def test_splits_are_found(bucket: Bucket, photos: Path) -> None:
    for split in ("train", "val"):
        bucket.put(f"divided/{split}/cat/1.png", png(seed=1))

    assert [*scan_imagefolder(f"s3://{BUCKET}/divided").splits] == ["train", "val"]


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
    assert not any(SECRET.encode() in data for data in content(tmp_path / "made").values())


def test_jobs_read_the_url(photos: Path, tmp_path: Path) -> None:
    convert(photos, tmp_path / "local", to="webdataset")
    target = tmp_path / "jobs"

    for command in (
        ("convert", "imagefolder", URL, target, "--to", "webdataset", "--plan-only"),
        ("work", target, "--claim"),
        ("commit", target),
    ):
        assert invoke(*command).exit_code == 0

    assert content(target) == content(tmp_path / "local")


@pytest.mark.parametrize("change", ["replaced", "deleted"])
def test_a_change_since_the_scan_is_a_bad_image(bucket: Bucket, photos: Path, change: str) -> None:
    source = ImageFolder(URL)
    images = source.scan().splits[""]
    if change == "replaced":
        put(bucket, "cat/1.png", png(seed=1)[:-1] + b"x")  # of the same size
    else:
        bucket.ask("DELETE", "photos/cat/1.png")

    row = [entry.path for entry in images.entries].index("cat/1.png")
    with pytest.raises(BadImage, match="changed" if change == "replaced" else "any more"):
        images.read([row])


def test_objects_read_ahead_are_those_that_are_read(bucket: Bucket, photos: Path) -> None:
    images = ImageFolder(URL).scan().splits[""]
    bucket.requests.clear()

    images.ahead()
    records = images.read(range(len(images)))

    assert [record.fields[record.image_field or ""] for record in records] == [
        IMAGES[entry.path] for entry in images.entries
    ]
    assert sum(bucket.count("GET").values()) == len(images)


@pytest.mark.parametrize("fault", ["busy", "reset", "short"])
def test_a_passing_fault_changes_nothing(
    bucket: Bucket, photos: Path, tmp_path: Path, fault: str
) -> None:
    bucket.planned["1.png"] = [fault]

    convert(URL, tmp_path / "made", to="webdataset")

    assert verify(tmp_path / "made", against=photos).ok


@pytest.mark.parametrize(
    ("fault", "message"), [("expired", "have expired"), ("denied", "access is denied")]
)
def test_an_error_of_the_store_leaves_out_no_image(
    bucket: Bucket, photos: Path, tmp_path: Path, fault: str, message: str
) -> None:
    bucket.planned["1.png"] = [fault] * 20

    with pytest.raises(ShardkitError, match=message) as error:
        convert(URL, tmp_path / "made", to="webdataset", on_error="skip")

    assert not isinstance(error.value, BadImages)
    assert SECRET not in str(error.value)


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("s3://other-bucket/photos", "there is no such bucket"),
        (f"s3://{BUCKET}/absent", "there are no images in"),
        (f"s3://{BUCKET}/made", "is a shardkit dataset"),
        ("http://127.0.0.1/photos", "copy this one to a local folder"),
    ],
)
def test_a_wrong_url_has_one_message(bucket: Bucket, url: str, message: str) -> None:
    bucket.put("made/shardkit.json", b"{}")

    with pytest.raises(UsageError, match=message):
        scan_imagefolder(url)


def test_an_object_with_a_folder_without_a_name_is_refused(bucket: Bucket, photos: Path) -> None:
    bucket.put("photos/cat//3.png", png(seed=3))

    with pytest.raises(UsageError, match="has an object whose name has //"):
        scan_imagefolder(URL)


class _Endless:
    """A store that repeats a page of its listing."""

    url = URL

    def listing(self, folder: str, *, deep: bool) -> Iterator[list[Listed]]:
        while True:
            yield [Listed("cat/1.png", 1, 1), Listed("cat/2.png", 1, 1)]


def test_a_listing_that_repeats_itself_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(whole, "open_store", lambda _: _Endless())

    with pytest.raises(ShardkitError, match="repeats its list of objects"):
        whole.listing(URL, "", True, tmp_path / "list")
