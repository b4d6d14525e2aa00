"""The report of `shardkit doctor` on made-up diagnoses: at most 16 lines that say what to do."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest
from diagnoses import profile, setup, stage

from shardkit.cli.doctor_report import report_lines, verbose_lines
from shardkit.measure.doctor.checks import Finding
from shardkit.measure.doctor.judgement import Measured, diagnose
from shardkit.measure.doctor.pipeline import Remedy
from shardkit.measure.doctor.profile import Profile
from shardkit.measure.doctor.report import DoctorReport
from shardkit.measure.runner.other_load import OtherLoad
from shardkit.measure.runner.spec import Subject
from shardkit.recipe import Recipe

BASE = [95.0, 100.0, 105.0]
RAW = Remedy(name="raw pixels of 256x256", price="2.0x the space", recipe=Recipe())
RESIDENT = Remedy(name='resident="cpu"', code="...")
RATED = [(RAW, [900.0, 1000.0, 1100.0]), (RESIDENT, [101.0, 99.0, 100.0])]
FINDINGS = [
    Finding("libraries", "warning", "Pillow is slow", "plain libjpeg", "pip install pillow"),
    Finding("processors", "ok", "processors", "8 workers"),
]


def report(
    *,
    step_ms: float | None = 80.0,
    found: Profile | None = None,
    rates: list[float] | None = None,
    measured: list[tuple[Remedy, list[float] | None]] | None = None,
    **changed: Any,
) -> DoctorReport:
    step = None if step_ms is None else step_ms / 1000
    found = dataclasses.replace(found or profile(), step_seconds=step)
    diagnosis = diagnose(
        found,
        rates or BASE,
        [Measured(*pair, rates or BASE) for pair in (RATED if measured is None else measured)],
        needed=None if step is None else 64 / step,
        round_seconds=2.0,
    )
    values: dict[str, Any] = {
        "subject": Subject(path="made"),
        "findings": FINDINGS[1:],
        "load": OtherLoad(busy=0.1, present=8),
        "profile": found,
        "diagnosis": diagnosis,
        "command": "shardkit convert dataset made made-256",
        "hints": ["then: make_loader(open_dataset('made-256', ...), ...)"],
    }
    return DoctorReport(**{**values, **changed})


def text(**changed: Any) -> str:
    lines = report_lines(report(**changed))
    assert len(lines) <= 16
    assert max(map(len, lines)) <= 100
    return " ".join(" ".join(lines).split())


def test_a_starved_gpu() -> None:
    assert "\n".join(report_lines(report())) == (
        """\
GPU         waits 87% to 88% of the time: a step of 80 ms with a batch of 64 needs 800 images/s; the
            loader (8 threads) delivers 100 (93 to 107)
cause       decoding takes 80% of an image's time (p50 10 ms, p95 20 ms); it computes without the
            GIL, so threads work well
remedies    images/s              800 needed
            1,000 (865 to 1,156)  enough  raw pixels of 256x256 (2.0x the space)
            no gain: resident="cpu"
trust       good: other programs used 0.1 of 8 CPUs; 3 rounds vary by 5%; conversions were tried
            with 1 of 10,000 images
machine     1 check passed (--verbose lists all)
next        shardkit convert dataset made made-256
            then: make_loader(open_dataset('made-256', ...), ...)"""
    )


NOISY, BUSY, HALF = (
    [80.0, 100.0, 120.0],
    OtherLoad(busy=7.0, present=8),
    OtherLoad(busy=4.0, present=8),
)
NOTHING: dict[str, Any] = {"command": "", "hints": []}
UNCLEAR = (RAW, [60.0, 150.0, 400.0])
LONG = Remedy(name=" ".join(["word"] * 30), recipe=Recipe())


def crop(busy: float = 1.0, name: str = "crop") -> Profile:
    """Return the profile of a slow transform."""
    return profile(transform=stage(99, busy), held=0.97, setup=setup(transform=name))


@pytest.mark.parametrize(
    ("given", "facts"),
    [
        # Whether a remedy is enough.
        ({"step_ms": 32.0}, ("1,000 (865 to 1,156) still waits 50% raw pixels", "not enough")),
        ({"step_ms": 64.0}, ("1,000 (865 to 1,156) uncertain raw pixels",)),
        ({"step_ms": None}, ("1,000 (865 to 1,156) 10.0x raw pixels",)),
        ({"step_ms": None}, ("batch of 64", "(8 threads) delivers 100", "--step-ms T or --model")),
        (
            {"step_ms": 1000.0, **NOTHING},
            ("step of 1 s", "needs 64", "slowest decoding", "remedies none", "next nothing: "),
        ),
        ({"measured": [(LONG, [900.0] * 3)] * 9}, ("... (--json lists all)",)),
        ({"measured": [(RAW, None)]}, ("failed: raw pixels",)),
        # Noise forbids a verdict, and says how long one takes; then nothing is to be changed.
        (
            {"step_ms": 600.0, "rates": NOISY, "measured": [], **NOTHING},
            ("GPU may wait", "next repeat", "--budget 3m"),
        ),
        ({"step_ms": 600.0, "rates": NOISY}, ("next repeat",)),
        (
            {"rates": NOISY, "measured": [UNCLEAR], **NOTHING},
            ("too noisy to tell: raw pixels", "next repeat", "--budget 52s"),
        ),
        ({"step_ms": 640.0, "rates": NOISY}, ("next repeat the same command on an idle",)),
        # Other load.
        ({"load": BUSY}, ("trust low",)),
        ({"load": None, "rates": [60.0, 100.0, 110.0], "measured": []}, ("trust low",)),
        ({"load": HALF}, ("trust good for the verdict but low for the figures",)),
        ({"step_ms": 1000.0, "load": HALF, **NOTHING}, ("trust good; other programs only",)),
        # The cause.
        (
            {"found": crop()},
            ("the transform crop takes 91%", "(p50 10 ms, p95 20 ms)", "holds the GIL 97%"),
        ),
        ({"found": crop(busy=0.01)}, ("it waits (for a disk, a network,",)),
        ({"found": profile(read=stage(99))}, ("reading takes 92%",)),
        (
            {"found": profile(read=stage(8))},
            ("reading takes 47% of an image's time, decoding 47%",),
        ),
        ({"found": profile(kind="raw")}, ("copying raw pixels takes 80%",)),
        ({"found": crop(name="a\x1b[2J\nb")}, (r"a\x1b[2J\nb",)),
    ],
)
def test_what_is_said(given: dict[str, Any], facts: tuple[str, ...]) -> None:
    said = text(**given)
    assert said.isprintable()
    assert not [fact for fact in facts if fact not in said], said


def test_without_data_the_checks_are_listed_and_verbose_lists_all() -> None:
    assert report_lines(DoctorReport(subject=None, findings=FINDINGS)) == [
        "machine     warning: Pillow is slow; 1 check passed",
        "  warning   Pillow is slow (plain libjpeg): pip install pillow",
    ]
    lines = "\n".join(verbose_lines(report()))
    assert "decode          8 ms per image, 80%; computes 100% of it" in lines
    assert "ok        processors (8 workers)" in lines


def test_json_holds_everything() -> None:
    found = json.loads(json.dumps(report().as_dict()))

    assert found["subject"]["path"] == "made"
    assert found["diagnosis"]["status"] == "starved"
    assert found["diagnosis"]["remedies"][0]["rate"]["median"] == 1000
    assert found["profile"]["stages"]["decode"]["seconds"] == 0.008
