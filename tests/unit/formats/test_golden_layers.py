"""Datasets whose fields were changed later: written once, they are read forever."""

from __future__ import annotations

import runpy
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from stated import stated

from shardkit import convert, open_dataset, open_source, undo_fields, verify

ROOT = Path(__file__).parents[3]
GOLDEN = ROOT / "tests" / "golden"
SCRIPT = runpy.run_path(str(ROOT / "scripts" / "make_golden.py"))
FORMATS = SCRIPT["FORMATS"]


@pytest.mark.parametrize("storage", FORMATS)
def test_all_fields_have_their_values(storage: str) -> None:
    fields = ("image", "label", "caption", "latent")
    dataset = open_dataset(GOLDEN / storage / "layered", fields=fields, decode="bytes", verify=True)
    latents = np.arange(30, dtype=np.float16).reshape(5, 3, 2)
    assert dataset.classes == ["bird", "cat", "fox"]
    for row, path in enumerate(dataset.paths):
        image, label, caption, latent = dataset[row]
        assert image == (GOLDEN / "source" / path).read_bytes()
        assert dataset.classes[label] == SCRIPT["LABELS"][path]
        assert caption == SCRIPT["CAPTIONS"][path]
        assert np.array_equal(latent.numpy(), latents[row])


@pytest.mark.parametrize("storage", FORMATS)
def test_it_is_intact_and_can_be_copied_or_undone(storage: Any, tmp_path: Path) -> None:
    golden = GOLDEN / storage / "layered"
    result = verify(golden, "decode")
    assert (result.findings, result.extras) == ([], [])
    shutil.copytree(golden, tmp_path / "two")
    convert(open_source("dataset", golden), tmp_path / "one", to=storage)
    digest = stated(golden).content_digest
    assert stated(tmp_path / "one").content_digest == digest
    undo_fields(tmp_path / "two")
    assert open_dataset(tmp_path / "two").classes == ["bird", "cat"]
    assert verify(tmp_path / "two").ok


@pytest.mark.parametrize("storage", FORMATS)
def test_its_shards_are_those_of_the_golden_dataset_without_layers(storage: str) -> None:
    layered, before = (stated(GOLDEN / storage / name) for name in ("layered", "labelled"))
    assert layered.shards == before.shards


@pytest.mark.parametrize("storage", FORMATS)
def test_todays_commands_give_the_same_shards_and_indexes(storage: str, tmp_path: Path) -> None:
    SCRIPT["change_fields"](storage, tmp_path / "made")
    assert contents(tmp_path / "made") == contents(GOLDEN / storage / "layered")


def contents(folder: Path) -> dict[str, Any]:
    """Return all files but the manifests, which state versions of libraries."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and path.name != "shardkit.json"
    }
