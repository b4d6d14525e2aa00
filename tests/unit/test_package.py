"""The installed package: public names, light imports, a wheel that works by itself."""

from __future__ import annotations

import importlib.util
import inspect
import os
import re
import subprocess
import sys
import sysconfig
import tomllib
import venv
from collections.abc import Callable, Iterator
from importlib.metadata import Distribution, distribution
from pathlib import Path

import pytest
from click.testing import CliRunner
from packaging.requirements import Requirement

import shardkit
from shardkit.cli.main import cli
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
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_public_names_are_sorted_and_exist() -> None:
    names = [name for name in shardkit.__all__ if name != "__version__"]

    assert names == sorted(names)
    for name in shardkit.__all__:
        assert getattr(shardkit, name) is not None
    assert dir(shardkit) == shardkit.__all__


def test_the_public_names_are_few() -> None:
    assert len(shardkit.__all__) <= 50  # with __version__


def test_the_types_of_public_functions_are_documented() -> None:
    """Types of parameters and results."""
    documented = re.findall(r"^::: .*?(\w+)$", (ROOT / "docs" / "api.md").read_text("utf-8"), re.M)
    public = [getattr(shardkit, name) for name in shardkit.__all__]
    public += [getattr(shardkit.fields, name) for name in ("add", "replace", "remove", "undo")]
    functions = [function for function in public if inspect.isfunction(function)]
    names = {kind.__name__ for function in functions for kind in types_of(function)}
    assert len(names) > 12
    assert names - {*documented} == set()


def types_of(function: Callable[..., object]) -> Iterator[type]:
    """Yield the classes of shardkit in a function's annotations."""
    names = vars(sys.modules[function.__module__])
    for annotation in function.__annotations__.values():
        for word in re.findall(r"[A-Za-z_]\w*", str(annotation)):
            kind = names.get(word)
            if inspect.isclass(kind) and kind.__module__.startswith("shardkit"):
                yield kind


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'LMDBDataSet'"):
        shardkit.LMDBDataSet  # type: ignore[attr-defined]  # noqa: B018


@pytest.mark.slow
def test_a_star_import_has_all_names_that_can_be_imported() -> None:
    """`ShardDataModule` is one of them only where its extra is installed."""
    code = (
        "import importlib.util, sys\n"
        "if sys.argv[1:]: importlib.util.find_spec = lambda name: None\n"
        "from shardkit import *\n"
        "print('ShardDataModule' in globals(), 'make_loader' in globals())"
    )
    assert run(sys.executable, "-c", code).strip() == "True True"
    assert run(sys.executable, "-c", code, "without").strip() == "False True"


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


def test_all_files_require_the_same_python() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
    version = project["project"]["requires-python"].removeprefix(">=")
    major, minor = version.split(".")
    assert project["tool"]["ruff"]["target-version"] == f"py{major}{minor}"
    versions = [
        name.rpartition(" ")[2]
        for name in project["project"]["classifiers"]
        if re.search(r"Python :: 3\.\d+$", name)
    ]
    assert min(versions, key=lambda name: int(name.partition(".")[2])) == version
    for path, text in {
        "README.md": f"Python {version} or later",
        "scripts/setup": f"sys.version_info < ({major}, {minor})",
        "scripts/hatch_build.py": f'"Py_LIMITED_API", "0x{int(major):02X}{int(minor):02X}0000"',
        "shardkit/native/README.md": f"Python {version} and newer",
    }.items():
        assert text in (ROOT / path).read_text("utf-8"), path


def test_the_version_names_the_licenses_that_a_wheel_has(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "licenses").mkdir()
    monkeypatch.setattr(native, "PACKAGE", tmp_path)
    assert CliRunner().invoke(cli, ["--version"]).output.splitlines()[1:] == [
        f"licenses of the included libraries: {tmp_path / 'licenses'}"
    ]


@pytest.mark.parametrize(
    ("disabled", "tag"), [(0, "cp311-abi3"), (None, "cp311-abi3"), (1, "cp313-cp313t")]
)
def test_a_wheel_has_the_abi_of_its_python(
    disabled: int | None, tag: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No free-threaded Python was at hand: this replaces its configuration."""
    spec = importlib.util.spec_from_file_location("hatch_build", ROOT / "scripts/hatch_build.py")
    assert spec is not None
    assert spec.loader is not None
    build = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(build)
    variables = {"Py_GIL_DISABLED": disabled, "py_version_nodot": "313"}
    monkeypatch.setattr(sysconfig, "get_config_var", variables.get)
    assert build._python_tag() == tag
