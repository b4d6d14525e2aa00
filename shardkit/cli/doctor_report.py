"""How `shardkit doctor` tells what it found: one screen, or JSON."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from shardkit.cli.console import can_show, say
from shardkit.cli.show import amount, line, wrapped
from shardkit.measure.doctor.doctor import DoctorReport
from shardkit.measure.doctor.facts import Facts
from shardkit.measure.doctor.findings import Finding
from shardkit.measure.doctor.judgement import Diagnosis
from shardkit.measure.doctor.measured import Measured, effective
from shardkit.measure.doctor.profiling import Profile
from shardkit.measure.doctor.remedies import Remedy
from shardkit.measure.doctor.stages import STAGES
from shardkit.system.formatting import percent, speedup_words
from shardkit.system.text import printable

_BAR = 24
"""Characters of a bar that stands for all of the time."""

_NAMED = 4
"""Maximum remedies to show; --json prints all."""


def as_json(report: DoctorReport) -> dict[str, Any]:
    """Return all that was found as JSON values; times in seconds, rates in images/s."""
    found = asdict(report)
    if found["seen"] is not None:
        del found["seen"]["waits"]  # hundreds of them
    if found["trial"] is not None:
        found["trial"]["gain"] = report.trial.gain if report.trial else None
    return {"subject": found.pop("request")["subject"], **found}


def show(report: DoctorReport) -> None:
    """Print the verdict, the stages, the findings, and what to do."""
    request = report.request
    if report.diagnosis is None or report.measured is None or request.subject is None:
        worst = report.findings[0].severity if report.findings else "ok"
        text = {"ok": "nothing stands in the way", "note": "nothing stands in the way"}
        say(f"this machine: {text.get(worst, 'something costs speed here')}")
        _show_findings(report.findings)
        _show_versions(report.facts)
        return
    name = printable(request.subject.path)
    wrapped(f"{name}: {printable(report.diagnosis.verdict)}", "  ", first="")
    _show_loader(report, report.measured, report.diagnosis)
    _show_stages(report.measured, report.diagnosis)
    _show_remedies(report.diagnosis.remedies)
    _show_findings(report.findings)
    _show_versions(report.facts)
    if report.trial is not None:
        trial, ratios = report.trial, report.trial.ratios
        line(
            "trial",
            f"{speedup_words(trial.gain, min(ratios), max(ratios), len(ratios))} on "
            f"{amount(trial.images, 'image')} in batches of {trial.batch_size}; "
            f"{percent(trial.bytes_after / trial.bytes_before)} of the bytes",
        )
        if not report.command:
            line("", "so the conversion does not help here, whatever its parts promised")
    elif report.trial_note:
        line("trial", f"none: {report.trial_note}")
    if report.command:
        line("next", printable(report.command))
        if "SRC" in shlex.split(report.command):
            line("", f"SRC is the folder that it was made from: {printable(report.source)}")
        if report.classes:
            line("", "its labels have an order of their own; this writes it into a file before:")
            line("", printable(report.classes))


def _show_loader(report: DoctorReport, measured: Measured, diagnosis: Diagnosis) -> None:
    request = report.request
    kind = "threads" if measured.engine == "thread" else "worker processes"
    reason = printable(report.seen.reason) if report.seen else ""
    sample = printable(request.subject.decode) if request.subject else ""
    if measured.transform:
        sample += f", then {printable(measured.transform)}"
    line("sample", f"{sample}; batches of {measured.batch_size}")
    wrapped(
        f"{measured.rate:,.0f} images/s with {measured.workers} {kind} ({reason})"
        + ("" if measured.single is None else f"; {measured.single:,.0f} with one worker"),
        " " * 12,
        first="  loader    ",
    )
    if measured.step is not None and diagnosis.headroom is not None:
        line(
            "step",
            f"{1000 * measured.step:.3g} ms a batch: {measured.batch_size / measured.step:,.0f} "
            f"images/s, of which the loader gives {diagnosis.headroom:.2g} x",
        )


def _show_stages(measured: Measured, diagnosis: Diagnosis) -> None:
    profile = measured.profile
    counted = effective(measured)
    say(f"  {'stage':<20}{'warm':>11}{'cold':>12}    part")
    for stage in STAGES:
        warm = profile.warm.get(stage)
        cold = _cold(profile) if stage == "read" else ""
        if warm is None:
            say(f"    {stage:<20}{profile.skipped.get(stage, 'not measured')}")
            continue
        share = diagnosis.shares.get(stage, 0.0)
        mark = " (cold)" if counted[stage] > warm else ""
        say(
            f"    {stage:<18}{1000 * warm:>8.3f} ms{cold:>12}  {percent(share):>5} "
            f"{_bar(share)}{mark}".rstrip()
        )
    part = ""
    if diagnosis.explained is not None:
        part = f", {percent(diagnosis.explained)} of what a loader with one worker takes"
    wrapped(
        f"{1000 * profile.total:.3f} ms in one thread{part}; {amount(profile.images, 'sample')}, "
        f"{profile.stored_bytes / 1000:,.0f} KB and "
        f"{profile.width:.0f} x {profile.height:.0f} pixels in the mean",
        " " * 12,
        first="  sum       ",
    )


def _cold(profile: Profile) -> str:
    return "" if profile.cold_read is None else f"{1000 * profile.cold_read:.3f} ms"


def _bar(share: float) -> str:
    """Return a bar; of plain characters where the terminal has no other."""
    return ("█" if can_show("█") else "#") * round(_BAR * share)


def _show_remedies(remedies: Sequence[Remedy]) -> None:
    for number, each in enumerate(remedies[:_NAMED]):
        gain = "" if each.gain is None else f"{each.gain:.1f} x"
        basis = f" ({each.basis})" if each.basis else ""
        code = f": {each.code}" if each.code and each.code not in each.what else ""
        name = "helps" if not number else ""
        wrapped(f"{each.what}{code}{basis}", " " * 19, first=f"  {name:<9} {gain:<6} ")


def _show_findings(findings: Sequence[Finding]) -> None:
    for each in findings:
        if each.severity != "ok":
            wrapped(
                f"{printable(each.what)} ({printable(each.evidence)})",
                " " * 12,
                first=f"  {each.severity:<9} ",
            )
            if each.remedy:
                arrow = "→ " if can_show("→") else ""
                wrapped(each.remedy, " " * 14, first=" " * 12 + arrow)
    fine = [each.name for each in findings if each.severity == "ok"]
    if fine:
        wrapped(", ".join(fine), " " * 12, first="  ok        ")


def _show_versions(facts: Facts) -> None:
    known = [f"{name} {version or 'unknown'}" for name, version in facts.versions.items()]
    wrapped(", ".join(known), " " * 12, first="  versions  ")
