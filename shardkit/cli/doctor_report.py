"""The report of `shardkit doctor`: at most 16 lines."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence

from shardkit.cli.show import amount
from shardkit.measure.doctor.checks import Finding
from shardkit.measure.doctor.doctor import DoctorReport
from shardkit.measure.doctor.groups import Group
from shardkit.measure.doctor.judgement import Cause, Diagnosis, Range, Rated
from shardkit.measure.doctor.pipeline import Setup
from shardkit.measure.runner.gil import HOLDS
from shardkit.system.formatting import significant
from shardkit.system.text import printable

_WIDTH, _INDENT = 100, 12

_OVERHEAD, _LONGEST = 8.0, 600.0
"""Seconds of a run before its rounds, and the longest rounds to propose."""

_MOST_LINES = 16
"""Lines of a report; the remedies that do not fit are only in the JSON."""

_NOISY = 0.15
"""Variation of the loader's rate between rounds from which figures are rough."""


def report_lines(report: DoctorReport) -> list[str]:
    """Return the report: the verdict first, and what to do last."""
    diagnosis, setup, profile = report.diagnosis, report.setup, report.profile
    if diagnosis is None or setup is None or profile is None:
        return _lines("machine", _checks(report.findings)) + _finding_lines(report.findings, "ok")
    cause = _cause(diagnosis.cause, setup)
    if profile.group is not None and diagnosis.cause.stage == profile.longest:
        cause += f"; {_group(profile.group)}"
    before = _lines("GPU", _gpu(report, diagnosis, setup))
    before += _lines("slowest" if diagnosis.status == "fed" else "cause", cause)
    after = _lines("trust", _trust(report, diagnosis))
    after += _lines("machine", f"{_checks(report.findings)} (--verbose lists all)")
    after += _next(report, diagnosis)
    return before + _remedies(report, diagnosis, _MOST_LINES - len(before) - len(after)) + after


def verbose_lines(report: DoctorReport) -> list[str]:
    """Return the time of all stages, and all checks of the machine."""
    lines = []
    if report.profile is not None:
        for name, stage in report.profile.stages.items():
            lines.append(
                f"  {name:<9} {_ms(stage.seconds):>10} per image, "
                f"{_percent(report.profile.fraction(name))}; p50 {_ms(stage.p50)}, "
                f"p95 {_ms(stage.p95)}; {_percent(stage.busy)} of it on a CPU"
            )
        lines += _finding_lines(report.findings, "")
    versions = (f"{name} {version or '?'}" for name, version in report.facts.versions.items())
    return lines + _lines("versions", ", ".join(versions))


def _lines(name: str, text: str, indent: int = _INDENT) -> list[str]:
    """Return a named paragraph of lines."""
    return textwrap.wrap(
        printable(text),
        _WIDTH,
        initial_indent=f"{name:<{_INDENT}}",
        subsequent_indent=" " * indent,
        break_on_hyphens=False,
    )


def _gpu(report: DoctorReport, diagnosis: Diagnosis, setup: Setup) -> str:
    rate = f"the loader gives {_spread(diagnosis.delivered)}"
    if diagnosis.needed is None or report.step_seconds is None or diagnosis.waiting is None:
        longest = setup.batch_size / diagnosis.delivered.median
        return (
            f"unknown without a training step: {rate} images/s, so a step of a batch of "
            f"{setup.batch_size} that is shorter than {_ms(longest)} waits. Add --step-ms T or "
            "--model"
        )
    needs = (
        f"a step of {_ms(report.step_seconds)} for a batch of {setup.batch_size} needs "
        f"{diagnosis.needed:,.0f} images/s; {rate}"
    )
    if diagnosis.status == "fed":
        return f"does not wait for data: {needs}"
    low, high = diagnosis.waiting
    if diagnosis.status == "starved":
        return f"waits {_range(low, high)} of the time: {needs}"
    return f"undecided, it waits {_range(low, high)} of the time: {needs}{_longer(diagnosis)}"


def _longer(diagnosis: Diagnosis) -> str:
    """Return how long a decisive run takes, if that is known."""
    if diagnosis.decisive_seconds is None:
        return ""
    if diagnosis.decisive_seconds > _LONGEST:
        return " (too close for a longer run)"
    return f" (decisive: --budget {_duration(diagnosis.decisive_seconds + _OVERHEAD)})"


def _cause(cause: Cause, setup: Setup) -> str:
    name = _stage(cause.stage, setup)
    if cause.stage == "torch threads":
        return f"{name}: without them loading is faster (see below)"
    text = f"{name} takes {_percent(cause.fraction)} of an image's time"
    if cause.next_stage:
        text += f", and {_stage(cause.next_stage, setup)} {_percent(cause.next_fraction)}"
    text += f" (p50 {_ms(cause.p50)}, p95 {_ms(cause.p95)}); it "
    if cause.stage == "read" and not cause.waits:
        return f"{text}copies from the page cache, so a faster disk does not help"
    if cause.waits:
        return f"{text}waits, for a disk, a network or a sleep, rather than computes"
    text += "computes"
    if cause.held is None or cause.held < HOLDS:
        return f"{text} and releases the GIL"
    text += f" and holds the GIL {_percent(cause.held)} of that time, so threads do not help"
    return text + (", but worker processes, as here, can" if setup.engine == "process" else "")


