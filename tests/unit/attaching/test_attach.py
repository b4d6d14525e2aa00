"""Archives of other programs, read in place."""

from __future__ import annotations

import gzip
import io
import os
import pickle
import pkgutil
import shutil
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import invoke, jpeg, make_tree, png, tree
from refusals import refused
from stated import restate_json, stated
from tars import PRODUCERS, NotInstalledError

from shardkit import attach, convert, describe, open_dataset, open_source, repair, verify
from shardkit.errors import (
    BadImages,
    ConversionFailed,
    CorruptDataset,
    CorruptRecord,
    CorruptShard,
    UsageError,
)
from shardkit.verification.reindex import reindex

pytestmark = pytest.mark.usefixtures("state")

ROWS = 5
"""Samples of an archive."""


def tar(path: Path, *files: tuple[str, bytes]) -> Path:
    path.parent.mkdir(exist_ok=True)
    with tarfile.open(path, "w", format=tarfile.GNU_FORMAT) as archive:
        for name, data in files:
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    return path


def make_tar(folder: Path, number: int, *, first: int | None = None) -> Path:
    """Write an archive of samples with an image, a label and a caption."""
    start = number * ROWS if first is None else first
    members: list[tuple[str, bytes]] = []
    for row in range(start, start + ROWS):
        members += [
            (f"s{row:03d}.cls", b"%d\n" % (row % 3)),
            (f"s{row:03d}.jpg", jpeg(24, 16, row)),
            (f"s{row:03d}.txt", f"caption {row}".encode()),
        ]
    return tar(folder / f"x-{number}.tar", *members)


@pytest.fixture
def tars(tmp_path: Path) -> Path:
    for number in range(3):
        make_tar(tmp_path / "tars", number)
    return tmp_path / "tars"


@pytest.fixture
def made(tars: Path, tmp_path: Path) -> Path:
    attach(tars, tmp_path / "index", keep="caption=txt")
    return tmp_path / "index"


def converted(tars: Path, target: Path, **options: Any) -> Path:
    source = open_source("webdataset", tars, **options)
    convert(source, target, to="lmdb", shuffle=False, workers=1)
    return target


def stat_of(folder: Path) -> list[tuple[int, ...]]:
    return [
        (each.stat().st_ino, each.stat().st_mtime_ns, each.stat().st_ctime_ns)
        for each in (folder, *sorted(folder.iterdir()))
    ]


def test_equals_the_converted_dataset(made: Path, tars: Path, tmp_path: Path) -> None:
    fields = ("image", "label", "caption")
    other = open_dataset(
        converted(tars, tmp_path / "made", keep="caption=txt"), decode="bytes", fields=fields
    )
    dataset = open_dataset(made, decode="bytes", fields=fields)
    assert [*dataset[:]] == [*other[:]]
    assert dataset.classes == other.classes
    assert dataset.manifest.fields == other.manifest.fields
    assert dataset.manifest.content_digest == other.manifest.content_digest
    assert [*dataset.keys] == [*other.keys]
    assert [*dataset.paths] == [*other.paths]
    one, two = (np.load(place / "index/rows.npy") for place in (made, tmp_path / "made"))
    assert (one["checksum"] == two["checksum"]).all()
    assert dataset.column("caption").tolist() == [f"caption {row}" for row in range(3 * ROWS)]


@pytest.mark.parametrize("producer", PRODUCERS)
def test_reads_archives_of_all_programs(producer: str, tmp_path: Path) -> None:
    files = {f"a{number}.png": png(12, 8, number) for number in range(3)}
    (tmp_path / "tars").mkdir()
    try:
        PRODUCERS[producer](tmp_path / "tars" / "x.tar", files)
    except NotInstalledError as error:
        pytest.skip(f"{error} is not installed")
    attach(tmp_path / "tars" / "x.tar", tmp_path / "index")
    dataset = open_dataset(tmp_path / "index", decode="bytes")
    found = {path: dataset[row][0] for row, path in enumerate(dataset.paths)}
    assert found == files


