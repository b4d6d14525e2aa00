"""Imports point downward, form no cycle inside a package, and never lead from core to ring."""

from __future__ import annotations

import ast
import importlib
import sys
from collections.abc import Iterator
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path
from typing import NamedTuple

import pytest
from helpers import execute

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "shardkit"

LAYERS = (
    "_version errors",
    "options",
    "system",
    "record",
    "record_columns",
    "codecs",
    "kinds",
    "recipe",
    "pipeline",
    "contracts",
    "registry",
    "formats sources",
    "dataset sampling",
    "conversion",
    "torch._compat",
    "verification torch.data",
    "orders remote",
    "changes attaching cluster",
    "exporting reporting",
    "torch.engine",
    "torch",
    "measure.runner",
    "measure.bench measure.tune measure.doctor",
    "measure",
    "cli testing",
    "__main__ __init__",
)
"""Packages and root modules, lowest first. None imports a higher one, or its neighbor."""

APART = (
    ("torch", "verification"),
    ("torch", "conversion"),
    ("formats", "codecs"),
    ("dataset", "sources"),
)
"""Packages of which the first never imports the second, although it stands higher."""

HEAVY = {
    "torch": (
        "torch",
        "orders",
        "measure",
    ),
    "h5py": ("formats", "sources.hdf5_reader"),
    "lmdb": ("formats", "sources.lmdb_reader"),
    "lightning": ("torch.lightning",),
    "webdataset": ("torch.web_pipeline",),
    "pyarrow": ("exporting.parquet", "sources.arrow_reader"),
    "obstore": ("remote.client", "remote.web"),
}
"""Libraries that only these packages or modules import."""

CORE = "sources.imagefolder sources.images sources.opening sources.folders sources.wrapper"
"""Modules of rings' packages that belong to the core: what an image folder needs."""

RINGS = {
    "remote": "remote",
    "cluster": "cluster",
    "changes": "changes",
    "attaching": "attaching",
    "sources": "sources dataset.source dataset.records dataset.selection conversion.exclude",
    "orders": "orders torch.data.iterable torch.sampler",
    "operations": "torch.data.crops torch.data.following",
    "typed images": "codecs.typed codecs.tiff codecs.tiff_structure codecs.png16 conversion.typed "
    "codecs.decoder_process codecs.extras",
    "planes": "codecs.planes",
    "facts": "codecs.measures codecs.properties",
    "engines": "torch.engine.resident torch.engine.resident_rows torch.engine.helper system.helper "
    "torch.tuned",
    "outer": "reporting exporting measure cli testing torch.lightning torch.batch_size "
    "torch.web_pipeline torch.monitor torch.prefetch verification.diff verification.receipt",
}
"""Packages and modules around the core, in which one may import another."""

LINES = 28_868
"""Lines of the modules that the main job may load."""

HUBS = 8
"""Modules that may import 14 or more others."""


class Import(NamedTuple):
    module: str
    """What is imported, as a module if it is one of the package."""
    at_top: bool
    typing_only: bool


def module_of(path: Path) -> str:
    """Return the dotted name in the package: ``torch.data.ops``; a package is its ``__init__``."""
    return ".".join(path.relative_to(PACKAGE).with_suffix("").parts)


FILES = {module_of(path): path for path in sorted(PACKAGE.rglob("*.py"))}


def layer_of(module: str) -> tuple[int, str]:
    """Return the number and name of the longest entry of LAYERS that contains the module."""
    layers = [
        (len(place), number, place)
        for number, places in enumerate(LAYERS)
        for place in places.split()
        if module == place or module.startswith(place + ".")
    ]
    assert layers, f"shardkit/{module}: no layer holds it; add it to LAYERS"
    _, number, place = max(layers)
    return number, place


@pytest.fixture(scope="module", autouse=True)
def parsed() -> None:
    """Parse and walk each file once, for all tests."""
    for path in FILES.values():
        imports(path)


@cache
def nodes(path: Path) -> list[ast.AST]:
    """Return all nodes of a file; the first one is the module."""
    return [*ast.walk(ast.parse(path.read_text("utf-8")))]


@cache
def imports(path: Path) -> list[Import]:
    return [*_imports(path)]


def _imports(path: Path) -> Iterator[Import]:
    tree, *others = nodes(path)
    assert isinstance(tree, ast.Module)
    typing_only = {
        id(node)
        for block in tree.body
        if isinstance(block, ast.If) and ast.unparse(block.test) == "TYPE_CHECKING"
        for node in ast.walk(block)
    }
    top = {id(node) for node in tree.body}
    top |= {id(node) for block in tree.body if isinstance(block, ast.Try) for node in block.body}
    for node in others:
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: a relative import"
            module = node.module or ""
            submodules = [f"{module}.{alias.name}" for alias in node.names]
            names = [name if name[9:] in FILES else module for name in submodules]
        elif isinstance(node, ast.Call) and getattr(node.func, "id", "") == "Library":
            names = [ast.literal_eval(node.args[0])]
            top.add(id(node))
        for name in names:
            yield Import(name, id(node) in top, id(node) in typing_only)


