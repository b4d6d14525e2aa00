"""Prints size, structure and spread-out ideas of the package at some commits, as Markdown tables.

python scripts/structure.py bf70f04 HEAD
"""

from __future__ import annotations

import ast
import io
import re
import statistics
import subprocess
import sys
import tarfile
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]


class Package(NamedTuple):
    """The package at one commit."""

    files: dict[str, str]
    """Dotted name inside ``shardkit`` -> source; a package is its ``__init__``."""
    layers: dict[str, int]
    """Package or module -> number of its layer, from the architecture test of that commit."""


def read(commit: str) -> Package:
    """Read the package and its layers from git."""
    archive = subprocess.run(
        ["git", "archive", commit], cwd=ROOT, stdout=subprocess.PIPE, check=True
    )
    files, layers = {}, {}
    with tarfile.open(fileobj=io.BytesIO(archive.stdout)) as tar:
        for member in tar:
            name, content = member.name, tar.extractfile(member)
            if content is None or not name.endswith(".py"):
                continue
            if name.startswith("shardkit/"):
                files[name[len("shardkit/") : -len(".py")].replace("/", ".")] = (
                    content.read().decode()
                )
            elif name.endswith("/test_architecture.py"):
                layers = layers_in(content.read().decode())
    return Package(files, layers)


def layers_in(test: str) -> dict[str, int]:
    """Return the layers that an architecture test lists (as ``LAYERS``, formerly ``FLOORS``)."""
    for node in ast.parse(test).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) in ("LAYERS", "FLOORS"):
            found: Sequence[str | set[str]] = ast.literal_eval(node.value)
            rows = [row.split() if isinstance(row, str) else row for row in found]
            layers = {name: number for number, row in enumerate(rows) for name in row}
            return {**layers, "__init__": len(rows)}  # it loads all others, at first use
    raise SystemExit("the architecture test lists no layers")


def package_of(module: str) -> str:
    return module.rpartition(".")[0] or "(root)"


def unit_of(module: str, package: Package) -> str:
    """Return the package, or the module if it has a layer of its own or no package."""
    return module if module in package.layers else module.rpartition(".")[0] or module


def imports(package: Package) -> Iterator[tuple[str, str]]:
    """Yield each import as two modules: the importing and the imported."""
    for name, source in package.files.items():
        tree = ast.parse(source)
        typing_only = {
            id(node)
            for block in tree.body
            if isinstance(block, ast.If) and ast.unparse(block.test) == "TYPE_CHECKING"
            for node in ast.walk(block)
        }
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and id(node) not in typing_only:
                module = (node.module or "") + "."
                if module.startswith("shardkit."):
                    for alias in node.names:
                        yield name, resolved(module[len("shardkit.") :], alias.name, package)


def resolved(module: str, name: str, package: Package) -> str:
    """Return the module that ``from shardkit.module import name`` reads."""
    for candidate in (module + name, module.rstrip("."), module + "__init__"):
        if candidate in package.files:
            return candidate
    return "__init__"


def layer_of(module: str, package: Package) -> int:
    """Return the number of the longest entry of the layers that contains the module."""
    parts = module.split(".")
    prefixes = (".".join(parts[:length]) for length in range(len(parts), 0, -1))
    return next(package.layers[prefix] for prefix in prefixes if prefix in package.layers)


def function_lines(source: str) -> Iterator[int]:
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield (node.end_lineno or node.lineno) - node.lineno + 1


def spread(values: Sequence[int]) -> str:
    """Return the median, the 90th percentile and the maximum."""
    ninety = statistics.quantiles(values, n=10)[8]
    return f"{statistics.median(values):.0f} / {ninety:.0f} / {max(values)}"


def summary(package: Package) -> dict[str, str]:
    """Return the figures of one commit by their names."""
    modules = {n: s for n, s in package.files.items() if not n.endswith("__init__")}
    per_package = Counter(package_of(name) for name in modules)
    lines = {name: source.count("\n") for name, source in package.files.items()}
    lines_per_package: Counter[str] = Counter()
    for name, count in lines.items():
        lines_per_package[package_of(name)] += count
    arrows = set(imports(package))
    units = {(unit_of(a, package), unit_of(b, package)) for a, b in arrows}
    between = {(a, b) for a, b in units if a != b}
    mutual = sum((b, a) in between for a, b in between) // 2
    upward = [(a, b) for a, b in arrows if layer_of(b, package) > layer_of(a, package)]
    return {
        "packages": f"{len(per_package)}",
        "modules": f"{len(modules)}",
        "modules directly in `shardkit`": f"{per_package['(root)']}",
        "modules per package: median / 90th percentile / maximum": spread([*per_package.values()]),
        "lines": f"{sum(lines.values()):,}",
        "lines per package": spread([*lines_per_package.values()]),
        "lines per file": spread([lines[name] for name in modules]),
        "lines per function": spread([n for s in modules.values() for n in function_lines(s)]),
        "imports between packages": f"{len(between)}",
        "pairs of packages that import each other": f"{mutual}",
        "upward imports": f"{len(upward)}",
    }


MANIFESTS = {"Manifest", "AttachedManifest", "SplitsManifest", "AttachedShard"}
KINDS = {
    *("image", "mask", "array", "bytes", "number", "label", "labels"),
    *("text", "json", "boxes", "keypoints"),
}
GENERATED = {"conversion.keywords"}


