"""Findings by embeddings: wrong labels, near duplicates, outliers and bad vectors."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import encoded, invoke, make_dataset, make_tree, png
from planted_faults import scene
from refusals import refused, refuses

from shardkit import fields, open_dataset, report
from shardkit.errors import UsageError

EACH, VALUES = 40, 16
CLASSES = "abc"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("photos")
    names = [f"{label}/{n:02}.png" for label in CLASSES for n in range(EACH)] + ["rare/00.png"]
    return make_tree(root, {name: png(8, 8, seed=n) for n, name in enumerate(names)})


@pytest.fixture(scope="module")
def measured(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dataset whose images a report need not read."""
    return make_dataset(folder, tmp_path_factory.mktemp("measured") / "made", facts=True)


@pytest.fixture
def place(measured: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(measured, tmp_path / "made"))


def embedded(place: Path, seed: int, dtype: Any = np.float32, scale: float = 1) -> dict[str, Any]:
    """Add embeddings with planted faults, drawn by a seed; return the keys of each kind."""
    rng = np.random.default_rng(seed)
    keys = list(open_dataset(place).keys)
    rows = {key: row for row, key in enumerate(keys)}
    centers = {label: rng.normal(size=VALUES) for label in [*CLASSES, "rare"]}
    vectors = np.stack([centers[key.split("/")[0]] for key in keys])
    vectors += rng.normal(size=vectors.shape) * 0.2
    chosen = rng.permutation([key for key in keys if not key.startswith("rare")]).tolist()
    wrong, copied, copies = chosen[:4], chosen[4:7], chosen[7:10]
    outlier, bad = chosen[10], chosen[11:13]
    for key in wrong:
        other = CLASSES[(CLASSES.index(key[0]) + 1) % len(CLASSES)]
        vectors[rows[key]] = centers[other] + rng.normal(size=VALUES) * 0.2
    for key, copy in zip(copied, copies, strict=True):
        vectors[rows[copy]] = vectors[rows[key]] * 3 + rng.normal(size=VALUES) * 0.002
    vectors[rows[outlier]] = centers[outlier[0]] + 4 * rng.normal(size=VALUES)
    vectors[rows[bad[0]]] = 0
    vectors[rows[bad[1]], 3] = np.nan
    fields.add(place, {"embedding": (vectors * scale).astype(dtype)})
    return {
        "label-error": {
            *wrong,
            *(copy for key, copy in zip(copied, copies, strict=True) if key[0] != copy[0]),
        },
        "embedding-duplicate": {*copied, *copies},
        "embedding-outlier": {outlier},
        "bad-embedding": set(bad),
    }


def found(made: Any, kind: str) -> set[str]:
    (finding,) = (each for each in made.findings if each.kind == kind)
    return {made.images.keys[row] for group in finding.groups for row in group.rows}


@pytest.mark.parametrize(("seed", "dtype"), [(0, np.float16), (1, np.float64), (2, np.float16)])
def test_planted_faults_are_found_by_embeddings(place: Path, seed: int, dtype: Any) -> None:
    planted = embedded(place, seed, dtype)
    made = report(place, embedding="embedding")

    for kind, expected in planted.items():
        assert expected <= found(made, kind), kind
    assert found(made, "bad-embedding") == planted["bad-embedding"]
    assert found(made, "embedding-duplicate") == planted["embedding-duplicate"]
    # The outlier may also look like another class.
    assert found(made, "label-error") - planted["embedding-outlier"] == planted["label-error"]
    assert len(found(made, "embedding-outlier")) <= 4


def test_a_note_says_what_the_neighbors_are(place: Path) -> None:
    embedded(place, 0)
    made = report(place, embedding="embedding")
    (finding,) = (each for each in made.findings if each.kind == "label-error")

    assert finding.note == "1 class with fewer than 10 embeddings is not judged"
    assert all(" of its 10 neighbors are " in group.note for group in finding.groups)
    assert sorted(finding.exclude) == sorted(row for group in finding.groups for row in group.rows)


