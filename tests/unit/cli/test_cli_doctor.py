"""The report of `shardkit doctor` on made-up diagnoses: at most 16 lines that say what to do."""

from __future__ import annotations

import json
from typing import Any

import pytest
from diagnoses import facts, profile, setup, stage

from shardkit.cli.doctor_report import report_lines, verbose_lines
from shardkit.conversion.recipe import Recipe
from shardkit.measure.doctor.checks import run_checks
from shardkit.measure.doctor.doctor import DoctorReport
from shardkit.measure.doctor.groups import Group
from shardkit.measure.doctor.judgement import diagnose
from shardkit.measure.doctor.profile import Profile
from shardkit.measure.doctor.remedies import Remedy
from shardkit.measure.runner.spec import Subject
from shardkit.system.machine import OtherLoad

RAW = Remedy(name="raw pixels", what="raw pixels, 256x256", price="2.0x the space", recipe=Recipe())
FAST = Remedy(name='jpeg="fast"', what='decode with jpeg="fast"', code="...")
RATED = [(RAW, [900.0, 1000.0, 1100.0]), (FAST, [101.0, 99.0, 100.0])]


def report(
    *,
    step_ms: float | None = 80.0,
    found: Profile | None = None,
    rates: list[float] | None = None,
    measured: list[tuple[Remedy, list[float]]] = RATED,
    **changed: Any,
) -> DoctorReport:
    found = found or profile()
    needed = None if step_ms is None else 64000 / step_ms
    diagnosis = diagnose(
        found, rates or [95.0, 100.0, 105.0], measured, needed=needed, round_seconds=2.0
    )
    values: dict[str, Any] = {
        "subject": Subject(path="made"),
        "facts": facts(),
        "findings": run_checks(facts()),
        "images": 10_000,
        "sample": 256,
        "setup": setup(),
        "profile": found,
        "step_seconds": None if step_ms is None else step_ms / 1000,
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
GPU         waits 87% to 88% of the time: a step of 80 ms for a batch of 64 needs 800 images/s; the
            loader gives 100 (93 to 107)
cause       decoding takes 80% of an image's time (p50 8 ms, p95 16 ms); it computes and releases
            the GIL
remedies    images/s              GPU
            1,000 (865 to 1,156)  no wait   raw pixels, 256x256 (2.0x the space)
            no gain: jpeg="fast"
trust       good: other processes used 0.1 of 8 CPUs at the start; 3 rounds vary by 5%; 256 of
            10,000 images converted
machine     8 checks passed (--verbose lists all)
next        shardkit convert imagefolder SRC made-raw256
            SRC is the folder that made was converted from: photos"""
    )


@pytest.mark.parametrize(
    ("step_ms", "words"),
    [
        (32.0, "1,000 (865 to 1,156) waits 50% raw pixels"),
        (64.0, "1,000 (865 to 1,156) borderline raw pixels"),
        (None, "1,000 (865 to 1,156) 10.0x raw pixels"),
    ],
)
def test_a_remedy_says_whether_it_is_enough(step_ms: float | None, words: str) -> None:
    assert words in text(step_ms=step_ms)


def test_without_a_step_the_rate_is_stated() -> None:
    found = text(step_ms=None)

    assert "GPU unknown without a training step: the loader gives 100 (93 to 107)" in found
    assert "Add --step-ms T or --model" in found


def test_a_fed_gpu_needs_nothing() -> None:
    found = text(step_ms=1000.0, command="", hints=[])

    assert "GPU does not wait for data: a step of 1 s for a batch of 64 needs 64" in found
    assert "slowest decoding takes" in found
    assert "remedies none needed" in found
    assert "next nothing: faster loading would not make training faster" in found


def test_noise_forbids_a_verdict_and_says_how_long_it_takes() -> None:
    noisy = [80.0, 100.0, 120.0]
    found = text(step_ms=600.0, rates=noisy, command="", hints=[])
    assert "undecided, it waits 0% to 30% of the time" in found
    assert "(decisive: --budget 3m)" in found
    assert "next measure again on an idle machine" in found

    unclear = text(rates=noisy, measured=[(RAW, [60.0, 150.0, 400.0])])
    assert "remedies too noisy to tell (decisive: --budget 52s): raw pixels" in unclear
    assert "(too close for a longer run)" in text(step_ms=640.0, rates=noisy)


def test_a_busy_machine_is_not_to_be_trusted() -> None:
    assert "trust low, repeat on" in text(facts=facts(load=OtherLoad(busy=7.0, present=8)))
    assert "trust low, repeat on" in text(rates=[60.0, 100.0, 110.0], measured=[])


@pytest.mark.parametrize(
    ("found", "words"),
    [
        (
            profile(transform=stage(99), held=0.97),
            "the transform crop takes 91% of an image's time (p50 99 ms, p95 198 ms); it "
            "computes and holds the GIL 97% of that time, so threads do not help",
        ),
        (profile(transform=stage(99, busy=0.01)), "it waits, for a disk, a network or a sleep"),
        (profile(read=stage(99)), "reading takes 92% of an image's time"),
        (profile(transform=stage(8)), "and the transform crop 44%"),
        (
            profile(
                group=Group(
                    by="class", name="maps", images=0.1, time=0.83, kind="png", megapixels=12.0
                )
            ),
            "class 'maps' (10% of the images; PNG, 12.0 megapixels) takes 83% of that",
        ),
    ],
)
def test_the_cause_is_one_sentence(found: Profile, words: str) -> None:
    assert words in text(found=found, setup=setup(transform="crop")).replace("decoding 44%, ", "")


def test_many_remedies_do_not_exceed_the_screen() -> None:
    long = Remedy(name="long", what=" ".join(["word"] * 30), recipe=Recipe())

    assert "... (--json lists all)" in text(measured=[(long, [900.0] * 3)] * 9)


def test_a_remedy_that_cannot_be_measured_is_named() -> None:
    assert "failed: JPEGs" in text(failed=["JPEGs"])


def test_without_data_the_checks_are_listed() -> None:
    planted = facts(place=None, libjpeg_turbo=False)
    lines = report_lines(DoctorReport(subject=None, facts=planted, findings=run_checks(planted)))

    assert lines[0].startswith("machine     warning: Pillow lacks libjpeg-turbo")
    assert "pip install --force-reinstall pillow" in " ".join(lines)


def test_verbose_lists_stages_and_checks() -> None:
    lines = "\n".join(verbose_lines(report()))

    assert "decode          8 ms per image, 80%; p50 8 ms, p95 16 ms; 100% of it on a CPU" in lines
    assert "ok        processors (8 workers; affinity 8 of 8; quota none)" in lines
    assert "torch 2.7" in lines


def test_hostile_names_break_no_line() -> None:
    found = text(setup=setup(transform="a\x1b[2J\nb"), found=profile(transform=stage(99)))

    assert "\x1b" not in found


def test_json_holds_everything() -> None:
    found = json.loads(json.dumps(report().as_dict()))

    assert found["subject"]["path"] == "made"
    assert found["diagnosis"]["status"] == "starved"
    assert found["diagnosis"]["remedies"][0]["rate"]["median"] == 1000
    assert found["profile"]["stages"]["decode"]["seconds"] == 0.008
    assert "rows" not in found["profile"]
