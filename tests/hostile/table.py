"""The corpus as a page of Markdown."""

from __future__ import annotations

from collections.abc import Iterator

from hostile import CASES
from hostile.cases import LEVELS, Case, Ignored, Outcome, Problem, Rejected, Stored, at_level

_NOTE = (
    "<!-- Made by scripts/make_hostile_table.py from tests/hostile/; edit the cases instead. -->"
)
_LEVEL_NAMES = {
    "decode": "`--check decode`",
    "header": "`--check header`",
    "none": "`--check none`",
    "resize": "`--resize 8`",
    "raw": "`--encode raw`",
}


def page() -> str:
    """Return the page of all cases."""
    files = sum(len(case.outcomes) for case in CASES)
    kinds = [type(outcome) for case in CASES for outcome in case.outcomes.values()]
    bad = kinds.count(Rejected) + kinds.count(Problem)
    parts = [
        _NOTE,
        "# Odd and hostile images, and what becomes of them",
        f"{len(CASES)} cases with {files} files, all made by `tests/hostile/`: "
        f"{kinds.count(Stored)} are stored, {bad} are rejected, and {kinds.count(Ignored)} are "
        "left out since they do not claim to be images. `tests/test_hostile_images.py` converts "
        "them, among healthy neighbours, and compares each pixel with a reference that is computed "
        "without shardkit.",
        "What stands here is a plain copy with `--check decode`, the default; where another check "
        "or a change of the pixels ends otherwise, the third column says so. *Unseen* is stored as "
        "the bytes that were there, which may not decode.",
    ]
    for group in dict.fromkeys(case.group for case in CASES):
        lines = [line for case in CASES if case.group == group for line in _lines(case)]
        head = "| case | outcome | otherwise |\n| --- | --- | --- |"
        parts += [f"## {group[0].upper()}{group[1:]}", "\n".join([head, *lines])]
    return "\n\n".join(parts) + "\n"


def _lines(case: Case) -> Iterator[str]:
    paths = sorted(case.outcomes)
    rows = {path: (_said(case.outcomes[path]), _otherwise(case, path)) for path in paths}
    if len(set(rows.values())) == 1:
        yield _line(case.name, *rows[paths[0]])
        return
    for path in paths:
        yield _line(f"{case.name}: `{path}`", *rows[path])


def _line(*cells: str) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _said(outcome: Outcome) -> str:
    if isinstance(outcome, Stored):
        if outcome.pixels is None:
            return f"stored unseen, as {outcome.kind}"
        notes = ", ".join(f"{name} {value}" for name, value in sorted(outcome.notes.items()))
        return f"stored as {outcome.kind}" + (f", noted: {notes}" if notes else "")
    words = outcome.words.strip().rstrip(":")
    if isinstance(outcome, Ignored):
        return f"left out: “{words}”"
    return f"rejected: “{words}”"


def _otherwise(case: Case, path: str) -> str:
    usual = case.outcomes[path]
    differing: dict[str, list[str]] = {}
    for level in LEVELS:
        outcome = at_level(case, path, level)
        if outcome != usual:
            differing.setdefault(_said(outcome), []).append(_LEVEL_NAMES[level])
    return "; ".join(f"{', '.join(levels)}: {said}" for said, levels in differing.items())