def test_leaves_read_only_archives_as_they_are(tars: Path, tmp_path: Path) -> None:
    before = tree(tars), stat_of(tars)
    for each in (*tars.iterdir(), tars):
        each.chmod(0o555 if each == tars else 0o444)
    changed = stat_of(tars)
    attach(tars, tmp_path / "index", workers=2)
    assert verify(tmp_path / "index", "decode").ok
    _ = open_dataset(tmp_path / "index")[:]
    assert stat_of(tars) == changed
    tars.chmod(0o755)
    assert tree(tars) == before[0]


def test_verify_names_each_damaged_record(made: Path, tars: Path) -> None:
    assert verify(made, "decode").ok
    offset = int(np.load(made / "index/rows.npy")["offset"][7])
    with (tars / "x-1.tar").open("r+b") as file:
        file.seek(offset + 100)
        file.write(b"\0\1\2\3")
    result = verify(made)
    assert [(each.file, each.key, each.row) for each in result.findings] == [
        ("x-1.tar", None, None),
        ("x-1.tar", "s007", 7),
    ]
    with pytest.raises(CorruptRecord, match="'s007'"):
        open_dataset(made)[7]
    (tars / "x-0.tar").unlink()
    assert "x-0.tar" in {finding.file for finding in verify(made, "quick").findings}


def test_refuses_a_replaced_archive(made: Path, tars: Path, tmp_path: Path) -> None:
    attach(tars, tmp_path / "quick", quick=True)
    make_tar(tars, 1, first=100)  # of the same size
    with pytest.raises(CorruptRecord):
        open_dataset(made)[ROWS]
    with refused(CorruptShard, "x-1.tar"):
        open_dataset(tmp_path / "quick")[ROWS]
    (finding,) = verify(tmp_path / "quick", "quick").findings
    assert finding.reason == "its modification time differs from the manifest"
    assert open_dataset(made)[0][1] == 0  # the other archives are as they were
    tar(tars / "x-1.tar", ("a.jpg", jpeg(8, 8)), ("a.cls", b"1"), ("a.txt", b"new"))
    with refused(CorruptShard, "x-1.tar", "`shardkit"):
        open_dataset(made)[ROWS]
    attach(tars, made, keep="caption=txt")
    assert len(open_dataset(made)) == 2 * ROWS + 1


def test_follows_only_manifests_whose_archives_the_user_named(
    made: Path, tars: Path, tmp_path: Path, state: Path
) -> None:
    copied = shutil.copytree(made, tmp_path / "copied")
    for place in (copied, made):
        if place == made:
            shutil.rmtree(state)
        with refused(UsageError, place):
            open_dataset(place)
        with refused(UsageError, "--root", "`shardkit verify`"):
            verify(place)
        assert describe(place)[""]["rows"] == 3 * ROWS  # which reads no archive
    dataset = pickle.loads(pickle.dumps(open_dataset(copied, root=tars)))
    assert [label for _, label in dataset[:]] == [row % 3 for row in range(3 * ROWS)]
    assert verify(copied, root=tars).ok
    assert attach(tars, made, keep="caption=txt").unchanged  # naming them again is enough
    assert open_dataset(made)[1][1] == 1


def test_no_name_leads_out_of_the_folder(made: Path, tars: Path) -> None:
    for name in ("../secret.tar", "/etc/passwd", "a/../../secret.tar", ""):
        changed = {"name": name}
        restate_json(made, lambda value: value["shards"][0].update(changed))  # noqa: B023
        with refused(CorruptDataset, "shardkit.json"):
            open_dataset(made, root=tars)


def test_links_in_the_folder_are_not_followed(made: Path, tars: Path, tmp_path: Path) -> None:
    shutil.move(tars / "x-0.tar", tmp_path / "secret.tar")
    (tars / "x-0.tar").symlink_to(tmp_path / "secret.tar")
    with refused(CorruptShard, "x-0.tar"):
        open_dataset(made, root=tars)[0]
    assert not verify(made, root=tars).ok


