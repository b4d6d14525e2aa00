"""A hook of MkDocs: pages at the root of the repository, where their links start with ``docs/``.

README.md is the first page of the site.
"""

from __future__ import annotations

from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

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


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages."""
    for name, path in PAGES.items():
        text = site_text((ROOT / name).read_text("utf-8"))
        files.append(File.generated(config, path, content=text))
    return files


def site_text(text: str) -> str:
    """Return a page from the root with its links as they are within ``docs``."""
    for name, path in PAGES.items():
        text = text.replace(f"]({name})", f"]({path})")
    return text.replace("](docs/", "](")
