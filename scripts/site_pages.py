"""A hook of MkDocs: what the site shows in addition to ``docs``.

Pages at the root of the repository, where links start with ``docs/``, the help of each command,
what each file of tests checks, and what becomes of odd images.
README.md is the first page of the site.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import click
from click.testing import CliRunner
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

from shardkit.cli.main import cli

ROOT = Path(__file__).parents[1]
PAGES = {
    "README.md": "index.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "CODE_OF_CONDUCT.md": "conduct.md",
    "SECURITY.md": "security.md",
    "LICENSE": "LICENSE",
}
"""File at the root of the repository -> its path in the site."""

_WIDTH = 90
"""Columns of help texts."""

_FULL = {"convert": "imagefolder", "attach": "lmdb"}
"""Of commands for kinds of sources: the kind with all options shown; others show their own."""


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages."""
    for name, path in PAGES.items():
        text = site_text((ROOT / name).read_text("utf-8"))
        files.append(File.generated(config, path, content=text))
    return files


def on_page_markdown(markdown: str, page: Page, **_: object) -> str:
    """Return a page of ``docs`` with links to pages at the root as they are in the site."""
    for name, path in PAGES.items():
        markdown = markdown.replace(f"](../{name}", f"]({path}")
    more = _GENERATED.get(page.file.src_uri)
    return markdown + more() if more else markdown


def on_page_content(html: str, **_: object) -> str:
    """Return a page with options marked, which site.css does not break after their hyphens."""
    return re.sub(r"(?<=[\s>(\[|])--\w+(-\w+)*", r'<span class="option">\g<0></span>', html)


def site_text(text: str) -> str:
    """Return a page from the root with its links as they are within ``docs``."""
    for name, path in PAGES.items():
        text = text.replace(f"]({name})", f"]({path})")
    return text.replace("](docs/", "](")


def help_of_commands() -> str:
    """Return a section for each command."""
    parts = [""]
    for words in _commands(cli, ()):
        output = _help(words)
        full = _FULL.get(words[0]) if len(words) == 2 else None
        if full and words[1] != full:
            output = _without(output, [words[0], full])
        parts.append(f"## `{' '.join(['shardkit', *words])}`")
        parts.append(f"```text\n{output}\n```")
    return "\n\n".join(parts) + "\n"


def promises_of_tests() -> str:
    """Return the first line of each file of tests, by folder."""
    parts = [""]
    for folder in sorted({path.parent for path in ROOT.glob("tests/**/test_*.py")}):
        said = [f"* {_first_line(path)} `{path.name}`" for path in sorted(folder.glob("test_*.py"))]
        parts += [f"### {folder.relative_to(ROOT)}", "\n".join(said)]
    return "\n\n".join(parts) + "\n"


def _first_line(path: Path) -> str:
    return (ast.get_docstring(ast.parse(path.read_text("utf-8"))) or "").partition("\n")[0]


def hostile_images() -> str:
    """Return what becomes of each odd or hostile image."""
    sys.path.insert(0, str(ROOT / "tests/support"))
    from hostile.page import tables

    return tables()


_GENERATED = {
    "cli.md": help_of_commands,
    "hostile-images.md": hostile_images,
    "reliability.md": promises_of_tests,
}
"""Page -> what the site adds at its end."""


def _commands(command: click.Command, words: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    yield words
    if isinstance(command, click.Group):
        context = click.Context(command)
        for name in command.list_commands(context):
            inner = command.get_command(context, name)
            assert inner is not None
            yield from _commands(inner, (*words, name))


def _help(words: Sequence[str]) -> str:
    shown = CliRunner().invoke(cli, [*words, "--help"], prog_name="shardkit", terminal_width=_WIDTH)
    assert shown.exit_code == 0, shown.output
    return shown.output.rstrip()


def _without(output: str, full: Sequence[str]) -> str:
    """Return a help text without the sections that another command of its kind shows."""
    common = {*_sections(_help(full))}
    sections = [section for section in _sections(output) if section not in common]
    return "\n\n".join([*sections, f"... and the other options of `shardkit {' '.join(full)}`"])


def _sections(output: str) -> list[str]:
    """Divide a help text at its headings."""
    return re.split(r"\n\n(?=[A-Z][a-z]+:\n)", output)