def test_few_references_find_the_same(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    planted = embedded(place, 1)
    monkeypatch.setattr("shardkit.reporting.embeddings._REFERENCES", 60)
    made = report(place, embedding="embedding")

    for kind in ("label-error", "embedding-duplicate", "bad-embedding"):
        assert planted[kind] <= found(made, kind), kind


def test_of_datasets_compared_a_near_duplicate_is_a_leak(measured: Path, tmp_path: Path) -> None:
    train, val = (Path(shutil.copytree(measured, tmp_path / name)) for name in ("train", "val"))
    rng = np.random.default_rng(5)
    vectors = rng.normal(size=(len(open_dataset(train)), VALUES))
    fields.add(train, {"embedding": vectors})
    other = rng.normal(size=vectors.shape)
    other[3] = vectors[7]
    fields.add(val, {"embedding": other})
    made = report(train, val, embedding="embedding")
    (leak,) = made.failed(["leak"])

    assert not found(made, "embedding-duplicate")
    assert ([7, len(vectors) + 3], "similar embeddings") in [
        (group.rows, group.note) for group in leak.groups
    ]


def test_a_leak_by_embeddings_alone_fails_the_command(tmp_path: Path) -> None:
    files = {
        f"{split}/a/{n:02}.jpg": encoded(scene(100 * len(split) + n))
        for n in range(12)
        for split in ("train", "val")
    }
    place = make_dataset(make_tree(tmp_path / "photos", files), tmp_path / "made")
    vectors = np.random.default_rng(7).normal(size=(24, VALUES))
    vectors[12 + 3] = vectors[7]
    fields.add(place, {"embedding": vectors})
    assert invoke("report", place, "--fail-on", "leak").exit_code == 0
    result = invoke("report", place, "--embedding", "embedding", "--fail-on", "leak")

    assert result.exit_code == 1
    assert "--fail-on: found leak (2 images)" in result.stderr
    made = report(place, embedding="embedding")
    (leak,) = made.failed(["leak"])
    assert [(group.rows, group.note) for group in leak.groups] == [([7, 15], "similar embeddings")]
    assert made.exclude(leak) == {"train": [made.images.keys[7]]}  # both splits have 12 images


def test_a_leak_of_pictures_is_not_shown_again_by_embeddings(
    measured: Path, tmp_path: Path
) -> None:
    train, val = (Path(shutil.copytree(measured, tmp_path / name)) for name in ("train", "val"))
    vectors = np.random.default_rng(5).normal(size=(len(open_dataset(train)), VALUES))
    for place in (train, val):
        fields.add(place, {"embedding": vectors})
    (leak,) = report(train, val, embedding="embedding").failed(["leak"])

    assert {group.note for group in leak.groups} == {"same bytes"}


def test_wrong_fields_are_refused_with_the_remedy(place: Path) -> None:
    count = len(open_dataset(place))
    with refused(UsageError, "'embedding'"):
        report(place, embedding="embedding")
    lists = [[0.5] * (1 + n % 2) for n in range(count)]
    fields.add(
        place,
        {"ragged": lists, "embedding": np.ones((count, 4), np.float32)},
        schema={"ragged": "array"},
    )
    fields.add(place, {"listed": lists, "ids": np.ones((count, 4), int)}, schema={"listed": "json"})
    for name, kind in (
        ("ragged", "array"),
        ("listed", "json"),
        ("ids", "int64 array, 4"),
        ("label", "label with 4 classes"),
        ("image", "image"),
    ):
        facts = (f"'{name}'", kind, "made has embedding", "`shardkit fields replace`")
        with refused(UsageError, *facts, f"--field {name}=COLUMN:array"):
            report(place, embedding=name)


def test_findings_by_embeddings_need_their_field(place: Path) -> None:
    refuses(2, "report", place, "--fail-on", "label-error", facts=("--embedding",))
    embedded(place, 2)
    result = invoke("report", place, "--embedding", "embedding", "--fail-on", "label-error")
    assert result.exit_code == 1
    assert "--fail-on: found label-error" in result.stderr
    assert "label-error: 1 class with fewer" in result.stdout
    with refused(UsageError, "embedding="):
        report(place).failed(["label-error"])


@pytest.mark.parametrize(
    ("count", "values", "reason"),
    [
        (4, "drawn", "fewer than 11 images have a usable embedding"),
        (24, "nan", "fewer than 11 images have a usable embedding"),
        (24, "equal", "all embeddings have the same direction"),
        (24, "scaled", "all embeddings have the same direction"),
        (18, "drawn", "no class has 10 images with a usable embedding"),
    ],
)
def test_what_cannot_be_judged_fails(tmp_path: Path, count: int, values: str, reason: str) -> None:
    files = {f"{'ab'[n % 2]}/{n:02}.png": png(8, 8, seed=n) for n in range(count)}
    place = make_dataset(make_tree(tmp_path / "photos", files), tmp_path / "made")
    rng = np.random.default_rng(count)
    vectors = {
        "drawn": rng.normal(size=(count, 3)),
        "nan": np.full((count, 3), np.nan),
        "equal": np.ones((count, 3)),
        "scaled": np.outer(rng.uniform(1, 9, count), [3.0, -1, 0.2]),
    }[values]
    fields.add(place, {"embedding": vectors})
    page = tmp_path / "page.html"
    options = ("--embedding", "embedding", "--fail-on", "label-error", "-o", page)
    result = invoke("report", place, *options)

    assert result.exit_code == 1
    message = f"label-error: nothing could be judged: {reason}"
    assert f"--fail-on: {message}\n" in result.stderr
    assert message in result.stdout
    assert f"{message}." in page.read_text()
    assert "label-error" not in page.read_text().split("Nothing found: ")[1].split("</p>")[0]
    found_ones = report(place, embedding="embedding").as_dict()["findings"]
    judged = {each["kind"]: each["judged"] for each in found_ones}
    assert not judged["label-error"]
    assert judged["leak"]
    assert not any(each["groups"] for each in found_ones if each["kind"] == "embedding-duplicate")


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("scale", [1e-300, 1e200])
def test_the_length_of_embeddings_does_not_matter(place: Path, scale: float) -> None:
    planted = embedded(place, 3, np.float64, scale)
    made = report(place, embedding="embedding")

    assert found(made, "bad-embedding") == planted["bad-embedding"]
    assert planted["label-error"] <= found(made, "label-error")
