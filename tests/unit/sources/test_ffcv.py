"""Files that the package of FFCV 1.0.2 wrote, and files that lie."""

from __future__ import annotations

import gzip
import hashlib
import json
import math
import struct
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from foreign import beton_images, make_beton, pixels_of, png_of
from helpers import invoke, png
from hostile.foreign_shards import BetonColumn, write_beton
from refusals import refused
from table import for_each

from shardkit import attach, convert, open_dataset, open_source, verify
from shardkit.errors import UsageError
from shardkit.kinds import values
from shardkit.torch.data.images import DecodeName

pytestmark = pytest.mark.usefixtures("state")

GOLDEN = Path(__file__).parents[2] / "golden" / "ffcv"
EXPECTED: dict[str, Any] = json.loads((GOLDEN / "expected.json").read_text())
JPEG, RAW = 0, 1
FILES = ("jpg", "raw", "raw-sizes", "smart", "proportion", "fields", "workers")


def beton(folder: Path, name: str) -> Path:
    """Unpack a file of FFCV."""
    path = folder / f"{name}.beton"
    path.write_bytes(gzip.decompress((GOLDEN / f"{name}.beton.gz").read_bytes()))
    return path


def opened(path: Path, **options: Any) -> Any:
    return open_source("ffcv", path, **options)


def converted(path: Path, **options: Any) -> Any:
    """Convert a file in its order; return the dataset, which has encoded images."""
    target = path.with_suffix(".made")
    convert(opened(path, **options), target, to="lmdb", shuffle=False)
    return open_dataset(target, decode="bytes")


def samples_of(target: Path, decode: DecodeName = "bytes") -> Any:
    """Return a dataset whose samples have all fields, by name."""
    names = (*open_dataset(target).schema,)
    return open_dataset(target, decode=decode, fields=names, as_dict=True)


def digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def as_ffcv_stores(mode: int, data: bytes) -> str:
    """Return the digest of what FFCV stores of an image: a JPEG, or pixels."""
    return digest(data if mode == JPEG else pixels_of(data).tobytes())


@pytest.mark.parametrize("name", FILES)
def test_images_labels_and_order_are_those_that_ffcv_reads(name: str, tmp_path: Path) -> None:
    dataset = converted(beton(tmp_path, name))
    images = dataset.column("label")
    assert [int(label) for label in images] == [row["label"] for row in EXPECTED[name]]
    for row, expected in enumerate(EXPECTED[name]):
        data = dataset[row][0]
        assert as_ffcv_stores(expected["image"]["mode"], data) == expected["image"]["sha256"]
        assert [*pixels_of(data).shape[1::-1]] == expected["image"]["size"]


def test_the_files_have_every_mode() -> None:
    modes = {name: {row["image"]["mode"] for row in EXPECTED[name]} for name in FILES}
    assert modes["smart"] == modes["proportion"] == {JPEG, RAW}
    assert (modes["jpg"], modes["raw"]) == ({JPEG}, {RAW})


@pytest.mark.parametrize("in_place", [False, True])
def test_every_field_has_the_values_that_ffcv_reads(in_place: bool, tmp_path: Path) -> None:
    path = beton(tmp_path, "fields")
    if in_place:
        keep = "weight,info,latent,blob,tensor,preview"
        attach(opened(path, keep=keep), tmp_path / "index")
        target = tmp_path / "index"
    else:
        converted(path)
        target = path.with_suffix(".made")
    for sample, expected in zip(samples_of(target), EXPECTED["fields"], strict=True):
        assert sample["weight"] == float(expected["weight"])
        assert sample["info"] == expected["info"]
        assert digest(sample["blob"]) == expected["blob"]["sha256"]
        assert digest(sample["preview"]) == expected["preview"]["sha256"]
        for name in ("latent", "tensor", *(("swapped",) * (not in_place))):
            array, stated = np.asarray(sample[name]), expected[name]
            assert array.dtype == np.dtype(stated["dtype"]).newbyteorder("<")
            assert array.tolist() == stated["values"]
            in_file = array.astype(stated["dtype"]).tobytes()
            assert digest(in_file) == stated["sha256"]
        if not in_place:
            assert digest(pixels_of(sample["thumb"]).tobytes()) == expected["thumb"]["sha256"]


