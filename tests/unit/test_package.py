"""The installed package: public names, light imports, a wheel that works by itself."""

from __future__ import annotations

import dataclasses
import inspect
import os
import re
import subprocess
import sys
import venv
from collections.abc import Callable, Iterator
from importlib.metadata import Distribution, distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import shardkit
from shardkit.system import native

ROOT = Path(__file__).parents[2]


def run(*command: str | Path) -> str:
    """Run a command away from the checkout, and return what it printed."""
    done = subprocess.run(
        [str(part) for part in command],
        cwd="/",
        env={name: value for name, value in os.environ.items() if name != "PYTHONPATH"},
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_public_names_are_sorted_and_exist() -> None:
    names = [name for name in shardkit.__all__ if name != "__version__"]

    assert names == sorted(names)
    for name in shardkit.__all__:
        assert getattr(shardkit, name) is not None
    assert dir(shardkit) == shardkit.__all__


def test_the_types_of_public_functions_are_public() -> None:
    """Types of parameters, results, and fields of options."""
    functions = [getattr(shardkit, name) for name in shardkit.__all__]
    functions = [each for each in functions if inspect.isfunction(each)]
    taken = {kind for each in functions for name, kind in types_of(each) if name != "return"} - {
        shardkit.ShardDataset,
        shardkit.Source,
    }
    functions += [kind.__init__ for kind in taken if dataclasses.is_dataclass(kind)]
    missing = {
        (each.__qualname__, kind.__name__)
        for each in functions
        for _, kind in types_of(each)
        if kind.__name__ not in shardkit.__all__
    }
    assert len(functions) > 12
    assert missing == set()


def types_of(function: Callable[..., object]) -> Iterator[tuple[str, type]]:
    """Yield the classes of shardkit in a function's annotations, with the parameter's name."""
    known = function.__globals__
    for name, annotation in function.__annotations__.items():
        for word in re.findall(r"[A-Za-z_]\w*", str(annotation)):
            kind = known.get(word)
            if inspect.isclass(kind) and kind.__module__.startswith("shardkit"):
                yield name, kind


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'LMDBDataSet'"):
        shardkit.LMDBDataSet  # noqa: B018


def test_importing_the_package_loads_nothing_heavy() -> None:
    code = (
        "import sys, shardkit; "
        "print({'torch', 'numpy', 'h5py', 'lmdb', 'PIL', 'click'} & set(sys.modules))"
    )

    assert run(sys.executable, "-c", code).strip() == "set()"


def test_converting_does_not_load_torch() -> None:
    code = "import sys, shardkit; shardkit.convert; shardkit.verify; print('torch' in sys.modules)"

    assert run(sys.executable, "-c", code).strip() == "False"


def runtime_distributions() -> dict[str, Distribution]:
    """Return the requirements of shardkit, including indirect ones."""
    found: dict[str, Distribution] = {}
    waiting = ["shardkit"]
    while waiting:
        for text in distribution(waiting.pop()).requires or ():
            requirement = Requirement(text)
            if requirement.marker and not requirement.marker.evaluate({"extra": ""}):
                continue
            if requirement.name not in found:
                found[requirement.name] = distribution(requirement.name)
                waiting.append(requirement.name)
    return found


@pytest.mark.slow
def test_the_wheel_works_without_the_development_packages(tmp_path: Path) -> None:
    run(sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", tmp_path, ROOT)
    (wheel,) = tmp_path.glob("*.whl")
    place = tmp_path / "venv"
    venv.create(place, with_pip=False)
    pip = (sys.executable, "-m", "pip", "--python", place, "--disable-pip-version-check")
    run(*pip, "install", "--no-deps", "--no-index", wheel)
    (site,) = place.glob("lib/python*/site-packages")
    for found in runtime_distributions().values():
        for top in {path.parts[0] for path in found.files or ()} - {"..", "__pycache__"}:
            if not (site / top).exists():
                (site / top).symlink_to(Path(str(found.locate_file(top))))
    python, command = place / "bin" / "python", place / "bin" / "shardkit"
    target = tmp_path / "dataset"

    version = run(command, "--version")
    assert version.startswith("shardkit ")
    if native.module() is not None:  # so it can be compiled here
        assert "libjpeg-turbo" in version
        assert wheel.name.endswith(".whl")
        assert "none-any" not in wheel.name
    assert "Usage" in run(python, "-m", "shardkit", "--help")
    converting = ("convert", "imagefolder", ROOT / "sample_data", target, "--to", "lmdb")
    assert "96 images in 4 classes" in run(command, *converting)
    assert "intact" in run(command, "verify", target)
    code = f"import shardkit; print(len(shardkit.LMDBDataset({str(target)!r}, decode='torch')[:8]))"
    assert run(python, "-c", code) == "8\n"
    assert run(python, "-c", "import importlib.util as u; print(u.find_spec('pytest'))") == "None\n"