def spread_out(package: Package) -> dict[str, str]:
    """Return in how many places ideas are that should be in one; goals are those of 0.1.0."""
    files = {name: source for name, source in package.files.items() if name not in GENERATED}
    trees = {name: ast.parse(source) for name, source in files.items()}
    calls = [
        (name, call, ast.unparse(call.func))
        for name, tree in trees.items()
        for call in ast.walk(tree)
        if isinstance(call, ast.Call)
    ]
    inside = [(name, call, function) for name, call, function in calls if "manifest" not in name]
    lines = "\n".join(files.values())
    names = [node for tree in trees.values() for node in ast.walk(tree)]
    words = Counter(node.id for node in names if isinstance(node, ast.Name))
    words += Counter(node.arg for node in names if isinstance(node, ast.arg))
    imported: dict[str, set[str]] = {}
    for importer, module in imports(package):
        imported.setdefault(importer, set()).add(module)
    code = [line for line in lines.split("\n") if line.strip() and not line.strip().startswith("#")]
    import_lines = sum(
        node.end_lineno - node.lineno + 1
        for node in names
        if isinstance(node, (ast.Import, ast.ImportFrom)) and node.end_lineno
    )
    strings = re.compile(r"""\b(?:call|send|_call)\(\s*(?:_READER,\s*)?["'][\w:]+["']""")
    return {
        "lines (goal 43,000)": f"{sum(source.count(chr(10)) for source in files.values()):,}",
        "files that mention `dct_scaling` (2)": str(
            sum("dct_scaling" in source for source in files.values())
        ),
        "`noqa: PLR0913` (3)": f"{len(re.findall('noqa:.*PLR0913', lines))}",
        "`isinstance` of manifest classes outside of their module (5)": str(
            sum(
                function == "isinstance" and bool(MANIFESTS & _names(call.args[1]))
                for _, call, function in inside
            )
        ),
        "places that construct a manifest (1)": str(
            len({name for name, _, function in inside if function in MANIFESTS - {"AttachedShard"}})
        ),
        "`hasattr` and `getattr` of a source, uses of lists of sources (0)": str(
            sum(_probes_source(node) for node in names)
        ),
        "comparisons of a field's kind outside of kinds/ (25)": str(
            sum(
                _compares_kind(node)
                for name, tree in trees.items()
                if not name.startswith("kinds.")
                for node in ast.walk(tree)
            )
        ),
        "calls by string to helper processes (0)": f"{len(strings.findall(lines))}",
        "public names (50)": f"{_public(package.files['__init__'])}",
        "`found` and `each` as identifiers (100)": f"{words['found'] + words['each']:,}",
        "import lines per code line (8%)": f"{100 * import_lines / len(code):.1f}%",
        "modules that import 14 or more others of ours (3)": str(
            sum(len(modules) >= 14 for name, modules in imported.items() if name != "__init__")
        ),
    }


def _names(node: ast.expr) -> set[str]:
    return {part.id for part in ast.walk(node) if isinstance(part, ast.Name)}


def _probes_source(node: ast.AST) -> bool:
    """Return whether a source is asked for an ability by name, or a list of sources is used."""
    if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
        return node.id in ("ATTACHABLE_SOURCES", "ATTACHED_SOURCE")
    if not isinstance(node, ast.Call) or ast.unparse(node.func) not in ("hasattr", "getattr"):
        return False
    return bool(re.search(r"(^|\W)_?source$", ast.unparse(node.args[0])))


def _compares_kind(node: ast.AST) -> bool:
    if not isinstance(node, ast.Compare) or not re.search(r"\bkind\b", ast.unparse(node.left)):
        return False
    texts = {
        part.value
        for side in node.comparators
        for part in ast.walk(side)
        if isinstance(part, ast.Constant) and isinstance(part.value, str)
    }
    names = {name for side in node.comparators for name in _names(side)}
    return bool(texts & KINDS or names & {"STORED_APART", "COLUMN_KINDS", "LISTED_KINDS", "KINDS"})


def _public(source: str) -> int:
    """Return the number of public names that the package's ``__init__`` states."""
    for node in ast.parse(source).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "_PUBLIC":
            modules = ast.literal_eval(node.value)
            return sum(len(names.split()) for names in modules.values())
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return len(ast.literal_eval(node.value)) - 1  # without __version__
    return 0


def sizes(package: Package) -> Iterator[str]:
    """Yield a table row for each package: modules and lines."""
    for name in sorted({package_of(module) for module in package.files}):
        inside = [m for m in package.files if package_of(m) == name]
        modules = sum(not module.endswith("__init__") for module in inside)
        lines = sum(package.files[module].count("\n") for module in inside)
        yield f"| `{name}` | {modules} | {lines:,} |"


def main(commits: list[str]) -> int:
    """Print one table that compares the commits, then one of the packages of each."""
    if not commits:
        print(__doc__, file=sys.stderr)
        return 2
    packages = [read(commit) for commit in commits]
    columns = [{**summary(package), **spread_out(package)} for package in packages]
    print("\n".join(["| | " + " | ".join(commits) + " |", "|---" * (len(commits) + 1) + "|"]))
    for name in columns[0]:
        print(f"| {name} | " + " | ".join(column[name] for column in columns) + " |")
    for commit, package in zip(commits, packages, strict=True):
        print(f"\n{commit}\n\n| package | modules | lines |\n|---|---:|---:|")
        print("\n".join(sizes(package)))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