def _stage(stage: str, setup: Setup) -> str:
    names = {
        "read": "reading",
        "decode": "decoding",
        "dataset": f"the dataset ({setup.dataset}.__getitem__)",
        "transform": f"the transform {setup.transform}",
        "collate": f"the collate function {setup.collate}" if setup.collate else "collating",
        "transport": "sending batches from worker processes",
        "torch threads": "each loader thread starts PyTorch threads, which compete for the CPUs",
    }
    return names[stage]


def _group(group: Group) -> str:
    who = {
        "class": f"class {group.name!r}",
        "encoding": f"{group.name.upper()} images",
        "size": "the largest images",
    }[group.by]
    detail = "" if group.by == "encoding" else f"{group.kind.upper()}, "
    return (
        f"{who} ({_percent(group.images)} of the images; {detail}"
        f"{significant(group.megapixels)} megapixels) take {_percent(group.time)} of that"
    ).replace(") take", ") takes" if group.by == "class" else ") take")


def _remedies(report: DoctorReport, diagnosis: Diagnosis, most: int) -> list[str]:
    """Return the ranked remedies, as many as fit, and those that do not help."""
    if diagnosis.status == "fed":
        return _lines("remedies", "none needed")
    rest = {
        f"too noisy to tell{_longer(diagnosis)}": diagnosis.unclear,
        "no gain": diagnosis.without_gain,
        "failed": report.failed,
    }
    last = "; ".join(f"{why}: {', '.join(names)}" for why, names in rest.items() if names)
    if not diagnosis.remedies:
        return _lines("remedies", last or "none measured: the loader kept up at first")
    effects = [_effect(each, diagnosis) for each in diagnosis.remedies]
    rates = [_spread(each.rate) for each in diagnosis.remedies]
    first, second = (max(map(len, [*column, "images/s"])) for column in (rates, effects))
    lines = _lines("remedies", f"{'images/s':<{first}}  {'GPU' if diagnosis.needed else 'speedup'}")
    for rate, effect, each in zip(rates, effects, diagnosis.remedies, strict=True):
        price = f" ({each.remedy.price})" if each.remedy.price else ""
        cells = f"{rate:<{first}}  {effect:<{second}}  "
        lines += _lines("", f"{cells}{each.remedy.what}{price}", _INDENT + len(cells))
    more = _lines("", last) if last else []
    if len(lines) + len(more) > most:
        lines = [*lines[: most - len(more) - 1], " " * _INDENT + "... (--json lists all)"]
    return lines + more


def _effect(rated: Rated, diagnosis: Diagnosis) -> str:
    """Return what a remedy changes: the GPU's wait, or without a step the speedup."""
    if diagnosis.needed is None:
        return f"{rated.rate.median / diagnosis.delivered.median:.1f}x"
    waits = _percent(max(0.0, 1 - rated.rate.median / diagnosis.needed))
    return {"yes": "no wait", "no": f"waits {waits}", "unclear": "borderline"}[rated.enough]


def _trust(report: DoctorReport, diagnosis: Diagnosis) -> str:
    rate = diagnosis.delivered
    busy = report.facts.load.disturbs or rate.variation > _NOISY
    level = "low, repeat on an idle machine" if busy else "good"
    text = f"{level}: {report.facts.load}; {amount(rate.rounds, 'round')} vary by "
    text += _percent(rate.variation)
    if report.sample:
        text += f"; {report.sample:,} of {report.images:,} images converted"
    return text


def _checks(findings: Sequence[Finding]) -> str:
    parts = []
    for severity in ("problem", "warning", "note"):
        found = [each.what for each in findings if each.severity == severity]
        if found and severity == "note":
            parts.append(f"{amount(len(found), 'note')}")
        elif found:
            parts.append(f"{severity}: {'; '.join(found)}")
    fine = sum(each.severity == "ok" for each in findings)
    return "; ".join([*parts, f"{amount(fine, 'check')} passed"])


def _finding_lines(findings: Sequence[Finding], hidden: str) -> list[str]:
    lines = []
    for each in findings:
        if each.severity != hidden:
            text = f"{each.what} ({each.evidence})" + (f": {each.remedy}" if each.remedy else "")
            lines += _lines(f"  {each.severity}", text)
    return lines


def _next(report: DoctorReport, diagnosis: Diagnosis) -> list[str]:
    if report.command:
        lines = [f"{'next':<{_INDENT}}{printable(report.command)}"]  # one line, to copy
        return lines + [f"{'':<{_INDENT}}{printable(hint)}" for hint in report.hints]
    if diagnosis.status == "fed":
        return _lines("next", "nothing: faster loading would not make training faster")
    if diagnosis.status == "undecided":
        return _lines("next", "measure again on an idle machine, or with a longer --budget")
    return _lines("next", diagnosis.advice or "faster or more CPUs: no measured change helps")


def _spread(rate: Range) -> str:
    return f"{rate.median:,.0f} ({rate.low:,.0f} to {rate.high:,.0f})"


def _range(low: float, high: float) -> str:
    return " to ".join(dict.fromkeys((_percent(low), _percent(high))))


def _ms(seconds: float) -> str:
    return f"{seconds:.2g} s" if seconds >= 1 else f"{1000 * seconds:.3g} ms"


def _duration(seconds: float) -> str:
    return f"{math.ceil(seconds / 60)}m" if seconds > 90 else f"{math.ceil(seconds)}s"


def _percent(part: float) -> str:
    return f"{100 * part:.0f}%"
