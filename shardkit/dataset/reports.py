"""Reports stored with the shards: the files left out and the reasons, one per line."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path

from shardkit.dataset.manifest import FileEntry
from shardkit.errors import Problem
from shardkit.record import dump_json, load_json
from shardkit.system.files import read_small

SKIPPED = "skipped.jsonl"
"""Report of bad files that were skipped."""

IGNORED = "ignored.jsonl"
"""Report of everything in the source that is not an image, and of images left out on request."""

EXCLUDED = "excluded by --exclude"
"""Reason of the images that a conversion left out because a list names them."""


def render_report(problems: Iterable[Problem]) -> bytes:
    """Return the report of ``problems``: one JSON object per line."""
    return b"".join(dump_json(asdict(problem)) + b"\n" for problem in problems)


def excluded_paths(place: Path, files: Iterable[FileEntry]) -> set[str] | None:
    """Return the paths of images that were left out on request; None if the report is damaged.

    Args:
        place: The dataset.
        files: Its files, from its manifest.
    """
    for entry in files:
        if entry.name == IGNORED:
            try:
                content = read_small(place / IGNORED, entry.bytes, root=place)
                if hashlib.sha256(content).hexdigest() != entry.sha256:
                    return None
                problems = map(load_json, content.splitlines())
                return {each["path"] for each in problems if each["reason"] == EXCLUDED}
            except (OSError, ValueError, KeyError, TypeError):
                return None
    return set()
