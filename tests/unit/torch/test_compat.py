"""Private names of PyTorch and multiprocessing are used in only one module, and exist."""

from __future__ import annotations

import ast
import multiprocessing
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

from torch.utils.data import DataLoader, get_worker_info
from torch.utils.data._utils import worker

from shardkit.torch import _compat

PACKAGE = Path(__file__).parents[3] / "shardkit"
PUBLIC = {"_replace", "_asdict", "_fields", "_exit", "_getframe", "_current_frames"}
"""Documented names of NamedTuple, os and sys that start with an underscore."""


def private_names(path: Path) -> list[str]:
    """Return accesses to private attributes of objects of classes that are not in the file."""
    nodes = list(ast.walk(ast.parse(path.read_text("utf-8"))))
    own = {node.name for node in nodes if isinstance(node, ast.FunctionDef)}
    private = [
        node
        for node in nodes
        if isinstance(node, ast.Attribute)
        and node.attr.startswith("_")
        and not node.attr.startswith("__")
        and node.attr not in PUBLIC
    ]
    is_self = {node: ast.unparse(node.value) in ("self", "cls") for node in private}
    own |= {node.attr for node in private if is_self[node] and isinstance(node.ctx, ast.Store)}
    return [
        f"{path.name}:{node.lineno} {ast.unparse(node)}"
        for node in private
        if not is_self[node] and node.attr not in own
    ]


def test_no_other_module_of_the_engines_uses_private_names() -> None:
    paths = [path for path in (PACKAGE / "torch").rglob("*.py") if path.name != "_compat.py"]
    paths += (PACKAGE / "measure").rglob("*.py")
    assert [name for path in paths for name in private_names(path)] == []
    assert private_names(PACKAGE / "torch" / "_compat.py"), "the check finds private names"


def test_this_pytorch_has_all_private_names() -> None:
    assert _compat.new_shared_storage(4096).nbytes() == 4096
    dataset: Any = list(range(4))
    loader: DataLoader[Any] = DataLoader(
        dataset, num_workers=1, persistent_workers=True, multiprocessing_context="fork"
    )
    iterator = iter(loader)
    try:
        assert _compat.persistent_iterator(loader) is iterator
        assert len(list(iterator)) == 4
    finally:
        _compat.shut_down(iterator)
        _compat.forget_iterator(loader)
    assert multiprocessing.active_children() == []
    assert _compat.persistent_iterator(loader) is None
    assert get_worker_info() is None
    try:
        _compat.set_worker_info(1, 2, 3, dataset)
        info: Any = get_worker_info()
        assert (info.id, info.num_workers, info.seed, info.dataset) == (1, 2, 3, dataset)
    finally:
        worker._worker_info = None
    server: Any = forkserver._forkserver
    assert _compat.forkserver_preload() == server._preload_modules