def test_files_of_the_tests_equal_those_of_ffcv(tmp_path: Path) -> None:
    path = beton(tmp_path, "raw")
    dataset = converted(path)
    columns = [
        beton_images([image for image, _ in dataset], raw=True),
        BetonColumn("label", 1, "<i8", [(label,) for _, label in dataset]),
    ]
    made = write_beton(tmp_path / "made", columns, page=1 << 21)
    assert made.read_bytes() == path.read_bytes()


@pytest.mark.parametrize("name", ["jpg", "raw", "workers"])
def test_an_attached_file_has_the_images_of_the_converted_one(name: str, tmp_path: Path) -> None:
    path = beton(tmp_path, name)
    before = path.read_bytes(), path.stat().st_mtime_ns
    converted(path)
    attach(opened(path), tmp_path / "index")
    made, index = (
        open_dataset(folder, decode="numpy")
        for folder in (path.with_suffix(".made"), tmp_path / "index")
    )
    assert index.classes == made.classes
    assert len(index) == len(made)
    for row in range(len(made)):
        (pixels, label), (expected, its) = index[row], made[row]
        assert (pixels.tolist(), label) == (expected.tolist(), its)
    assert verify(tmp_path / "index", "decode").ok
    assert (path.read_bytes(), path.stat().st_mtime_ns) == before


@for_each(
    ("name", "reason"),
    [
        ("smart", "2 of 5 images are raw pixels"),
        ("raw-sizes", "5 of 5 images are raw pixels"),
        ("fields", r"column swapped \(array of >f4"),
    ],
)
def test_what_is_not_stored_as_it_is_cannot_be_attached(
    name: str, reason: str, tmp_path: Path
) -> None:
    with pytest.raises(UsageError, match=f"{reason}.*`shardkit convert`"):
        attach(opened(beton(tmp_path, name)), tmp_path / "index")


def test_a_compressed_file_is_converted_but_not_attached(tmp_path: Path) -> None:
    path = tmp_path / "jpg.beton.gz"
    path.write_bytes((GOLDEN / path.name).read_bytes())
    assert len(converted(path)) == 5
    with pytest.raises(UsageError, match="is compressed"):
        attach(opened(path), tmp_path / "index")


def test_raw_pixels_stay_raw_if_asked(tmp_path: Path) -> None:
    path = beton(tmp_path, "raw")
    words = ("convert", "ffcv", path, tmp_path / "made", "--to", "hdf5", "--no-shuffle")
    assert invoke(*words, "--resize", "12x16", "--encode", "raw").exit_code == 0
    dataset = open_dataset(tmp_path / "made", decode="numpy")
    stored = [digest(image.tobytes()) for image, _ in dataset[:]]
    assert stored == [row["image"]["sha256"] for row in EXPECTED["raw"]]


def test_a_dry_run_shows_every_field(tmp_path: Path) -> None:
    path = beton(tmp_path, "fields")
    done = invoke(
        *("convert", "ffcv", path, tmp_path / "made", "--to", "lmdb", "--dry-run"),
        *("--keep", "weight,caption=info:/caption:text,latent"),
    )
    for line in (
        "  files     1, containing 5 samples",
        "  image     image: 5 JPEG",
        "  label     label: 3 integers from 0 to 2",
        "  weight    weight (float): float64 number",
        "  caption   info (json): text",
        "  latent    latent (array of float16, (2, 3)): float16 array, 2 x 3",
        "  unused    blob (bytes), tensor (array of ",
    ):
        assert line in done.output


def test_classes_have_the_names_in_a_file(tmp_path: Path) -> None:
    (tmp_path / "names").write_text("cat\ndog\nfox\n")
    dataset = converted(beton(tmp_path, "jpg"), classes=str(tmp_path / "names"))
    assert [*dataset.classes] == ["cat", "dog", "fox"]
    assert dataset[0][1] == 2


# Options


def two_images(folder: Path, *more: BetonColumn) -> Path:
    return write_beton(folder / "x.beton", [beton_images([png(seed=0), png(seed=1)]), *more])


def column(name: str, *numbers: int) -> BetonColumn:
    return BetonColumn(name, 1, "<i8", [(number,) for number in numbers])


