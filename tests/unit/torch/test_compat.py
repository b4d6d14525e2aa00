"""Private names of PyTorch and multiprocessing are used in only one module, and exist."""

from __future__ import annotations

import ast
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

from torch.utils.data import DataLoader

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
        (worker,) = _compat.worker_processes(iterator)
        assert worker.is_alive()
        assert {"_workers_done_event", "_worker_pids_set"} <= vars(iterator).keys()
        _compat.set_timeout(iterator, 30)
        assert len(list(iterator)) == 4
    finally:
        _compat.shut_down(iterator)
        _compat.forget_iterator(loader)
    assert not worker.is_alive()
    assert _compat.persistent_iterator(loader) is None
    server: Any = forkserver._forkserver
    assert _compat.forkserver_preload() == server._preload_modules
