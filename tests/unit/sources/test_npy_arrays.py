"""Arrays in .npy and .npz files become fields, unchanged."""

from __future__ import annotations

import io
import pickle
import struct
import warnings
import zipfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from helpers import tree
from refusals import refused
from repairing import flip
from table import for_each

from shardkit import convert, open_dataset, open_source, repair, verify
from shardkit.dataset.manifest import load_manifest
from shardkit.errors import ConversionFailed, UsageError

Arrays = dict[str, npt.NDArray[Any]]


def save_all(folder: Path, arrays: Arrays) -> Path:
    for name, array in arrays.items():
        path = folder / f"{name}.npy"
        path.parent.mkdir(parents=True, exist_ok=True)
        np.save(path, array)
    return folder


def header_of(shape: tuple[int, ...]) -> bytes:
    """Return an .npy file of float32 without values, and with any shape."""
    text = f"{{'descr': '<f4', 'fortran_order': False, 'shape': {shape}}}".encode()
    return b"\x93NUMPY\x01\0" + struct.pack("<H", len(text)) + text


def repeated_member() -> bytes:
    """Return an .npz file with two arrays of one name."""
    file, array = io.BytesIO(), io.BytesIO()
    np.save(array, random((2, 3)))
    with warnings.catch_warnings(action="ignore"), zipfile.ZipFile(file, "w") as archive:
        for _ in range(2):
            archive.writestr("0.npy", array.getvalue())
    return file.getvalue()


def made_of(source: Path, target: Path, **options: Any) -> Any:
    opened = open_source("npy", source, arrays=True, **options)
    convert(opened, target, to="webdataset", shuffle=False)
    return opened_as_dicts(target)


def opened_as_dicts(path: Path, **options: Any) -> Any:
    names = tuple(open_dataset(path, **options).schema)
    return open_dataset(path, fields=names, as_dict=True, **options)


def random(shape: tuple[int, ...], dtype: str = "float32") -> npt.NDArray[Any]:
    return np.random.default_rng(0).normal(size=shape).astype(dtype)


def test_class_folders_give_labels(tmp_path: Path) -> None:
    arrays = {"cat/0": random((2, 3)), "dog/0": random((2, 3)) + 1}
    dataset = made_of(save_all(tmp_path / "src", arrays), tmp_path / "made")
    assert list(dataset.keys) == list(arrays)
    assert dataset.classes == ["cat", "dog"]
    for row, array in enumerate(arrays.values()):
        np.testing.assert_array_equal(dataset[row]["array"], array)
        assert dataset[row]["label"] == row


@pytest.mark.parametrize("module", ["with_native", "without_native"])
def test_usual_and_other_headers_are_read(
    tmp_path: Path, request: pytest.FixtureRequest, module: str
) -> None:
    request.getfixturevalue(module)
    array = random((2, 3))
    good = save_all(tmp_path / "src", {"a/usual": array, "b/fortran": np.asfortranarray(array)})
    with (good / "b" / "version.npy").open("wb") as file:
        np.lib.format.write_array(file, array, version=(2, 0))
    usual = (good / "a" / "usual.npy").read_bytes()
    bad = {"a/cut.npy": usual[:-1], "a/other.npy": header_of((2, 3)), "a/short.npy": usual[:100]}
    bad |= {"b/empty.npy": b"", "b/two.npy": usual * 2, "b/zip.npy": b"PK" + usual}
    for name, content in bad.items():
        (good / name).write_bytes(content)
    np.save(good / "b" / "object.npy", np.array([{}]), allow_pickle=True)
    opened = open_source("npy", good, arrays=True)
    convert(opened, tmp_path / "made", to="lmdb", shuffle=False, on_error="skip")
    dataset = opened_as_dicts(tmp_path / "made")
    assert list(dataset.keys) == ["a/usual", "b/fortran", "b/version"]
    for row in range(3):
        np.testing.assert_array_equal(dataset[row]["array"], array)
    skipped = load_manifest(tmp_path / "made").skipped
    reasons = {problem.path: problem.reason for problem in skipped}
    assert reasons.keys() == {*bad, "b/object.npy"}
    assert "truncated" in reasons["a/short.npy"]


