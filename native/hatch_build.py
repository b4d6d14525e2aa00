"""Compile `shardkit._native` while a wheel or an editable install is built; see native/README.md.

The package works without it. So where there is no compiler or no libjpeg-turbo, the build goes on,
says that it skipped the module, and makes a wheel of Python alone.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

VARIABLE = "SHARDKIT_BUILD_NATIVE"
"""Environment variable: ``auto`` (default), ``require`` to fail where the module cannot be built,
``off`` not to build it, ``sanitize`` for a build with ASan and UBSan."""

PREFIX = "SHARDKIT_LIBJPEG"
"""Environment variable: a folder with the ``include`` and ``lib`` of a static libjpeg-turbo."""

STABLE = sys.version_info >= (3, 11) and not sysconfig.get_config_var("Py_GIL_DISABLED")
"""Whether one module serves all later versions of Python: 3.10 lacks the buffer protocol there."""

FLAGS = [
    "-std=c11",
    "-O3",
    "-Wall",
    "-Wextra",
    "-fvisibility=hidden",
    "-ffp-contract=off",  # weights must be Pillow's to the bit
]


class NativeHook(BuildHookInterface[Any]):
    """Adds the compiled module to a wheel."""

    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile the module, into the package if that is installed in place."""
        name = f"_native.{'abi3.so' if STABLE else _suffix()}"
        self._temporary = tempfile.TemporaryDirectory()
        target = Path(self._temporary.name, name)
        if version == "editable":
            for old in Path(self.root, "shardkit").glob("_native.*so"):  # its calls may differ
                old.unlink()
        wish = os.environ.get(VARIABLE, "auto")
        if wish == "off":
            return
        try:
            compile_to(target, Path(self.root, "native"))
        except Exception as error:  # from compilers, linkers, and what is missing of them
            if wish == "require":
                raise
            self.app.display_warning(
                f"shardkit._native was skipped: {_reason(error)}. shardkit works without it, more "
                "slowly. It needs a C compiler and the headers of libjpeg-turbo 2.1 or newer "
                "(Debian: apt-get install gcc libjpeg62-turbo-dev)."
            )
            return
        if version == "editable":
            shutil.move(target, Path(self.root, "shardkit", name))
        else:
            build_data["force_include"][str(target)] = f"shardkit/{name}"
        build_data["pure_python"] = False
        build_data["tag"] = _tag()

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """Remove the module that is in the wheel now."""
        self._temporary.cleanup()


def compile_to(target: Path, sources: Path) -> None:
    """Compile the C files in ``sources`` into an extension module; uses the folder of ``target``.

    Raises:
        Exception: From setuptools or the compiler, if it cannot be compiled.
    """
    from setuptools import Distribution, Extension  # noqa: PLC0415 - where it is missing, skip
    from setuptools.command.build_ext import build_ext  # noqa: PLC0415

    prefix = os.environ.get(PREFIX)
    library: dict[str, Any] = {"libraries": ["jpeg"]}
    if prefix:
        library = {
            "include_dirs": [f"{prefix}/include"],
            "extra_objects": [next(str(each) for each in Path(prefix).glob("lib*/libjpeg.a"))],
        }
    extension = Extension(
        "shardkit._native",
        sorted(str(each.relative_to(sources.parent)) for each in sources.glob("*.c")),
        depends=sorted(map(str, sources.glob("*.h"))),
        define_macros=[("Py_LIMITED_API", "0x030B0000")] if STABLE else [],
        py_limited_api=STABLE,
        extra_compile_args=[*FLAGS, *_more_flags()],
        extra_link_args=_more_flags(),
        **library,
    )
    distribution = Distribution({"name": "shardkit", "ext_modules": [extension]})
    command = build_ext(distribution)
    command.build_lib, command.build_temp = str(target.parent / "lib"), str(target.parent / "temp")
    before = Path.cwd()
    os.chdir(sources.parent)
    try:
        command.ensure_finalized()
        command.run()
    finally:
        os.chdir(before)
    (built,) = Path(command.build_lib, "shardkit").iterdir()
    built.rename(target)


def _more_flags() -> list[str]:
    if os.environ.get(VARIABLE) == "sanitize":
        return ["-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
    return []


def _suffix() -> str:
    return str(sysconfig.get_config_var("EXT_SUFFIX")).lstrip(".")


def _tag() -> str:
    """Return the tag of a wheel for this platform, and for this Python or all from it on."""
    python = f"cp{sys.version_info.major}{sys.version_info.minor}"
    if STABLE:
        python, abi = "cp311", "abi3"
    else:
        abi = python + ("t" if sysconfig.get_config_var("Py_GIL_DISABLED") else "")
    return f"{python}-{abi}-{re.sub('[-.]', '_', sysconfig.get_platform())}"


def _reason(error: Exception) -> str:
    return str(error).strip() or type(error).__name__
