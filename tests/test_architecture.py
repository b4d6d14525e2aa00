"""The structure holds: imports point downwards, at the top of the file, and rooms stay small."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "shardkit"

FLOORS = (
    {
        "",
        "errors",
        "record",
        "files",
        "machine",
        "manifest",
        "index",
        "npy",
        "order",
        "scratch",
        "share",
    },
    {"contracts", "registry"},
    {"formats", "codecs", "sources"},
    {
        "recipe",
        "handles",
        "columns",
        "shardset",
        "decode",
        "indexing",
        "examine",
        "compare",
        "pool",
    },
    {"conversion"},
    {"verbs", "torch"},
    {"measure"},
    {"cli", "testing", "__main__"},
)
"""Rooms, from the ground up: a module or folder directly in the package; "" is its __init__."""

APART = ({"verbs", "torch"}, {"formats", "codecs"}, {"cli", "testing"})
"""Rooms of one floor that must not know each other."""

HEAVY = {
    "torch": {"torch", "measure", "codecs.scaling"},  # the recipe loads that file, if asked to
    "h5py": {"formats"},
    "lmdb": {"formats"},
    "lightning": {"torch"},
    "matplotlib": set(),  # an extra: loaded by the one function that draws
}
"""Libraries that only these rooms, or single files of one, may import."""

FILES = sorted(PACKAGE.rglob("*.py"))


def room_of(module: str) -> str:
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else ""


def module_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def floor_of(room: str) -> int:
    return next(number for number, rooms in enumerate(FLOORS) if room in rooms)


def is_type_checking(node: ast.stmt) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"


def imports(path: Path) -> list[tuple[str, bool]]:
    """Return each imported module, and whether the import stands at the top of the file."""
    tree = ast.parse(path.read_text("utf-8"))
    top = [node for node in tree.body if not is_type_checking(node)]
    top += [part for node in top if isinstance(node, ast.Try) for part in node.body]
    hidden = {id(n) for node in tree.body if is_type_checking(node) for n in ast.walk(node)}
    found = []
    for node in ast.walk(tree):
        if id(node) in hidden:
            continue
        if isinstance(node, ast.Import):
            found += [(alias.name, node in top) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: a relative import"
            found.append((node.module or "", node in top))
    return found


@pytest.mark.parametrize("path", FILES, ids=module_of)
def test_imports_point_downwards_and_stand_at_the_top(path: Path) -> None:
    room = room_of(module_of(path))
    for module, at_top in imports(path):
        assert at_top, f"{path}: import of {module} inside a function"
        if module.split(".")[0] != "shardkit":
            continue
        target = room_of(module)
        if target == room:
            continue
        assert floor_of(target) <= floor_of(room), f"{path} reaches up to {module}"
        assert not any({room, target} <= pair for pair in APART), f"{path} knows {module}"


@pytest.mark.parametrize("path", FILES, ids=module_of)
def test_heavy_libraries_stay_in_their_rooms(path: Path) -> None:
    name = module_of(path)
    places = {room_of(name), name.removeprefix("shardkit.")}
    for module, _ in imports(path):
        allowed = HEAVY.get(module.split(".")[0])
        assert allowed is None or places & allowed, f"{path} imports {module}"
        loads_torch = module == "shardkit.codecs.scaling" and room_of(name) not in HEAVY["torch"]
        assert not loads_torch, f"{path} loads torch with {module}"


@pytest.mark.parametrize("path", FILES, ids=module_of)
def test_rooms_and_functions_stay_small(path: Path) -> None:
    text = path.read_text("utf-8")
    assert text.count("\n") <= 400, f"{path} is more than one room"
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef):
            assert (node.end_lineno or 0) - node.lineno < 60, f"{path}: {node.name} is long"


def test_only_one_file_knows_that_a_process_can_fork() -> None:
    knowing = {module_of(path) for path in FILES if "register_at_fork" in path.read_text("utf-8")}

    assert knowing == {"shardkit.handles"}


def test_the_engine_knows_no_format_by_name() -> None:
    for path in FILES:
        room = room_of(module_of(path))
        if floor_of(room) < floor_of("torch") and room not in ("formats", "registry"):
            strings = {
                node.value
                for node in ast.walk(ast.parse(path.read_text("utf-8")))
                if isinstance(node, ast.Constant) and isinstance(node.value, str)
            }
            assert not strings & {"lmdb", "hdf5", "webdataset"}, path


def test_every_room_has_a_place() -> None:
    rooms = {room_of(module_of(path)) for path in FILES}

    assert rooms == set().union(*FLOORS) & rooms
    assert rooms >= set().union(*FLOORS) - {"testing"}