def test_a_folder_of_files_has_no_labels(tmp_path: Path) -> None:
    dataset = made_of(save_all(tmp_path / "src", {"0": random((3,))}), tmp_path / "made")
    assert "label" not in dataset.schema
    source = save_all(tmp_path / "classes", {"a/0": random((2,)), "b/1": random((2,))})
    assert "label" not in made_of(source, tmp_path / "none", labels="none").schema


HEAD = "file_name,note,label\n"


def labeled(folder: Path, rows: str) -> str:
    (folder / "labels.csv").write_text(HEAD + rows)
    return "labels.csv"


@pytest.mark.parametrize(
    ("rows", "classes", "labels"),
    [
        ("b/1.npy,,dog\na/0.npy,,cat\n", ["cat", "dog"], [0, 1]),
        ("a/0.npy,,3\nb/1.npy,,0\n", ["0", "1", "2", "3"], [3, 0]),
    ],
)
def test_a_table_gives_labels(
    rows: str, classes: list[str], labels: list[int], tmp_path: Path
) -> None:
    source = save_all(tmp_path / "src", {"a/0": random((2,)), "b/1": random((2,))})
    table = labeled(source, rows)
    dataset = made_of(source, tmp_path / "made", labels=table)
    assert dataset.classes == classes
    assert [dataset[row]["label"] for row in range(2)] == labels
    assert verify(tmp_path / "made", against=source).ok


@for_each(
    ("name", "content", "facts"),
    [
        ("labels.csv", f"{HEAD}a/0.npy,,cat\nb/1.npy,,cat\nc/1.npy,,cat\n", ["c/1.npy"]),
        ("labels.csv", f"{HEAD}a/0.npy,,cat\na/0.npy,,cat\n", ["labels.csv:3", "a/0.npy"]),
        ("labels.csv", f"{HEAD}a/0.npy,,\"['a', 'b']\"\n", ["labels.csv:2", "a list"]),
        ("labels.csv", f"{HEAD}a/0.npy\n", ["labels.csv:2", "1 value,", "3"]),
        ("labels.csv", "path,label\n", ["file_name", "labels="]),
        ("none.csv", HEAD, ["none.csv", "labels="]),
        ("../labels.csv", HEAD, ["labels='../labels.csv'"]),
        ("/etc/passwd", HEAD, ["labels='/etc/passwd'"]),
        ("a/0.npy", HEAD, ["a/0.npy"]),
    ],
)
def test_a_table_of_labels_that_does_not_fit_is_refused(
    name: str, content: str, facts: list[str], tmp_path: Path
) -> None:
    source = save_all(tmp_path / "src", {"a/0": random((2,)), "b/1": random((2,))})
    for place in (source, tmp_path):
        (place / "labels.csv").write_text(content)
    with refused(UsageError, *facts):
        made_of(source, tmp_path / "made", labels=name)


def test_a_file_without_a_label_is_named(tmp_path: Path) -> None:
    source = save_all(tmp_path / "src", {"a/0": random((2,)), "b/1": random((2,))})
    with refused(ConversionFailed, "b/1.npy", "labels.csv"):
        made_of(source, tmp_path / "made", labels=labeled(source, "a/0.npy,,cat\n"))


def test_options_for_images_are_refused(tmp_path: Path) -> None:
    source = save_all(tmp_path / "src", {"a/0": random((2,))})
    opened = open_source("npy", source, arrays=True)
    for options in ({"resize": 32}, {"orient": True}, {"encode": "jpeg"}):
        with refused(UsageError):
            convert(opened, tmp_path / "made", to="lmdb", **options)


