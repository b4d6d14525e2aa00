"""The sample data and the script that draws it."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest
from helpers import opened

from shardkit.codecs.image import decode, inspect, sniff
from shardkit.conversion.convert import convert_scan
from shardkit.conversion.plan import ConvertOptions
from shardkit.sources.imagefolder import scan_imagefolder

ROOT = Path(__file__).parents[2]
SAMPLES = ROOT / "sample_data"


@pytest.fixture(scope="module")
def script() -> ModuleType:
    path = ROOT / "scripts" / "make_sample_data.py"
    spec = importlib.util.spec_from_file_location("make_sample_data", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def files_of(folder: Path) -> dict[str, Path]:
    return {str(path.relative_to(folder)): path for path in folder.rglob("*") if path.is_file()}


def test_the_script_reproduces_the_sample_data(script: ModuleType, tmp_path: Path) -> None:
    """Names and sizes; the bytes differ between versions of libraries."""
    script.main(tmp_path)
    made, kept = files_of(tmp_path), files_of(SAMPLES)
    assert made.keys() == kept.keys()
    for name, path in kept.items():
        if path.suffix != ".txt":
            ours = opened(path.read_bytes())
            assert ours.size == opened(made[name].read_bytes()).size, name


def test_the_sample_data_has_its_special_cases() -> None:
    names = files_of(SAMPLES)
    kinds = [sniff(path.read_bytes()[:32]) for path in names.values()]
    assert len(names) == 97
    assert kinds.count(None) == 1
    assert {"jpg", "png", "webp"} <= set(kinds)
    turned = [
        name
        for name, path in names.items()
        if sniff(data := path.read_bytes()) == "jpg" and inspect(data, "jpg").orientation != 1
    ]
    assert len(turned) == 4
    stems = [name.rpartition(".")[0] for name in names]
    assert len(stems) - len(set(stems)) == 1
    assert any(" " in name for name in names)
    assert any(not name.isascii() for name in names)
    assert any(name.endswith(".JPG") for name in names)


def test_the_sample_data_can_be_converted(tmp_path: Path) -> None:
    scan = scan_imagefolder(SAMPLES)
    assert scan.classes == ("circle", "square", "star", "triangle")
    manifest = convert_scan(scan, tmp_path / "out", ConvertOptions(to="webdataset")).manifests[""]
    assert manifest.rows == 96
    assert manifest.class_counts == (24, 24, 24, 24)
    assert manifest.notes == {"orientation": 4}
    assert manifest.ignored == {"not an image": 1}


def test_the_sample_data_is_small_and_decodes() -> None:
    for path in files_of(SAMPLES).values():
        data = path.read_bytes()
        if (field := sniff(data[:32])) is not None:
            assert len(data) < 40_000
            assert decode(data, field).shape[2] == 3