def test_labels_are_the_only_integers_or_have_a_usual_name(tmp_path: Path) -> None:
    assert converted(two_images(tmp_path, column("id", 1, 0)))[0][1] == 1
    for name, others in (("target", ("id",)), (None, ("id", "age"))):
        fields = [column(each, 0, 3) for each in others]
        (tmp_path / str(name)).mkdir()
        if name:
            fields.append(column(name, 1, 0))
        dataset = converted(two_images(tmp_path / str(name), *fields))
        assert ("label" in dataset.schema) == (name is not None)
        assert set(others) < set(dataset.schema)


def test_negative_labels_are_missing_or_refused_unless_they_are_numbers(tmp_path: Path) -> None:
    path = two_images(tmp_path, column("label", -1, 4))
    assert [label for _, label in converted(path)] == [-1, 4]
    path = two_images(tmp_path, column("label", -5, 4))
    with refused(UsageError, "-5", "keep="):
        opened(path).scan()
    keep = {"label": "none", "keep": "number=label"}
    (record, _) = opened(path, **keep).scan().splits[""].read(range(2))
    assert record.meta["number"] == -5


@for_each(
    ("options", "reason"),
    [
        ({"image": "label"}, "label (int) is not an image column"),
        ({"label": "image"}, "has no column 'image' of integers or text; it has image"),
        ({"keep": "x"}, "has no column 'x'; it has image"),
        ({"keep": "n=label:/a"}, "selects a part of JSON, but this column is label (int)"),
    ],
)
def test_wrong_options_are_named(options: dict[str, Any], reason: str, tmp_path: Path) -> None:
    path = two_images(tmp_path, column("label", 0, 1))
    with refused(UsageError, reason):
        opened(path, **options)


def test_several_fields_of_images_need_a_choice(tmp_path: Path) -> None:
    pictures = [png(seed=0), png(seed=1)]
    columns = [beton_images(pictures, "left"), beton_images(pictures[::-1], "right")]
    path = write_beton(tmp_path / "x.beton", columns)
    with refused(UsageError, "2", "image="):
        opened(path)
    assert converted(path, image="right", keep="none")[0][0] == pictures[1]


def test_files_are_not_joined(tmp_path: Path) -> None:
    for name in ("train.beton", "val.beton"):
        two_images(tmp_path).rename(tmp_path / name)
    with refused(UsageError, "2"):
        opened(tmp_path)


# Files that lie


@for_each(
    ("name", "reason"),
    [
        ("custom", "'mine' field has a custom type, which only its author's code can read"),
        ("arrays", r"has no image column; it has covariate \(array of float64"),
        ("unfinished", "FFCV did not finish it, so it has no allocation table: write it again"),
    ],
)
def test_files_that_cannot_be_read_are_refused(name: str, reason: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=reason):
        opened(beton(tmp_path, name))


@for_each("size", [0, 10, 24, 1000, 3000, 1 << 20, 3 << 20, -25, -24, -1])
def test_a_truncated_file_is_refused(size: int, tmp_path: Path) -> None:
    path = beton(tmp_path, "jpg")
    path.write_bytes(path.read_bytes()[:size])
    with refused(UsageError):
        opened(path)


HEADER, FIELDS = 0, 24
ROWS = FIELDS + 2 * 1041
"""Offset of the samples of a file of images and labels; each has 24 bytes."""
Change = Callable[[bytearray], None]


def put(offset: int, form: str, *numbers: Any) -> Change:
    return lambda data: struct.pack_into(form, data, offset, *numbers)


def in_table(row: int, number: int, value: int) -> Change:
    """Change a number of an allocation: 0 is the sample, 1 the offset, 2 the size."""

    def change(data: bytearray) -> None:
        (table,) = struct.unpack_from("<Q", data, 16)
        struct.pack_into("<Q", data, table + 24 * row + 8 * number, value)

    return change


