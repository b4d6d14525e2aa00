"""Objects that are imported at first use, by name."""

from __future__ import annotations

from importlib import import_module
from typing import Any


def load(target: str) -> Any:
    """Return the object that ``package.module:NAME`` names.

    Only tables in the code call this, with their own constants: data never chooses code.

    Raises:
        ImportError: If the module cannot be imported.
        AttributeError: If it has no such object.
    """
    module, _, name = target.partition(":")
    return getattr(import_module(module), name)