def own(module: str) -> str | None:
    """Return the name inside the package, or None for a library."""
    if module.split(".", maxsplit=1)[0] != "shardkit":
        return None
    name = module[9:]
    return name if name in FILES else f"{name}.__init__".lstrip(".")


def test_imports_point_downward() -> None:
    wrong = []
    for name, path in FILES.items():
        for item in imports(path):
            target = own(item.module)
            if target is None or item.typing_only:
                continue
            (number, place), (other, its_place) = layer_of(name), layer_of(target)
            fine = other < number or place == its_place
            if not fine or any(
                name.split(".")[0] == a and target.split(".")[0] == b for a, b in APART
            ):
                wrong.append(f"{name} imports {target}")
    assert not wrong, "\n".join(wrong)


def test_no_modules_import_each_other() -> None:
    graph = {
        name: {
            target
            for item in imports(path)
            if (target := own(item.module)) and not item.typing_only and target != "__init__"
        }
        for name, path in FILES.items()
        if name != "__init__"
    }
    TopologicalSorter(graph).prepare()  # CycleError names the modules of a cycle


def test_few_modules_import_many_others() -> None:
    hubs = [
        name
        for name, path in FILES.items()
        if name not in ("__init__", "__main__")
        and len({own(item.module) for item in imports(path) if not item.typing_only} - {None}) >= 14
    ]
    assert len(hubs) <= HUBS, hubs


def test_imports_are_at_the_top() -> None:
    for name, path in FILES.items():
        for item in imports(path):
            assert item.at_top or item.typing_only, f"{name} imports {item.module} late"


def test_heavy_libraries_stay_in_their_packages() -> None:
    for name, path in FILES.items():
        for item in imports(path):
            allowed = HEAVY.get(item.module.split(".")[0])
            if allowed is not None and not item.typing_only:
                inside = any(name == place or name.startswith(place + ".") for place in allowed)
                assert inside, f"{name} imports {item.module}"


def test_one_module_handles_forks() -> None:
    knowing = {
        name for name, path in FILES.items() if "register_at_fork" in path.read_text("utf-8")
    }

    assert knowing == {"dataset.handles"}


def test_one_module_calls_the_compiled_one() -> None:
    callers = {name for name, path in FILES.items() if "native.module()" in path.read_text("utf-8")}

    assert callers == {"system.compiled"}


def test_no_format_or_source_is_named_outside_the_registry() -> None:
    for name, path in FILES.items():
        if layer_of(name)[0] < layer_of("torch.data")[0] and name.split(".")[0] not in (
            "formats",
            "sources",
            "registry",
        ):
            strings = {
                node.value
                for node in nodes(path)
                if isinstance(node, ast.Constant) and isinstance(node.value, str)
            }
            assert not strings & {"lmdb", "hdf5", "webdataset", "imagefolder"}, name


def test_assertions_only_narrow_types() -> None:
    """In the package an assertion is ``X is not None`` or ``isinstance``, for mypy."""
    others = [
        f"{name}:{node.lineno}"
        for name, path in FILES.items()
        if not name.startswith("testing.")
        for node in nodes(path)
        if isinstance(node, ast.Assert) and not narrows_a_type(node.test)
    ]
    assert others == []


def narrows_a_type(test: ast.expr) -> bool:
    calls = [node for node in ast.walk(test) if isinstance(node, ast.Call)]
    if isinstance(test, ast.Call):
        return ast.unparse(test.func) == "isinstance" and len(calls) == 1
    return ast.unparse(test).endswith(" is not None") and not calls


def ring_of(module: str) -> str | None:
    if module in CORE.split():
        return None
    for ring, places in RINGS.items():
        if any(module == place or module.startswith(place + ".") for place in places.split()):
            return ring
    return None


def test_the_core_imports_no_ring() -> None:
    found = {
        f"{name} imports {target}"
        for name, path in FILES.items()
        if name not in ("__init__", "__main__") and ring_of(name) is None
        for item in imports(path)
        if (target := own(item.module)) and ring_of(target) and not item.typing_only
    }
    assert not found


@pytest.mark.slow
def test_what_is_loaded_by_name_exists() -> None:
    """No table names a module or an object that was moved."""
    for path in FILES.values():
        for node in nodes(path):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                module, colon, name = node.value.partition(":")
                if colon and name.isidentifier() and module.startswith("shardkit."):
                    assert hasattr(importlib.import_module(module), name), node.value


@pytest.mark.slow
def test_the_main_job_loads_no_ring() -> None:
    script = ROOT / "scripts" / "main_job.py"
    done = execute(sys.executable, script, check=True)
    lines = {name: int(count) for count, name in map(str.split, done.stdout.splitlines())}
    total = lines.pop("all")
    assert [name for name in lines if ring_of(name) and not name.endswith("__init__")] == []
    assert total <= LINES