def test_split_folders_become_datasets(tmp_path: Path) -> None:
    arrays = {"train/cat/0": random((2,)), "val/cat/0": random((2,)) * 2}
    source = open_source("npy", save_all(tmp_path / "src", arrays), arrays=True)
    made = convert(source, tmp_path / "made", to="hdf5")
    assert list(made.manifests) == ["train", "val"]
    value = opened_as_dicts(tmp_path / "made", split="val")[0]["array"]
    np.testing.assert_array_equal(value, arrays["val/cat/0"])


def test_each_array_of_an_npz_file_is_a_field(tmp_path: Path) -> None:
    (tmp_path / "src").mkdir()
    mel, text = random((4, 5)), np.arange(3)
    np.savez_compressed(tmp_path / "src" / "0.npz", mel=mel, text=text)
    sample = made_of(tmp_path / "src", tmp_path / "made")[0]
    np.testing.assert_array_equal(sample["mel"], mel)
    np.testing.assert_array_equal(sample["text"], text)


@pytest.mark.parametrize("stated", [1 << 29, 1, 10_000])
def test_a_member_of_another_size_than_stated_is_bad(stated: int, tmp_path: Path) -> None:
    source = save_all(tmp_path / "src", {"0": random((2, 3))})
    np.savez_compressed(source / "1.npz", array=random((2, 3)))
    content = bytearray((source / "1.npz").read_bytes())
    at = content.index(b"PK\x01\x02") + 24  # the size in the directory
    content[at : at + 4] = struct.pack("<I", stated)
    (source / "1.npz").write_bytes(content)
    with refused(ConversionFailed):
        made_of(source, tmp_path / "made")


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
@pytest.mark.parametrize("whole", [False, True], ids=["rows", "files"])
def test_a_damaged_member_is_refused_as_by_numpy(save: Any, whole: bool, tmp_path: Path) -> None:
    path = tmp_path / "arrays/a.npz"
    path.parent.mkdir()
    save(path, values=np.random.default_rng(0).integers(0, 256, (4, 500), np.uint8))
    damaged = bytearray(path.read_bytes())
    damaged[len(damaged) // 2] ^= 1
    path.write_bytes(damaged)
    with pytest.raises((zipfile.BadZipFile, zlib.error)):
        np.load(path)["values"]
    with refused((UsageError, ConversionFailed), "a.npz"):
        made_of(path.parent if whole else path, tmp_path / "made")


def test_a_damaged_label_of_an_archive_is_refused(tmp_path: Path) -> None:
    labels = np.arange(4096, dtype=np.int64)
    np.savez(tmp_path / "a.npz", images=np.zeros((4096, 1, 1), np.uint8), labels=labels)
    damaged = bytearray((tmp_path / "a.npz").read_bytes())
    damaged[damaged.index(labels[1000:1010].tobytes())] ^= 1
    (tmp_path / "a.npz").write_bytes(damaged)
    with refused(UsageError, "a.npz", "labels"):
        convert(open_source("npy", tmp_path / "a.npz"), tmp_path / "made", to="lmdb")


def test_packed_files_leave_nothing_unpacked_on_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "src").mkdir()
    np.savez_compressed(tmp_path / "src" / "0.npz", a=random((8, 8)))
    source = open_source("npy", tmp_path / "src", arrays=True)
    monkeypatch.setattr("shardkit.sources.inputs.unpacked", None)
    (record,) = source.scan().splits[""].read([0])
    assert record.fields["a.npy"] == random((8, 8)).tobytes()


def test_each_row_of_an_npy_file_is_a_sample(tmp_path: Path) -> None:
    rows = random((5, 2, 3), ">f8")
    np.save(tmp_path / "x.npy", rows)
    np.save(tmp_path / "y.npy", np.array([1, 0, 1, 0, 1]))
    dataset = made_of(tmp_path / "x.npy", tmp_path / "made", labels="y")
    np.testing.assert_array_equal([dataset[n]["array"] for n in range(5)], rows)
    assert [dataset[n]["label"] for n in range(5)] == [1, 0, 1, 0, 1]


