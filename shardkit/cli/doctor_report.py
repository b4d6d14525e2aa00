"""The report of `shardkit doctor`: at most 16 lines."""

from __future__ import annotations

import math
import os
import textwrap
from collections.abc import Iterable, Sequence

from shardkit.measure.doctor.checks import Finding
from shardkit.measure.doctor.judgement import TORCH_THREADS, Diagnosis, LoopDiagnosis, Range, Rated
from shardkit.measure.doctor.lines import Line
from shardkit.measure.doctor.pipeline import Setup
from shardkit.measure.doctor.profile import OWN_CODE, WAITS, Profile
from shardkit.measure.doctor.report import DoctorReport
from shardkit.measure.doctor.tail import Tail
from shardkit.measure.runner.gil import HOLDS
from shardkit.measure.runner.other_load import OtherLoad
from shardkit.record import PLANES
from shardkit.system.text import amount, printable

_WIDTH = 100
_INDENT = 12

_OVERHEAD = 8.0
_LONGEST = 600.0
"""Seconds of a run before its rounds, and the longest rounds to propose."""

_MOST_LINES = 16
_LEAST_REMEDIES = 4
"""Lines of a report, and those for remedies at least; what does not fit is only in the JSON."""

_NOISY = 0.15
"""Variation of the loader's rate between rounds from which figures are rough."""

_ALONE = 0.15
"""The next stage is named, too, if its fraction is within this of the longest one's."""


def report_lines(report: DoctorReport) -> list[str]:
    """Return the report: the verdict first, and what to do last."""
    diagnosis = report.diagnosis
    profile = report.profile
    if diagnosis is None or profile is None:
        findings = [finding for finding in report.findings if finding.severity != "ok"]
        return _lines("machine", _checks(report.findings)) + _finding_lines(findings)
    before = _lines("GPU", _gpu(diagnosis, profile))
    name = "cause" if diagnosis.status == "starved" else "slowest"
    before += _lines(name, _cause(diagnosis.cause, profile))
    cause = len(before)
    lines = [_line("" if number else "lines", line) for number, line in enumerate(profile.lines)]
    if profile.tail:
        before += _lines("tail", _tail(profile.tail))
    if report.loop is not None:
        before += _lines("loop", _loop(report.loop))
    after = _lines("trust", _trust(report, diagnosis))
    after += _lines("machine", f"{_checks(report.findings)} (--verbose lists all)")
    after += _next(report, diagnosis, profile)
    space = _MOST_LINES - len(before) - len(after)
    remedies = _remedies(diagnosis, max(_LEAST_REMEDIES, space - len(lines)))
    return (
        before[:cause] + lines[: max(1, space - len(remedies))] + before[cause:] + remedies + after
    )


def verbose_lines(report: DoctorReport) -> list[str]:
    """Return the time of all stages, and all checks of the machine that are not in the report."""
    if report.profile is None:
        return _finding_lines(finding for finding in report.findings if finding.severity == "ok")
    stages = [
        f"  {name:<9} {_ms(stage.seconds):>10} per image, {report.profile.fraction(name):.0%}; "
        f"computes {stage.busy:.0%} of it"
        for name, stage in report.profile.stages.items()
    ]
    return stages + _finding_lines(report.findings)


def _lines(name: str, text: str, indent: int = _INDENT) -> list[str]:
    """Return a named paragraph of lines."""
    return textwrap.wrap(
        printable(text),
        _WIDTH,
        initial_indent=f"{name:<{_INDENT}}",
        subsequent_indent=" " * indent,
        break_on_hyphens=False,
    )


def _gpu(diagnosis: Diagnosis, profile: Profile) -> str:
    setup = profile.setup
    size = profile.setup.batch_size
    rate = f"the loader ({_engine(setup)}) delivers {_spread(diagnosis.delivered)}"
    if diagnosis.needed is None or profile.step_seconds is None or diagnosis.waiting is None:
        return (
            f"waits if a training step with a batch of {size} takes less than "
            f"{_ms(size / diagnosis.delivered.median)}: {rate} images/s. To measure with your "
            "step, add --step-ms T or --model"
        )
    needs = (
        f"a step of {_ms(profile.step_seconds)} with a batch of {size} needs "
        f"{amount(round(diagnosis.needed), 'image')}/s; {rate}"
    )
    waits = " to ".join(dict.fromkeys(f"{fraction:.0%}" for fraction in diagnosis.waiting))
    return {
        "fed": f"does not wait for data: {needs}",
        "starved": f"waits {waits} of the time: {needs}",
        "undecided": f"may wait, but the rounds differ too much to tell: {needs}",
    }[diagnosis.status]


def _engine(setup: Setup) -> str:
    return "no workers" if setup.kind is None else amount(setup.workers, setup.kind.worker)


def _longer(diagnosis: Diagnosis) -> str:
    """Return how long a decisive run takes, if that is known."""
    if diagnosis.decisive_seconds is None or diagnosis.decisive_seconds > _LONGEST:
        return ""
    return f" with {_budget(diagnosis.decisive_seconds)}"


