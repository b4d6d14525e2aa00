"""Writes docs/cli.md from the commands' help texts and docs/api.md from the public docstrings.

python scripts/make_reference.py           write both
python scripts/make_reference.py --check   write nothing; exit with 1 if one is stale
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import re
import sys
import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import click
from click.testing import CliRunner

import shardkit
from shardkit.cli.main import cli

DOCS = Path(__file__).parents[1] / "docs"
_NOTE = "<!-- Made by scripts/make_reference.py; edit the docstrings and help texts instead. -->"
_WIDTH = 90
"""Columns of help texts, in any terminal."""
_SECTIONS = ("Args", "Returns", "Raises", "Yields")
_SHOWN_METHODS = ("__getitems__",)
"""Public methods despite their underscore."""


TASKS = {
    "Converting": (
        "Convert a folder of images to a dataset. `shardkit convert` does the same.",
        (
            "convert",
            "Converted",
            "attach",
            "Attached",
            "append",
            "Appended",
            "merge",
            "Field",
            "Sample",
            "Plan",
            "Manifest",
            "Progress",
            "Source",
            "upload",
            "download",
        ),
    ),
    "Reading": (
        "Open a dataset as a PyTorch dataset, and decode only what you need.",
        (
            "open_dataset",
            "ShardDataset",
            "LMDBDataset",
            "HDF5Dataset",
            "TarDataset",
            "IterableShardDataset",
            "IterableLMDBDataset",
            "IterableHDF5Dataset",
            "IterableTarDataset",
            "CenterCrop",
            "RandomResizedCrop",
            "Resize",
            "ImageOp",
            "with_rng",
            "BatchView",
            "collate",
        ),
    ),
    "Loading": (
        "Load batches in a reproducible order, resume exactly, and copy them to the GPU.",
        (
            "make_loader",
            "Loader",
            "LoaderOptions",
            "Order",
            "BlockShuffle",
            "RankShard",
            "Weighted",
            "Balanced",
            "Mixture",
            "EpochBatchSampler",
            "DevicePrefetcher",
            "Normalize",
            "ShardDataModule",
        ),
    ),
    "Verifying": (
        "Check, repair, compare, export and examine datasets.",
        (
            "verify",
            "Verification",
            "Finding",
            "SourceReport",
            "repair",
            "Repaired",
            "describe",
            "reindex",
            "split",
            "diff",
            "Differences",
            "DatasetDifference",
            "ChangedRecord",
            "export",
            "Exported",
            "report",
            "DatasetReport",
        ),
    ),
    "Measuring": (
        "Find out what limits loading, and which settings are fastest.",
        (
            "doctor",
            "DoctorReport",
            "tune",
            "TuneReport",
            "find_batch_size",
            "FoundBatchSize",
            "bench",
            "BenchReport",
            "ThroughputMonitor",
            "ThroughputReport",
        ),
    ),
    "Errors": (
        "Every error that shardkit raises on purpose is a `ShardkitError`.",
        (
            "ShardkitError",
            "UsageError",
            "StateMismatch",
            "ConversionFailed",
            "BadImages",
            "DiskFull",
            "BadImage",
            "Problem",
            "LoaderFailed",
            "TransformFailed",
            "MeasurementFailed",
            "CorruptDataset",
            "CorruptShard",
            "CorruptRecord",
        ),
    ),
}
"""Section of docs/api.md to its introduction and public names."""


def main(arguments: list[str]) -> int:
    """Write the pages, or with ``--check`` compare them; return the exit code."""
    if arguments not in ([], ["--check"]):
        print(__doc__, file=sys.stderr)
        return 2
    pages = {DOCS / "cli.md": cli_page(), DOCS / "api.md": api_page()}
    if not arguments:
        for path, text in pages.items():
            path.write_text(text, "utf-8")
        return 0
    stale = [
        path for path, text in pages.items() if not path.exists() or path.read_text("utf-8") != text
    ]
    for path in stale:
        place = path.relative_to(DOCS.parent)
        print(f"{place} is stale: run `python scripts/make_reference.py` and commit the result")
    return 1 if stale else 0


def cli_page() -> str:
    """Return the page of all commands."""
    parts = [_NOTE, "# The `shardkit` command", "`python -m shardkit` is the same command."]
    common = set(_options(_help(_FULL))[1])
    for words, command in _commands(cli, ()):
        assert command.help, f"the command {' '.join(words)!r} has no help text"
        output = _help(words)
        if len(words) == 2 and words[0] == _FULL[0] and words != _FULL:
            output = _without(output, common)
        parts.append(f"## `{' '.join(['shardkit', *words])}`")
        parts.append(f"```text\n{output}\n```")
    return "\n\n".join(parts) + "\n"


_FULL = ("convert", "imagefolder")
"""The source whose options are all shown; for others, only their own."""


def _help(words: Sequence[str]) -> str:
    shown = CliRunner().invoke(cli, [*words, "--help"], prog_name="shardkit", terminal_width=_WIDTH)
    assert shown.exit_code == 0, shown.output
    return shown.output.rstrip()


def _options(output: str) -> tuple[str, list[str]]:
    """Divide a help text into the part before the options, and each option with its lines."""
    head, _, options = output.partition("Options:\n")
    return head, re.split(r"\n(?=  -)", options)


def _without(output: str, common: set[str]) -> str:
    """Return a help text without the options that another page of the same kind shows."""
    head, options = _options(output)
    own = [option for option in options if option not in common]
    name = " ".join(["shardkit", *_FULL])
    return "\n".join([f"{head}Options:", *own, f"  ... and the options of `{name}`"])


def api_page() -> str:
    """Return the page of all public names, by task.

    Raises:
        ValueError: If a public name has no task, or a task names something else.
    """
    listed = sorted(name for _, names in TASKS.values() for name in names)
    public = sorted({*shardkit.__all__, "ShardDataModule"} - {"__version__"})
    if listed != public:
        raise ValueError(f"TASKS differs from the public names: {sorted({*listed} ^ {*public})}")
    parts = [
        _NOTE,
        "# The Python interface",
        "Import every name from `shardkit`; the modules inside may change. `shardkit.__version__` "
        "is the version.",
    ]
    for task, (text, names) in TASKS.items():
        links = ", ".join(f"[`{name}`](#{name.lower()})" for name in names)
        parts += [f"## {task}", text, links]
        for name in names:
            parts += _entry(name, getattr(shardkit, name))
    return "\n\n".join(parts) + "\n"


def _commands(
    command: click.Command, words: tuple[str, ...]
) -> Iterator[tuple[tuple[str, ...], click.Command]]:
    yield words, command
    if isinstance(command, click.Group):
        context = click.Context(command)
        for name in command.list_commands(context):
            inner = command.get_command(context, name)
            assert inner is not None
            yield from _commands(inner, (*words, name))


def _entry(name: str, thing: Any) -> list[str]:
    parts = [f"### {name}"]
    if not inspect.isclass(thing):
        return [*parts, _code(f"{name}{_signature(thing)}"), _prose(thing)]
    bases = [base.__name__ for base in thing.__bases__ if base.__name__ in shardkit.__all__]
    if bases:
        parts.append("A " + " and a ".join(f"[`{base}`](#{base.lower()})" for base in bases) + ".")
    own_init = "__init__" in vars(thing) and not dataclasses.is_dataclass(thing)
    if own_init:
        parts.append(_code(f"{name}{_signature(thing.__init__)}"))
    parts.append(_prose(thing))
    if own_init and thing.__init__.__doc__:
        _, _, arguments = _prose(thing.__init__).partition("\n\n")
        parts.append(arguments)
    if attributes := list(_attributes(thing)):
        parts += ["**Attributes:**", "\n".join(attributes)]
    for member in _members(thing):
        value = vars(thing)[member]
        parts.append(f"#### {name}.{member}")
        parts.append(_code(f"{member}{_signature(value)}"))
        parts.append(_prose(value))
    return parts


def _members(kind: type) -> list[str]:
    return [
        name
        for name, value in vars(kind).items()
        if inspect.isfunction(value)
        and value.__doc__
        and (not name.startswith("_") or name in _SHOWN_METHODS)
    ]


def _attributes(kind: type) -> Iterator[str]:
    """Yield a list item for each attribute with its docstring, and for each property."""
    (tree,) = ast.parse(textwrap.dedent(inspect.getsource(kind))).body
    assert isinstance(tree, ast.ClassDef)
    for node, after in zip(tree.body, [*tree.body[1:], None], strict=True):
        if isinstance(node, ast.AnnAssign):
            name, default = ast.unparse(node.target), ""
            if node.value is not None:
                default = f" = {ast.unparse(node.value)}"
            text = _constant(after)
            if not name.startswith("_"):
                yield _item(f"{name}: {ast.unparse(node.annotation)}{default}", text)
    for name, value in vars(kind).items():
        if isinstance(value, property) and not name.startswith("_"):
            kind_of = (value.fget.__annotations__ if value.fget else {}).get("return", "Any")
            yield _item(f"{name}: {kind_of}", inspect.getdoc(value) or "")


def _constant(node: ast.stmt | None) -> str:
    """Return the string in ``node``, the docstring of the line before it; "" for other nodes."""
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
        return str(node.value.value)
    return ""


def _item(code: str, text: str) -> str:
    joined = " ".join(text.split())
    return f"- `{code}`" + (f": {joined}" if joined else "")


def _signature(function: Any) -> str:
    signature = inspect.signature(function)
    parameters = [item for item in signature.parameters.values() if item.name != "self"]
    text = str(signature.replace(parameters=parameters))
    text = re.sub(r"<function (\S+) at 0x\w+>", r"\1", text)  # an address differs in each run
    return re.sub(r"(: |-> )'([^']*)'", r"\1\2", text)  # annotations are strings, so quoted


def _code(text: str) -> str:
    if len(text) > _WIDTH:
        head, _, rest = text.partition("(")
        inner, arrow, result = rest.rpartition(")")
        arguments = re.split(r", (?![^\[]*\])", inner)
        lines = "".join(f"    {argument},\n" for argument in arguments)
        text = f"{head}(\n{lines}){result if arrow else ''}"
    return f"```text\n{text}\n```"


def _prose(thing: Any) -> str:
    """Return the docstring of ``thing`` as Markdown: sections become bold words and lists."""
    text = inspect.getdoc(thing)
    assert text, f"{thing!r} has no docstring"
    lines: list[str] = []
    section = ""
    for line in text.splitlines():
        if line.rstrip(":") in _SECTIONS and line.endswith(":"):
            section = line.rstrip(":")
            lines += [f"**{section}:**", ""]
        elif not section or not line.startswith("    "):
            lines.append(line)
        elif section in ("Returns", "Yields"):
            lines.append(line[4:])
        elif line.startswith("     "):
            lines[-1] += f" {line.strip()}"
        else:
            what, _, rest = line.strip().partition(": ")
            lines.append(f"- `{what}`: {rest}")
    return "\n".join(lines).strip()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
