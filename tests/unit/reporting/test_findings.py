"""Findings: each planted fault and every near pair, and nothing else; lists keep the best copy."""

from __future__ import annotations

import io
import itertools
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from helpers import encoded, exif, make_dataset, make_tree, opened, png
from PIL import Image, ImageFilter, ImageOps
from planted_faults import FAULTS, planted, scene
from refusals import refused

from shardkit import convert, report
from shardkit.dataset.manifest import FACTS_NAME
from shardkit.dataset.opened import OpenedDirectory
from shardkit.dataset.shardset import ShardSet, open_shards
from shardkit.errors import CorruptRecord, UsageError
from shardkit.record import STORED_KINDS
from shardkit.reporting import neighbors, similar
from shardkit.reporting.copies import Copies, RowPairs, connected
from shardkit.reporting.facts import load_facts
from shardkit.reporting.identical import Identical
from shardkit.reporting.image_facts import MEASURED, VERSION
from shardkit.reporting.neighbors import Hashes, Pairs, near_pairs
from shardkit.reporting.report import DatasetReport
from shardkit.system.npy import save_npy


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("planted")
    return make_dataset(planted(folder / "photos"), folder / "made")


@pytest.fixture(scope="module")
def made(dataset: Path) -> DatasetReport:
    return report(dataset)


def keys(found: dict[str, Any]) -> set[str]:
    return {image["key"] for group in found["groups"] for image in group["images"]}


@pytest.mark.parametrize("kind", FAULTS)
def test_planted_faults_are_found(made: DatasetReport, kind: str) -> None:
    (found,) = (each for each in made.as_dict()["findings"] if each["kind"] == kind)

    assert keys(found) == FAULTS[kind]
    assert found["images"] == len(FAULTS[kind])
    assert found["complete"]


def test_leaving_out_the_listed_keys_removes_the_finding(made: DatasetReport) -> None:
    excluded = {each.kind: made.exclude(each) for each in made.findings}

    # Of duplicates the first is kept; of leaks, what is in the smaller split.
    assert {each.split("/")[1] for each in excluded["exact-duplicate"]["train"]} <= {
        "00",
        "01",
        "copy",
    }
    assert len(excluded["exact-duplicate"]["train"]) == 2
    assert {*excluded["leak"]} == {"train"}
    assert {*excluded["leak"]["train"]} == {"cat/02", "cat/03"}
    assert len(excluded["near-duplicate"]["train"]) == 1
    assert {*excluded["label-conflict"]["train"]} == FAULTS["label-conflict"]


def test_findings_have_distances_and_notes(made: DatasetReport) -> None:
    groups = {each.kind: each.groups for each in made.findings}

    assert (groups["leak"][0].distance, groups["leak"][0].note) == (0, "same bytes")
    assert groups["leak"][1].note == "similar"
    assert all(0 <= (group.distance or 0) <= 6 for group in groups["near-duplicate"])
    assert groups["rotated"][0].note == "orientation 6"
    assert groups["wrong-suffix"][0].note == "its content is png"


def test_a_suffix_of_another_kind_is_a_finding(tmp_path: Path) -> None:
    files = {
        "cat/a.pnm": png(seed=1),
        "cat/b.PNM": encoded(scene(2), "PPM"),
        "cat/c.tif": encoded(scene(3), "TIFF"),
        "cat/d.raw": png(seed=4),  # also the suffix of cameras
    }
    made = report(make_dataset(make_tree(tmp_path / "photos", files), tmp_path / "made"))
    findings = {finding["kind"]: finding for finding in made.as_dict()["findings"]}

    assert keys(findings["wrong-suffix"]) == {"cat/a"}


TURNED = {
    Image.Transpose.FLIP_LEFT_RIGHT: "mirrored",
    Image.Transpose.FLIP_TOP_BOTTOM: "mirrored",
    Image.Transpose.TRANSPOSE: "mirrored",
    Image.Transpose.TRANSVERSE: "mirrored",
    Image.Transpose.ROTATE_90: "rotated",
    Image.Transpose.ROTATE_180: "rotated",
    Image.Transpose.ROTATE_270: "rotated",
}


