"""The targets, one module for each parser."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

from scripts.fuzzing.target import Target

_MODULES = (
    *("manifest", "index", "tar", "lmdb", "hdf5", "image", "fields", "state", "native", "dataset"),
    *("sources", "columns", "lists", "arrow"),
)


def _targets() -> Iterator[type[Target]]:
    """Yield the classes of the modules that have a name."""
    for name in _MODULES:
        module = import_module(f"{__name__}.{name}")
        for kind in filter(inspect.isclass, vars(module).values()):
            if not issubclass(kind, Target) or kind.__module__ != module.__name__:
                continue
            if "name" in vars(kind):
                yield kind


TARGETS = {target.name: target for target in _targets()}


def make(name: str, folder: Path) -> Target:
    """Return the target of this name, or ``module:class``, to work in ``folder``."""
    target = _class(name)(folder)
    for seed in target.seeds[:2]:  # what is loaded or made at first use is so now, not under guard
        with contextlib.suppress(*target.allowed):
            target.check(seed)
    return target


def _class(name: str) -> type[Target]:
    if name in TARGETS:
        return TARGETS[name]
    module, _, attribute = name.partition(":")
    found: type[Target] = getattr(import_module(module), attribute)
    return found
