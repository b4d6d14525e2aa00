"""The stub: what editors and type checkers know of functions that take options."""

from __future__ import annotations

import ast
from pathlib import Path

from table import for_each

import shardkit

STUB = ast.parse(Path(shardkit.__file__).with_suffix(".pyi").read_text("utf-8"))


@for_each("name", ["make_loader", "convert", "LMDBDataset"])
def test_an_editor_shows_every_parameter_with_a_line(name: str) -> None:
    found = {
        node.name: node for node in STUB.body if isinstance(node, ast.ClassDef | ast.FunctionDef)
    }
    node = found[name]
    if isinstance(node, ast.ClassDef):  # the constructor is that of its base
        assert ast.unparse(node.bases[0]) == "ShardDataset"
        node = next(n for n in found["ShardDataset"].body if isinstance(n, ast.FunctionDef))
    assert isinstance(node, ast.FunctionDef)
    items = [*node.args.args, *node.args.kwonlyargs]
    lines = (ast.get_docstring(node) or "").splitlines()
    for item in items:
        if item.arg != "self":
            assert item.annotation is not None
            assert any(line.startswith(f"    {item.arg}: ") for line in lines), item.arg