def test_attaches_links_to_archives(tars: Path, tmp_path: Path) -> None:
    (tmp_path / "names").mkdir()
    for each in tars.iterdir():
        (tmp_path / "names" / each.name).symlink_to(each)
    attach(tmp_path / "names", tmp_path / "index")
    assert len(open_dataset(tmp_path / "index")[:]) == 3 * ROWS


def test_adds_archives_without_reading_the_others(made: Path, tars: Path, tmp_path: Path) -> None:
    make_tar(tars, 3)
    fresh = attach(tars, tmp_path / "fresh", keep="caption=txt")
    path = tars / "x-1.tar"
    content, status = path.read_bytes(), path.stat()
    at = content.index(b"\xff\xda") + 20
    path.write_bytes(content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :])  # an image
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    again = attach(tars, made, keep="caption=txt")
    assert (again.kept, again.unchanged) == (3, False)
    assert again.manifests[""] == fresh.manifests[""]
    path.write_bytes(content)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert attach(tars, made, keep="caption=txt").unchanged
    assert verify(made).ok


def test_an_added_archive_may_change_the_keys_of_others(
    made: Path, tars: Path, tmp_path: Path
) -> None:
    make_tar(tars, 3, first=0)  # the names of x-0.tar
    again = attach(tars, made, keep="caption=txt")
    assert again.kept == 0
    assert again.manifests[""] == attach(tars, tmp_path / "fresh", keep="caption=txt").manifests[""]
    assert open_dataset(made).keys[0] == "x-0/s000"


def test_new_classes_follow_the_old_ones(tmp_path: Path) -> None:
    for name in ("dog", "cat"):
        tar(tmp_path / "tars" / f"{name}.tar", ("a.jpg", jpeg(8, 8)), ("a.cls", name.encode()))
        made = attach(tmp_path / "tars", tmp_path / "index")
    assert made.manifests[""].classes == ("dog", "cat")
    dataset = open_dataset(tmp_path / "index")
    assert [dataset.classes[label] for _, label in dataset[:]] == ["cat", "dog"]


def test_resumes_after_an_interruption(tars: Path, tmp_path: Path) -> None:
    indexed = 0

    def stop(progress: Any) -> None:
        nonlocal indexed
        indexed += progress.images
        if indexed >= 2 * ROWS:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        attach(tars, tmp_path / "index", on_progress=stop)
    with refused(UsageError, tmp_path / "index"):
        open_dataset(tmp_path / "index")
    resumed = attach(tars, tmp_path / "index")
    assert 0 < resumed.kept < 3
    assert resumed.manifests[""] == attach(tars, tmp_path / "other", workers=2).manifests[""]
    assert sorted(tree(tmp_path / "index")) == sorted(tree(tmp_path / "other"))


def test_wrong_options_leave_nothing_behind(tmp_path: Path) -> None:
    path = tar(tmp_path / "tars" / "x.tar", ("cat/a.png", png()), ("dog/b.png", png()))
    with refused(BadImages):
        attach(path, tmp_path / "index", label="cls")
    assert not (tmp_path / "index").exists()
    assert attach(path, tmp_path / "index", label="folder").manifests[""].rows == 2


