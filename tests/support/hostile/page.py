"""Generates the tables that the site adds to docs/hostile-images.md."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from hostile.cases import LEVELS, Case, Ignored, Outcome, Problem, Rejected, Stored, at_level
from hostile.images import CASES

_LEVEL_NAMES = {
    "decode": "`--check decode`",
    "header": "`--check header`",
    "none": "`--check none`",
    "resize": "`--resize 8`",
    "raw": "`--encode raw`",
}


def tables() -> str:
    """Return the number of cases, and a table of each group."""
    files = sum(len(case.outcomes) for case in CASES)
    kinds = [type(outcome) for case in CASES for outcome in case.outcomes.values()]
    bad = kinds.count(Rejected) + kinds.count(Problem)
    parts = [
        f"\n{len(CASES)} cases in {files} files: {kinds.count(Stored)} are stored, {bad} rejected, "
        f"and {kinds.count(Ignored)} left out, as they do not claim to be images."
    ]
    for group in dict.fromkeys(case.group for case in CASES):
        lines = _lines(case for case in CASES if case.group == group)
        head = "| outcome | otherwise | cases |\n| --- | --- | --- |"
        parts += [f"## {group[0].upper()}{group[1:]}", "\n".join([head, *lines])]
    return "\n\n".join(parts) + "\n"


def _lines(cases: Iterable[Case]) -> Iterator[str]:
    """Yield a line for each outcome, with the cases that have it."""
    named: dict[tuple[str, str], list[str]] = {}
    for case in cases:
        outcomes = {
            path: (_said(case.outcomes[path]), _otherwise(case, path))
            for path in sorted(case.outcomes)
        }
        single = len(set(outcomes.values())) == 1
        for path, outcome in outcomes.items():
            name = case.name if single else f"{case.name}: `{path}`"
            if name not in named.setdefault(outcome, []):
                named[outcome].append(name)
    for outcome, names in named.items():
        yield _line(*outcome, "; ".join(names))


def _line(*cells: str) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _said(outcome: Outcome) -> str:
    if isinstance(outcome, Stored):
        if outcome.pixels is None:
            return f"unseen, as {outcome.kind}"
        notes = ", ".join(f"{name} {value}" for name, value in sorted(outcome.notes.items()))
        return f"stored as {outcome.kind}" + (f", noted: {notes}" if notes else "")
    words = outcome.words.strip().rstrip(":")
    if isinstance(outcome, Ignored):
        return f"left out: “{words} ...”"
    return f"rejected: “{words} ...”"


def _otherwise(case: Case, path: str) -> str:
    usual = case.outcomes[path]
    differing: dict[str, list[str]] = {}
    for level in LEVELS:
        outcome = at_level(case, path, level)
        if outcome != usual:
            differing.setdefault(_said(outcome), []).append(_LEVEL_NAMES[level])
    return "; ".join(f"{', '.join(levels)}: {said}" for said, levels in differing.items())
