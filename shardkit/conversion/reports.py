"""The reports that lie beside the shards: which files were left out, one in each line, and why."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict

from shardkit.errors import Problem
from shardkit.record import dump_json

SKIPPED = "skipped.jsonl"
"""Bad files that were left out on request."""

IGNORED = "ignored.jsonl"
"""What else was in the source, and is no image."""


def render_report(problems: Iterable[Problem]) -> bytes:
    """Return a report: a JSON object in each line."""
    return b"".join(dump_json(asdict(problem)) + b"\n" for problem in problems)