def _budget(seconds: float) -> str:
    seconds += _OVERHEAD
    return (
        f"--budget {math.ceil(seconds / 60)}m"
        if seconds > 90
        else f"--budget {math.ceil(seconds)}s"
    )


def _cause(cause: str, profile: Profile) -> str:
    if cause == TORCH_THREADS:
        return "each loader thread starts PyTorch threads, which compete for the CPUs"
    stage = profile.stages[cause]
    setup = profile.setup
    text = f"{_stage(cause, profile)} takes {profile.fraction(cause):.0%} of an image's time"
    for other in profile.stages:
        if other != cause and profile.fraction(other) > profile.fraction(cause) - _ALONE:
            text += f", {_stage(other, profile)} {profile.fraction(other):.0%}"
    text += f" (p50 {_ms(profile.p50)}, p95 {_ms(profile.p95)}); it "
    if stage.busy < WAITS:
        text += "waits (for a disk, a network, a lock or a sleep) instead of computing"
    elif cause == "read":
        text += "copies from memory, so a faster disk does not help"
    elif cause not in OWN_CODE or profile.held < HOLDS:
        text += "computes without the GIL, so threads work well"
    else:
        text += (
            f"computes and holds the GIL {profile.held:.0%} of that time, so threads do not help"
        )
        text += ", but worker processes, as here, can" if setup.engine == "process" else ""
    return text


def _stage(stage: str, profile: Profile) -> str:
    setup = profile.setup
    return {
        "read": "reading",
        "decode": {"raw": "copying raw pixels", PLANES: "converting planes"}.get(
            profile.kind, "decoding"
        ),
        "dataset": f"the dataset {setup.dataset}",
        "transform": f"the transform {setup.transform}",
        "collate": f"the collate function {setup.collate}" if setup.collate else "collating",
    }[stage]


def _line(name: str, line: Line) -> str:
    """Return one line: its code, its fraction of the time, and its text."""
    code = f"{os.path.basename(line.file)}:{line.line} {line.function}"
    code += ", in native code" * line.is_native
    text = f"{line.time:.0%}  {code}: {line.text}" if line.text else f"{line.time:.0%}  {code}"
    text = f"{name:<{_INDENT}}{printable(text)}"
    return text if len(text) <= _WIDTH else f"{text[: _WIDTH - 3]}..."


def _loop(loop: LoopDiagnosis) -> str:
    """Return how the loader slows the training loop, and which changes help."""
    fraction = min(1.0, loop.loop.median / loop.alone.median)
    texts = [
        f"training reaches {_spread(loop.loop)} images/s, {fraction:.0%} of the rate of the step "
        "alone"
    ]
    for rated in loop.remedies:
        if rated.verdict == "gain" and rated.rate is not None:
            gain = rated.rate.median / loop.loop.median
            texts.append(f"{rated.remedy.name}: {gain:.2f}x ({rated.remedy.price})")
    if loop.needed_seconds is not None:
        texts.append(f"to measure what would help, add {_budget(loop.needed_seconds)}")
    return "; ".join([*texts, *_without_gain(loop.remedies)])


def _without_gain(remedies: Iterable[Rated]) -> list[str]:
    """Return the remedies that do not clearly help, by verdict."""
    texts = []
    verdicts = {"unclear": "too noisy to tell", "no gain": "no gain", "failed": "failed"}
    for verdict, text in verdicts.items():
        names = [rated.remedy.name for rated in remedies if rated.verdict == verdict]
        texts += [f"{text}: {', '.join(names)}"] if names else []
    return texts


def _tail(tail: Tail) -> str:
    """Return which images are slow, such as 3% of them, and what they have in common."""
    common = f"all of {tail.common}" if tail.common.startswith(("class", "shard")) else tail.common
    prefix = f"{common}, such as" if common else "such as"
    text = (
        f"{100 * tail.images:.2g}% of the images take {tail.time:.0%} of the time, "
        f"{_ms(tail.median)} each ({prefix} {', '.join(tail.examples)}); "
    )
    if tail.passing:
        return text + "they were fast on a second read: the storage stalls at times"
    return text + f"without them, the rate would be {tail.speedup:.1f} times as high"


def _remedies(diagnosis: Diagnosis, most: int) -> list[str]:
    """Return the ranked remedies, as many as fit, and those that do not help."""
    if diagnosis.status == "fed":
        return _lines("remedies", "none needed")
    gains = [(rated, rated.rate) for rated in diagnosis.remedies if rated.verdict == "gain"]
    rows = [
        (_spread(rate), _effect(rated, diagnosis), rated.remedy) for rated, rate in gains if rate
    ]
    last = "; ".join(_without_gain(diagnosis.remedies))
    if not rows:
        return _lines("remedies", last or "none that doctor can measure")
    first, second = (max(len(str(row[n])) for row in rows) for n in range(2))
    first = max(first, len("images/s"))
    head = f"{diagnosis.needed:,.0f} needed" if diagnosis.needed else "speedup"
    lines = _lines("remedies", f"{'images/s':<{first}}  {head}")
    for rate, effect, remedy in rows:
        cells = f"{rate:<{first}}  {effect:<{second}}  "
        price = f" ({remedy.price})" if remedy.price else ""
        lines += _lines("", f"{cells}{remedy.name}{price}", _INDENT + len(cells))
    more = _lines("", last) if last else []
    if len(lines) + len(more) > most:
        lines = [*lines[: most - len(more) - 1], " " * _INDENT + "... (--json lists all)"]
    return lines + more


