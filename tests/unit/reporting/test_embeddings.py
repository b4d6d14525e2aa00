"""Findings by embeddings: wrong labels, near duplicates, outliers and bad vectors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import invoke, make_dataset, make_tree, png, run_main

from shardkit import add_fields, report
from shardkit.dataset.shardset import open_shards
from shardkit.errors import UsageError
from shardkit.reporting import embeddings
from shardkit.reporting.report import DatasetReport

EACH, VALUES = 60, 16
CLASSES = "abc"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("photos")
    names = [f"{label}/{n:02}.png" for label in CLASSES for n in range(EACH)] + ["rare/00.png"]
    return make_tree(root, {name: png(8, 8, seed=n) for n, name in enumerate(names)})


@pytest.fixture
def place(folder: Path, tmp_path: Path) -> Path:
    return make_dataset(folder, tmp_path / "made")


def embedded(place: Path, seed: int, dtype: Any = np.float32) -> dict[str, Any]:
    """Add embeddings with planted faults, drawn by a seed; return the keys of each kind."""
    rng = np.random.default_rng(seed)
    keys = list(open_shards(place).keys)
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
    add_fields(place, {"embedding": vectors.astype(dtype)})
    return {
        "label-error": {
            *wrong,
            *(copy for key, copy in zip(copied, copies, strict=True) if key[0] != copy[0]),
        },
        "embedding-duplicate": {*copied, *copies},
        "embedding-outlier": {outlier},
        "bad-embedding": set(bad),
    }


def found(made: DatasetReport, kind: str) -> set[str]:
    (finding,) = (each for each in made.findings if each.kind == kind)
    return {made.images.keys[row] for group in finding.groups for row in group.rows}


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("dtype", [np.float16, np.float64])
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
    monkeypatch.setattr(embeddings, "_REFERENCES", 90)
    made = report(place, embedding="embedding")

    for kind in ("label-error", "embedding-duplicate", "bad-embedding"):
        assert planted[kind] <= found(made, kind), kind


def test_of_datasets_compared_a_near_duplicate_is_a_leak(folder: Path, tmp_path: Path) -> None:
    train, val = (make_dataset(folder, tmp_path / name) for name in ("train", "val"))
    rng = np.random.default_rng(5)
    vectors = rng.normal(size=(len(open_shards(train)), VALUES))
    add_fields(train, {"embedding": vectors})
    other = rng.normal(size=vectors.shape)
    other[3] = vectors[7]
    add_fields(val, {"embedding": other})
    made = report(train, val, embedding="embedding")
    (finding,) = (each for each in made.findings if each.kind == "embedding-duplicate")

    assert [(group.rows, group.note) for group in finding.groups] == [
        ([7, len(vectors) + 3], "leak")
    ]
    assert made.exclude(finding) == {"train": [made.images.keys[7]]}


def test_wrong_names_are_refused(place: Path) -> None:
    add_fields(place, {"embedding": np.ones((181, 4), np.float32), "ids": np.ones((181, 4), int)})
    for name in ("nothing", "ids", "label", "image"):
        with pytest.raises(UsageError, match="floats, of one shape: embedding"):
            report(place, embedding=name)


def test_findings_by_embeddings_need_their_field(place: Path) -> None:
    refused = run_main("report", place, "--fail-on", "label-error")
    assert refused.returncode == 2
    assert "that has them with --embedding" in refused.stderr
    embedded(place, 2)
    result = invoke("report", place, "--embedding", "embedding", "--fail-on", "label-error")
    assert result.exit_code == 1
    assert "--fail-on: found label-error" in result.stderr
    assert "label-error: 1 class with fewer" in result.stdout
    with pytest.raises(UsageError, match="with embedding="):
        report(place).failed(["label-error"])


def test_without_enough_embeddings_nothing_is_found(tmp_path: Path) -> None:
    files = {f"a/{n}.png": png(8, 8, seed=n) for n in range(4)}
    place = make_dataset(make_tree(tmp_path / "photos", files), tmp_path / "made")
    add_fields(place, {"embedding": np.ones((4, 3), np.float32)})
    made = report(place, embedding="embedding")

    assert not any(found(made, kind) for kind in embeddings.KINDS)
