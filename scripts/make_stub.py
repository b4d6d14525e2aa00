"""Writes shardkit/__init__.pyi, the types of the public names, which are imported lazily.

Functions and classes that take options have their signature and docstring there, which editors
show. Such a class is a subclass of itself. A namespace is a class of static methods.

python scripts/make_stub.py           write it
python scripts/make_stub.py --check   write nothing; exit with 1 if it is stale
"""

from __future__ import annotations

import ast
import builtins
import inspect
import subprocess
import sys
import textwrap
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import shardkit
from shardkit.options import Option

STUB = Path(shardkit.__file__).with_suffix(".pyi")


class _Stub:
    """The content of the file."""

    def __init__(self) -> None:
        self.public: dict[str, str] = {}
        """Module of each public name."""
        for module, names in sorted(vars(shardkit)["_PUBLIC"].items()):
            self.public |= dict.fromkeys(names.split(), f"shardkit.{module}")
        self.imports = {"from shardkit._version import __version__ as __version__"}
        self.types: dict[str, str] = {}
        """Statement that imports each name of a type."""
        self.classes: list[str] = []
        self.functions: list[str] = []

    def text(self) -> str:
        """Return the file."""
        for name in vars(shardkit)["_NAMESPACES"]:
            self.classes.append(self._namespace(name, getattr(shardkit, name)))
        for name, module in self.public.items():
            value = getattr(shardkit, name)
            taken = _constructor(value) if isinstance(value, type) else value
            if not hasattr(taken, "__options__"):
                self.imports.add(f"from {module} import {name} as {name}")
            elif isinstance(value, type):
                self.classes.append(self._class(value))
            else:
                self.functions.append(self._function(value, name))
        parts = [
            "# Made by scripts/make_stub.py from __init__.py.",
            *sorted(self.imports),
            "__all__: list[str]",
            *self.classes,
            *self.functions,
        ]
        return _formatted("\n".join(parts))

    def _class(self, kind: type[Any]) -> str:
        """Return a class that takes options: a subclass of the real one."""
        name = kind.__name__
        self.imports.add(f"from {kind.__module__} import {name} as _{name}")
        bases = [base.__name__ for base in kind.__bases__ if base.__name__ in self.public]
        body = [_docstring(kind)]
        if "__init__" in vars(kind):
            body.append(self._function(_constructor(kind), "__init__"))
        head = f"class {name}({', '.join([*bases, f'_{name}'])}):"
        return head + "\n" + textwrap.indent("\n".join(body), "    ")

    def _namespace(self, name: str, module: ModuleType) -> str:
        """Return a class with the public functions of a module."""
        body = [_docstring(module)]
        for member, function in inspect.getmembers(module, inspect.isfunction):
            if function.__module__ == module.__name__ and not member.startswith("_"):
                body.append(f"@staticmethod\n{self._function(function, member)}")
        head = f"class {name}:  # noqa: N801 - a namespace\n"
        return head + textwrap.indent("\n".join(body), "    ")

    def _function(self, function: Any, name: str) -> str:
        options = {item.name: item for item in getattr(function, "__options__", ())}
        lines = []
        keyword = False
        for item in inspect.signature(function).parameters.values():
            if item.kind is item.KEYWORD_ONLY and not keyword:
                keyword = True
                lines.append("*,")
            if item.annotation is item.empty:
                lines.append(f"{item.name},")
                continue
            option = options.get(item.name, Option(help="", module=function.__module__))
            type_ = self._type(item.annotation, option.module, option.choices)
            default = "" if item.default is item.empty else f" = {_default(item.default)}"
            lines.append(f"{item.name}: {type_}{default},")
        result = self._type(inspect.signature(function).return_annotation, function.__module__)
        parameters = "\n".join(lines)
        body = textwrap.indent(_docstring(function), "    ")
        return f"def {name}(\n{textwrap.indent(parameters, '    ')}\n) -> {result}:\n{body}"

    def _type(self, written: str, module: str, choices: Sequence[str] = ()) -> str:
        """Return a type as written in a module, and import its names; choices replace ``str``."""
        tree = ast.parse(written, mode="eval")
        for node in ast.walk(tree):
            if not isinstance(node, ast.Name):
                continue
            if node.id == "str" and choices:
                node.id = f"Literal{[*choices]}"
                self.imports.add("from typing import Literal")
            elif hasattr(builtins, node.id):
                continue
            elif node.id not in self.public:
                default = f"from {module} import {node.id}"
                node.id = self._import(node.id, _imports_of(module).get(node.id, default))
        return ast.unparse(tree)

    def _import(self, name: str, statement: str) -> str:
        """Import a name of a type; return the one under which it is imported."""
        if self.types.setdefault(name, statement) == statement:
            self.imports.add(statement)
            return name
        self.imports.add(f"{statement} as _{name}")
        return f"_{name}"


def _constructor(kind: Any) -> Any:
    return kind.__init__


@cache
def _imports_of(module: str) -> dict[str, str]:
    """Return the statement that imports each name that a module imports, also for types alone."""
    found = {}
    for node in ast.walk(ast.parse(inspect.getsource(sys.modules[module]))):
        if isinstance(node, ast.ImportFrom):
            for alias in node.names:
                found[alias.asname or alias.name] = (
                    f"from {node.module} import {ast.unparse(alias)}"
                )
        elif isinstance(node, ast.Import):
            for alias in node.names:
                found[alias.asname or alias.name] = f"import {ast.unparse(alias)}"
    return found


def _default(value: Any) -> str:
    return repr(value) if isinstance(value, (str, int, float, tuple, type(None))) else "..."


def _docstring(value: Any) -> str:
    text = (inspect.getdoc(value) or "").replace("\\", "\\\\")
    return f'"""{text}"""' if "\n" not in text else f'"""{text}\n"""'


def _formatted(text: str) -> str:
    for command in ("check --quiet --fix --exit-zero --select I", "format"):
        words = [sys.executable, "-m", "ruff", *command.split(), "--stdin-filename", str(STUB), "-"]
        done = subprocess.run(words, input=text, capture_output=True, text=True, check=True)
        text = done.stdout
    return text


if __name__ == "__main__":
    content = _Stub().text()
    if sys.argv[1:] == ["--check"]:
        sys.exit(STUB.read_text("utf-8") != content and f"{STUB} is stale: run {sys.argv[0]}")
    STUB.write_text(content, "utf-8")
