"""Objects that are imported at first use, by name."""

from __future__ import annotations

from importlib import import_module
from typing import Any


def load(target: str) -> Any:
    """Return the object that ``package.module:NAME`` names.

    Only tables in the code call this, with their own constants: data never chooses code.
    """
    module, _, name = target.partition(":")
    return getattr(import_module(module), name)