REFUSED: dict[str, tuple[Change, str]] = {
    "another version": (put(0, "<H", 1), "not an FFCV file of version 2: it declares version 1"),
    "no fields": (put(2, "<H", 0), "not an FFCV file"),
    "many fields": (put(2, "<H", 65535), "not an FFCV file"),
    "more fields than bytes": (put(2, "<H", 900), "truncated"),
    "many samples": (put(8, "<Q", 1 << 63), "truncated or damaged"),
    "a table outside": (put(16, "<Q", 1 << 62), "truncated or damaged"),
    "a table in the header": (put(16, "<Q", 8), "truncated or damaged"),
    "an unknown type": (put(FIELDS, "<B", 9), "'image' field has the unknown type 9"),
    "a name without bytes": (put(FIELDS + 1, "<B", 0), "has .* type"),
    "a name twice": (put(FIELDS + 1042, "<5s", b"image"), "two fields are called 'image'"),
    "an allocation outside": (in_table(0, 1, 1 << 60), "points outside its data"),
    "an allocation in the header": (in_table(0, 1, 8), "points outside its data"),
    "a huge allocation": (in_table(0, 2, (1 << 64) - 1), "points outside its data"),
    "allocations that overlap": (in_table(0, 2, 1000), "overlapping ranges"),
}


@for_each("change", REFUSED)
def test_a_lying_file_is_refused(change: str, tmp_path: Path) -> None:
    path = make_beton(tmp_path, {f"{n}/{n}.png": png(seed=n) for n in range(3)})
    data = bytearray(path.read_bytes())
    REFUSED[change][0](data)
    path.write_bytes(data)
    with pytest.raises(UsageError, match=REFUSED[change][1]):
        opened(path).scan()


BAD: dict[str, tuple[Change, str]] = {
    "a pointer of nobody": (
        put(ROWS + 5, "<Q", 4096),
        "its image is not where the allocation table",
    ),
    "a huge pointer": (
        put(ROWS + 5, "<Q", (1 << 64) - 1),
        "its image is not where the allocation table",
    ),
    "an unknown mode": (put(ROWS, "<B", 7), "its image is not where the allocation table"),
    "no pixels": (put(ROWS + 1, "<HH", 0, 0), "its image is not where the allocation table"),
    "a sample of another": (in_table(0, 0, 2), "its image is not where the allocation table"),
    "no allocation": (in_table(0, 2, 0), "its image is not where the allocation table"),
}


@for_each("raw", [False, True])
@for_each("change", BAD)
def test_a_lying_sample_is_bad_and_others_are_good(change: str, raw: bool, tmp_path: Path) -> None:
    pictures = {f"{n}/{n}.png": png(seed=n) for n in range(3)}
    path = make_beton(tmp_path, pictures, raw=raw)
    data = bytearray(path.read_bytes())
    BAD[change][0](data)
    path.write_bytes(data)
    scan = opened(path).scan()
    ((problem,), images) = scan.problems[""], scan.splits[""]
    assert problem.path == "x/00000000"
    assert problem.reason.startswith(BAD[change][1])
    assert len(images) == 2
    found = [pixels_of(record.fields["png"]).tolist() for record in images.read([0, 1])]
    assert found == [pixels_of(pictures[f"{n}/{n}.png"]).tolist() for n in (1, 2)]


@for_each("sides", [(65535, 65535), (16, 25), (24, 15)])
def test_raw_pixels_of_another_size_are_bad(sides: tuple[int, int], tmp_path: Path) -> None:
    path = make_beton(tmp_path, {"0/0.png": png(24, 16)}, raw=True)
    data = bytearray(path.read_bytes())
    put(ROWS + 1, "<HH", *sides)(data)
    path.write_bytes(data)
    (problem,) = opened(path).scan().problems[""]
    assert problem.reason.startswith("its image is not where the allocation table")


def array_of(stated: bytes, *sides: int, length: int | None = None) -> BetonColumn:
    """Return a field of arrays of 4 bytes."""
    arguments = struct.pack("<33Q", *sides, *[0] * (32 - len(sides)), length or len(stated))
    return BetonColumn("a", 4, "<u8", [(None,)] * 2, [b"1234", b"5678"], arguments + stated)


@for_each(
    ("field", "reason"),
    [
        (array_of(b'[["", "|O"]]', 1), "not plain numbers"),
        (array_of(b'[["", "|O8"]]', 1), "not plain numbers"),
        (array_of(b'[["x", "<f4"], ["y", "<f4"]]', 1), "not plain numbers"),
        (array_of(b'[["", "<f3"]]', 1), "not plain numbers"),
        (array_of(b'[["", "<f4"]]', 1, length=1 << 63), "not plain numbers"),
        (array_of(b"__import__('os')", 1), "not plain numbers"),
        (array_of(b'[["", "<f4"]]', 1 << 40, 1 << 40), "is out of range"),
        (array_of(b'[["", "<f4"]]', 1, 0, 1), "out of range|empty axis"),
        (array_of(b'[["", "<f4"]]', *[1] * 32), "out of range"),
    ],
)
def test_a_lying_array_is_refused(field: BetonColumn, reason: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=reason):
        opened(two_images(tmp_path, field))


