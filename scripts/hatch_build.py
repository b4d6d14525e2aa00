"""Compile `shardkit._native` for a wheel or an editable install; see shardkit/native/README.md.

One module serves Python 3.11 and newer (abi3). Free-threaded Python cannot load it, and gets one
for its version. The package works without it. So where there is no compiler or no libjpeg-turbo,
the build goes on, says that it skipped the module, and makes a wheel of Python alone. Without
libdeflate, the module does not decode PNGs.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

VARIABLE = "SHARDKIT_BUILD_NATIVE"
"""Environment variable: ``auto`` (default), ``require`` to fail where the module cannot be built,
``off`` not to build it, ``sanitize`` for a build with ASan and UBSan."""

PREFIX = "SHARDKIT_LIBRARIES"
"""Environment variable: a folder with the ``include`` and ``lib`` of a static libjpeg-turbo and
libdeflate, and their ``licenses`` (`scripts/build_libraries.sh`)."""

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
        name = (
            f"_native{'.abi3.so' if _has_stable_abi() else sysconfig.get_config_var('EXT_SUFFIX')}"
        )
        self._temporary = tempfile.TemporaryDirectory()
        target = Path(self._temporary.name, name)
        if version == "editable":
            for old in Path(self.root, "shardkit").glob("_native.*so"):  # its calls may differ
                old.unlink()
        wish = os.environ.get(VARIABLE, "auto")
        if wish == "off":
            return
        try:
            compile_to(target, Path(self.root, "shardkit", "native"))
        except Exception as error:  # from compilers, linkers, and what is missing of them
            if wish == "require":
                raise
            self.app.display_warning(
                f"shardkit._native was skipped: {_reason(error)}. shardkit works without it, more "
                "slowly. It needs a C compiler and the headers of libjpeg-turbo 2.1 or newer, and "
                "for PNGs those of libdeflate (Debian: apt-get install gcc libjpeg62-turbo-dev "
                "libdeflate-dev)."
            )
            return
        if version == "editable":
            shutil.move(target, Path(self.root, "shardkit", name))
        else:
            build_data["force_include"][str(target)] = f"shardkit/{name}"
            for text in Path(os.environ.get(PREFIX, self.root), "licenses").glob("*"):
                build_data["force_include"][str(text)] = f"shardkit/licenses/{text.name}"
        build_data["pure_python"] = False
        build_data["tag"] = f"{_python_tag()}-{re.sub('[-.]', '_', sysconfig.get_platform())}"

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """Remove the module that is in the wheel now."""
        self._temporary.cleanup()


def compile_to(target: Path, sources: Path) -> None:
    """Compile the C files in ``sources`` into an extension module; uses the folder of ``target``.

    Raises:
        Exception: From setuptools or the compiler, if it cannot be compiled.
    """
    from setuptools import Distribution, Extension  # missing: the build skips the module
    from setuptools.command.build_ext import build_ext

    prefix = os.environ.get(PREFIX)
    is_stable = _has_stable_abi()
    macros: list[tuple[str, str | None]] = []
    if is_stable:
        macros.append(("Py_LIMITED_API", "0x030B0000"))
    names = ["jpeg"]
    if prefix or _has_libdeflate():
        macros.append(("SK_LIBDEFLATE", None))
        names.append("deflate")
    library: dict[str, Any] = {"libraries": names}
    if prefix:
        static = [f"{prefix}/lib/lib{name}.a" for name in names]
        library = {"include_dirs": [f"{prefix}/include"], "extra_objects": static}
    extension = Extension(
        "shardkit._native",
        sorted(str(path.relative_to(sources.parent)) for path in sources.glob("*.c")),
        depends=sorted(map(str, sources.glob("*.h"))),
        define_macros=macros,
        py_limited_api=is_stable,
        extra_compile_args=[*FLAGS, *_more_flags()],
        extra_link_args=["-lm", *_more_flags()],
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


def _has_stable_abi() -> bool:
    """Return whether this Python has the stable ABI; free-threaded Python does not."""
    return not sysconfig.get_config_var("Py_GIL_DISABLED")


def _python_tag() -> str:
    """Return the tags of Python and ABI of a wheel with the module."""
    if _has_stable_abi():
        return "cp311-abi3"
    version = f"cp{sysconfig.get_config_var('py_version_nodot')}"
    return f"{version}-{version}t"


def _has_libdeflate() -> bool:
    """Return whether the compiler finds the header of libdeflate."""
    compiler = os.environ.get("CC") or sysconfig.get_config_var("CC") or "cc"
    flags = f"{os.environ.get('CPPFLAGS', '')} {os.environ.get('CFLAGS', '')}"
    command = [*shlex.split(f"{compiler} {flags}"), "-E", "-include", "libdeflate.h", "-x", "c"]
    compiled = subprocess.run([*command, os.devnull], capture_output=True, check=False)
    return compiled.returncode == 0


def _more_flags() -> list[str]:
    if os.environ.get(VARIABLE) == "sanitize":
        return ["-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
    return []


def _reason(error: Exception) -> str:
    return str(error).strip() or type(error).__name__
