"""``shardkit export``: the bytes of the source, and nothing outside of the folder."""

from __future__ import annotations

import csv
import errno
import io
import json
import os
import resource
import shutil
import signal
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from helpers import (
    in_fork,
    invoke,
    jpeg,
    make_dataset,
    make_folder,
    make_tree,
    png,
    python,
    run_main,
    tree,
)
from PIL import Image
from refusals import refused, refuses
from stated import restate_json

from shardkit import Field, convert, export
from shardkit.errors import ConversionFailed, CorruptDataset, UsageError
from shardkit.exporting.output import OutputFolder
from shardkit.testing.tools import call_in

NAMES = {
    "cat/a b.jpg": jpeg(),
    "cat/twin.jpg": jpeg(seed=1),
    "cat/twin.png": png(seed=2),
    "cat/deep/er/größer.JPEG": jpeg(seed=3),
    "dog/no suffix": png(seed=4),
    "dog/wrong.jpg": png(seed=5),
    "dog/A.png": png(seed=6),
    "dog/a.png": png(seed=7),
}


def test_a_folder_is_restored_bit_for_bit(tmp_path: Path) -> None:
    source = make_tree(tmp_path / "photos", NAMES)
    (source / os.fsdecode(b"dog/\xff.png")).write_bytes(png())
    done = export(make_dataset(source, tmp_path / "made"), tmp_path / "again")
    assert tree(tmp_path / "again") == tree(source)
    assert (done.records, done.files) == (9, 9)
    assert done.bytes == sum(p.stat().st_size for p in source.rglob("*") if p.is_file())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["again", "made", "photos"]


def forge_raw(value: dict[str, Any]) -> None:
    value["raw_shape"] = [8, 9, 3]


def forge_array(value: dict[str, Any]) -> None:
    (vector,) = (entry for entry in value["schema"] if entry["name"] == "vector")
    vector["shape"] = [3]


@pytest.mark.parametrize("forge", [forge_raw, forge_array])
def test_another_shape_in_the_manifest_is_named(
    forge: Callable[[dict[str, Any]], None], tmp_path: Path
) -> None:
    """No verb reshapes bytes that it has not counted."""
    image = np.zeros((8, 8, 3), np.uint8)
    samples = [{"image": image, "vector": np.zeros((2, 2), np.float32)}]
    place = tmp_path / "made"
    convert(samples, place, to="webdataset", encode="raw", resize=(8, 8), workers=1)
    restate_json(place, forge)
    fact = "192" if forge is forge_raw else "16"  # 8 * 8 * 3 and 2 * 2 * 4 bytes
    out = tmp_path / "out"
    export_to = ("export", place, out, "--layout", "webdataset", "--raw-as-png")
    refuses(1, *export_to, facts=(place, f"{fact} bytes"))
    convert_to = ("convert", "dataset", place, out, "--to", "lmdb", "--workers", 1)
    refuses(1, *convert_to, facts=(f"{fact} bytes",))
    done = run_main(*convert_to, "--encode", "png")
    assert done.returncode == 1
    assert f"{fact} bytes" in done.stderr


def test_a_name_that_is_not_utf8_cannot_be_in_parquet(tmp_path: Path) -> None:
    source = make_tree(tmp_path / "photos", {"a/1.png": png()})
    (source / os.fsdecode(b"a/\xff.png")).write_bytes(png(seed=1))
    made = make_dataset(source, tmp_path / "made")
    with refused(UsageError, "UTF-8", "Parquet"):
        export(made, tmp_path / "again", layout="parquet")
    assert not (tmp_path / "again").exists()
    export(made, tmp_path / "again", layout="webdataset")


def test_splits_and_unlabeled_images_are_restored(tmp_path: Path) -> None:
    for split in ("train", "val"):
        make_folder(tmp_path / "photos" / split, each=1)
    export(make_dataset(tmp_path / "photos", tmp_path / "made"), tmp_path / "again")
    assert tree(tmp_path / "again") == tree(tmp_path / "photos")
    loose = make_tree(tmp_path / "loose", {"a.png": png(), "b.jpg": jpeg()})
    export(make_dataset(loose, tmp_path / "unlabeled"), tmp_path / "loose-again")
    assert tree(tmp_path / "loose-again") == tree(loose)


