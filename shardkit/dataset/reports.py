"""Reports stored with the shards: the files left out and the reasons, one per line."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict

from shardkit.errors import Problem
from shardkit.record import dump_json

SKIPPED = "skipped.jsonl"
"""Report of bad files that were skipped."""

IGNORED = "ignored.jsonl"
"""Report of everything in the source that is not an image."""


def render_report(problems: Iterable[Problem]) -> bytes:
    """Return the report of ``problems``: one JSON object per line."""
    return b"".join(dump_json(asdict(problem)) + b"\n" for problem in problems)