def test_each_row_of_an_npz_file_is_a_sample(tmp_path: Path) -> None:
    x, z = random((2, 3)), np.arange(8, dtype=np.int16).reshape(2, 4)
    np.savez(tmp_path / "x.npz", x=x, z=z, labels=np.array(["b", "a"]))
    dataset = made_of(tmp_path / "x.npz", tmp_path / "made")
    for row in range(2):
        np.testing.assert_array_equal(dataset[row]["x"], x[row])
        np.testing.assert_array_equal(dataset[row]["z"], z[row])
    assert [dataset[row]["label"] for row in range(2)] == [1, 0]


@pytest.mark.parametrize(
    "array",
    [
        random((2, 3), ">f4"),
        np.asfortranarray(random((2, 3))),
        np.asfortranarray(random((2, 3, 4), ">f8")),
        random((4,), "float16"),
        np.array([True, False]),
        np.array([1.5, -2], np.float32).view(np.uint16),  # as bits of bfloat16 are saved
    ],
    ids=["big-endian", "Fortran", "both", "float16", "bool", "bits"],
)
def test_values_become_little_endian_and_c_ordered(array: Any, tmp_path: Path) -> None:
    source = save_all(tmp_path / "src", {"0": array})
    value = np.asarray(made_of(source, tmp_path / "made")[0]["array"])
    np.testing.assert_array_equal(value, array)
    assert value.dtype == array.dtype.newbyteorder("<")
    assert value.flags.c_contiguous


def test_shapes_may_vary(tmp_path: Path) -> None:
    arrays = {"0": random((2, 3)), "1": random((5, 3)), "2": random((0, 3))}
    dataset = made_of(save_all(tmp_path / "src", arrays), tmp_path / "made")
    assert dataset.schema["array"].shape is None
    for row, array in enumerate(arrays.values()):
        np.testing.assert_array_equal(dataset[row]["array"], array)


def lying(shape: str) -> bytes:
    text = f"{{'descr': '<f4', 'fortran_order': False, 'shape': {shape}, }}\n".encode()
    return b"\x93NUMPY\1\0" + struct.pack("<H", len(text)) + text + bytes(24)


def pickled() -> bytes:
    return pickle.dumps([1, 2])


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("1.npy", lying("(999999999999, 999)"), ()),
        ("1.npy", lying("(" + "1, " * 40 + "6)"), ("41",)),
        ("1.npy", lying("()")[:-20], ("0",)),
        ("1.npy", np.zeros(3, np.float64), ()),
        ("1.npy", np.array([None, 1], object), ()),
        ("1.npy", np.zeros(2, "V2"), ("'uint16'",)),
        ("1.npy", np.zeros(2, "S3"), ()),
        ("1.npy", b"text", ()),
        ("1.npz", b"text", ()),
        ("1.pt", pickled(), ()),
        ("1.npy", header_of((0, 2**63 - 1)), (str(2**63 - 1),)),
        ("1.npy", header_of((2**62, 0, 3)), (str(2**62),)),
        ("1.npz", repeated_member(), ("'0.npy'",)),
    ],
    ids=[
        *("huge", "41 axes", "no axes", "other type", "objects", "bfloat16", "texts", "no npy"),
        *("no npz", "pickle", "long side", "long product", "one name twice"),
    ],
)
def test_bad_files_are_problems(
    name: str, content: Any, message: tuple[str, ...], tmp_path: Path
) -> None:
    source = save_all(tmp_path / "src", {"0": random((2, 3))})
    if isinstance(content, bytes):
        (source / name).write_bytes(content)
    else:
        np.save(source / name, content)
    with refused(ConversionFailed, *message):
        made_of(source, tmp_path / "made")
    opened = open_source("npy", source, arrays=True)
    convert(opened, tmp_path / "skipped", to="lmdb", on_error="skip")
    assert len(open_dataset(tmp_path / "skipped")) == 1


