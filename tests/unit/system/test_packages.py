"""Versions and entry points of installed packages are those that `importlib.metadata` finds."""

from __future__ import annotations

import zipfile
from importlib import metadata
from pathlib import Path

import pytest
from helpers import make_folder, python

from shardkit.system.packages import entry_points, version_of

METADATA = "Metadata-Version: 2.1\nName: other\nVersion: 1.0\n\nVersion: 2.0\n"


def test_versions_are_those_of_the_installed_packages() -> None:
    for name in ("numpy", "pillow", "lmdb", "h5py", "simplejpeg"):
        assert version_of(name) == metadata.version(name)
    assert version_of("never-installed") is None


def test_the_first_package_on_the_path_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in (2, 1):
        place = tmp_path / str(number)
        (place / f"twice-{number}.dist-info").mkdir(parents=True)
        text = METADATA.replace("1.0", f"{number}.0+local")
        (place / f"twice-{number}.dist-info" / "METADATA").write_text(text)
        monkeypatch.syspath_prepend(str(place))

    assert version_of("twice") == "1.0+local"


def test_metadata_of_setuptools_and_in_archives_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "old.egg-info").mkdir()
    (tmp_path / "old.egg-info" / "PKG-INFO").write_text("Name: old\nVersion: 3.0\n")
    (tmp_path / "old.egg-info" / "entry_points.txt").write_text("[some.group]\nfirst = a:B\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert version_of("old") == "3.0"
    assert entry_points("some.group") == {"first": "a:B"}

    with zipfile.ZipFile(tmp_path / "packed.zip", "w") as archive:
        archive.writestr("packed-1.0.dist-info/METADATA", METADATA)
        archive.writestr("packed-1.0.dist-info/entry_points.txt", "[in.archive]\nlast = c:D\n")
    monkeypatch.syspath_prepend(str(tmp_path / "packed.zip"))
    assert entry_points("in.archive") == {"last": "c:D"}
    assert entry_points("no.group") == {}


def test_a_small_conversion_loads_nothing_that_it_does_not_need(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "in")
    (min(folder.iterdir()) / "notes.txt").write_text("Taken in the Straße, 2024.\n")
    slow = ("importlib.metadata", "multiprocessing", "shardkit.sources.coco", "PIL.DdsImagePlugin")
    done = python(
        "import sys\n"
        "from shardkit.cli.main import main\n"
        f"sys.argv = ['shardkit', 'convert', 'imagefolder', {str(folder)!r},"
        f" {str(tmp_path / 'out')!r}, '--to', 'lmdb', '--quiet']\n"
        "try:\n    main()\n"
        f"finally:\n    print(sorted({{*{slow!r}}} & sys.modules.keys()))\n"
    )
    assert done.stdout == "[]\n"
