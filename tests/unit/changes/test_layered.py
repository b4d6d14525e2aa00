"""Layers: hostile manifests, links and files of other datasets."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from helpers import make_dataset, make_folder
from hostile.damage import edit
from refusals import refused

from shardkit import CorruptDataset, UsageError, add_fields, open_dataset, remove_fields, verify


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("layered")
    place = make_dataset(make_folder(root / "photos"), root / "made")
    add_fields(place, {"first": list(range(6))})
    add_fields(place, {"second": list("abcdef")})
    return place


@pytest.fixture
def made(pristine: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(pristine, tmp_path / "made"))


def layer(value: dict[str, Any]) -> Any:
    return value["layering"]["layers"][0]


def rename_file(name: str) -> Callable[[dict[str, Any]], object]:
    return lambda value: layer(value)["files"][1].update(name=name)


EDITS: dict[str, Callable[[dict[str, Any]], object]] = {
    "a file that climbs": rename_file("layers/000001/../../secret"),
    "a file elsewhere": rename_file("index/rows2.npy"),
    "a file of another layer": rename_file("layers/000009/shard-000000.lmdb"),
    "a file without a name": rename_file("layers/000001/"),
    "a file of the work folder": rename_file("layers/000001/.shardkit-work/x"),
    "a manifest in a folder": rename_file("layers/000001/index/shardkit.json"),
    "two files of one name": lambda value: layer(value)["files"].append(layer(value)["files"][0]),
    "a folder that climbs": lambda value: layer(value).update(name="../../"),
    "a folder of other letters": lambda value: layer(value).update(name="abc"),
    "folders in another order": lambda value: value["layering"]["layers"].reverse(),
    "an unknown operation": lambda value: layer(value).update(operation="rename"),
    "no fields": lambda value: layer(value).update(fields=[]),
    "other fields": lambda value: layer(value).update(fields=["third"]),
    "no layers": lambda value: value["layering"].update(layers=[]),
    "no layering": lambda value: value.update(layering=None),
    "no files": lambda value: layer(value).update(files=[]),
    "more layers before": lambda value: value["layering"].update(before=3),
    "a field that no layer has": lambda value: value["schema"].append(
        {**value["schema"][-1], "name": "third"}
    ),
    "another base": lambda value: value["layering"]["base"]["schema"].pop(),
    "another field of the base": lambda value: value["schema"][0].update(rows=3),
    "a field of the base that cannot be": lambda value: value["layering"]["base"]["schema"][
        0
    ].update(kind="text"),
    "unknown entries": lambda value: layer(value).update(more=1),
    "files of layers among those of the dataset": lambda value: value["files"].append(
        layer(value)["files"].pop()
    ),
}


def test_a_manifest_with_impossible_layers_is_refused(made: Path) -> None:
    good = (made / "shardkit.json").read_bytes()
    for name, change in EDITS.items():
        edit(made, change)
        with refused(CorruptDataset, made):
            open_dataset(made)
        assert not verify(made).ok, name
        (made / "shardkit.json").write_bytes(good)
    assert verify(made).ok


def test_a_manifest_with_another_digest_of_a_layer_is_found(made: Path) -> None:
    edit(made, lambda value: layer(value).update(digest="0" * 64))
    assert open_dataset(made)[0][1] in (0, 1)
    with refused(CorruptDataset):
        open_dataset(made, fields=["first"])[0]
    assert {finding.file for finding in verify(made).findings} == {"layers/000001/shardkit.json"}


def test_a_forged_schema_of_a_layer_is_found(made: Path) -> None:
    edit(made, lambda value: value["schema"][2].update(dtype="float64"))
    with pytest.raises(CorruptDataset, match="another field 'first'"):
        open_dataset(made, fields=["first"])[0]
    assert not verify(made).ok


@pytest.mark.parametrize("name", ["layers", "layers/000001"])
def test_links_in_place_of_layers_are_refused(made: Path, tmp_path: Path, name: str) -> None:
    shutil.move(made / name, tmp_path / "moved")
    (made / name).symlink_to(tmp_path / "moved")
    with pytest.raises(CorruptDataset, match="symbolic link"):
        open_dataset(made, fields=["first"])[0]
    assert not verify(made).ok
    with refused(UsageError, made / name, "symbolic link"):
        remove_fields(made, "first")


def test_a_layer_of_other_rows_is_refused(pristine: Path, made: Path, tmp_path: Path) -> None:
    """Its manifest is right, and so is the digest, but its keys are those of another dataset."""
    other = make_dataset(pristine.parent / "photos", tmp_path / "other", shuffle=False)
    add_fields(other, {"first": list(range(6))})
    stated = json.loads((other / "shardkit.json").read_bytes())["layering"]["layers"][0]
    shutil.rmtree(made / "layers" / "000001")
    shutil.copytree(other / "layers" / "000001", made / "layers" / "000001")
    edit(made, lambda value: layer(value).update(stated))
    with refused(CorruptDataset):
        open_dataset(made, fields=["first"])[0]
    assert not verify(made).ok
