"""The locale does not change a byte of a dataset: names are UTF-8, and other bytes are kept."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from pathlib import Path

import pytest
from helpers import execute, jpeg, run
from stated import stated

PLAIN = {"PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
NAMES = ("größe", "日本", "a b")
SURROUNDINGS = {"C": {"LC_ALL": "C", **PLAIN}, "C with UTF-8": {"LC_ALL": "C"}, "latin": None}


@pytest.fixture(scope="module")
def latin(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, str]:
    """An environment in which each byte is a letter."""
    made = tmp_path_factory.mktemp("locales") / "en_US.ISO-8859-1"
    if shutil.which("localedef") is None:
        pytest.skip("localedef is missing")
    done = execute("localedef", "-i", "en_US", "-f", "ISO-8859-1", made, timeout=240)
    if not made.exists():
        pytest.skip(f"localedef cannot make it: {done.stderr[:80]}")
    return {"LOCPATH": str(made.parent), "LC_ALL": made.name, **PLAIN}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two splits: one name is not ASCII, and some file names are not even text."""
    root = tmp_path_factory.mktemp("photos")
    for split in ("train", "größe"):
        for number, name in enumerate(NAMES):
            folder = root / split / name
            folder.mkdir(parents=True)
            (folder / f"{name}.jpg").write_bytes(jpeg(seed=number))
            (folder / f".{name}").write_bytes(b"hidden")
        with open(os.fsencode(root / split / "a b") + b"/\xff\xe9.jpg", "wb") as file:
            file.write(jpeg(seed=9))
    return root


@pytest.fixture(scope="module")
def made(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return converted(source, tmp_path_factory.mktemp("utf-8") / "made", {})


def converted(source: Path, place: Path, env: Mapping[str, str]) -> Path:
    how = ("--to", "webdataset", "--splits", "--workers", "1", "--no-shuffle")
    done = run("convert", "imagefolder", source, place, *how, env=env)
    assert done.returncode == 0, done.stderr
    return place


def files_of(place: Path) -> dict[Path, bytes]:
    return {p.relative_to(place): p.read_bytes() for p in place.rglob("*") if p.is_file()}


@pytest.mark.parametrize("name", SURROUNDINGS)
@pytest.mark.slow
def test_the_locale_does_not_change_a_byte(
    source: Path, made: Path, tmp_path: Path, request: pytest.FixtureRequest, name: str
) -> None:
    env = SURROUNDINGS[name] or request.getfixturevalue("latin")
    again = converted(source, tmp_path / "made", env)
    assert files_of(again) == files_of(made)
    assert stated(made / "größe").classes == ["a b", "größe", "日本"]
    for place, other in ((made, env), (again, {})):
        done = run("verify", place, "--against", source, "--workers", "1", env=other)
        assert done.returncode == 0, done.stdout + done.stderr
    assert run("info", made, env=env).returncode == 0