def test_other_sources_get_class_folders_and_suffixes(tmp_path: Path) -> None:
    samples = [{"image": png(), "label": 1}, {"image": jpeg(), "label": 0}]
    schema = {"label": Field("label", classes=("cat", "dog"))}
    convert(samples, tmp_path / "made", to="lmdb", schema=schema)
    export(tmp_path / "made", tmp_path / "files")
    assert sorted(tree(tmp_path / "files")) == [
        "cat",
        "cat/000000001.jpg",
        "dog",
        "dog/000000000.png",
    ]


def test_a_sample_whose_key_cannot_name_a_file_is_exported_by_number(tmp_path: Path) -> None:
    keys = ["plain/a", "/data/b.png", "https://host/c", "../d", ".hidden", "é" * 200]
    samples = [{"key": key, "image": png(seed=seed)} for seed, key in enumerate(keys)]
    convert(samples, tmp_path / "made", to="lmdb")
    for layout in ("imagefolder", "csv"):
        export(tmp_path / "made", tmp_path / layout, layout=layout)
        names = ["plain/a.png", *(f"{number:09}.png" for number in range(1, len(keys)))]
        for seed, name in enumerate(names):
            assert (tmp_path / layout / name).read_bytes() == png(seed=seed)


def test_raw_pixels_are_exported_only_on_request(folder: Path, tmp_path: Path) -> None:
    convert(folder, tmp_path / "raw", to="lmdb", resize="8x6", encode="raw")
    with refused(UsageError, "raw_as_png=True"):
        export(tmp_path / "raw", tmp_path / "files")
    assert not (tmp_path / "files").exists()
    export(tmp_path / "raw", tmp_path / "files", raw_as_png=True)
    convert(folder, tmp_path / "png", to="lmdb", resize="8x6", encode="png")
    export(tmp_path / "png", tmp_path / "expected")
    for path in (tmp_path / "expected").rglob("*.png"):
        found = tmp_path / "files" / path.relative_to(tmp_path / "expected")
        assert Image.open(found).tobytes() == Image.open(path).tobytes()
    assert len(list((tmp_path / "files").rglob("*.png"))) == 6


@pytest.fixture
def fields(tmp_path: Path) -> Path:
    samples = [
        {
            "image": jpeg(),
            "label": 1,
            "mask": Image.new("L", (24, 16), 3),
            "caption": 'a "red",\nshape',
            "age": 2.5,
            "boxes": [[1, 2, 3, 4, 0]],
            "latent": np.arange(4, dtype=np.float32),
        },
        {"image": png(), "latent": np.zeros(4, np.float32)},
    ]
    classes = ("cat", "dog")
    schema = {"label": Field("label", classes=classes), "boxes": Field("boxes", classes=classes)}
    convert(samples, tmp_path / "fields", to="hdf5", schema=schema, shuffle=False)
    return tmp_path / "fields"


def test_a_folder_of_images_does_not_lose_fields(fields: Path, tmp_path: Path) -> None:
    with refused(UsageError, "mask", "csv"):
        export(fields, tmp_path / "files")


def test_csv_names_files_and_holds_the_other_fields(fields: Path, tmp_path: Path) -> None:
    export(fields, tmp_path / "files", layout="csv")
    with open(tmp_path / "files/metadata.csv", newline="") as file:
        first, second = csv.DictReader(file)
    assert first == {
        "file_name": "image/000000000.jpg",
        "label": "dog",
        "mask_file_name": "mask/000000000.png",
        "caption": 'a "red",\nshape',
        "age": "2.5",
        "boxes": '[[1.0,2.0,3.0,4.0,"cat"]]',
        "latent_file_name": "latent/000000000.npy",
    }
    assert (second["label"], second["mask_file_name"], second["caption"]) == ("", "", "")
    files = tmp_path / "files"
    assert (files / first["file_name"]).read_bytes() == jpeg()
    assert np.load(files / first["latent_file_name"]).tolist() == [0, 1, 2, 3]


def test_parquet_holds_images_and_features(fields: Path, tmp_path: Path) -> None:
    export(fields, tmp_path / "files", layout="parquet")
    table = pq.read_table(tmp_path / "files/data/train-00000-of-00001.parquet")
    first, second = table.to_pylist()
    assert first["image"] == {"bytes": jpeg(), "path": "000000000.jpg"}
    assert (first["label"], first["age"], second["label"]) == (1, 2.5, None)
    assert json.loads(first["boxes"]) == [[1, 2, 3, 4, "cat"]]
    features = json.loads(table.schema.metadata[b"huggingface"])["info"]["features"]
    assert features["label"] == {"_type": "ClassLabel", "names": ["cat", "dog"]}