@pytest.mark.parametrize("seed", range(2))
def test_mirrored_and_rotated_copies_are_found(tmp_path: Path, seed: int) -> None:
    rng = np.random.default_rng(seed)
    pictures = [scene(1000 * seed + n, (161, 119)) for n in range(20)]
    content = {f"train/a/{n:02}.jpg": encoded(picture) for n, picture in enumerate(pictures)}
    turned = dict(zip(rng.permutation(20)[: len(TURNED)].tolist(), TURNED, strict=True))
    for n, turn in turned.items():
        copy = pictures[n].transpose(turn)
        if rng.random() < 0.5:
            copy = copy.resize((copy.width // 2, copy.height // 2))
        content[f"val/a/copy{n:02}.jpg"] = encoded(copy, quality=int(rng.integers(50, 95)))
    made = report(make_dataset(make_tree(tmp_path / "photos", content), tmp_path / "made"))

    found = {each.kind: each.groups for each in made.findings}
    keys, groups = made.images.keys, found["leak"]
    pairs = {tuple(sorted(keys[row] for row in group.rows)): group.note for group in groups}
    assert pairs == {(f"a/{n:02}", f"a/copy{n:02}"): TURNED[turn] for n, turn in turned.items()}
    assert not found["near-duplicate"]


@pytest.mark.parametrize("seed", range(3))
def test_a_jpeg_and_the_png_made_from_it_are_an_exact_duplicate(tmp_path: Path, seed: int) -> None:
    rng = np.random.default_rng(seed)
    size = tuple(rng.integers(100, 400, 2).tolist())
    plain, turned = (encoded(scene(7 * seed + n, size), quality=85) for n in range(2))
    tagged = encoded(Image.open(io.BytesIO(turned)), quality=85, exif=exif(6))
    upright = ImageOps.exif_transpose(Image.open(io.BytesIO(tagged)))
    contents = {
        "a/one.jpg": plain,
        "a/same.png": encoded(Image.open(io.BytesIO(plain)), "PNG"),
        "a/two.jpg": tagged,
        "b/two.png": encoded(upright, "PNG"),
        "b/two_again.jpg": encoded(upright, quality=60),
    }
    made = report(make_dataset(make_tree(tmp_path / "photos", contents), tmp_path / "made"))
    assert repr(made).startswith("DatasetReport(5 images, findings: {")

    found = {
        each.kind: sorted(
            sorted(made.images.keys[row] for row in group.rows) for group in each.groups
        )
        for each in made.findings
    }
    assert found["exact-duplicate"] == [["a/one", "a/same"], ["a/two", "b/two"]]
    assert found["label-conflict"] == [["a/two", "b/two"]]
    assert found["near-duplicate-classes"] == [["a/two", "b/two_again"]]
    assert found["near-duplicate"] == [["b/two", "b/two_again"]]


@pytest.mark.parametrize("sigma", [3, 10])
def test_blur_is_found_whatever_the_quality_and_size(tmp_path: Path, sigma: int) -> None:
    rng = np.random.default_rng(sigma)
    files = {}
    for n in range(10):
        picture = scene(100 * sigma + n, tuple(rng.integers(256, 640, 2).tolist()))
        files[f"a/{n:02}-sharp.jpg"] = encoded(picture, quality=int(rng.integers(50, 96)))
        soft = picture.filter(ImageFilter.GaussianBlur(sigma))
        files[f"a/{n:02}-soft.jpg"] = encoded(soft, quality=int(rng.integers(50, 96)))
    made = report(make_dataset(make_tree(tmp_path / "photos", files), tmp_path / "made"))

    (found,) = (each for each in made.as_dict()["findings"] if each["kind"] == "blurred")
    blurred = {image["key"] for group in found["groups"] for image in group["images"]}
    assert blurred == {f"a/{n:02}-soft" for n in range(10)}


def test_the_same_pixels_in_other_bytes_are_an_exact_duplicate(tmp_path: Path) -> None:
    contents = {
        "a/x.png": encoded(scene(0), "PNG"),
        "a/y.png": encoded(scene(0), "PNG", compress_level=1),
        "a/z.png": encoded(scene(1), "PNG"),
    }
    place = make_dataset(make_tree(tmp_path / "photos", contents), tmp_path / "made")
    groups = next(each for each in report(place).findings if each.kind == "exact-duplicate").groups

    assert [(len(group.rows), group.note) for group in groups] == [(2, "same pixels")]


def test_datasets_are_compared_with_each_other(tmp_path: Path) -> None:
    for name, seeds in (("one", (0, 1)), ("two", (1, 2))):
        files = {f"cat/{n}.jpg": encoded(scene(n)) for n in seeds}
        make_dataset(make_tree(tmp_path / name, files), tmp_path / f"made-{name}")
    places = [tmp_path / "made-one", tmp_path / "made-two"]
    (leak,) = (each for each in report(*places).as_dict()["findings"] if each["kind"] == "leak")

    names = ["made-one", "made-two"]
    assert [image["dataset"] for image in leak["groups"][0]["images"]] == names
    assert leak["exclude"] == {"made-one": ["cat/1"]}
    with pytest.raises(UsageError, match="listed twice"):
        report(places[0], tmp_path / "one/../made-one")


REDUCED = {f"{n}.jpg": encoded(scene(n, (300, 260)), quality=90) for n in range(6)}
"""Large JPEGs, whose facts are those of smaller ones."""


@pytest.mark.parametrize(
    ("files", "most"),
    [
        ({f"{n}.png": encoded(scene(n, (40 + n, 30)), "PNG") for n in range(4)}, 1e-5),
        ({**REDUCED, "small.png": encoded(scene(9), "PNG")}, 1e-3),
    ],
    ids=["PNGs", "reduced JPEGs"],
)
def test_channel_statistics_are_those_of_all_images(
    tmp_path: Path, files: dict[str, bytes], most: float
) -> None:
    made = report(make_dataset(make_tree(tmp_path / "photos", files), tmp_path / "made"))
    pixels = [np.asarray(opened(data).convert("RGB"), np.float64) / 255 for data in files.values()]
    mean = np.mean([each.mean((0, 1)) for each in pixels], 0)
    square = np.mean([(each**2).mean((0, 1)) for each in pixels], 0)

    assert made.mean == pytest.approx(mean, abs=most)
    assert made.std == pytest.approx(np.sqrt(square - mean**2), abs=most)
    assert made.normalize == NORMALIZE.format(*made.mean, *made.std)


NORMALIZE = "Normalize(mean=({:.4f}, {:.4f}, {:.4f}), std=({:.4f}, {:.4f}, {:.4f}))"


def test_a_dataset_without_images_is_refused(tmp_path: Path) -> None:
    convert([{"number": n} for n in range(3)], tmp_path / "made", to="lmdb")

    with refused(UsageError):
        report(tmp_path / "made")


def test_a_damaged_record_is_an_error(dataset: Path, tmp_path: Path) -> None:
    shutil.copytree(dataset, tmp_path / "made")
    for path in tmp_path.rglob("facts.npy"):
        path.unlink()
    shard = next((tmp_path / "made/train").glob("shard-*"))
    content = bytearray(shard.read_bytes())
    content[content.index(b"\xff\xd8\xff") + 500] ^= 255
    shard.write_bytes(content)

    with pytest.raises(CorruptRecord, match="shardkit verify"):
        report(tmp_path / "made")


def test_a_leak_excludes_all_copies_of_a_picture(tmp_path: Path) -> None:
    content = encoded(scene(0), "PNG")
    files = {f"train/cat/{n}.png": content for n in range(2)}
    files |= {f"train/cat/other{n}.png": encoded(scene(n), "PNG") for n in (5, 6)}
    files["val/cat/similar.jpg"] = encoded(scene(0), quality=60)
    made = report(make_dataset(make_tree(tmp_path / "photos", files), tmp_path / "made"))
    (leak,) = (each for each in made.findings if each.kind == "leak")

    assert {key for keys in made.exclude(leak).values() for key in keys} == {"cat/0", "cat/1"}


@pytest.mark.parametrize(
    ("key", "listed"),
    [
        ("a", "a"),
        ("7", "key:7"),
        ("# a", "key:# a"),
        ("key:a", "key:key:a"),
        ("a\nb", "1"),
        (" a", "1"),
        ("\udcff", "1"),
    ],
)
def test_lists_have_keys_or_else_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, key: str, listed: str
) -> None:
    files = {f"{n}.png": encoded(scene(n // 2), "PNG") for n in range(2)}
    made = report(make_dataset(make_tree(tmp_path / "photos", files), tmp_path / "made"))
    monkeypatch.setattr(ShardSet, "keys", property(lambda _: [key] * 2))
    (found,) = (each for each in made.findings if each.groups)
    (path,) = made.save_exclude(tmp_path / "lists")

    assert made.exclude(found) == {"made": [key]}
    assert path.read_text().splitlines()[-1] == listed


def test_without_findings_there_are_no_lists(tmp_path: Path) -> None:
    files = {"0.png": encoded(scene(0), "PNG")}
    measured = report(make_dataset(make_tree(tmp_path / "photos", files), tmp_path / "made"))

    assert measured.save_exclude(tmp_path / "lists") == []
    assert not (tmp_path / "lists").exists()


def made_alike(source: Path, target: Path) -> Path:
    """Make a dataset whose facts, but not pixels, are those of one picture."""
    place = make_dataset(source, target)
    for split in OpenedDirectory(place).splits.values():
        folder = split.path
        facts = load_facts(open_shards(folder))
        alike = [*{*(facts.dtype.names or ())} - {"checksum", "content", "pixels"}]
        facts[alike] = 0
        facts["state"], facts["version"], facts["contrast"] = MEASURED, VERSION, 50
        facts["sharpness"] = facts["highlight"] = 200
        save_npy(folder / FACTS_NAME, facts)
    return place


def test_a_crowd_of_similar_pictures_is_one_group_without_all_its_pairs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = {f"{n % 2}/{n:02}.png": png(8, 8, seed=n) for n in range(30)}
    place = made_alike(make_tree(tmp_path / "photos", files), tmp_path / "made")
    keys, facts = open_shards(place).keys, np.load(place / FACTS_NAME)
    facts["mean"][[keys.index("0/00"), keys.index("1/01")]] = 255, 0, 0  # unlike the others
    save_npy(place / FACTS_NAME, facts)
    compared: list[int] = []

    def counted(hashes: Hashes, *rest: Any, **options: Any) -> Pairs:
        compared.append(len(hashes))
        return near_pairs(hashes, *rest, **options)

    monkeypatch.setattr(similar, "_CROWD", 8)
    monkeypatch.setattr(similar, "near_pairs", counted)
    made = report(place)
    found = {each.kind: each for each in made.findings}
    across, within = found["near-duplicate-classes"], found["near-duplicate"]

    assert compared == [2, 2]  # one of each color, upright and turned
    assert [len(group.rows) for group in across.groups] == [15, 2]
    assert [len(group.rows) for group in within.groups] == [14]
    assert len({*across.exclude, *within.exclude}) == 30 - 2
    assert across.complete


def made_with_crowds(folder: Path) -> Path:
    """A dataset of 20 similar pictures in train and 12 in val."""
    files = {f"train/{n % 2}/{n:02}.png": png(8, 8, seed=n) for n in range(20)}
    files |= {f"val/0/{n}.png": png(8, 8, seed=n) for n in range(30, 42)}
    return made_alike(make_tree(folder / "photos", files), folder / "made")


def test_all_of_a_crowd_that_leaks_is_excluded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = made_with_crowds(tmp_path)
    monkeypatch.setattr(similar, "_CROWD", 8)
    made = report(place)
    (leak,) = (each for each in made.findings if each.kind == "leak")

    assert [len(group.rows) for group in leak.groups] == [32]
    assert len(made.exclude(leak)["train"]) == 20


def test_a_quarter_turn_with_a_near_hash_is_found(tmp_path: Path) -> None:
    """The hashes of both are near, too, but only the turned picture has the same aspect ratio."""
    picture = scene(3, (120, 120)).resize((240, 120))
    files = {"a/one.png": picture, "a/two.png": picture.transpose(Image.Transpose.ROTATE_90)}
    contents = {name: encoded(image, "PNG") for name, image in files.items()}
    place = make_dataset(make_tree(tmp_path / "photos", contents), tmp_path / "made")
    report(place)
    facts = np.load(place / FACTS_NAME)
    facts["hash"] = facts["hash"][0]
    facts["turned"] = facts["hash"][:, None]
    save_npy(place / FACTS_NAME, facts)
    (groups,) = (each.groups for each in report(place).findings if each.kind == "near-duplicate")

    assert [group.rows for group in groups] == [[0, 1]]


def lists(made: DatasetReport) -> dict[str, set[str]]:
    """Return the keys to leave out for each kind of finding, with their splits."""
    return {
        each.kind: {
            f"{member}/{key}" for member, keys in made.exclude(each).items() for key in keys
        }
        for each in made.findings
    }


@pytest.mark.parametrize("seed", range(3))
def test_the_copy_without_other_findings_is_kept(tmp_path: Path, seed: int) -> None:
    """In any order of rows, and of leaks, even if it is in the larger split."""
    rng = np.random.default_rng(seed)
    contents = {}
    for n in range(4):
        plain = scene(50 * seed + n, (300, 220))
        turned = encoded(plain.rotate(90, expand=True), exif=exif(6))
        soft = encoded(plain.filter(ImageFilter.GaussianBlur(4)), quality=90)
        names = [f"train/a/{n}{rng.integers(9)}{which}" for which in "xyz"]
        contents[f"{names[0]}.jpg"] = encoded(plain, quality=60)
        contents[f"{names[1]}.jpg"] = turned
        contents[f"{names[2]}.jpg"] = soft
    contents["val/a/soft.jpg"] = soft  # the last one
    contents |= {f"val/a/{n}.jpg": encoded(scene(900 + n)) for n in range(3)}
    place = make_dataset(make_tree(tmp_path / "photos", contents), tmp_path / "made", seed=seed)
    found = lists(report(place))

    keys = {f"train/{key}" for key in open_shards(place / "train").keys}
    clean = {key for key in keys if key.endswith("x")}
    assert found["rotated"] == {key for key in keys if key.endswith("y")}
    assert {key for key in keys if key.endswith("z")} <= found["blurred"]
    assert found["near-duplicate"] == keys - clean
    assert "val/a/soft" in found["leak"]
    assert not clean & set().union(*found.values())


@pytest.mark.parametrize("seed", range(2))
def test_of_a_jpeg_and_its_png_the_jpeg_is_kept(tmp_path: Path, seed: int) -> None:
    contents = {}
    for n in range(5):
        photo = encoded(scene(10 * seed + n, (200, 140)), quality=90)
        contents[f"a/{n}.jpg"] = photo
        contents[f"a/{n}_copy.png"] = encoded(opened(photo), "PNG")
        contents[f"a/{n}_half.jpg"] = encoded(opened(photo).resize((100, 70)), quality=95)
    place = make_dataset(make_tree(tmp_path / "photos", contents), tmp_path / "made", seed=seed)
    found = lists(report(place))

    assert found["exact-duplicate"] == {f"made/a/{n}_copy" for n in range(5)}
    kept = {f"made/{key}" for key in open_shards(place).keys} - set().union(*found.values())
    assert kept == {f"made/a/{n}" for n in range(5)}


def test_a_similar_picture_of_a_label_conflict_is_kept(tmp_path: Path) -> None:
    photo = encoded(scene(0), quality=90)
    contents = {"a/1.jpg": photo, "b/2.jpg": photo, "b/3.jpg": encoded(scene(0).resize((80, 60)))}
    place = make_dataset(make_tree(tmp_path / "photos", contents), tmp_path / "made")
    found = lists(report(place))

    assert found["label-conflict"] == {"made/a/1", "made/b/2"}
    assert set().union(*found.values()) == {"made/a/1", "made/b/2"}


def test_of_a_crowd_the_row_without_other_findings_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = made_with_crowds(tmp_path)
    facts = np.load(place / "val" / FACTS_NAME)
    facts["sharpness"] = 0.1
    save_npy(place / "val" / FACTS_NAME, facts)
    facts = np.load(place / "train" / FACTS_NAME)
    facts["sharpness"][np.arange(20) != 13] = 0.1
    save_npy(place / "train" / FACTS_NAME, facts)
    monkeypatch.setattr(similar, "_CROWD", 8)
    found = lists(report(place))
    keys = open_shards(place / "train").keys

    assert found["leak"] == {f"val/0/{n}" for n in range(30, 42)}
    kept = {f"train/{key}" for key in keys} - set().union(*found.values())
    assert kept == {f"train/{keys[13]}"}


# The choice of the copies to keep: any lists together leave the best row of each picture.

MEMBERS, PICTURES = 3, 12


class Drawn:
    """Rows of several datasets with copies, crowds and similar pairs, drawn by a seed."""

    def __init__(self, seed: int) -> None:
        rng = np.random.default_rng(seed)
        self.rows = int(rng.integers(5, 40))
        self.member = np.sort(rng.integers(0, MEMBERS, self.rows))
        self.members = [
            SimpleNamespace(shards=[0] * int(size)) for size in rng.integers(1, 4, MEMBERS)
        ]
        self.sizes = rng.integers(1, 3, (self.rows, 2))
        kinds = [STORED_KINDS.index(name) for name in ("jpg", "png")]
        self.index = {"field": rng.choice(kinds, self.rows)}
        picture = rng.integers(0, PICTURES, self.rows)
        first = np.array([np.flatnonzero(picture == each)[0] for each in picture])
        self.same = Identical(first, first)
        self.faulty: list[int] = np.flatnonzero(rng.random(self.rows) < 0.4).tolist()
        pairs = np.sort(rng.integers(0, self.rows, (int(rng.integers(0, 30)), 2)), axis=1)
        pairs = pairs[first[pairs[:, 0]] != first[pairs[:, 1]]]
        equal = np.argwhere((first[:, None] == first) & np.tri(self.rows, k=-1, dtype=bool).T)
        across = self.member[pairs[:, 0]] != self.member[pairs[:, 1]]
        inside, crowded = pairs[~across], rng.random((~across).sum()) < 0.3
        apart = self.member[equal[:, 0]] != self.member[equal[:, 1]]
        self.crowds = inside[crowded]
        self.lists = [
            np.concatenate([pairs[across], equal[apart]]),
            equal[~apart],
            inside[inside.sum(1) % 2 == 0],
            inside[inside.sum(1) % 2 == 1],
        ]

    def __len__(self) -> int:
        return self.rows


def test_each_list_removes_its_pairs_and_all_lists_keep_the_best_row() -> None:
    for seed in range(200):
        check(Drawn(seed))


def check(drawn: Any) -> None:
    copies = Copies(drawn, drawn.same, drawn.crowds, drawn.faulty)
    leak, *others = drawn.lists
    copies.leave_out(leak)
    copies.leave_out(np.concatenate(others))
    excluded = [set(copies.excluded(pairs)) for pairs in drawn.lists]
    left_out = set[int]().union(*excluded)

    for pairs, rows in zip(drawn.lists, excluded, strict=True):
        assert all(rows & {*pair} for pair in pairs.tolist())
    every: RowPairs = np.concatenate(drawn.lists)
    for members in connected(every):
        kept = [row for row in members if row not in left_out]
        assert kept
        assert {*kept} - {*drawn.faulty} or {*members} <= {*drawn.faulty}


def test_lists_agree_on_a_chain() -> None:
    """Both lists leave out its middle, so both ends stay."""
    drawn: Any = Drawn(0)
    rows = np.arange(drawn.rows)
    drawn.member[:], drawn.sizes[:], drawn.index["field"][:] = 0, 1, 0
    copies = Copies(drawn, Identical(rows, rows), np.zeros((0, 2), np.int64), [])
    first, second = np.array([[0, 1]]), np.array([[1, 2]])
    copies.leave_out(np.concatenate([first, second]))

    assert copies.excluded(first) == copies.excluded(second) == [1]


# Near pairs of hashes: exactly those that comparing all pairs finds.


def near(distance: int, count: int = 300) -> Hashes:
    """Return random hashes, and for each another one with up to ``distance`` + 2 other bits."""
    rng = np.random.default_rng(distance)
    hashes = rng.integers(0, 1 << 64, count, dtype=np.uint64)
    for number in range(0, count - 1, 2):
        bits = rng.choice(64, rng.integers(0, distance + 3), replace=False).tolist()
        hashes[number + 1] = hashes[number] ^ np.uint64(sum(1 << bit for bit in bits))
    return hashes


def differing(one: int, other: int) -> int:
    return (int(one) ^ int(other)).bit_count()


@pytest.mark.parametrize("distance", [0, 1, 3, 6, 10])
def test_all_near_pairs_are_found(distance: int) -> None:
    hashes = near(distance)
    found = near_pairs(hashes, distance)
    expected = {
        (i, j, differing(hashes[i], hashes[j]))
        for i, j in itertools.combinations(range(len(hashes)), 2)
        if differing(hashes[i], hashes[j]) <= distance
    }

    assert len(expected) > 40
    assert {*zip(found.first, found.second, found.distance, strict=True)} == expected
    assert found.complete


def test_a_hash_may_be_near_a_query_of_the_other() -> None:
    hashes = np.array([0, 0xFFFF, 0xFFFF << 20], np.uint64)
    queries = np.array([[7 << 40, 9 << 50], [1, 5 << 40], [5 << 40, 6 << 30]], np.uint64)
    found = near_pairs(hashes, 2, queries=queries)

    # The queries 5 << 40 of two objects are equal, which does not count.
    assert [*zip(found.first, found.second, found.distance, strict=True)] == [(0, 1, 1), (0, 2, 2)]


def test_long_runs_of_equal_hashes_are_searched_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(neighbors, "_CHUNK", 7)
    hashes = np.repeat(near(2, 6), 20)
    queries = hashes[:, None] ^ np.uint64(1 << 63)
    found = near_pairs(hashes, 2, queries=queries)
    expected = [
        (i, j)
        for i, j in itertools.combinations(range(len(hashes)), 2)
        if min(differing(hashes[i], each) for each in (hashes[j], queries[j, 0])) <= 2
    ]

    assert [*zip(found.first, found.second, strict=True)] == expected


def test_a_search_for_too_many_pairs_stops() -> None:
    found = near_pairs(np.zeros(5000, np.uint64), 3, limit=500)

    assert not found.complete
    assert len(found.first) == 500


@pytest.mark.parametrize("count", [0, 1])
def test_few_hashes_have_no_pairs(count: int) -> None:
    assert len(near_pairs(np.zeros(count, np.uint64), 3).first) == 0


def test_numpy_1_counts_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    hashes = near(5)
    expected = near_pairs(hashes, 5)
    monkeypatch.delattr(np, "bitwise_count", raising=False)

    found = near_pairs(hashes, 5)
    assert [each.tolist() for each in found[:3]] == [each.tolist() for each in expected[:3]]
