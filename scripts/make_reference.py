"""Writes docs/cli.md, docs/api.md and shardkit/__init__.pyi.

They follow from help texts, public docstrings and classes of options.

python scripts/make_reference.py           write all
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
from importlib import import_module
from pathlib import Path
from typing import Any

import click
from click.testing import CliRunner

import shardkit
from shardkit.cli.main import cli

DOCS = Path(__file__).parents[1] / "docs"
_NOTE = "<!-- Made by scripts/make_reference.py; edit the docstrings and help texts instead. -->"
_STUB = Path(shardkit.__file__).with_suffix(".pyi")
_WIDTH = 90
"""Columns of help texts, in any terminal."""
_PROSE = 120
"""Columns of prose."""
_SECTIONS = ("Args", "Returns", "Raises", "Yields")
_SHOWN_METHODS = ("__getitems__",)
"""Public methods despite their underscore."""


TASKS = {
    "Converting": (
        "Convert a folder of images to a dataset. `shardkit convert` does the same.",
        (
            "convert",
            "conversion.convert.Converted",
            "conversion.convert.plan_conversion",
            "conversion.convert.plan_jobs",
            "conversion.work.work",
            "conversion.convert.commit",
            "attach",
            "conversion.attach.Attached",
            "append",
            "conversion.append.Appended",
            "merge",
            "add_fields",
            "replace_fields",
            "remove_fields",
            "undo_fields",
            "conversion.fields.Changed",
            "Field",
            "Sample",
            "recipe.Recipe",
            "conversion.plan.Plan",
            "dataset.manifest.Manifest",
            "system.pool.Progress",
            "contracts.Source",
            "open_source",
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
            "RandomCrop",
            "RandomResizedCrop",
            "Resize",
            "torch.data.ops.ImageOp",
            "Windows",
            "with_rng",
            "torch.data.collate.BatchView",
            "collate",
        ),
    ),
    "Loading": (
        "Load batches in a reproducible order, resume exactly, and copy them to the GPU.",
        (
            "make_loader",
            "torch.loader.Loader",
            "sampling.order.Order",
            "BlockShuffle",
            "Rank",
            "Weighted",
            "Balanced",
            "Mixture",
            "Buckets",
            "sampling.buckets.BucketCount",
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
            "verification.verify.Verification",
            "verification.shard_check.Finding",
            "verification.source_comparison.SourceReport",
            "repair",
            "verification.repair.Repaired",
            "describe",
            "reindex",
            "split",
            "diff",
            "verification.diff.Differences",
            "verification.diff.DatasetDifference",
            "verification.diff.ChangedRecord",
            "export",
            "exporting.export.Exported",
            "report",
            "reporting.report.DatasetReport",
        ),
    ),
    "Measuring": (
        "Find out what limits loading, and which settings are fastest.",
        (
            "doctor",
            "measure.doctor.doctor.DoctorReport",
            "tune",
            "measure.tune.tune.TuneReport",
            "find_batch_size",
            "torch.batch_size.FoundBatchSize",
            "bench",
            "measure.bench.report.BenchReport",
            "ThroughputMonitor",
            "torch.monitor.ThroughputReport",
        ),
    ),
    "Errors": (
        "Every error that shardkit raises on purpose is a `ShardkitError`.",
        (
            "ShardkitError",
            "UsageError",
            "errors.StateMismatch",
            "errors.NotPublished",
            "ConversionFailed",
            "errors.BadImages",
            "errors.DiskFull",
            "errors.BadImage",
            "errors.Problem",
            "errors.LoaderFailed",
            "errors.TransformFailed",
            "errors.MeasurementFailed",
            "CorruptDataset",
            "errors.CorruptShard",
            "errors.CorruptRecord",
        ),
    ),
}
"""Section of docs/api.md to its introduction and names; those that are not public, with module."""


def main(arguments: list[str]) -> int:
    """Write the pages, or with ``--check`` compare them; return the exit code."""
    if arguments not in ([], ["--check"]):
        print(__doc__, file=sys.stderr)
        return 2
    pages = {
        DOCS / "cli.md": cli_page(),
        DOCS / "api.md": api_page(),
        _STUB: stub(),
    }
    if not arguments:
        for path, text in pages.items():
            path.parent.mkdir(parents=True, exist_ok=True)
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
    for words, command in _commands(cli, ()):
        assert command.help, f"the command {' '.join(words)!r} has no help text"
        output = _help(words)
        full = _FULL.get(words[0]) if len(words) == 2 else None
        if full and words[1] != full:
            output = _without(output, f"{words[0]} {full}")
        parts.append(f"## `{' '.join(['shardkit', *words])}`")
        parts.append(f"```text\n{output}\n```")
    return "\n\n".join(parts) + "\n"


_FULL = {"convert": "imagefolder", "attach": "lmdb"}
"""Of commands for kinds of sources: the kind with all options shown; others show their own."""


def _help(words: Sequence[str]) -> str:
    shown = CliRunner().invoke(cli, [*words, "--help"], prog_name="shardkit", terminal_width=_WIDTH)
    assert shown.exit_code == 0, shown.output
    return shown.output.rstrip()


def _sections(output: str) -> list[str]:
    """Divide a help text at its headings."""
    return re.split(r"\n\n(?=[A-Z][a-z]+:\n)", output)


def _without(output: str, full: str) -> str:
    """Return a help text without the sections that another command of its kind shows."""
    common = set(_sections(_help(full.split())))
    sections = [section for section in _sections(output) if section not in common]
    return "\n\n".join([*sections, f"... and the other options of `shardkit {full}`"])


def api_page() -> str:
    """Return the page of all public names, by task.

    Raises:
        ValueError: If a public name has no task, or a task names something else.
    """
    listed = sorted(name for _, names in TASKS.values() for name in names if "." not in name)
    public = sorted({*shardkit.__all__, "ShardDataModule"} - {"__version__"})  # lightning or not
    if listed != public:
        raise ValueError(f"TASKS differs from the public names: {sorted({*listed} ^ {*public})}")
    parts = [
        _NOTE,
        "# The Python interface",
        "Import a name from `shardkit`, unless its entry gives a module. `shardkit.__version__` is "
        "the version.",
    ]
    for task, (text, names) in TASKS.items():
        shown = [name.rpartition(".")[2] for name in names]
        links = ", ".join(f"[`{name}`](#{name.lower()})" for name in shown)
        parts += [f"## {task}", text, _filled(links)]
        for name in names:
            module, _, last = f"shardkit.{name}".rpartition(".")
            parts += _entry(last, module, getattr(import_module(module), last))
    return "\n\n".join(parts) + "\n"


def stub() -> str:
    """Return the types of the public names."""
    lines = [
        f"from shardkit.{module} import {name} as {name}"
        for module, names in sorted(vars(shardkit)["_PUBLIC"].items())
        for name in names.split()
    ]
    note = f"# {_NOTE.strip('<!- >')}"
    imports = ["from shardkit._version import __version__ as __version__", *lines]
    return "\n".join([note, *imports, "", "__all__: list[str]"]) + "\n"


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


def _entry(name: str, module: str, thing: Any) -> list[str]:
    parts = [f"### {name}"]
    if module != "shardkit":
        parts.append(f"In `{module}`.")
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
    bases = [base for base in kind.__mro__[:0:-1] if dataclasses.is_dataclass(base)]
    for base in (*bases, kind):
        yield from _fields(base)
    for name, value in vars(kind).items():
        if isinstance(value, property) and not name.startswith("_"):
            kind_of = (value.fget.__annotations__ if value.fget else {}).get("return", "Any")
            yield _item(f"{name}: {kind_of}", inspect.getdoc(value) or "")


def _fields(kind: type) -> Iterator[str]:
    """Yield a list item for each attribute that a class states itself."""
    (tree,) = ast.parse(textwrap.dedent(inspect.getsource(kind))).body
    assert isinstance(tree, ast.ClassDef)
    for node, after in zip(tree.body, [*tree.body[1:], None], strict=True):
        if isinstance(node, ast.AnnAssign):
            name, default, text = ast.unparse(node.target), "", _constant(after)
            if isinstance(node.value, ast.Call) and ast.unparse(node.value.func) == "option":
                first, *_ = node.value.args
                default = f" = {ast.unparse(first)}"
                text = next(
                    str(ast.literal_eval(word.value))
                    for word in node.value.keywords
                    if word.arg == "help"
                )
            elif node.value is not None:
                default = f" = {ast.unparse(node.value)}"
            if not (name.startswith("_") or name.isupper()):
                yield _item(f"{name}: {ast.unparse(node.annotation)}{default}", text)


def _constant(node: ast.stmt | None) -> str:
    """Return the string in ``node``, the docstring of the line before it; "" for other nodes."""
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
        return str(node.value.value)
    return ""


def _item(code: str, text: str) -> str:
    joined = " ".join(text.split())
    return _filled(f"- `{code}`" + (f": {joined}" if joined else ""), "  ")


def _filled(text: str, indent: str = "") -> str:
    """Return a paragraph, or an item of a list, in lines of prose."""
    return textwrap.fill(
        text, _PROSE, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )


def _signature(function: Any) -> str:
    signature = inspect.signature(function)
    parameters = [item for item in signature.parameters.values() if item.name != "self"]
    text = str(signature.replace(parameters=parameters))
    text = re.sub(
        r"<function (?:\w+\.)*(\S+) at 0x\w+>", r"\1", text
    )  # an address differs in each run
    return re.sub(r"(: |-> )'([^']*)'", r"\1\2", text)  # annotations are strings, so quoted


def _code(text: str) -> str:
    if len(text) > _WIDTH and "\n" not in text:
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
    return "\n".join(_filled(x, "  ") if x.startswith("- ") else x for x in lines).strip()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
