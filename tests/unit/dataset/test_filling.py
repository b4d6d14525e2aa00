"""The compiled module fills a batch with the pixels that Python gives, or leaves an image to it."""

from __future__ import annotations

import io
import itertools
import os
import queue
import signal
import tempfile
import threading
from collections import Counter
from collections.abc import Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from filled import DISK, Located, Stored, fill_pieces, fill_region, fill_whole, python_whole
from helpers import DEADLINE, FORMATS, encoded, jpeg, make_dataset, make_tree, picture, pixels, png
from hostile import jpegs
from hostile.cases import files_of
from refusals import refused

from scripts.fuzzing.pieces import compare
from shardkit import CenterCrop, RandomCrop, RandomResizedCrop, Resize, make_loader, open_dataset
from shardkit.codecs import planes
from shardkit.codecs.geometry import Region
from shardkit.codecs.image import Decoding, stated_size
from shardkit.dataset.decode import decode_stored
from shardkit.errors import BadImage, CorruptRecord
from shardkit.record import PLANES
from shardkit.sampling.order import BatchDraws, Draws
from shardkit.system import compiled, native
from shardkit.system.compiled import fill, fill_values, fill_views, read_stored
from shardkit.torch.data.ops import Crop, ImageOp, as_crop_table, select_crop_table

pytestmark = pytest.mark.usefixtures("with_native")

OPERATIONS: dict[str, ImageOp] = {
    "crop": CenterCrop(24),
    "whole": CenterCrop((20, 24), resize=26),
    "unscaled": RandomCrop((24, 30)),
    "random": RandomResizedCrop(24),
    "random bicubic": RandomResizedCrop((20, 28), filter="bicubic", oversample=2.0),
    "all pixels": RandomResizedCrop(24, oversample=float("inf")),
    "resize": Resize((30, 20)),
    "enlarge": Resize((150, 170), filter="bicubic"),
}


