from __future__ import annotations

from pathlib import Path

import pytest
from helpers import make_dataset, make_folder, python
from refusals import refused

from shardkit import open_source
from shardkit.contracts import Format, SourceKind
from shardkit.errors import UsageError
from shardkit.registry import DEFAULT_SOURCE, format_names, get_format, get_source, source_names


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Provide a folder on ``sys.path``."""
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


def install(site: Path, entry: str, group: str = "shardkit.formats", **modules: str) -> None:
    """Put a package with one entry point, and the given modules, into ``site``."""
    folder = site / "other-1.0.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: other\nVersion: 1.0\n")
    (folder / "entry_points.txt").write_text(f"[{group}]\n{entry}\n")
    for name, text in modules.items():
        (site / f"{name}.py").write_text(text)


def test_the_names_are_sorted_and_each_is_a_format_of_that_name() -> None:
    names = format_names()
    assert names == sorted(names)
    assert {"hdf5", "lmdb", "webdataset"} <= set(names)
    for name in names:
        storage = get_format(name)
        assert isinstance(storage, Format)
        assert storage.name == name


def test_suffixes_differ_and_start_with_a_dot() -> None:
    suffixes = [get_format(name).suffix for name in format_names()]
    assert len(set(suffixes)) == len(suffixes)
    assert all(suffix.startswith(".") for suffix in suffixes)


def test_an_unknown_format_is_a_usage_error_that_lists_all() -> None:
    with pytest.raises(UsageError, match=r"'zarr'.*hdf5, lmdb, webdataset"):
        get_format("zarr")


@pytest.mark.parametrize("kind", ["hdf5", "lmdb", "webdataset"])
def test_shards_of_shardkit_are_not_a_source_of_files(kind: str, tmp_path: Path) -> None:
    made = make_dataset(make_folder(tmp_path / "photos"), tmp_path / "made", to=kind)
    (shard, *_) = sorted(made.glob("shard-*"))
    for path in (made, str(shard)):
        with refused(UsageError):
            open_source(kind, path)


def test_naming_the_formats_imports_none_of_their_libraries() -> None:
    code = (
        "import sys; from shardkit.registry import format_names; format_names(); "
        "print(sorted({'h5py', 'lmdb', 'torch'} & sys.modules.keys()))"
    )
    done = python(code, check=True)
    assert done.stdout == "[]\n"


def test_a_missing_package_is_a_usage_error_with_the_command_to_install_it(site: Path) -> None:
    install(site, "odd = lacks_it:FORMAT", lacks_it="import not_there_at_all\n")
    assert "odd" in format_names()
    with pytest.raises(UsageError, match="pip install not_there_at_all"):
        get_format("odd")


@pytest.mark.parametrize(
    ("modules", "fact"),
    [
        ({}, "module_of_odd"),
        ({"module_of_odd": ""}, "odd"),
        ({"module_of_odd": "FORMAT = 1"}, "odd"),
    ],
    ids=["no module", "no attribute", "not a format"],
)
def test_a_wrong_entry_point_is_a_usage_error(
    site: Path, modules: dict[str, str], fact: str
) -> None:
    install(site, "odd = module_of_odd:FORMAT", **modules)
    with pytest.raises(UsageError, match=fact):
        get_format("odd")


def test_another_package_cannot_replace_a_format_of_shardkit(site: Path) -> None:
    before = get_format("lmdb")
    install(site, "lmdb = wrong_lmdb:FORMAT", wrong_lmdb="FORMAT = None\n")
    assert format_names().count("lmdb") == 1
    assert get_format("lmdb") is before


def test_a_broken_third_party_format_does_not_affect_the_others(site: Path) -> None:
    install(site, "odd = gone_module:FORMAT")
    assert {get_format(name).name for name in format_names() if name != "odd"} >= {"hdf5", "lmdb"}


def test_sources_are_registered_by_name() -> None:
    assert DEFAULT_SOURCE in source_names()
    for name in source_names():
        kind = get_source(name)
        assert isinstance(kind, SourceKind)
        assert kind.name == name


def test_an_unknown_source_is_a_usage_error_that_lists_all() -> None:
    with pytest.raises(UsageError, match=r"unknown source 'nosuch'; choose from .*imagefolder"):
        get_source("nosuch")


def test_a_format_is_not_a_source(site: Path) -> None:
    install(site, "odd = shardkit.formats.lmdb:FORMAT", "shardkit.sources")
    with refused(UsageError):
        get_source("odd")
    assert "odd" not in format_names()