def test_irregularities_are_findings(tmp_path: Path) -> None:
    image = png(8, 6)
    path = tar(
        tmp_path / "tars" / "x.tar",
        *(("a.png", image), ("b.png", image), ("a.cls", b"1"), ("b.png", image), ("b.cls", b"0")),
        *(("c.png", b"none"), ("c.cls", b"0"), ("d.cls", b"1"), ("plain", b"x")),
    )
    with path.open("r+b") as file:  # cut the two blocks at the end
        content = file.read().rstrip(b"\0")
        file.truncate(-(-len(content) // 512) * 512)
    with refused(BadImages, "4") as caught:
        attach(path, tmp_path / "index")
    reasons = {problem.path: problem.reason for problem in caught.value.problems}
    assert reasons == {
        "c.png": "its content is not an image",
        "x.tar (rest)": "the archive ends without its end marker, so it may be truncated",
        "x.tar:b.png (again)": "the archive has two members with this name",
        "x.tar:d": "its sample has no image; it has cls",
    }
    assert not (tmp_path / "index" / "shardkit.json").exists()
    made = attach(path, tmp_path / "index", on_error="skip").manifests[""]
    assert (made.rows, len(made.skipped), made.ignored) == (
        *(2, 4),
        {"not part of a sample": 1},
    )
    assert [label for _, label in open_dataset(tmp_path / "index")[:]] == [1, 0]
    assert attach(path, tmp_path / "index", on_error="skip").unchanged


def test_fields_of_all_kinds(tmp_path: Path) -> None:
    array = io.BytesIO()
    np.save(array, np.arange(6, dtype="float32").reshape(2, 3))
    mask = png(12, 8, 3, "L")
    tar(
        tmp_path / "tars" / "x.tar",
        *(("a.jpg", jpeg(12, 8)), ("a.emb.npy", array.getvalue()), ("a.mask.png", mask)),
        *(("a.json", b'{"age": 7, "boxes": [[0, 1, 2, 3]]}'), ("b.jpg", jpeg(12, 8, 1))),
    )
    keep = "emb=emb.npy?,mask=mask.png:mask?,age=json:/age:int64?"
    attach(tmp_path / "tars", tmp_path / "index", image="jpg", keep=keep)
    fields = ("image", "emb", "mask", "age")
    dataset = open_dataset(tmp_path / "index", decode="numpy", fields=fields)
    image, emb, found, age = dataset[0]
    assert image.shape == (8, 12, 3)
    assert (np.asarray(emb) == np.arange(6).reshape(2, 3)).all()
    assert found.shape == (8, 12)
    assert age == 7
    assert dataset[1][1:] == (None, None, None)
    assert verify(tmp_path / "index", "decode").ok
    other = open_dataset(converted(tmp_path / "tars", tmp_path / "made", image="jpg", keep=keep))
    assert dataset.manifest.content_digest == other.manifest.content_digest


def test_becomes_other_datasets_and_files(tmp_path: Path) -> None:
    members = [("a.jpg", jpeg(12, 8)), ("a.mask.png", png(12, 8, 3, "L")), ("a.cls", b"1")]
    members += [("a.json", b'{"age": 7.5, "boxes": [[0, 1, 2, 3]]}'), ("b.jpg", jpeg(8, 8, 1))]
    tar(tmp_path / "tars" / "x.tar", *members, ("a.txt", b"a text"), ("b.cls", b"0"))
    keep = "mask=mask.png:mask?,age=json:/age:float64?,spots=json:/boxes:boxes?,caption=txt?"
    made = attach(tmp_path / "tars", tmp_path / "index", image="jpg", keep=keep).manifests[""]
    copied = invoke("convert", "dataset", tmp_path / "index", tmp_path / "copy", "--to", "hdf5")
    assert copied.exit_code == 0, copied.output
    copy = open_dataset(tmp_path / "copy", fields=("image", "mask", "age", "spots", "caption"))
    assert copy.manifest.content_digest == made.content_digest
    exported = invoke("export", tmp_path / "index", tmp_path / "files", "--layout", "csv")
    assert exported.exit_code == 0, exported.output
    assert invoke("diff", tmp_path / "index", tmp_path / "copy").exit_code == 0


def test_wrong_uses_are_explained(tars: Path, tmp_path: Path) -> None:
    make_tree(tmp_path, {"full/mine.txt": b"", "linked": None})
    for name in ("a.tar", "b.tar"):
        (tmp_path / "linked" / name).symlink_to(tars / "x-0.tar")
    cases: list[tuple[str, dict[str, Any], str]] = [
        (str(tars / "x-{0..9}.tar"), {}, "7 files"),
        (str(tars / "y.tar"), {}, "y.tar"),
        ("s3://bucket/x.tar", {}, "s3://bucket/x.tar"),
        (str(tars), {"check": "none"}, "header, decode"),
        (str(tars), {"on_error": "ignore"}, "on_error='ignore'"),
        (str(tars), {"grouping": "first"}, "webdataset"),
        (str(tars), {"keep": "image:txt"}, "keep='image:txt'"),
        (str(tars), {"target": tars}, str(tars)),
        (str(tars), {"target": tmp_path / "full"}, "mine.txt"),
        (str(tars), {"target": tars / "x-0.tar"}, "x-0.tar"),
        (str(tmp_path / "linked"), {}, "links"),
    ]
    for pattern, options, fact in cases:
        target = options.pop("target", tmp_path / "index")
        with refused(UsageError, fact):
            attach(pattern, target, **options)
        assert not (tmp_path / "index" / "shardkit.json").exists(), fact
    (tars / "x.tar.gz").write_bytes(gzip.compress((tars / "x-0.tar").read_bytes()))
    with refused(UsageError, "x.tar.gz"):
        attach(tars / "x.tar.gz", tmp_path / "index")


def test_wrong_uses_of_an_attached_dataset(made: Path, tars: Path, tmp_path: Path) -> None:
    with refused(UsageError, "against="):
        verify(made, against=tars)
    with refused(UsageError, "--force"):
        reindex(made)
    with refused(UsageError, made):
        repair(made, tars)
    with refused(UsageError, "keep=", "force=True"):
        attach(tars, made)
    with refused(UsageError, "2 archives"):
        attach(tars / "x-0.tar", made, keep="caption=txt")
    with refused(UsageError, "1 archive "):
        attach(tars / "x-[01].tar", made, keep="caption=txt")
    other = converted(tars, tmp_path / "made")
    with refused(UsageError, other, "force=True"):
        attach(tars, other)
    with refused(UsageError, other):
        open_dataset(other, root=tars)
    assert attach(tars, made, force=True).kept == 0
    attach(tars, other, force=True)
    assert sorted(os.listdir(other)) == ["index", "shardkit.json"]


def test_an_archive_that_changes_meanwhile_is_refused(
    tars: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = "shardkit.attaching.tasks._index_records"
    index = pkgutil.resolve_name(name)

    def change(task: Any, *more: Any) -> Any:
        yield from index(task, *more)
        os.utime(task.path)

    monkeypatch.setattr(name, change)
    with refused(ConversionFailed, "x-0.tar"):
        attach(tars, tmp_path / "index")


def test_the_command(tars: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    expanded = invoke("attach", "tars/x-0.tar", "tars/x-1.tar", "tars/x-2.tar", "index")
    assert "4 paths were given" in str(expanded.exception)
    assert "shardkit attach webdataset '*' index" in str(expanded.exception)
    done = invoke("attach", "tars", "index", "--workers", 1)
    assert done.exit_code == 0, done.output
    assert "15 images in 3 archives" in done.output
    assert stated(tmp_path / "index").folder == "../tars"
    again = invoke("attach", "tars", "index", "--json", "--quiet", "--workers", 1)
    assert '"unchanged": true' in again.output
    assert "attached  reads files in ../tars" in invoke("info", "index").output
    assert invoke("verify", "index", "--workers", 1).exit_code == 0
    tar(tars / "x-1.tar", ("a.jpg", b"not an image"), ("a.cls", b"1"))
    failed = invoke("attach", "tars", "index", "--workers", 1)
    assert failed.exit_code != 0
    assert "a.jpg: its content is not an image" in failed.output
    assert "restore the files" in invoke("verify", "index", "--workers", 1).output
