"""The stub: what editors and type checkers know of functions that take options."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest
from table import for_each

import shardkit

STUB = ast.parse(Path(shardkit.__file__).with_suffix(".pyi").read_text("utf-8"))

WRONG = """
import shardkit
from shardkit.torch.loader import Loader
from torch import Tensor

shardkit.convert("photos", "out", to="zip")
shardkit.convert("photos", "out", to="lmdb", encode="gif")
shardkit.convert("photos", "out", to="lmdb", on_error="ignore")
shardkit.convert("photos", "out", to="lmdb", resise=8)
shardkit.convert("photos", "out")
dataset = shardkit.LMDBDataset("out", decode="jpeg")
shardkit.make_loader(dataset, 4, engine="threads")
shardkit.verify("out", "slow")
shardkit.Rank(remainder="keep")
"""

RIGHT = """
import shardkit
from shardkit.torch.loader import Loader
from torch import Tensor

shardkit.convert("photos", "out", to="lmdb", encode="raw", on_error="skip", resize=8)
dataset: shardkit.ShardDataset = shardkit.LMDBDataset("out", decode="torch")
dataset = shardkit.open_dataset("out", decode=shardkit.CenterCrop(8))
loader: Loader[tuple[Tensor, Tensor]] = shardkit.make_loader(dataset, 4, engine="thread")
for images, labels in loader:
    images.float().mean(labels.tolist())
"""


def mypy(tmp_path: Path, text: str) -> list[int]:
    """Return the lines of a program that mypy refuses."""
    (tmp_path / "program.py").write_text(text, "utf-8")
    words = ["-m", "mypy", "--strict", "--cache-dir", "cache", "program.py"]
    command = [sys.executable, *words]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    lines = [line.split(":") for line in done.stdout.splitlines() if ": error:" in line]
    assert all(name.endswith("program.py") for name, *_ in lines)
    return [int(number) for _, number, *_ in lines]


@pytest.mark.slow
def test_mypy_refuses_wrong_values_and_names_of_options(tmp_path: Path) -> None:
    calls = WRONG.splitlines()
    wrong = [
        number for number, line in enumerate(calls, 1) if line.startswith(("shardkit", "data"))
    ]
    assert mypy(tmp_path, WRONG) == wrong
    assert mypy(tmp_path, RIGHT) == []


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
