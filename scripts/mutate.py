"""Change the package's syntax tree, one node at a time, and check that tests fail.

    .venv/bin/python scripts/mutate.py --sample 20                  of the whole package
    .venv/bin/python scripts/mutate.py --sample 20 remote sources   of some packages or modules
    .venv/bin/python scripts/mutate.py dataset.handles:read_at      all of one function
    .venv/bin/python scripts/mutate.py cli --tests tests/unit/cli   run these tests only
    .venv/bin/python scripts/mutate.py --sample 40 --seed 7 --minutes 120   another sample, in part

Each is tried in a fork of this process, which has loaded everything: a test that starts a new
Python does not meet it. A mutation is named MODULE:FUNCTION:OPERATOR:NUMBER. A sample holds the
names with the smallest hashes, so that a change of one function keeps the mutations of all others.
Another seed gives other hashes.
The exit status is 1 if one survives: then a test is missing, or the change makes no difference.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import copy
import gc
import hashlib
import importlib
import inspect
import math
import os
import re
import signal
import sys
import time
from collections import Counter
from collections.abc import Container, Iterator, Sequence
from itertools import accumulate, takewhile
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any, NamedTuple, NoReturn

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "shardkit"
DEADLINE = 900
PYTEST = ["-x", "-q", "-p", "no:cacheprovider", "-m", "not slow and not measures"]
PYTEST += ["--timeout=120", "--cpu-limit=inf", "-W", "ignore::pytest.PytestAssertRewriteWarning"]

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


def sample(mutants: Sequence[Mutation], size: int, seed: str = "") -> list[Mutation]:
    """Return the mutations whose names have the smallest hashes."""

    def key(mutant: Mutation) -> bytes:
        return hashlib.sha256(f"{mutant.name}{seed}".encode()).digest()

    return sorted(mutants, key=key)[:size]


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
    yield sorted(str(p.relative_to(root)) for p in root.glob("tests/unit/*/"))


def outcome(mutant: Mutation, tests: Sequence[str]) -> str:
    """Run tests in a fork of this process, which has the mutation; return what they say of it.

    Without ``tests``, all suites. A test that starts a new Python does not have the mutation.
    """
    for suite in [tests] if tests else suites_of(mutant.file, ROOT):
        child = os.fork()
        if child == 0:
            _test(mutant, suite)
        end = time.monotonic() + DEADLINE
        ended, status = 0, 0
        while not ended and time.monotonic() < end:
            ended, status = os.waitpid(child, os.WNOHANG)
            time.sleep(0.02)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child, signal.SIGKILL)  # what it has started, too
        if not ended:
            os.waitpid(child, 0)
            return "hangs"
        code = os.waitstatus_to_exitcode(status)
        if code in (pytest.ExitCode.INTERNAL_ERROR, pytest.ExitCode.USAGE_ERROR):
            return "cannot be tried"
        if code not in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
            return "killed"
    return "survived"


def _test(mutant: Mutation, suite: Sequence[str]) -> NoReturn:
    code = int(pytest.ExitCode.INTERNAL_ERROR)
    try:
        os.setpgid(0, 0)
        apply(mutant)
        with open(os.devnull, "w") as nowhere:
            os.dup2(nowhere.fileno(), 1)
            os.dup2(nowhere.fileno(), 2)
        code = int(pytest.main([*PYTEST, *suite]))
    finally:
        os._exit(code)


def apply(mutant: Mutation) -> None:
    """Give the functions of this process the changed code; they stay the same objects."""
    path = PACKAGE / mutant.file
    source = path.read_bytes()
    changed = source[: mutant.start] + mutant.new.encode() + source[mutant.end :]
    line = source[: mutant.start].count(b"\n") + 1
    old, new = (_function_at(line, compile(text, path, "exec")) for text in (source, changed))
    functions = [
        each
        for each in gc.get_objects()
        if type(each) is FunctionType
        and each.__code__.co_filename == str(path)
        and each.__code__.co_qualname == old.co_qualname
    ]
    if not functions:
        raise LookupError(mutant.name)
    for function in functions:
        function.__code__ = new


def _function_at(line: int, code: CodeType) -> CodeType:
    """Return the outermost function with a line, of a module or of its classes."""
    found = [each for each in code.co_consts if isinstance(each, CodeType)]
    above = [each for each in found if each.co_firstlineno <= line]
    last = max(above, key=lambda each: each.co_firstlineno)
    is_class = not last.co_flags & inspect.CO_NEWLOCALS
    return _function_at(line, last) if is_class else last


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
        if not names or any(re.match(rf"{re.escape(n)}([.:]|$)", mutant.name) for n in names)
    ]


def module_of(file: Path) -> str:
    """Return the dotted name of a module in the package."""
    return ".".join(file.relative_to(PACKAGE).with_suffix("").parts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("names", nargs="*", help="PACKAGE, MODULE, FUNCTION or mutation")
    parser.add_argument("--sample", type=int, metavar="N", help="number of mutations")
    parser.add_argument("--seed", default="", help="selects another sample")
    parser.add_argument("--minutes", type=float, default=math.inf, help="start none after these")
    parser.add_argument("--tests", nargs="*", default=(), help="run these instead of all")
    arguments = parser.parse_args()
    mutants = chosen(arguments.names)
    if arguments.sample is not None:
        mutants = sample(mutants, arguments.sample, arguments.seed)
    os.chdir(ROOT)
    sys.path[:0] = [str(ROOT), str(ROOT / "tests/support")]
    importlib.import_module("forked").load_everything()
    end = time.monotonic() + 60 * arguments.minutes
    results = []
    for mutant in takewhile(lambda _: time.monotonic() < end, mutants):
        results.append(outcome(mutant, arguments.tests))
        print(f"{mutant.name}: {mutant.old!r} -> {mutant.new!r}: {results[-1]}", flush=True)
    killed = results.count("killed")
    print(f"{killed} of {len(results)} mutations were killed")
    sys.exit(0 if killed == len(results) else 1)


if __name__ == "__main__":
    main()