@pytest.mark.parametrize("layout", ["csv", "imagefolder", "parquet", "webdataset"])
def test_a_write_that_is_cut_short_fails_the_export(layout: Any, tmp_path: Path) -> None:
    """The kernel accepts all but the last byte of the largest file, then refuses."""
    dataset = make_dataset(make_tree(tmp_path / "photos", NAMES), tmp_path / "dataset")
    done = export(dataset, tmp_path / "complete", layout=layout)
    files = [path for path in (tmp_path / "complete").rglob("*") if path.is_file()]
    assert done.files == len(files)
    largest = max(path.stat().st_size for path in files)
    reason = call_in("fork", reason_with_limit, largest - 1, dataset, tmp_path / "files", layout)
    assert os.strerror(errno.EFBIG) in reason
    assert sorted(path.name for path in tmp_path.iterdir()) == ["complete", "dataset", "photos"]


def reason_with_limit(size: int, dataset: Path, target: Path, layout: Any) -> str:
    """Export where no file may be larger than ``size``; return the error."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))
    with pytest.raises(ConversionFailed) as failed:
        export(dataset, target, layout=layout)
    return str(failed.value)


@pytest.mark.slow
def test_parquet_is_read_by_datasets(fields: Path, tmp_path: Path) -> None:
    export(fields, tmp_path / "files", layout="parquet")
    code = (
        "import sys, datasets; "
        "rows = datasets.load_dataset(sys.argv[1], cache_dir=sys.argv[2])['train']; "
        "print(rows.features['label'].names, rows[0]['image'].size, rows[0]['caption'])"
    )
    variables = {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "home")}
    found = python(code, tmp_path / "files", tmp_path / "cache", env=variables, check=True)
    assert found.stdout == "['cat', 'dog'] (24, 16) a \"red\",\nshape\n"


def test_webdataset_holds_the_same_members(folder: Path, fields: Path, tmp_path: Path) -> None:
    export(make_dataset(folder, tmp_path / "made"), tmp_path / "tars", layout="webdataset")
    direct = make_dataset(folder, tmp_path / "direct", to="webdataset")
    for number in range(2):
        found, expected = (
            _members(path)
            for path in (
                tmp_path / f"tars/data-{number:06d}.tar",
                direct / f"shard-{number:06d}.tar",
            )
        )
        assert found == expected
    export(fields, tmp_path / "more", layout="webdataset")
    members = _members(tmp_path / "more/data-000000.tar")
    assert np.load(io.BytesIO(members["000000000.latent.npy"])).tolist() == [0, 1, 2, 3]


def _members(path: Path) -> dict[str, bytes]:
    with tarfile.open(path) as archive:
        files = {member.name: archive.extractfile(member) for member in archive}
        return {name: file.read() for name, file in files.items() if file and name[0] != "_"}


def test_a_damaged_dataset_exports_nothing(folder: Path, tmp_path: Path) -> None:
    place = make_dataset(folder, tmp_path / "made", to="webdataset")
    data = bytearray((place / "shard-000001.tar").read_bytes())
    data[data.index(b"JFIF") + 200] ^= 1
    (place / "shard-000001.tar").write_bytes(data)
    with refused(CorruptDataset, "shard-000001.tar"):
        export(place, tmp_path / "files")
    assert not (tmp_path / "files").exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["made", "photos"]


def test_a_folder_with_content_is_refused(folder: Path, tmp_path: Path) -> None:
    place = make_dataset(folder, tmp_path / "made")
    make_tree(tmp_path / "full", {"x": b""})
    (tmp_path / "link").symlink_to(tmp_path / "full")
    for target in (tmp_path / "full", tmp_path / "link", tmp_path / "full/x", place / "in"):
        before = tree(tmp_path)
        refuses(2, "export", place, target, facts=(target,))
        assert tree(tmp_path) == before
    (tmp_path / "empty").mkdir()
    assert run_main("export", place, tmp_path / "empty", "--quiet").returncode == 0
    assert tree(tmp_path / "empty") == tree(folder)


def test_a_killed_export_leaves_nothing_in_place_and_a_rerun_completes(
    folder: Path, tmp_path: Path
) -> None:
    place = make_dataset(folder, tmp_path / "made")

    def killed() -> None:
        _kill_at_rename()
        export(place, tmp_path / "files")

    assert in_fork(killed) == -signal.SIGKILL
    assert any(path.is_file() for path in tmp_path.glob(".*/**/*.jpg"))
    assert not (tmp_path / "files").exists()
    shown = invoke("export", place, tmp_path / "files")
    assert shown.stdout.startswith(f"{place}: 6 records exported to {tmp_path / 'files'}: 6 files")
    assert tree(tmp_path / "files") == tree(folder)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["files", "made", "photos"]


@pytest.mark.parametrize("layout", ["imagefolder", "csv", "parquet", "webdataset"])
def test_an_export_killed_after_its_last_step_is_done(
    folder: Path, tmp_path: Path, layout: Any
) -> None:
    place = make_dataset(folder, tmp_path / "made")
    command = ("export", place, tmp_path / "files", "--layout", layout)

    def killed() -> None:
        _kill_after_rename()
        export(place, tmp_path / "files", layout=layout)

    assert in_fork(killed) == -signal.SIGKILL
    before = tree(tmp_path / "files")
    for _ in range(2):
        done = run_main(*command)
        assert done.returncode == 0, done.stderr
        assert "already" in done.stdout
        assert tree(tmp_path / "files") == before
        assert sorted(path.name for path in tmp_path.iterdir()) == ["files", "made", "photos"]


def test_a_folder_that_differs_from_the_export_is_refused(folder: Path, tmp_path: Path) -> None:
    place = make_dataset(folder, tmp_path / "made")
    target = tmp_path / "files"
    changes: list[Callable[[], object]] = [
        lambda: (target / "cat/000.jpg").write_bytes(b""),
        lambda: (target / "dog/more.jpg").write_bytes(b""),
        (target / "cat/000.jpg").unlink,
        lambda: (target / "link").symlink_to("cat"),
        (target / "empty").mkdir,
    ]
    for change in changes:
        export(place, target)
        change()
        before = tree(tmp_path)
        refuses(2, "export", place, target, facts=(target,))
        assert tree(tmp_path) == before
        shutil.rmtree(target)


def _kill_after_rename() -> None:
    """Kill this process when the folder has its name."""
    rename = os.rename

    def call(*names: Any) -> None:
        rename(*names)
        os.kill(os.getpid(), signal.SIGKILL)

    os.rename = call  # type: ignore[assignment]


def _kill_at_rename() -> None:
    """Kill this process when all files are written, before the folder gets its name."""
    for name in ("rename", "replace"):
        setattr(os, name, lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL))


def test_encoded_images_of_one_name_keep_the_suffix_of_their_source(tmp_path: Path) -> None:
    files: dict[str, bytes | None] = {
        "a/twin.jpg": jpeg(),
        "a/twin.png": png(),
        "a/other.jpg": jpeg(),
    }
    source = make_tree(tmp_path / "source", files)
    made = make_dataset(source, tmp_path / "made", encode="png")
    export(made, tmp_path / "out")
    assert sorted(os.listdir(tmp_path / "out/a")) == ["other.png", "twin.jpg.png", "twin.png"]


# Files of an export: names that lead elsewhere, links and collisions.


def test_names_that_lead_elsewhere_are_refused(tmp_path: Path) -> None:
    (tmp_path / "root").mkdir()
    for name in (
        "../x.png",
        "/srv/x.png",
        "a/../../x.png",
        "a//b.png",
        "",
        "./a.png",
        "a\0.png",
    ):
        with refused(UsageError, repr(name)):
            OutputFolder(tmp_path / "root").write(name, b"")
    assert sorted(tree(tmp_path)) == ["root"]


def test_links_are_not_followed(tmp_path: Path) -> None:
    root = make_tree(tmp_path, {"root": None, "outside": None}) / "root"
    (root / "link").symlink_to(tmp_path / "outside")
    with pytest.raises(UsageError):
        OutputFolder(root).write("link", b"")
    with pytest.raises(OSError, match="symbolic link"):
        OutputFolder(root).write("link/file", b"")
    assert list((tmp_path / "outside").iterdir()) == []


def test_names_that_collide_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    output = OutputFolder(tmp_path)
    output.write("a/B.png", b"")
    with refused(UsageError, "'a/B.png'"):
        output.write("a/B.png", b"")
    for name in ("a", "a/B.png/c"):
        with refused(UsageError, "'a"):
            output.write(name, b"")
    output.write("a/ü.png", b"")
    real = os.open

    def without_case(path: Any, *rest: Any, **named: Any) -> int:
        if path == "u\u0308.PNG":
            raise FileExistsError(17, "File exists")
        return real(path, *rest, **named)

    monkeypatch.setattr(os, "open", without_case)
    with refused(UsageError, "a/u\u0308.PNG"):
        output.write("a/u\u0308.PNG", b"")
