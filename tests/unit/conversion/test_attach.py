"""Archives of other programs, read in place."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import os
import pickle
import shutil
import tarfile
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import invoke, jpeg, png, tree
from tars import PRODUCERS, NotInstalledError

from shardkit import (
    ConversionFailed,
    CorruptDataset,
    UsageError,
    attach,
    convert,
    describe,
    make_loader,
    open_dataset,
    reindex,
    repair,
    verify,
)
from shardkit.conversion import attach as attaching
from shardkit.conversion.attach import Attached
from shardkit.dataset.manifest import MANIFEST_NAME, load_any_manifest
from shardkit.dataset.shardset import open_shards
from shardkit.errors import BadImages, CorruptRecord, CorruptShard
from shardkit.registry import get_source
from shardkit.system.files import write_atomically
from shardkit.torch.loader import Loader
from shardkit.verification.shard_check import Finding

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


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder in which `attach` remembers what the user named."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return tmp_path / "state"


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
    source = get_source("webdataset").open(tars, **options)
    convert(source, target, to="lmdb", shuffle=False)
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
    one, two = open_shards(made), open_shards(tmp_path / "made")
    assert [*one.keys] == [*two.keys]
    assert [*one.paths] == [*two.paths]
    assert (one.rows["checksum"] == two.rows["checksum"]).all()
    assert dataset.column("caption").tolist() == [f"caption {row}" for row in range(3 * ROWS)]


def loader_of(path: Path, batch_size: int) -> Loader:
    options: dict[str, Any] = {"num_workers": 0}
    dataset = open_dataset(path, decode="torch")
    return make_loader(dataset, batch_size, shuffle=True, seed=7, **options)


def test_gives_the_orders_of_the_converted_dataset(made: Path, tars: Path, tmp_path: Path) -> None:
    def epochs(path: Path) -> list[list[int]]:
        with closing(loader_of(path, 4)) as loader:
            return [[int(image.sum()) for batch, _ in loader for image in batch] for _ in range(2)]

    assert epochs(made) == epochs(converted(tars, tmp_path / "made"))


def test_resumes_at_the_exact_batch(made: Path) -> None:
    with ExitStack() as stack:
        whole, stopped, resumed = (
            stack.enter_context(closing(loader_of(made, 2))) for _ in range(3)
        )
        expected = [labels.tolist() for _, labels in whole]
        batches = iter(stopped)
        found = [next(batches)[1].tolist() for _ in range(3)]
        resumed.load_state_dict(stopped.state_dict())
        assert found + [labels.tolist() for _, labels in resumed] == expected


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
    shards = open_shards(tmp_path / "index")
    found = {path: dataset[row][0] for row, path in enumerate(shards.paths)}
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
    offset = int(open_shards(made).rows["offset"][7])
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
    assert Finding(file="x-0.tar", reason="it is missing") in verify(made, "quick").findings


def test_refuses_a_replaced_archive(made: Path, tars: Path, tmp_path: Path) -> None:
    attach(tars, tmp_path / "quick", quick=True)
    make_tar(tars, 1, first=100)  # of the same size
    with pytest.raises(CorruptRecord):
        open_dataset(made)[ROWS]
    with pytest.raises(CorruptShard, match=r"another modification time.*run the same"):
        open_dataset(tmp_path / "quick")[ROWS]
    (finding,) = verify(tmp_path / "quick", "quick").findings
    assert finding.reason == "its modification time differs from the manifest"
    assert open_dataset(made)[0][1] == 0  # the other archives are as they were
    tar(tars / "x-1.tar", ("a.jpg", jpeg(8, 8)), ("a.cls", b"1"), ("a.txt", b"new"))
    with pytest.raises(CorruptShard, match=r"the manifest says .*It was replaced after `shardkit"):
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
        with pytest.raises(UsageError, match="you have not attached them here"):
            open_dataset(place)
        with pytest.raises(UsageError, match="--root of `shardkit verify`"):
            verify(place)
        assert describe(place)[""]["rows"] == 3 * ROWS  # which reads no archive
    dataset = pickle.loads(pickle.dumps(open_dataset(copied, root=tars)))
    assert [label for _, label in dataset[:]] == [row % 3 for row in range(3 * ROWS)]
    assert verify(copied, root=tars).ok
    assert attach(tars, made, keep="caption=txt").unchanged  # naming them again is enough
    assert open_dataset(made)[1][1] == 1


@pytest.mark.parametrize("name", ["../secret.tar", "/etc/passwd", "a/../../secret.tar", ""])
def test_no_name_leads_out_of_the_folder(made: Path, tars: Path, name: str) -> None:
    forge(made, lambda manifest: manifest["shards"][0].update(name=name))
    with pytest.raises(CorruptDataset, match="not a plain relative path"):
        open_dataset(made, root=tars)


def test_links_in_the_folder_are_not_followed(made: Path, tars: Path, tmp_path: Path) -> None:
    shutil.move(tars / "x-0.tar", tmp_path / "secret.tar")
    (tars / "x-0.tar").symlink_to(tmp_path / "secret.tar")
    with pytest.raises(CorruptShard, match="symbolic link"):
        open_dataset(made, root=tars)[0]
    assert not verify(made, root=tars).ok


def forge(directory: Path, change: Any) -> None:
    """Change a manifest, and give it the digest of its new content."""
    value = json.loads((directory / MANIFEST_NAME).read_text())
    del value["digest"]
    change(value)
    plain = json.dumps(value, sort_keys=True, separators=(",", ":")).encode()
    value["digest"] = hashlib.sha256(plain).hexdigest()
    text = json.dumps(value, indent=1, sort_keys=True) + "\n"
    write_atomically(directory / MANIFEST_NAME, text.encode())


def test_attaches_links_to_archives(tars: Path, tmp_path: Path) -> None:
    (tmp_path / "names").mkdir()
    for each in tars.iterdir():
        (tmp_path / "names" / each.name).symlink_to(each)
    attach(tmp_path / "names", tmp_path / "index")
    assert len(open_dataset(tmp_path / "index")[:]) == 3 * ROWS


def test_adds_archives_without_reading_the_others(
    made: Path, tars: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_tar(tars, 3)
    indexed: list[str] = []
    index = attaching._ArchiveTask.make

    def watch(task: Any) -> Any:
        indexed.append(task.name)
        return index(task)

    monkeypatch.setattr(attaching._ArchiveTask, "make", watch)
    again = attach(tars, made, keep="caption=txt")
    assert (indexed, again.kept, again.unchanged) == (["x-3.tar"], 3, False)
    fresh = attach(tars, tmp_path / "fresh", keep="caption=txt")
    assert again.manifest == fresh.manifest
    assert attach(tars, made, keep="caption=txt").unchanged
    assert verify(made).ok


def test_an_added_archive_may_change_the_keys_of_others(
    made: Path, tars: Path, tmp_path: Path
) -> None:
    make_tar(tars, 3, first=0)  # the names of x-0.tar
    again = attach(tars, made, keep="caption=txt")
    assert again.kept == 0
    assert again.manifest == attach(tars, tmp_path / "fresh", keep="caption=txt").manifest
    assert open_shards(made).keys[0] == "x-0/s000"


def test_new_classes_follow_the_old_ones(tmp_path: Path) -> None:
    for name in ("dog", "cat"):
        tar(tmp_path / "tars" / f"{name}.tar", ("a.jpg", jpeg(8, 8)), ("a.cls", name.encode()))
        made = attach(tmp_path / "tars", tmp_path / "index")
    assert made.manifest.classes == ("dog", "cat")
    dataset = open_dataset(tmp_path / "index")
    assert [dataset.classes[label] for _, label in dataset[:]] == ["cat", "dog"]


def test_resumes_after_a_kill(tars: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    index = attaching._ArchiveTask.make

    def die(task: Any) -> Any:
        if task.name == "x-2.tar":
            raise KeyboardInterrupt
        return index(task)

    monkeypatch.setattr(attaching._ArchiveTask, "make", die)
    with pytest.raises(KeyboardInterrupt):
        attach(tars, tmp_path / "index")
    with pytest.raises(UsageError, match="unfinished"):
        open_dataset(tmp_path / "index")
    monkeypatch.setattr(attaching._ArchiveTask, "make", index)
    resumed = attach(tars, tmp_path / "index")
    assert resumed.kept == 2
    assert resumed.manifest == attach(tars, tmp_path / "other", workers=2).manifest
    assert sorted(tree(tmp_path / "index")) == sorted(tree(tmp_path / "other"))


def test_wrong_options_leave_nothing_behind(tmp_path: Path) -> None:
    path = tar(tmp_path / "tars" / "x.tar", ("cat/a.png", png()), ("dog/b.png", png()))
    with pytest.raises(BadImages, match="No good sample is left"):
        attach(path, tmp_path / "index", label="cls")
    assert not (tmp_path / "index").exists()
    assert attach(path, tmp_path / "index", label="folder").manifest.rows == 2


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
    with pytest.raises(BadImages, match="4 findings in the archives") as caught:
        attach(path, tmp_path / "index")
    reasons = {problem.path: problem.reason for problem in caught.value.problems}
    assert reasons == {
        "c.png": "its content is not an image",
        "x.tar (rest)": "the archive ends without its end marker, so it may be truncated",
        "x.tar:b.png (again)": "the archive has two members of this name",
        "x.tar:d": "its sample has no image; it has cls",
    }
    assert not (tmp_path / "index" / MANIFEST_NAME).exists()
    made = attach(path, tmp_path / "index", on_error="skip").manifest
    assert (made.rows, len(made.skipped), made.ignored) == (
        *(2, 4),
        {"its name has no key and suffix": 1},
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
    made = attach(tmp_path / "tars", tmp_path / "index", image="jpg", keep=keep).manifest
    copied = invoke("convert", "dataset", tmp_path / "index", tmp_path / "copy", "--to", "hdf5")
    assert copied.exit_code == 0, copied.output
    copy = open_dataset(tmp_path / "copy", fields=("image", "mask", "age", "spots", "caption"))
    assert copy.manifest.content_digest == made.content_digest
    exported = invoke("export", tmp_path / "index", tmp_path / "files", "--layout", "csv")
    assert exported.exit_code == 0, exported.output
    assert invoke("diff", tmp_path / "index", tmp_path / "copy").exit_code == 0


def _wrong(tars: Path, tmp_path: Path) -> Iterator[tuple[str, dict[str, Any], str]]:
    yield str(tars / "x-{0..9}.tar"), {}, "7 files of .* are missing"
    yield str(tars / "y.tar"), {}, "does not exist"
    yield "s3://bucket/x.tar", {}, "is a URL"
    yield str(tars / "x.tar.gz"), {}, "is compressed"
    yield str(tars), {"check": "none"}, "choose from header, decode"
    yield str(tars), {"on_error": "ignore"}, "on_error='ignore' is unknown; choose from fail, skip"
    yield str(tars), {"grouping": "first"}, "choose from webdataset"
    yield str(tars), {"keep": "image:txt"}, "keep='image:txt' is not"
    yield str(tars), {"target": tars}, "overlap"
    yield str(tars), {"target": tars.parent / "full"}, "holds other files"
    yield str(tars), {"target": tars / "x-0.tar"}, "overlap"
    yield str(tars.parent / "linked"), {}, "twice, by links to one file"


def test_wrong_uses_are_explained(tars: Path, tmp_path: Path) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine.txt").touch()
    (tmp_path / "linked").mkdir()
    for name in ("a.tar", "b.tar"):
        (tmp_path / "linked" / name).symlink_to(tars / "x-0.tar")
    tar_gz = tars / "x.tar.gz"
    for pattern, options, message in _wrong(tars, tmp_path):
        if pattern.endswith(".gz"):
            tar_gz.write_bytes(gzip.compress((tars / "x-0.tar").read_bytes()))
        elif tar_gz.exists():
            tar_gz.unlink()
        target = options.pop("target", tmp_path / "index")
        with pytest.raises(UsageError, match=message):
            attach(pattern, target, **options)
        assert not (tmp_path / "index" / MANIFEST_NAME).exists(), message


def test_wrong_uses_of_an_attached_dataset(made: Path, tars: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="leave against= out"):
        verify(made, against=tars)
    with pytest.raises(UsageError, match="with --force"):
        reindex(made)
    with pytest.raises(UsageError, match="Restore them from a copy"):
        repair(made, tars)
    with pytest.raises(UsageError, match="made with another keep=; force=True replaces it"):
        attach(tars, made)
    with pytest.raises(UsageError, match="2 archives that you did not name"):
        attach(tars / "x-0.tar", made, keep="caption=txt")
    with pytest.raises(UsageError, match="1 archive that you did not name"):
        attach(tars / "x-[01].tar", made, keep="caption=txt")
    other = converted(tars, tmp_path / "made")
    with pytest.raises(UsageError, match="already holds a dataset; force=True"):
        attach(tars, other)
    with pytest.raises(UsageError, match="is not an attached dataset"):
        open_dataset(other, root=tars)
    assert attach(tars, made, force=True).kept == 0
    assert isinstance(attach(tars, other, force=True), Attached)
    assert sorted(os.listdir(other)) == ["index", MANIFEST_NAME]


def test_an_archive_that_changes_meanwhile_is_refused(
    tars: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    index = attaching._index_records

    def change(task: Any, *more: Any) -> Any:
        yield from index(task, *more)
        os.utime(task.path)

    monkeypatch.setattr(attaching, "_index_records", change)
    with pytest.raises(ConversionFailed, match="changed while it was indexed"):
        attach(tars, tmp_path / "index")


def test_the_command(tars: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    expanded = invoke("attach", "tars/x-0.tar", "tars/x-1.tar", "tars/x-2.tar", "index")
    assert "4 paths were given" in str(expanded.exception)
    assert "shardkit attach webdataset '*' index" in str(expanded.exception)
    done = invoke("attach", "tars", "index", "--workers", 1)
    assert done.exit_code == 0, done.output
    assert "15 images in 3 archives" in done.output
    manifest = load_any_manifest(tmp_path / "index")
    assert manifest.folder == "../tars"  # type: ignore[union-attr]
    again = invoke("attach", "tars", "index", "--json", "--quiet", "--workers", 1)
    assert '"unchanged": true' in again.output
    assert "attached  the shards are archives in ../tars" in invoke("info", "index").output
    assert invoke("verify", "index", "--workers", 1).exit_code == 0
    tar(tars / "x-1.tar", ("a.jpg", b"not an image"), ("a.cls", b"1"))
    failed = invoke("attach", "tars", "index", "--workers", 1)
    assert failed.exit_code != 0
    assert "a.jpg: its content is not an image" in failed.output
    assert "restore the archives" in invoke("verify", "index", "--workers", 1).output