def _effect(rated: Rated, diagnosis: Diagnosis) -> str:
    """Return what a remedy changes: the GPU's wait, or without a step the speedup."""
    assert rated.rate is not None
    if diagnosis.needed is None:
        return f"{rated.rate.median / diagnosis.delivered.median:.1f}x"
    waits = f"still waits {max(0.0, 1 - rated.rate.median / diagnosis.needed):.0%}"
    return {"yes": "enough", "no": waits, "unclear": "uncertain"}[rated.enough]


def _trust(report: DoctorReport, diagnosis: Diagnosis) -> str:
    rate = diagnosis.delivered
    load = report.load
    if (load is None or not load.disturbs) and rate.variation <= _NOISY:
        text = "good: "
    elif diagnosis.status == "fed":
        text = "good; other programs only slow it down: "
    elif _starves_alone(diagnosis, load):
        text = "good for the verdict but low for the figures: "
    else:
        text = "low; repeat on an idle machine: "
    if load is not None:
        text += f"other programs used {load.busy:.1f} of {amount(load.present, 'CPU')}; "
    text += f"{amount(rate.rounds, 'round')} vary by {rate.variation:.0%}"
    if report.profile is not None and any(rated.remedy.recipe for rated in diagnosis.remedies):
        tried = len(report.profile.rows)
        images = report.profile.images
        text += f"; conversions were tried with {tried:,} of {images:,} images"
    return text


def _starves_alone(diagnosis: Diagnosis, load: OtherLoad | None) -> bool:
    """Return whether the GPU would wait even if the loader also had the CPUs of other programs."""
    if diagnosis.status != "starved" or diagnosis.needed is None or load is None:
        return False
    free = max(load.present - load.busy, 0.1)
    return diagnosis.delivered.high * load.present / free < diagnosis.needed


def _checks(findings: Sequence[Finding]) -> str:
    counts = []
    for severity in ("problem", "warning", "note"):
        names = [finding.what for finding in findings if finding.severity == severity]
        if names:
            notes = amount(len(names), "note")
            counts.append(notes if severity == "note" else f"{severity}: {'; '.join(names)}")
    fine = sum(finding.severity == "ok" for finding in findings)
    return "; ".join([*counts, f"{amount(fine, 'check')} passed"])


def _finding_lines(findings: Iterable[Finding]) -> list[str]:
    lines = []
    for finding in findings:
        text = f"{finding.what} ({finding.evidence})" + (
            f": {finding.remedy}" if finding.remedy else ""
        )
        lines += _lines(f"  {finding.severity}", text)
    return lines


def _next(report: DoctorReport, diagnosis: Diagnosis, profile: Profile) -> list[str]:
    """Return what to do: a command on one line, to copy, or a sentence."""
    if diagnosis.status == "undecided":
        again = f"repeat the same command{_longer(diagnosis)} on an idle machine"
        return _lines("next", f"{again}; change something only if the GPU still waits")
    lines = [f"{'next':<{_INDENT}}{printable(report.command)}"] if report.command else []
    lines += [f"{'':<{_INDENT}}{printable(hint)}" for hint in report.hints]
    if (
        lines
        and diagnosis.status != "fed"
        and diagnosis.cause in OWN_CODE
        and profile.stages[diagnosis.cause].busy < WAITS
    ):
        lines += _lines("", f"or remove what {_stage(diagnosis.cause, profile)} waits for")
    best = diagnosis.recommended
    if best is not None and best.enough == "no":
        return lines + _lines("", "that is not enough, and nothing else that was measured helps")
    if lines:
        return lines
    if diagnosis.status == "fed":
        return _lines("next", "nothing: faster loading would not make training faster")
    if diagnosis.decisive_seconds is not None:
        again = f"repeat the same command{_longer(diagnosis)} on an idle machine"
        return _lines("next", f"{again}: the rounds differ too much")
    slow = "the images in the tail" if profile.tail else _stage(diagnosis.cause, profile)
    return _lines("next", f"nothing that was measured helps: look at {slow}")


def _spread(rate: Range) -> str:
    return f"{rate.median:,.0f} ({rate.low:,.0f} to {rate.high:,.0f})"


def _ms(seconds: float) -> str:
    return f"{seconds:.2g} s" if seconds >= 1 else f"{1000 * seconds:.3g} ms"
