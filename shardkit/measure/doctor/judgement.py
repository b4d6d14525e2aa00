"""The judgement: from what was measured to what limits loading, and what would move it.

It is a function of its arguments alone; whatever it says was measured by others.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from shardkit.measure.doctor.findings import Finding, ordered
from shardkit.measure.doctor.measured import Measured, effective, waits_for_disk
from shardkit.measure.doctor.remedies import GAIN, Remedy, find_remedies
from shardkit.measure.doctor.surroundings import fits_in_memory
from shardkit.measure.runner.gil import HOLDS
from shardkit.system.formatting import percent

UNEXPLAINED = 0.25
"""Part of a sample's time that the stages may leave unexplained, or overdo, without a word."""


@dataclass(frozen=True, kw_only=True)
class Diagnosis:
    """What limits loading."""

    bottleneck: str
    """``step``, ``interpreter lock``, a stage, or the name of a finding that is a problem."""
    verdict: str
    """The bottleneck in words."""
    shares: dict[str, float]
    """Stage to its part of a sample's time, 0 to 1."""
    explained: float | None
    """Sum of the stages divided by what a loader of one worker takes for a sample; None if that is
    not known."""
    headroom: float | None
    """Rate of loading divided by that of the step; None without a step."""
    findings: list[Finding]
    """The worst first."""
    remedies: list[Remedy]
    """The greatest gain first; those without a measured gain come last."""


def diagnose(measured: Measured, surroundings: Sequence[Finding] = ()) -> Diagnosis:
    """Return what limits loading, and what would help.

    Args:
        measured: Times and rates.
        surroundings: What the checks of the machine found; a problem among them comes first.
    """
    seconds = effective(measured)
    total = sum(seconds.values())
    shares = {stage: value / total for stage, value in seconds.items()}
    largest = max(seconds, key=lambda stage: seconds[stage])
    headroom = None
    if measured.step is not None:
        headroom = measured.rate * measured.step / measured.batch_size
    problem = next((each for each in surroundings if each.severity == "problem"), None)
    if problem is not None:
        name, verdict = problem.name, f"{_sentence(problem.what)}: {problem.evidence}."
    elif headroom is not None and headroom >= 1:
        name, verdict = "step", _step_verdict(measured, headroom)
    else:
        name, verdict = _stage_verdict(measured, largest, seconds)
        if headroom is not None:
            verdict = (
                f"Loading, not the step, is the limit: it gives {headroom:.2g} x what the step "
                f"takes. {verdict}"
            )
    explained = None if measured.single is None else measured.profile.total * measured.single
    findings = ordered([*surroundings, *_findings(measured, explained)])
    remedies = [] if name == "step" else find_remedies(measured, largest)
    if problem is not None:
        remedies.insert(0, Remedy(name=problem.name, what=problem.remedy))
    return Diagnosis(
        bottleneck=name,
        verdict=verdict,
        shares=shares,
        explained=explained,
        headroom=headroom,
        findings=findings,
        remedies=remedies,
    )


def _step_verdict(measured: Measured, headroom: float) -> str:
    assert measured.step is not None
    return (
        f"The step, not loading, is the limit: the loader could feed {headroom:.1f} x what a step "
        f"of {1000 * measured.step:.3g} ms takes."
    )


_WORDS = {
    "read": "Reading",
    "checksum": "Comparing checksums",
    "decode": "Decoding",
    "transform": "The transform",
    "collate": "Collating",
    "transport": "The way from the worker process",
    "copy to the device": "The copy to the device",
}


def _stage_verdict(measured: Measured, stage: str, seconds: Mapping[str, float]) -> tuple[str, str]:
    profile, total = measured.profile, sum(seconds.values())
    part = (
        f"{percent(seconds[stage] / total)} of a sample's time "
        f"({1000 * seconds[stage]:.3g} of {1000 * total:.3g} ms)"
    )
    if stage == "transform" and profile.held is not None and profile.held >= HOLDS:
        answer = "threads cannot share it"
        if measured.engine == "process":
            answer += ", and worker processes, which the loader takes, can"
        return "interpreter lock", (
            f"The transform limits: it is {part}, and holds the interpreter's lock "
            f"{percent(profile.held)} of that, so {answer}."
        )
    verdict = f"{_WORDS[stage]} limits: it is {part}."
    if stage == "read" and not waits_for_disk(measured):
        verdict += " It comes from memory: no disk would be faster."
    if stage == "read" and seconds["read"] > profile.warm.get("read", 0.0):
        verdict += " The data do not fit in memory, so every epoch reads them from the disk."
    return stage, verdict


def _findings(measured: Measured, explained: float | None) -> list[Finding]:
    """Return what the measured times themselves have to say, beside the bottleneck."""
    found = []
    profile = measured.profile
    warm = profile.warm.get("read", 0.0)
    cold = profile.cold_read
    fits = fits_in_memory(measured.bytes, measured.memory)
    if cold is not None and fits and cold > profile.total - warm and cold > 2 * warm:
        found.append(
            Finding(
                name="first epoch",
                severity="note",
                what="the first epoch is limited by the disk, later ones are not",
                evidence=f"a sample is read in {1000 * cold:.2f} ms cold, in "
                f"{1000 * warm:.2f} ms warm",
                remedy="read the files once before (cat them to /dev/null), if it matters",
            )
        )
    if explained is not None and abs(1 - explained) > UNEXPLAINED:
        found.append(
            Finding(
                name="stages",
                severity="note",
                what="the stages do not add up to what the loader takes",
                evidence=f"they are {percent(explained)} of a sample's time in a "
                "loader of one worker",
                remedy="measure again when the machine is idle, or with more --rows",
            )
        )
    if profile.resident is not None and profile.resident > 0.5 and cold is not None:
        found.append(
            Finding(
                name="cold",
                severity="note",
                what="the cold times are not cold",
                evidence=f"{percent(profile.resident)} of the files stayed in memory: "
                "somebody maps them, or the file system keeps them there",
            )
        )
    alone = measured.gain("one torch thread")
    if alone is not None and alone > GAIN:
        found.append(
            Finding(
                name="torch threads",
                severity="warning",
                what="PyTorch's own threads get in the way of the loader's",
                evidence=f"{measured.rate:.0f} images/s, and {alone:.1f} x with one of its threads",
                remedy="torch.set_num_threads(1), or OMP_NUM_THREADS=1",
            )
        )
    return found


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:]
