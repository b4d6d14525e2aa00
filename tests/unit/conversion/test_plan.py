from __future__ import annotations

import itertools
import os
from pathlib import Path
from typing import Any

import pytest
from helpers import FORMATS, jpeg, make_folder, make_tree, png
from hypothesis import given
from hypothesis import strategies as st
from refusals import refused
from table import for_each

from shardkit.contracts import Entry, Images, Scan
from shardkit.conversion import plan as module
from shardkit.conversion.convert import convert_scan
from shardkit.conversion.entry_files import dump_entries, load_entries
from shardkit.conversion.plan import ConvertOptions, Plan, make_plan
from shardkit.conversion.stored_order import stored_order
from shardkit.errors import UsageError
from shardkit.recipe import Recipe
from shardkit.record import MAX_KEY_BYTES, NO_LABEL, dump_json
from shardkit.sources.imagefolder import ImageFolder, scan_imagefolder

NAMES = st.lists(st.binary(min_size=1, max_size=6).map(os.fsdecode), max_size=20, unique=True)


def scan_of(sizes: list[int]) -> Scan:
    """Return a scan of nonexistent images with the given sizes."""
    entries = [Entry(f"{n:04d}.jpg", f"{n:04d}", -1, size, 0) for n, size in enumerate(sizes)]
    source = ImageFolder("photos")
    return Scan(source=source, splits={"": Images(source, "", entries)}, classes=None)


def planned(sizes: list[int], **options: Any) -> Plan:
    return make_plan(scan_of(sizes), ConvertOptions(to="lmdb", **options))


@given(NAMES, st.integers(-5, 5))
def test_the_order_is_a_permutation(names: list[str], seed: int) -> None:
    assert sorted(stored_order(names, seed)) == list(range(len(names)))


@given(NAMES, st.integers(0, 5), st.randoms(use_true_random=False))
def test_the_order_of_two_images_depends_only_on_them_and_the_seed(
    names: list[str], seed: int, random: Any
) -> None:
    whole = [names[row] for row in stored_order(names, seed)]
    some = [name for name in names if random.random() < 0.5]
    random.shuffle(some)
    assert [some[row] for row in stored_order(some, seed)] == [n for n in whole if n in set(some)]


def test_the_order_of_version_1_is_frozen() -> None:
    names = ["cat/0.jpg", "cat/1.jpg", "dog/0.jpg", "dog/größe.png", "bird/\udcff.jpg"]
    assert stored_order(names, 0) == GOLDEN_0
    assert stored_order(names, 1) == GOLDEN_1


GOLDEN_0 = [2, 1, 3, 4, 0]
GOLDEN_1 = [2, 1, 3, 0, 4]


@given(st.lists(st.integers(0, 50), max_size=30), st.integers(1, 120))
def test_shards_hold_at_most_their_size_or_one_image(sizes: list[int], room: int) -> None:
    cuts = planned(sizes, shard_size=f"{room}B", shuffle=False).splits[0].cuts
    assert cuts[0] == 0
    assert cuts[-1] == len(sizes)
    assert list(cuts) == sorted(cuts)
    for start, stop in itertools.pairwise(cuts):
        assert stop > start or not sizes
        assert sum(sizes[start:stop]) <= room or stop == start + 1
        if stop < len(sizes):  # no shard is cut too early
            assert sum(sizes[start : stop + 1]) > room


@given(st.integers(0, 40), st.integers(1, 15))
def test_shards_hold_exactly_the_requested_number_of_images(images: int, samples: int) -> None:
    split = planned([10**9] * images, shard_samples=samples).splits[0]
    sizes = [stop - start for start, stop in itertools.pairwise(split.cuts)]
    assert sum(sizes) == images
    assert all(size == samples for size in sizes[:-1])
    assert images == 0 or 1 <= sizes[-1] <= samples


def test_no_images_give_one_shard() -> None:
    split = planned([]).splits[0]
    assert (split.shards, len(split.shard_source(0))) == (1, 0)


@pytest.mark.parametrize("shuffle", [False, True])
def test_a_limit_takes_the_first_in_stored_order(shuffle: bool) -> None:
    whole = planned([1] * 20, shuffle=shuffle).splits[0].source.entries
    some = planned([1] * 20, shuffle=shuffle, limit=7).splits[0].source.entries
    assert list(some) == list(whole)[:7]
    assert len(planned([1] * 20, limit=99).splits[0].source) == 20


def test_a_limit_applies_to_each_split(tmp_path: Path) -> None:
    make_folder(tmp_path / "train", each=4)
    make_folder(tmp_path / "val", each=1)
    plan = make_plan(scan_imagefolder(tmp_path), ConvertOptions(to="lmdb", limit=3))
    assert {split.name: len(split.source) for split in plan.splits} == {"train": 3, "val": 2}


def test_equal_plans_have_equal_digests_wherever_the_source_is(tmp_path: Path) -> None:
    scans = []
    for place in ("one", "two"):
        root = make_tree(tmp_path / place / "photos", {"cat/a.jpg": jpeg(), "dog/b.jpg": png()})
        for path in root.rglob("*.jpg"):
            os.utime(path, ns=(0, 10**18))
        scans.append(scan_imagefolder(root))
    digests = {make_plan(scan, ConvertOptions(to="lmdb")).fingerprint().digest for scan in scans}
    assert len(digests) == 1


