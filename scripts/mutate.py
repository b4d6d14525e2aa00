"""Change the package's syntax tree, one node at a time, and check that tests fail.

    .venv/bin/python scripts/mutate.py --sample 20                  of the whole package
    .venv/bin/python scripts/mutate.py --sample 20 remote sources   of some packages or modules
    .venv/bin/python scripts/mutate.py dataset.handles:read_at      all of one function

A mutation is named MODULE:FUNCTION:OPERATOR:NUMBER. A sample holds the names with the smallest
hashes, so that a change of one function keeps the mutations of all others. The exit status is 1
if one survives: then a test is missing, or the change makes no difference.
"""

from __future__ import annotations

import argparse
import ast
import copy
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Container, Iterator, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "shardkit"
DEADLINE = 900
PYTEST = ["-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "-m", "not slow and not measures"]
PYTEST += ["--timeout=120", "--cpu-limit=inf"]

_PAIRS: tuple[tuple[Any, Any], ...] = (
    (ast.Lt, ast.LtE),
    (ast.Gt, ast.GtE),
    (ast.Eq, ast.NotEq),
    (ast.In, ast.NotIn),
    (ast.Is, ast.IsNot),
    (ast.And, ast.Or),
    (ast.Add, ast.Sub),
)
_OPPOSITE = dict(_PAIRS) | {second: first for first, second in _PAIRS}
_VALUES = (ast.Name, ast.Call, ast.Attribute, ast.Subscript, ast.NamedExpr)
"""Conditions to negate; comparisons and `and`, `or`, `not` have mutations of their own."""
_IGNORED = (ast.Raise, ast.Assert, ast.JoinedStr, ast.FunctionDef, ast.ClassDef, ast.Lambda)
"""Messages and type hints are not mutated; inner functions have names of their own."""


class Mutation(NamedTuple):
    """A changed expression or statement."""

    name: str
    file: str
    """Path in the package."""
    start: int
    end: int
    """Range of bytes of the file."""
    old: str
    new: str


def mutations(file: Path) -> list[Mutation]:
    """Return all mutations of a file of the package."""
    source = file.read_bytes()
    lines = source.splitlines(keepends=True)
    starts = [0, *accumulate(map(len, lines))]
    skipped = {number for number, line in enumerate(lines, 1) if b"pragma: no cover" in line}
    path, module = str(file.relative_to(PACKAGE)), module_of(file)
    mutants, numbers = [], Counter[str]()
    for function, tree in _functions(ast.parse(source), ""):
        for operator, node, new in _changes(tree, skipped):
            start = starts[node.lineno - 1] + node.col_offset
            end = starts[(node.end_lineno or 0) - 1] + (node.end_col_offset or 0)
            name = f"{module}:{function}:{operator}"
            numbers[name] += 1
            old = source[start:end].decode()
            mutants.append(Mutation(f"{name}:{numbers[name]}", path, start, end, old, new))
    return mutants


def _functions(node: ast.AST, prefix: str) -> Iterator[tuple[str, ast.FunctionDef]]:
    """Yield the functions of a tree with their qualified names."""
    for child in ast.iter_child_nodes(node):
        name = prefix
        if isinstance(child, (ast.FunctionDef, ast.ClassDef)):
            name = f"{prefix}{child.name}"
            if isinstance(child, ast.FunctionDef):
                yield name, child
            name += "."
        yield from _functions(child, name)


def _changes(
    node: ast.AST, skipped: Container[int]
) -> Iterator[tuple[str, ast.expr | ast.stmt, str]]:
    """Yield the operators that apply in a tree, the nodes that change, and their new source."""
    body = node.body if isinstance(node, ast.FunctionDef) else ast.iter_child_nodes(node)
    for child in body:
        if isinstance(child, _IGNORED) or getattr(child, "lineno", None) in skipped:
            continue
        if isinstance(child, (ast.If, ast.While, ast.IfExp)) and isinstance(child.test, _VALUES):
            yield "negate", child.test, f"(not {ast.unparse(child.test)})"
        if isinstance(child, ast.AugAssign) or (
            isinstance(child, ast.Expr) and isinstance(child.value, ast.Call)
        ):
            yield "drop", child, "pass"
        if isinstance(child, ast.Compare) and len(child.ops) == 1:
            new = copy.deepcopy(child)
            new.ops = [_OPPOSITE[type(op)]() for op in child.ops]
            yield "compare", child, f"({ast.unparse(new)})"
        if isinstance(child, (ast.BoolOp, ast.BinOp)) and type(child.op) in _OPPOSITE:
            operation = copy.deepcopy(child)
            operation.op = _OPPOSITE[type(child.op)]()
            yield "operator", child, f"({ast.unparse(operation)})"
        if isinstance(child, ast.UnaryOp) and isinstance(child.op, ast.Not):
            yield "negate", child, f"({ast.unparse(child.operand)})"
        if isinstance(child, ast.Constant) and isinstance(child.value, bool):
            yield "constant", child, str(not child.value)
        elif isinstance(child, ast.Constant) and isinstance(child.value, int):
            yield "constant", child, str(child.value + 1)
        yield from _changes(child, skipped)


def sample(mutants: Sequence[Mutation], size: int) -> list[Mutation]:
    """Return the mutations whose names have the smallest hashes."""
    return sorted(mutants, key=lambda mutant: hashlib.sha256(mutant.name.encode()).digest())[:size]


def suites_of(file: str, root: Path) -> Iterator[list[str]]:
    """Yield tests of a file in a tree: those of its name, of its users, then of all packages."""
    path = Path(file)
    folder = root / "tests/unit" / path.parent
    named = [str(test.relative_to(root)) for test in folder.glob(f"test_{path.stem}*.py")]
    if named:
        yield sorted(named)
    module = f"shardkit/{path.with_suffix('')}".replace("/", r"\.")
    package, _, name = module.rpartition(r"\.")
    used = re.compile(rf"{module}\b|from {package} import [^)]*?\b{name}\b")
    users = [
        str(test.relative_to(root))
        for test in (root / "tests/unit").rglob("test_*.py")
        if used.search(test.read_text("utf-8")) or test.parent == folder
    ]
    if others := sorted(set(users) - set(named)):
        yield others
    # other tests need files of the repository that a copy lacks
    yield ["-n", "auto", *sorted(str(p.relative_to(root)) for p in root.glob("tests/unit/*/"))]


def copy_to(folder: Path) -> None:
    """Copy what tests need."""
    for name in ("shardkit", "tests", "docs", "sample_data", "scripts"):
        shutil.copytree(
            ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__", "plots")
        )
    for name in ("pyproject.toml", "README.md", "CHANGELOG.md"):
        shutil.copy(ROOT / name, folder / name)


def outcome(mutant: Mutation, folder: Path) -> str:
    """Return "killed" or "survived", or what went wrong, with the end of the output."""
    path = folder / "shardkit" / mutant.file
    source = path.read_bytes()
    path.write_bytes(source[: mutant.start] + mutant.new.encode() + source[mutant.end :])
    try:
        for tests in suites_of(mutant.file, folder):
            done = subprocess.run(
                [sys.executable, *PYTEST, *tests],
                cwd=folder,
                env={**os.environ, "PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1"},
                capture_output=True,
                text=True,
                timeout=DEADLINE,
                check=False,
            )
            if done.returncode == 1 or "ImportError while loading conftest" in done.stderr:
                return "killed"
            if done.returncode not in (0, 5):
                return f"cannot be tested\n{done.stdout[-2000:]}{done.stderr[-2000:]}"
    except subprocess.TimeoutExpired:
        return "hangs"
    finally:
        path.write_bytes(source)
    return "survived"


def chosen(names: Sequence[str]) -> list[Mutation]:
    """Return the mutations of packages, modules or functions; without names, all."""
    mutants = []
    for file in sorted(PACKAGE.rglob("*.py")):
        module = module_of(file)
        if not names or any(f"{module}.".startswith(f"{n}.") or module in n for n in names):
            mutants += mutations(file)
    return [
        mutant
        for mutant in mutants
        if not names or any(re.match(rf"{re.escape(n)}[.:]", mutant.name) for n in names)
    ]


def module_of(file: Path) -> str:
    """Return the dotted name of a module in the package."""
    return ".".join(file.relative_to(PACKAGE).with_suffix("").parts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("names", nargs="*", help="PACKAGE, MODULE or MODULE:FUNCTION")
    parser.add_argument("--sample", type=int, metavar="N", help="number of mutations")
    arguments = parser.parse_args()
    mutants = chosen(arguments.names)
    if arguments.sample is not None:
        mutants = sample(mutants, arguments.sample)
    killed = 0
    with tempfile.TemporaryDirectory() as scratch:
        copy_to(Path(scratch))
        for mutant in mutants:
            result = outcome(mutant, Path(scratch))
            killed += result == "killed"
            print(f"{mutant.name}: {mutant.old!r} -> {mutant.new!r}: {result}", flush=True)
    print(f"{killed} of {len(mutants)} mutations were killed")
    sys.exit(0 if killed == len(mutants) else 1)


if __name__ == "__main__":
    main()
