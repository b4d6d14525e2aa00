"""The report of `shardkit doctor` on made-up diagnoses: at most 16 lines that say what to do."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest
from diagnoses import profile, setup, stage

from shardkit.cli.doctor_report import report_lines, verbose_lines
from shardkit.measure.doctor.checks import Finding
from shardkit.measure.doctor.doctor import DoctorReport
from shardkit.measure.doctor.judgement import Measured, diagnose
from shardkit.measure.doctor.pipeline import Remedy
from shardkit.measure.doctor.profile import Profile
from shardkit.measure.doctor.stored import Group
from shardkit.measure.runner.spec import Subject
from shardkit.recipe import Recipe
from shardkit.system.machine import OtherLoad

BASE = [95.0, 100.0, 105.0]
RAW = Remedy(name="raw pixels, 256x256", price="2.0x the space", recipe=Recipe())
FAST = Remedy(name='jpeg="fast"', code="...")
RATED = [(RAW, [900.0, 1000.0, 1100.0]), (FAST, [101.0, 99.0, 100.0])]
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
        "command": "shardkit convert imagefolder SRC made-raw256",
        "hints": ["SRC is the folder that made was converted from: photos"],
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
            loader (8 threads) gives 100 (93 to 107)
cause       decoding takes 80% of an image's time (p50 10 ms, p95 20 ms); it computes without the
            GIL, so threads suit it
remedies    images/s              800 needed
            1,000 (865 to 1,156)  enough  raw pixels, 256x256 (2.0x the space)
            no gain: jpeg="fast"
trust       good: other programs used 0.1 of 8 CPUs; 3 rounds vary by 5%; conversions were tried
            with 1 of 10,000 images
machine     1 check passed (--verbose lists all)
next        shardkit convert imagefolder SRC made-raw256
            SRC is the folder that made was converted from: photos"""
    )


@pytest.mark.parametrize(
    ("step_ms", "words"),
    [
        (32.0, "1,000 (865 to 1,156) still waits 50% raw pixels"),
        (32.0, "that is not enough, and nothing else that was measured is"),
        (64.0, "1,000 (865 to 1,156) uncertain raw pixels"),
        (None, "1,000 (865 to 1,156) 10.0x raw pixels"),
    ],
)
def test_a_remedy_says_whether_it_is_enough(step_ms: float | None, words: str) -> None:
    assert words in text(step_ms=step_ms)


def test_without_a_step_the_rate_is_stated() -> None:
    found = text(step_ms=None)

    assert "GPU waits if a training step with a batch of 64 takes less than" in found
    assert "the loader (8 threads) gives 100" in found
    assert "add --step-ms T or --model" in found


def test_a_fed_gpu_needs_nothing() -> None:
    found = text(step_ms=1000.0, command="", hints=[])

    assert "GPU does not wait for data: a step of 1 s with a batch of 64 needs 64" in found
    assert "slowest decoding takes" in found
    assert "remedies none needed" in found
    assert "next nothing: faster loading would not make training faster" in found


def test_noise_forbids_a_verdict_and_says_how_long_it_takes() -> None:
    noisy = [80.0, 100.0, 120.0]
    found = text(step_ms=600.0, rates=noisy, measured=[], command="", hints=[])
    assert "GPU may wait, the rounds differ too much to tell" in found
    assert "next repeat the same command with --budget 3m on an idle machine" in found
    # Nothing is to be changed for a verdict that may be wrong.
    assert "next repeat the same" in text(step_ms=600.0, rates=noisy)

    unclear = text(rates=noisy, measured=[(RAW, [60.0, 150.0, 400.0])], command="", hints=[])
    assert "remedies too noisy to tell: raw pixels" in unclear
    assert "next repeat the same command with --budget 52s" in unclear
    assert "next repeat the same command on an idle machine" in text(step_ms=640.0, rates=noisy)


def test_a_busy_machine_is_not_to_be_trusted() -> None:
    busy = OtherLoad(busy=7.0, present=8)
    assert "trust low, repeat on" in text(load=busy)
    assert "trust low, repeat on" in text(load=None, rates=[60.0, 100.0, 110.0], measured=[])


def test_a_busy_machine_does_not_change_a_clear_verdict() -> None:
    half = OtherLoad(busy=4.0, present=8)
    assert "trust good for the verdict, low for the figures" in text(load=half)
    fed = text(step_ms=1000.0, load=half, command="", hints=[])
    assert "trust good, other programs only slow it down" in fed


def slow_transform(busy: float = 1.0, name: str = "crop") -> Profile:
    return profile(transform=stage(99, busy), held=0.97, setup=setup(transform=name))


@pytest.mark.parametrize(
    ("found", "words"),
    [
        (
            slow_transform(),
            "the transform crop takes 91% of an image's time (p50 10 ms, p95 20 ms); it "
            "computes and holds the GIL 97% of that time, so threads do not help",
        ),
        (slow_transform(busy=0.01), "it waits (for a disk, a network, a lock or a sleep)"),
        (profile(read=stage(99)), "reading takes 92% of an image's time"),
        (profile(read=stage(8)), "reading takes 47% of an image's time, decoding 47%"),
        (profile(kind="raw"), "copying raw pixels takes 80%"),
        (
            profile(
                group=Group(
                    by="class", name="maps", images=0.1, time=0.83, kind="png", megapixels=12.0
                )
            ),
            "class 'maps' (10% of the images; PNG, 12.0 megapixels) takes 83% of the time",
        ),
    ],
)
def test_the_cause_is_one_sentence(found: Profile, words: str) -> None:
    assert words in text(found=found)


def test_many_remedies_do_not_exceed_the_screen() -> None:
    long = Remedy(name=" ".join(["word"] * 30), recipe=Recipe())

    assert "... (--json lists all)" in text(measured=[(long, [900.0] * 3)] * 9)


def test_a_remedy_that_cannot_be_measured_is_named() -> None:
    assert "failed: raw pixels" in text(measured=[(RAW, None)])


def test_without_data_the_checks_are_listed() -> None:
    lines = report_lines(DoctorReport(subject=None, findings=FINDINGS))

    assert lines == [
        "machine     warning: Pillow is slow; 1 check passed",
        "  warning   Pillow is slow (plain libjpeg): pip install pillow",
    ]


def test_verbose_lists_stages_and_checks() -> None:
    lines = "\n".join(verbose_lines(report()))

    assert "decode          8 ms per image, 80%; computes 100% of it" in lines
    assert "ok        processors (8 workers)" in lines


def test_hostile_names_break_no_line() -> None:
    assert "\x1b" not in text(found=slow_transform(name="a\x1b[2J\nb"))


def test_json_holds_everything() -> None:
    found = json.loads(json.dumps(report().as_dict()))

    assert found["subject"]["path"] == "made"
    assert found["diagnosis"]["status"] == "starved"
    assert found["diagnosis"]["remedies"][0]["rate"]["median"] == 1000
    assert found["profile"]["stages"]["decode"]["seconds"] == 0.008