def test_everything_that_affects_the_result_is_in_the_digest(tmp_path: Path) -> None:
    root = make_folder(tmp_path / "photos")

    def digest(**options: Any) -> str:
        given: dict[str, Any] = {"to": "lmdb", **options}
        return make_plan(scan_imagefolder(root), ConvertOptions(**given)).fingerprint().digest

    options: list[dict[str, Any]] = [
        {},
        {"to": "hdf5"},
        {"seed": 1},
        {"shuffle": False},
        {"limit": 2},
        {"shard_samples": 1},
        {"on_error": "skip"},
        {"recipe": Recipe(quality=50)},
        {"recipe": Recipe(check="none")},
    ]
    digests = [digest(**given) for given in options]
    os.utime(root / "cat/000.jpg", ns=(0, 0))
    digests.append(digest())
    (root / "empty").mkdir()
    digests.append(digest())
    (root / "cat/broken.jpg").symlink_to("nowhere")
    digests.append(digest())
    assert len(set(digests)) == len(digests)


@pytest.mark.parametrize(
    ("to", "recipe"),
    [
        *((to, Recipe()) for to in FORMATS),
        ("lmdb", Recipe(encode="raw", resize=(90, 120), resize_mode="crop")),
        ("hdf5", Recipe(resize=100, encode="png")),
    ],
    ids=lambda value: getattr(value, "encode", value),
)
def test_the_size_of_a_dataset_is_estimated(tmp_path: Path, to: str, recipe: Recipe) -> None:
    files = {f"cat/{n:03d}.png": png(150 + n, 110, n) for n in range(18)}
    scan = scan_imagefolder(make_tree(tmp_path / "photos", files))
    options = ConvertOptions(to=to, recipe=recipe, shard_samples=6)
    (split,) = make_plan(scan, options).splits
    convert_scan(scan, tmp_path / "out", options)
    taken = sum(p.stat().st_size for p in (tmp_path / "out").rglob("*") if p.is_file())
    assert 0.9 * taken < split.estimated_bytes < 1.1 * taken
    assert (len(split.shard_bytes), sum(split.shard_bytes)) == (3, split.estimated_bytes)


def test_a_bad_image_in_the_trial_does_not_affect_the_estimate(tmp_path: Path) -> None:
    scan = scan_imagefolder(make_folder(tmp_path))
    (tmp_path / "cat/000.jpg").write_bytes(b"x" * (tmp_path / "cat/000.jpg").stat().st_size)
    recipe = Recipe(resize=8, encode="png")
    split = make_plan(scan, ConvertOptions(to="hdf5", recipe=recipe)).splits[0]
    assert 6 * 400 < split.estimated_bytes < 6 * 700


def test_the_software_is_recorded(tmp_path: Path) -> None:
    for name, package in (("lmdb", "lmdb"), ("hdf5", "h5py")):
        plan = make_plan(scan_of([1]), ConvertOptions(to=name))
        assert {"shardkit", "pillow", "simplejpeg", package} <= plan.software.keys()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"to": "zip"}, "unknown format 'zip'; choose from hdf5, lmdb, webdataset"),
        ({"shard_size": 0}, "shard size .* 0"),
        ({"shard_size": 256}, "shard_size=256"),
        ({"shard_size": "256"}, "shard_size='256'"),
        ({"shard_samples": 0}, "shard_samples=0"),
        ({"limit": -1}, "limit=-1"),
        ({"on_error": "ignore"}, "on_error='ignore'"),
    ],
    ids=str,
)
def test_options_out_of_range_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        ConvertOptions(**{"to": "lmdb", **options})


def test_only_files_of_over_a_tenth_of_all_bytes_are_large() -> None:
    assert planned([100] * 20).large_files() == ""
    assert planned([100] * 20 + [1 << 30]).large_files() == (
        " The largest files are 0020.jpg (1.0 GiB)."
    )


def test_a_library_without_metadata_is_recorded_as_absent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shardkit.contracts.version_of", {"pillow": "1.0"}.get)
    software = planned([1]).software
    assert (software["simplejpeg"], software["pillow"]) == ("absent", "1.0")


def test_classes_that_no_manifest_holds_are_refused(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "CLASS_BYTES", 5)
    with refused(UsageError, "5"):
        make_plan(scan_imagefolder(folder), ConvertOptions(to="lmdb"))


# Lists of images as JSON: what was written is read, and anything else is refused.

ENTRY = Entry("cat/gr\u00f6\u00dfe\udcff.jpg", "cat/key", NO_LABEL, 1 << 40, -5, 7, '{"age": 1}')


def test_entries_survive_a_round_trip() -> None:
    assert load_entries(dump_entries([ENTRY] * 2)) == [ENTRY] * 2


@for_each(
    ("field", "wrong"),
    [
        ("key", ""),
        ("key", "a" * (MAX_KEY_BYTES + 1)),
        ("key", "a\ud800"),
        ("values", "a\ud800"),
        ("path", 1),
        ("label", NO_LABEL - 1),
        ("label", True),
        ("bytes", -1),
        ("place", 1 << 63),
        ("stamp", 2.5),
    ],
)
def test_a_value_that_no_source_lists_is_refused(field: str, wrong: Any) -> None:
    content = dump_entries([ENTRY, ENTRY._replace(**{field: wrong})])
    with refused(ValueError):
        load_entries(content)


@for_each("value", [{}, {"entries": 1}, {"entries": [1]}, {"entries": [["a"]]}])
def test_anything_but_entries_is_refused(value: dict[str, Any]) -> None:
    with refused(ValueError):
        load_entries(dump_json(value))