def test_an_array_of_another_size_is_bad(tmp_path: Path) -> None:
    path = two_images(tmp_path, array_of(b'[["", "<f4"]]', 2))
    problems = opened(path).scan().problems[""]
    assert {problem.reason for problem in problems} == {
        "its a is not where the allocation table lists it"
    }


def test_an_array_without_axes_is_one_value(tmp_path: Path) -> None:
    dataset = converted(two_images(tmp_path, array_of(b'[["", "<i4"]]')))
    assert dataset.schema["a"].shape == ()
    assert np.asarray(samples_of(dataset.path)[0]["a"]).tobytes() == b"1234"


def test_a_label_may_be_the_position_of_a_one(tmp_path: Path) -> None:
    rows = [bytes([0, 0, 1, 0]), bytes([1, 0, 0, 0])]
    path = two_images(tmp_path, array_of(b'[["", "|u1"]]', 4)._replace(values=rows))
    assert [converted(path, label="a")[row][1] for row in (0, 1)] == [2, 0]


def json_of(*texts: bytes) -> BetonColumn:
    rows: Sequence[Any] = [(None, len(text)) for text in texts]
    return BetonColumn("info", 5, "<u8 <u8", rows, texts)


@pytest.mark.parametrize(
    "text", [b'{"a": NaN}\0', b"[" * 100_000 + b"\0", b"{\0", b"\0", b"\xff\0", b"1" * 9999]
)
def test_bad_json_is_a_bad_image(text: bytes, tmp_path: Path) -> None:
    path = two_images(tmp_path, json_of(text, b"[1]\0"))
    done = invoke(
        *("convert", "ffcv", path, tmp_path / "made", "--to", "lmdb", "--on-error", "skip")
    )
    assert done.exit_code == 0, done.output
    assert [sample["info"] for sample in samples_of(tmp_path / "made")] == [[1]]


def test_long_json_is_a_bad_image(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(values, "_MOST_JSON", 10)
    path = two_images(tmp_path, json_of(b"[1, 2, 3, 4, 5]\0", b"[1]\0"))
    (images,) = opened(path).scan().splits.values()
    images.read([1])
    with refused(Exception, "10"):
        images.read([0])


def test_empty_bytes_share_the_offset_of_the_next_value(tmp_path: Path) -> None:
    blobs = BetonColumn("blob", 3, "<u8 <u8", [(None, 0), (None, 0)], [b"", b""])
    pictures = [png_of(np.full((4, 4, 3), n, np.uint8)) for n in range(2)]
    path = write_beton(tmp_path / "x.beton", [blobs, beton_images(pictures, raw=True)])
    dataset = converted(path)
    samples = samples_of(dataset.path, "numpy")
    assert [(bytes(s["blob"]), int(s["image"][0, 0, 0])) for s in samples] == [(b"", 0), (b"", 1)]


@for_each("size", [1, 4, (1 << 64) - 1, 1 << 63])
def test_bytes_of_another_size_are_bad(size: int, tmp_path: Path) -> None:
    for number, row in ((size, None), (3, 4096)):
        blobs = BetonColumn("b", 3, "<u8 <u8", [(None, 3), (None, 3)], [b"123", b"456"])
        path = two_images(tmp_path, blobs)
        data = bytearray(path.read_bytes())
        if row is not None:
            put(ROWS + 13, "<Q", row)(data)
        put(ROWS + 21, "<Q", number)(data)
        path.write_bytes(data)
        (problem,) = opened(path).scan().problems[""]
        assert problem.reason == "its b is not where the allocation table lists it"


def test_infinite_numbers_are_kept(tmp_path: Path) -> None:
    weights = BetonColumn("w", 0, "<f8", [(math.inf,), (math.nan,)])
    dataset = converted(two_images(tmp_path, weights))
    infinite, missing = (float(number) for number in dataset.column("w"))
    assert infinite == math.inf
    assert math.isnan(missing)
