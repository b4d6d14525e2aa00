"""What a check found: how bad it is, what was seen, and what helps."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from shardkit.errors import UsageError

SEVERITIES = ("problem", "warning", "note", "ok")
"""``problem``: loading fails, or cannot work as it was asked. ``warning``: it costs speed.
``note``: good to know. ``ok``: looked at, and as it should be."""


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One result of one check.

    Raises:
        UsageError: If the severity is unknown.
    """

    name: str
    """Of the check."""
    severity: str
    """One of `SEVERITIES`."""
    what: str
    """The finding in a few words."""
    evidence: str
    """What was seen or measured."""
    remedy: str = ""
    """What helps; empty if nothing has to."""

    def __post_init__(self) -> None:
        if self.severity not in SEVERITIES:
            raise UsageError(
                f"severity {self.severity!r} is unknown; known are {', '.join(SEVERITIES)}"
            )


def fine(name: str, evidence: str) -> Finding:
    """Return the finding of a check that has nothing to say."""
    return Finding(name=name, severity="ok", what=name, evidence=evidence)


def ordered(findings: Iterable[Finding]) -> list[Finding]:
    """Return findings with the worst first; those of one severity keep their order."""
    return sorted(findings, key=lambda each: SEVERITIES.index(each.severity))