def test_files_have_the_same_arrays(tmp_path: Path) -> None:
    (tmp_path / "src").mkdir()
    np.savez(tmp_path / "src" / "0.npz", a=np.zeros(2))
    np.savez(tmp_path / "src" / "1.npz", a=np.zeros(2), b=np.zeros(2))
    with refused(ConversionFailed):
        made_of(tmp_path / "src", tmp_path / "made")


@for_each(
    ("arrays", "fact"),
    [
        (np.asfortranarray(np.zeros((3, 2))), "np.ascontiguousarray"),
        (np.zeros(3), "x.reshape(-1, 1)"),
        (np.array([None], object), "pickled objects"),
        ({"a": np.zeros((2, 2)), "b": np.zeros((3, 2))}, "numbers of rows"),
        ({"Mel-1": np.zeros((2, 2))}, "Mel-1"),
    ],
)
def test_rows_that_cannot_be_stored_are_refused(arrays: Any, fact: str, tmp_path: Path) -> None:
    path = tmp_path / ("x.npz" if isinstance(arrays, dict) else "x.npy")
    np.savez(path, **arrays) if isinstance(arrays, dict) else np.save(path, arrays)
    with refused(UsageError, path.name, fact):
        made_of(path, tmp_path / "made")


@for_each("arrays", [None, True])
def test_pickles_are_refused(arrays: bool | None, tmp_path: Path) -> None:
    (tmp_path / "x.pt").write_bytes(pickled())
    with pytest.raises(UsageError, match=r"numpy\.save"):
        open_source("npy", tmp_path / "x.pt", arrays=arrays)


@pytest.mark.parametrize("to", ["lmdb", "hdf5", "webdataset"])
def test_arrays_are_a_source_like_any_other(to: Any, tmp_path: Path) -> None:
    """What `SourceConformance` asks of sources of images."""
    arrays = {f"{c}/{n}": random((3, n % 3 + 1)) + n for c in "ab" for n in range(20)}
    path = save_all(tmp_path / "src", arrays)
    source = open_source("npy", path, arrays=True)
    (first,), (again,) = source.scan().splits.values(), source.scan().splits.values()
    assert [*first.entries] == [*again.entries]
    assert first.read([3, 1]) == [*first.read([3]), *first.read([1])]
    copy = pickle.loads(pickle.dumps(first))
    assert copy.read(range(40)) == first.read(range(40))
    trees = []
    for workers in (1, 2):
        target = tmp_path / f"made{workers}"
        convert(source, target, to=to, shard_samples=7, workers=workers)
        trees.append(tree(target))
        assert convert(source, target, to=to, shard_samples=7).unchanged
        assert verify(target, against=path).ok
        manifest = (target / "shardkit.json").read_text()
        assert str(tmp_path) not in manifest
    assert trees[0] == trees[1]
    shard = sorted((tmp_path / "made1").glob("shard-*"))[0]
    flip(shard)
    assert not verify(tmp_path / "made1").ok
    assert repair(tmp_path / "made1", path).ok
    assert tree(tmp_path / "made1") == trees[0]
    changed = path / "a" / "7.npy"
    np.save(changed, arrays["a/7"] + 1)
    report = verify(tmp_path / "made1", against=path)
    assert not report.ok
    changed.write_bytes(b"no array")
    with pytest.raises(ConversionFailed, match=r"a/7\.npy"):
        convert(open_source("npy", path, arrays=True), tmp_path / "bad", to=to)
    skipped = convert(
        open_source("npy", path, arrays=True), tmp_path / "bad", to=to, on_error="skip"
    )
    assert skipped.manifests[""].rows == 39
