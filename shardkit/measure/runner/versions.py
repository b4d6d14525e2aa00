"""Versions of the libraries that reading and decoding stand on, for reports to state."""

from __future__ import annotations

import contextlib
from importlib import import_module, metadata

LIBRARIES = {
    "torch": "torch",
    "numpy": "numpy",
    "pillow": "PIL",
    "simplejpeg": "simplejpeg",
    "lmdb": "lmdb",
    "h5py": "h5py",
}
"""Name of a distribution to the module that it gives."""


def library_versions() -> dict[str, str]:
    """Return the version of each of `LIBRARIES`; an empty one could not be found out."""
    return {name: _version(name, module) for name, module in LIBRARIES.items()}


def _version(name: str, module: str) -> str:
    """Return a version; of a fork, such as pillow-simd, that of its module."""
    with contextlib.suppress(metadata.PackageNotFoundError):
        return metadata.version(name)
    with contextlib.suppress(ImportError):
        return str(getattr(import_module(module), "__version__", ""))
    return ""
