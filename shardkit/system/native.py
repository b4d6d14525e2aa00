"""The optional compiled module, `shardkit._native`: whether it is used.

It is built with the package where a C compiler and libjpeg-turbo are installed. Python implements
the same and is the reference: it handles every image that the module leaves, and explains errors.
"""

from __future__ import annotations

import functools
import os
from importlib import import_module
from pathlib import Path
from types import ModuleType

from shardkit.errors import UsageError, setting

VARIABLE = "SHARDKIT_NATIVE"
"""The environment variable that controls the module: ``off`` disables it, ``on`` requires it."""

PACKAGE = Path(__file__).parents[1]
"""The folder of shardkit. A wheel has the licenses of the libraries in the module there."""

_API = 18
"""Version of the interface; a module built from other sources is not called."""


def module() -> ModuleType | None:
    """Return the compiled module if it is installed and not disabled.

    UsageError if the environment variable is invalid, or requires a module that is missing.
    """
    return _load()[0]


def describe() -> str:
    """Return which compiled module is used, or why none is, as a part of a sentence."""
    try:
        loaded, reason = _load()
    except UsageError as error:
        return str(error)
    if loaded is None:
        return reason
    deflate = f"libdeflate {loaded.LIBDEFLATE}" if loaded.LIBDEFLATE else "no libdeflate"
    return f"libjpeg-turbo {loaded.LIBJPEG_TURBO}, {deflate}"


@functools.cache
def _load() -> tuple[ModuleType | None, str]:
    """Return the module, and why there is none."""
    wish = os.environ.get(VARIABLE, "")
    if wish not in ("", "on", "off"):
        raise UsageError(f"{setting(VARIABLE, wish)} is unknown; choose on or off")
    if wish == "off":
        return None, f"off ({VARIABLE})"
    try:
        compiled = import_module("shardkit._native")
    except ImportError as error:  # not built, or its libjpeg is missing now
        reason = "not built" if isinstance(error, ModuleNotFoundError) else f"unusable: {error}"
    else:
        if getattr(compiled, "API", 0) == _API:
            return compiled, ""
        reason = "built from other sources"
    if wish == "on":
        raise UsageError(
            f"{VARIABLE}=on, but the compiled module is {reason};",
            remedy="install a C compiler and libjpeg-turbo's headers, then install shardkit "
            "again, or unset the variable",
        )
    return None, reason