@pytest.fixture
def left(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of images that each batch left to Python."""
    counts: list[int] = []

    def spy(*arguments: Any, **options: Any) -> list[Sequence[int]]:
        positions = fill_views(*arguments, **options)
        counts.append(sum(map(len, positions)))
        return positions

    monkeypatch.setattr(compiled, "fill_views", spy)
    return counts


def kinds() -> dict[str, Stored]:
    """Return JPEGs of all kinds that the module decodes."""
    random = np.random.default_rng(3)
    found: dict[str, Stored] = {}
    variants: dict[str, dict[str, Any]] = {
        "420": {},
        "422": {"subsampling": 1},
        "444": {"subsampling": 0},
        "restarts": {"restart_marker_blocks": 3},
        "quality 100": {"quality": 100},
        "quality 5": {"quality": 5},
        "RGB": {"keep_rgb": True},
    }
    for name, options in variants.items():
        width, height = map(int, random.integers(40, 130, 2))
        data = jpeg(width, height, seed=len(found), **options)
        found[name] = Stored(data, width, height)
    found["gray"] = Stored(encoded(picture(70, 55, mode="L")), 70, 55)
    return found


def png_kinds() -> dict[str, Stored]:
    """Return PNGs of all kinds that the module decodes."""
    if not getattr(native.module(), "LIBDEFLATE", ""):
        return {}
    modes = ("1", "L", "LA", "P", "RGB", "RGBA", "I;16")
    return {
        mode: Stored(png(49 + n, 63 - n, n, mode), 49 + n, 63 - n, "png")
        for n, mode in enumerate(modes)
    }


def planes_of(images: dict[str, Stored]) -> dict[str, Stored]:
    """Return the planes of JPEGs that have some."""
    records = {name: planes.from_jpeg(image.data) for name, image in images.items()}
    return {
        f"planes of {name}": Stored(record, *images[name][1:3], PLANES)
        for name, record in records.items()
        if record is not None
    }


def python_samples(images: list[Stored], op: ImageOp, crops: list[Crop], how: Decoding) -> Any:
    return np.stack([op.render(i.encoded, p, how) for i, p in zip(images, crops, strict=True)])


@pytest.mark.parametrize("are_stored_once", [True, False])
@pytest.mark.parametrize("name", OPERATIONS)
def test_samples_are_those_of_python(name: str, are_stored_once: bool) -> None:
    """An image that a batch has several times is decoded once."""
    op, how, random = OPERATIONS[name], Decoding(), np.random.default_rng(5)
    images = list((kinds() | planes_of(kinds()) | png_kinds()).values()) * 6
    raw = pixels(61, 47)
    images += [Stored(raw.tobytes(), 61, 47, "raw")] * 6
    if not are_stored_once:
        images = [Stored(*image) for image in images]
    draws = [Draws(int(random.integers(1 << 40)), number) for number in range(len(images))]
    sizes = [image[1:3] for image in images]
    crops = op.crops([w for w, _ in sizes], [h for _, h in sizes], draws.__getitem__)

    found, left = fill_pieces(images, op, crops, how)

    assert left == []
    np.testing.assert_array_equal(found, python_samples(images, op, crops, how))


def test_equal_samples_of_an_image_are_made_once() -> None:
    one, other = Stored(jpeg(30, 28, seed=1), 30, 28), Stored(jpeg(30, 28, seed=2), 30, 28)
    damaged = Stored(one.data[:200], 30, 28)
    images = [one, damaged, other, one, one, damaged, other]
    whole, cropped = np.zeros((7, 28, 30, 3), np.uint8), np.zeros((7, 9, 11, 3), np.uint8)
    crops = [Crop(n % 5, n % 2, 11, 9, (9, 11), n > 4) for n in (0, 1, 2, 3, 0, 5, 6)]
    table = as_crop_table(RandomCrop((9, 11)), crops)
    views = [compiled.View(whole, None), compiled.View(cropped, table)]

    assert [*map(list, fill_views(Located(images).as_rows(), views))] == [[1, 5], [1, 5]]
    for number, crop in enumerate(crops):
        if images[number] is not damaged:
            expected = python_whole(images[number], Decoding())
            assert expected is not None
            np.testing.assert_array_equal(whole[number], expected)
            slices = _slices(crop)
            flipped = expected[slices][:, :: -1 if crop.flip else 1]
            np.testing.assert_array_equal(cropped[number], flipped)


def test_all_bands_that_crops_of_one_image_need_are_read() -> None:
    record = planes.from_jpeg(jpeg(200, 400))
    assert record is not None
    image = Stored(record, 200, 400, PLANES)
    op = RandomCrop((24, 30))
    crops = [Crop(7 * n, top, 30, 24, (24, 30)) for n, top in enumerate((330, 3, 200, 330))]

    found, left = fill_pieces([image] * 4, op, crops)

    assert left == []
    np.testing.assert_array_equal(found, python_samples([image] * 4, op, crops, Decoding()))


def test_whole_images_are_those_of_python() -> None:
    images = kinds() | planes_of(kinds()) | png_kinds()
    how = Decoding(background=(9, 99, 199))
    for name, image in images.items():
        np.testing.assert_array_equal(fill_whole(image, how), python_whole(image, how), name)


def test_other_images_are_left_to_python() -> None:
    width, height = 41, 33
    data = jpeg(width, height)
    progressive = jpeg(width, height, progressive=True)
    record = planes.from_rgb(pixels(width, height), "420")
    buffer = io.BytesIO()
    picture(width, height, mode="CMYK").save(buffer, "JPEG")
    frames = picture(width, height), [picture(width, height, 1)]
    animated = encoded(frames[0], "PNG", save_all=True, append_images=frames[1])
    others = {
        "truncated PNG": Stored(png(width, height)[:-40], width, height, "png"),
        "animated": Stored(animated, width, height, "png"),
        "PNG of another size": Stored(png(width, height + 1), width, height, "png"),
        "progressive": Stored(progressive, width, height),
        "CMYK": Stored(buffer.getvalue(), width, height),
        "truncated": Stored(data[:-200], width, height),
        "no end": Stored(data[:-2], width, height),
        "a PNG": Stored(png(width, height), width, height),
        "nothing": Stored(b"", width, height),
        "another size": Stored(jpeg(width, height + 1), width, height),
        "planes, too short": Stored(record[:-1], width, height, PLANES),
        "planes of another size": Stored(record, width, height + 1, PLANES),
        "no planes": Stored(data, width, height, PLANES),
        "raw, too short": Stored(bytes(3 * width * height - 1), width, height, "raw"),
    }
    good = Stored(data, width, height)
    images = [image for other in others.values() for image in (other, good)]
    out = np.zeros((len(images), height, width, 3), np.uint8)

    left = fill(Located(images).as_rows(), out)

    assert [list(others)[number // 2] for number in left] == list(others)
    assert not any(number % 2 for number in left)
    np.testing.assert_array_equal(out[1], python_whole(good))


def test_mutated_jpegs_give_the_pixels_of_the_whole_or_none() -> None:
    found = compare(range(800), fill_region)

    assert found["equal"] > 100
    assert found["refused"] > 20
    assert not found["different"]


def test_no_region_decides_whether_a_jpeg_is_damaged() -> None:
    width, height = 96, 80
    data = jpeg(width, height)
    cut, end = data[: len(data) * 8 // 10], b"\xff\xd9"
    regions = [Region(3, top, 40, side) for top, side in ((0, 1), (5, 20), (40, 40), (79, 1))]
    scan = data.index(b"\xff\xda")
    damaged = {
        "truncated": cut,
        "no end": data[:-2],
        "half an end": data[:-1],
        "no end, but other bytes": data[:-2] + bytes(9),
        "another image in its scan": cut + data,
        "an unknown segment": data[:-2] + b"\xff\xf0\0\2" + end,
        "fill bytes instead of an end": data[:-2] + b"\xff" * 9,
    }
    for (name, content), region in itertools.product(damaged.items(), regions):
        assert fill_region(content, (width, height), 8, region) is None, name
        with pytest.raises(BadImage):
            decode_stored(Stored(content, width, height).encoded)
    accepted = {
        "intact": data,
        "other bytes after its end": data + b"\xff\xf0" + data,
        "fill bytes before its end": data[:-2] + b"\xff" * 5 + end,
        "lost data": cut + end,
        "restart markers": jpeg(width, height, restart_marker_blocks=2),
        "wrong bytes": data[: scan + 200] + bytes(20) + data[scan + 220 :],
    }
    for (name, content), region in itertools.product(accepted.items(), regions):
        top, left = region.top, region.left
        expected = decode_stored(Stored(content, width, height).encoded)
        crop = fill_region(content, (width, height), 8, region)
        if crop is not None:  # without a warning
            expected = expected[top : top + region.height, left : left + region.width]
            np.testing.assert_array_equal(crop, expected, name)
        else:
            assert name in ("lost data", "wrong bytes")


def test_hostile_jpegs_give_the_pixels_of_python_or_none(tmp_path: Path) -> None:
    outcomes = Counter[str]()
    for case, path in files_of(jpegs.CASES, tmp_path):
        data = path.read_bytes()
        try:
            width, height = stated_size(data, "jpg")
        except BadImage:
            continue
        if 0 < width * height < 1 << 20:
            image = Stored(data, width, height)
            expected, found = python_whole(image), fill_whole(image)
            outcomes[str(found is not None)] += 1
            if found is not None:
                np.testing.assert_array_equal(found, expected, case.name)
    assert outcomes["True"] > 5
    assert outcomes["False"] > 20


IMPOSSIBLE = [
    Crop(-1, 0, 24, 24, (24, 24)),
    Crop(10, 0, 24, 24, (24, 24)),
    Crop(0, 5, 24, 24, (24, 24)),
    Crop(0, 0, 0, 24, (24, 24)),
    Crop(0, 0, 2**31 - 1, 24, (24, 24)),
    Crop(2**31 - 1, 0, 24, 24, (24, 24)),
    Crop(0, 0, 24, 24, (24, 24), scaled=(23, 50)),
    Crop(0, 0, 23, 24, (24, 24), scaled=(50, 50)),
    Crop(0, 0, 24, 24, (24, 24), scaled=(-50, -50)),
]


def test_impossible_crops_are_left_to_python() -> None:
    images = [Stored(jpeg(30, 28), 30, 28), Stored(bytes(3 * 30 * 28), 30, 28, "raw")]

    for crop in IMPOSSIBLE:
        assert fill_pieces(images, CenterCrop(24), [crop] * 2)[1] == [0, 1]
    for bits in (31, 40, 70):  # more than a number of the table has
        crops = [Crop(0, 0, 24, 24, (24, 24), scaled=(1 << bits, 24))]
        assert as_crop_table(CenterCrop(24), crops) is None


def test_every_number_of_an_entry_may_lie() -> None:
    """Python compares an entry's check first; without it too nothing is read or written amiss."""
    images = [Stored(jpeg(30, 28), 30, 28), Stored(bytes(3 * 30 * 28), 30, 28, "raw")]
    expected = [python_whole(image) for image in images]
    for bit in range(8 * 32):
        found = Located(images, verifies=False)
        for entry in (0, 32):
            found.entries[entry + bit // 8] ^= 1 << bit % 8
        out = np.full((4, 28, 30, 3), 9, np.uint8)
        left = fill(found.as_rows(), out[1:3])
        assert (out[::3] == 9).all()
        for number in {0, 1} - set(left):
            if 96 <= bit < 160 or bit >= 232:  # checksum, label, check: not compared here
                np.testing.assert_array_equal(out[1 + number], expected[number])


def test_checksums_are_compared() -> None:
    images = [Stored(jpeg(30, 28), 30, 28), Stored(bytes(3 * 30 * 28), 30, 28, "raw")]
    for place in (12, 17, 19):  # of the checksum and the label
        for verifies in (True, False):
            found = Located(images * 2, verifies=verifies)
            found.entries[place] ^= 1
            found.entries[32 + place] ^= 1
            out = np.empty((4, 28, 30, 3), np.uint8)
            assert fill(found.as_rows(), out) == ([0, 1] if verifies else [])


@pytest.fixture
def copied(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many images of each batch were copied from maps."""
    module, counts = native.module(), list[int]()
    assert module is not None
    spied = SimpleNamespace(
        fill=lambda *given: counts.append(module.fill(*given)),
        map_file=module.map_file,
        LEAST_MAPPED=module.LEAST_MAPPED,
    )
    monkeypatch.setattr(native, "module", lambda: spied)
    return counts


_WCLONE = -(1 << 31)  # <linux/wait.h>: only children that send no signal at their end

LARGE = 40
"""Images of 200 x 200 pixels, which make a batch large enough for maps."""


def mapped_images() -> tuple[Located, Any]:
    """Return images in a mapped file, and their pixels."""
    made = np.random.default_rng(7).integers(0, 256, (LARGE, 200, 200, 3), np.uint8)
    images = [Stored(each.tobytes(), 200, 200, "raw") for each in made]
    found = Located(images, verifies=False, mapped=True)
    if found.map is None:
        pytest.skip("nothing is copied from maps here")
    return found, made


@pytest.mark.parametrize("crop", [None, CenterCrop((200, 180)), CenterCrop((190, 200))])
def test_raw_pixels_are_copied_from_maps(copied: list[int], crop: ImageOp | None) -> None:
    found, made = mapped_images()
    crops = crop.crops([200] * LARGE, [200] * LARGE, lambda _: Draws(0, 0)) if crop else []
    expected = made if crop is None else made[(slice(None), *_slices(crops[0]))]
    out = np.zeros(expected.shape, np.uint8)

    left = fill(found.as_rows(), out, as_crop_table(crop, crops) if crop else None)

    assert (left, copied) == ([], [LARGE])
    np.testing.assert_array_equal(out, expected)


def _slices(crop: Crop) -> tuple[slice, slice]:
    return (
        slice(crop.top, crop.top + crop.height),
        slice(crop.left, crop.left + crop.width),
    )


def test_pixels_are_not_copied_from_maps_if_their_checksum_is_compared(copied: list[int]) -> None:
    found, made = mapped_images()
    found.verifies = True
    out = np.zeros_like(made)

    assert (fill(found.as_rows(), out), copied) == ([], [0])
    np.testing.assert_array_equal(out, made)


def test_pixels_outside_the_page_cache_are_read() -> None:
    """The helper stops at the first page that it waits for; the others are read without a map."""
    found, made = mapped_images()
    os.fsync(found.descriptor)
    size = made[0].nbytes
    for first in (0, 1, LARGE // 2):
        os.posix_fadvise(found.descriptor, first * size, 0, os.POSIX_FADV_DONTNEED)
        out = np.zeros_like(made)
        assert fill(found.as_rows(), out) == []
        np.testing.assert_array_equal(out, made)


def test_a_missing_page_of_a_map_ends_no_process(copied: list[int]) -> None:
    """The file of the descriptors is complete, so the rest is read from there."""
    found, made = mapped_images()
    module, before = native.module(), signal.getsignal(signal.SIGBUS)
    assert module is not None
    whole, out = LARGE // 2, np.zeros_like(made)
    with tempfile.TemporaryFile(dir=DISK) as short:
        short.write(made[:whole].tobytes())
        short.flush()
        found.map = module.map_file(short.fileno(), found.size)

    assert fill(found.as_rows(), out) == []

    assert copied == [whole]
    np.testing.assert_array_equal(out, made)
    assert signal.getsignal(signal.SIGBUS) is before
    with pytest.raises(ChildProcessError):  # the helper was waited for
        os.waitpid(-1, os.WNOHANG | _WCLONE)


def test_the_last_page_of_a_truncated_file_gives_no_zeros(copied: list[int]) -> None:
    """The file ends within a page of its last image, at any moment of the copy."""
    found, made = mapped_images()
    content, turns = made.tobytes(), queue.SimpleQueue[int]()
    done = threading.Semaphore(0)

    def truncate() -> None:
        while (turn := turns.get()) >= 0:
            for _ in range(50 * turn):  # later each time; whether in the copy is up to chance
                pass
            os.truncate(found.descriptor, len(content) - 1000)
            done.release()

    thread = threading.Thread(target=truncate)
    thread.start()
    try:
        for turn in range(60):
            os.pwrite(found.descriptor, content[-1000:], len(content) - 1000)
            out = np.zeros_like(made)
            turns.put(turn)
            left = fill(found.as_rows(), out)
            assert done.acquire(timeout=DEADLINE)
            assert left in ([], [LARGE - 1])
            assert (out[: LARGE - len(left)] == made[: LARGE - len(left)]).all()
    finally:
        turns.put(-1)
        thread.join(DEADLINE)
    out = np.zeros_like(made)
    assert fill(found.as_rows(), out) == [LARGE - 1]  # it was truncated before
    assert (out[:-1] == made[:-1]).all()


def test_maps_are_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = native.module()
    assert module is not None
    found, made = mapped_images()
    for maps in ([found.map], [3] * LARGE, ()):
        monkeypatch.setattr(found, "maps", partial(list, maps) if maps else tuple)
        with pytest.raises(ValueError, match=r"maps|PyCapsule"):
            fill(found.as_rows(), made)
    with open(tmp_path / "empty", "wb") as file:
        assert module.map_file(file.fileno(), 0) is None
        assert module.map_file(file.fileno(), 1 << 20) is None  # it is not open for reading


def test_the_row_being_read_is_noted() -> None:
    found, mark = Located([Stored(jpeg(30, 28), 30, 28)] * 3), np.full(1, -1)

    fill(found.as_rows(), np.empty((3, 28, 30, 3), np.uint8), mark=mark)

    assert mark.tolist() == [found.array[-1]]


def test_stored_bytes_are_read_in_one_call() -> None:
    images = [Stored(each.data, each.width, each.height) for each in kinds().values()]
    found, mark = Located([*images, Stored(b"", 0, 0)]), np.full(1, -1)

    values, left = read_stored(found.as_rows(), mark)

    assert values == [*(each.data for each in images), b""]
    assert (left, mark[0]) == ([], found.array[-1])
    found.entries[12] ^= 1  # the checksum of the first
    found.entries[32 : 32 + 8] = (1 << 40).to_bytes(8, "little")  # the offset of the second
    found.entries[64 : 64 + 8] = (-1).to_bytes(8, "little", signed=True)
    values, left = read_stored(found.as_rows())
    assert left == [0, 1, 2]
    assert values[3:] == [*(each.data for each in images[3:]), b""]


def random_op(random: Random) -> ImageOp:
    if random.random() < 0.4:
        padding = random.choice([0, 1, 9, 5000])
        return RandomCrop((24, 1 + random.randrange(50)), padding, random.choice([0, 0.3, 1]))
    low = random.choice([0.08, 0.5, 1.0, random.random() + 1e-9])
    return RandomResizedCrop(
        24,
        scale=(low, low * random.choice([1, 1.5, 12.5])),
        ratio=random.choice([(3 / 4, 4 / 3), (1, 1), (0.1, 10.0), (2.5, 3), (0.01, 0.02)]),
        flip=random.choice([0, 0.5, 1]),
    )


def test_crops_are_drawn_as_python_draws_them() -> None:
    random = Random(7)
    for _ in range(40):
        op, key = random_op(random), random.getrandbits(64)
        samples = [random.getrandbits(random.choice([8, 40, 63, 80])) for _ in range(32)]
        sizes = [
            random.choice([1, 2, random.randint(1, 9), random.randint(1, 4000)]) for _ in "ab" * 32
        ]
        widths, heights = np.array(sizes, np.uint32).reshape(2, 32)

        found = select_crop_table(op, widths, heights, partial(BatchDraws, key, samples))

        draws = [Draws(key, sample) for sample in samples]
        crops = op.crops(widths.tolist(), heights.tolist(), draws.__getitem__)
        expected = as_crop_table(op, crops)
        assert found is not None
        assert expected is not None
        np.testing.assert_array_equal(found.numbers, expected.numbers)


def test_an_operation_with_its_own_piece_is_not_drawn_by_the_module() -> None:
    class Top(RandomResizedCrop):
        def crop(self, width: int, height: int, draws: Draws) -> Crop:
            return Crop(0, 0, 8, 8, (24, 24))

    sides = np.full(3, 50, np.uint32)
    assert select_crop_table(Top(24), sides, sides, partial(BatchDraws, 0, [0, 1, 2])) is None


# Datasets.


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Datasets of each format: originals of several kinds, and raw pixels."""
    place = tmp_path_factory.mktemp("filled")
    files: dict[str, bytes | None] = {}
    for number in range(9):
        files[f"a/{number}.jpg"] = jpeg(60 + number, 50, seed=number, progressive=number == 4)
    files["b/0.png"] = png(50, 40)
    folder = make_tree(place / "photos", files)
    found = {}
    for to in FORMATS:
        found[to] = make_dataset(folder, place / to, to=to)
    raw = {"resize": "32x32", "resize_mode": "crop", "encode": "raw"}
    found["raw"] = make_dataset(folder, place / "raw", **raw)
    return found


@pytest.mark.parametrize("source", [*FORMATS, "raw"])
def test_datasets_read_the_same_with_and_without_the_module(
    sources: dict[str, Path], left: list[int], source: str
) -> None:
    decodes: list[Any] = [CenterCrop(24), RandomResizedCrop(24), *["torch"] * (source == "raw")]
    for decode in decodes:
        dataset = open_dataset(sources[source], decode=decode)
        dataset.set_epoch(2, seed=5)
        with_module = dataset.__getitems__(range(len(dataset))).batch[0]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(compiled, "fill_views", lambda rows, views, **_: [range(len(rows))])
            without = dataset.__getitems__(range(len(dataset))).batch[0]
        np.testing.assert_array_equal(with_module, without)
    others = 1 if png_kinds() else 2  # a progressive JPEG, and perhaps a PNG
    assert left == [0 if source == "raw" else others] * len(decodes)


@pytest.mark.parametrize("engine", ["thread", "helper", "process"])
def test_loaders_read_the_same_with_and_without_the_module(
    sources: dict[str, Path], engine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    options: dict[str, Any] = {"num_workers": 2, "engine": engine}
    found = []
    for wish in ("on", "off"):
        monkeypatch.setenv(native.VARIABLE, wish)
        native._load.cache_clear()
        dataset = open_dataset(sources["lmdb"], decode=CenterCrop(24))
        with closing(make_loader(dataset, 4, shuffle=True, seed=3, **options)) as loader:
            found.append([images.clone() for images, _ in loader])
    native._load.cache_clear()
    assert all(map(torch.equal, *found))


def test_damage_is_reported_as_by_python(sources: dict[str, Path]) -> None:
    for to in ("lmdb", "raw"):
        dataset = open_dataset(sources[to], decode=CenterCrop(24), verify=True)
        (shard, *_), rows = dataset.shard_paths, np.load(sources[to] / "index/rows.npy")
        content = shard.read_bytes()
        damaged = bytearray(content)
        damaged[int(rows["offset"][1]) + 300] ^= 1
        try:
            shard.write_bytes(damaged)
            with pytest.raises(CorruptRecord, match=r"row 1.*checksum"):
                dataset.__getitems__([0, 1, 2])
            shard.write_bytes(content)
            assert len(dataset.__getitems__([0, 1, 2])) == 3
            os.truncate(shard, len(content) // 2)
            with refused(CorruptRecord, f"ends at byte {len(content) // 2}"):
                dataset.__getitems__(list(range(4)))
        finally:
            shard.write_bytes(content)
        assert len(dataset.__getitems__([0, 1, 2])) == 3


def test_own_operations_render_in_python(sources: dict[str, Path], left: list[int]) -> None:
    class Mine(CenterCrop):
        def render(self, *arguments: Any) -> Any:
            super().render(*arguments)[:] = 7
            return arguments[-1]

    images = open_dataset(sources["lmdb"], decode=Mine(24)).__getitems__([0, 1]).batch[0]

    assert (images == 7).all()
    assert left == []


def arrays_of(count: int, size: int) -> list[Stored]:
    rng = np.random.default_rng(0)
    return [Stored(rng.bytes(size), 0, 0, "npy") for _ in range(count)]


def test_arrays_are_copied_as_they_are() -> None:
    ways = ((True, False), (False, False), (False, True))
    for (count, size), (verifies, mapped) in itertools.product(((5, 7), (1, 1), (70, 65536)), ways):
        arrays = arrays_of(count, size)
        found = Located(arrays, verifies=verifies, mapped=mapped)
        out = np.zeros((count, size), np.uint8)
        mark = np.zeros(1, np.int64)
        assert list(fill_values(found.as_rows(), out, mark)) == []
        assert [row.tobytes() for row in out] == [stored.data for stored in arrays]


def test_arrays_that_are_not_what_they_should_be_are_left_to_python() -> None:
    good = arrays_of(6, 64)
    found = Located(
        [good[0], good[1]._replace(data=b"short"), good[2]._replace(field="bin"), *good[3:]]
    )
    entries = bytearray(found.entries)
    entries[3 * 32 : 3 * 32 + 8] = (-1).to_bytes(8, "little", signed=True)
    entries[4 * 32 : 4 * 32 + 8] = (1 << 40).to_bytes(8, "little")
    entries[5 * 32 + 12] ^= 1  # its checksum
    found.entries = memoryview(entries)
    out = np.zeros((6, 64), np.uint8)
    assert list(fill_values(found.as_rows(), out)) == [1, 2, 3, 4, 5]
    assert out[0].tobytes() == good[0].data


def test_arrays_of_another_size_than_the_batch_are_refused() -> None:
    found = Located(arrays_of(2, 8)).as_rows()
    for out in (np.zeros((3, 8), np.uint8), np.zeros((2, 0), np.uint8)):
        with refused(ValueError):
            fill_values(found, out)
