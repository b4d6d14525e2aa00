"""Display of `shardkit doctor`: made-up reports on one screen and as JSON."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest
from diagnoses import change, measured, profile
from machines import facts

from shardkit.cli.doctor_report import as_json, show
from shardkit.measure.doctor.doctor import DoctorReport, DoctorRequest
from shardkit.measure.doctor.findings import ordered
from shardkit.measure.doctor.judgement import diagnose
from shardkit.measure.doctor.measured import Measured
from shardkit.measure.doctor.surroundings import check
from shardkit.measure.doctor.trial import Trial
from shardkit.measure.runner.spec import Subject
from shardkit.measure.runner.timing import Measurement


def report(given: Measured, **changed: Any) -> DoctorReport:
    diagnosis = diagnose(given, check(facts()))
    seen = Measurement(
        images=1,
        seconds=1.0,
        waits=(),
        first=0.0,
        cpu=0.0,
        memory=0,
        batch_bytes=0,
        engine="thread",
        reason="asked for",
        workers=2,
    )
    values: dict[str, Any] = {
        "request": request(),
        "facts": facts(),
        "findings": diagnosis.findings,
        "images": 9,
    }
    return DoctorReport(
        **{**values, "seen": seen, "measured": given, "diagnosis": diagnosis, **changed}
    )


def request(path: str = "made") -> DoctorRequest:
    return DoctorRequest(subject=Subject(path=path, decode="CenterCrop(8)"))


@pytest.fixture
def slow() -> Measured:
    """Decoding limits, and smaller images would help."""
    found = profile(
        warm={"decode": 0.0078}, skipped={"copy to the device": "no accelerator"}, cold_read=0.002
    )
    found = dataclasses.replace(
        found, warm={k: v for k, v in found.warm.items() if k != "copy to the device"}
    )
    return measured(profile=found, changes=[change()], rates=[250.0])


def told(capsys: pytest.CaptureFixture[str], given: DoctorReport, path: str = "made") -> str:
    show(dataclasses.replace(given, request=request(path)))
    return capsys.readouterr().out


def test_the_verdict_comes_first_and_the_command_last(
    slow: Measured, capsys: pytest.CaptureFixture[str]
) -> None:
    text = told(capsys, report(slow, command="shardkit convert imagefolder SRC b", source="photos"))
    lines = text.splitlines()

    assert lines[0].startswith("made: Decoding limits: it is 94 % of a sample's time (7.8 of 8.3")
    assert lines[-2] == "  next      shardkit convert imagefolder SRC b"
    assert lines[-1].strip() == "SRC is the folder that it was made from: photos"
    assert max(map(len, lines)) <= 100
    assert "250 images/s with 2 threads (asked for)" in text
    assert "no accelerator" in text
    assert "step " not in text
    assert "3.5 x  store smaller images (--resize 256)" in text


def test_missing_facts_are_left_out_and_a_class_file_is_reported(
    slow: Measured, capsys: pytest.CaptureFixture[str]
) -> None:
    unknown = dataclasses.replace(slow, single=None)
    text = told(capsys, report(unknown, command="shardkit convert", classes="python -c x > y"))

    assert "one worker" not in text
    assert text.splitlines()[-1].strip() == "python -c x > y"
    assert "with one worker" in told(capsys, report(slow))


def test_bars_are_as_long_as_their_part(slow: Measured, capsys: pytest.CaptureFixture[str]) -> None:
    lines = told(capsys, report(slow)).splitlines()
    (decode,) = [each for each in lines if each.strip().startswith("decode  ")]
    (read,) = [each for each in lines if each.strip().startswith("read  ")]

    assert decode.split() == ["decode", "7.800", "ms", "94", "%", "█" * round(24 * 0.94)]
    assert read.split() == ["read", "0.100", "ms", "2.000", "ms", "1", "%"]


def test_a_cold_time_that_counts_is_marked(
    slow: Measured, capsys: pytest.CaptureFixture[str]
) -> None:
    large = dataclasses.replace(slow, bytes=slow.memory)
    text = told(capsys, report(large))

    (read,) = [each for each in text.splitlines() if each.strip().startswith("read  ")]
    assert read.endswith("(cold)")
    assert "20 %" in read


def test_a_step_is_reported_with_its_part(
    slow: Measured, capsys: pytest.CaptureFixture[str]
) -> None:
    text = told(capsys, report(dataclasses.replace(slow, step=0.128)))

    assert "128 ms a batch: 500 images/s, of which the loader gives 0.5 x" in text


def test_hostile_names_break_no_line(slow: Measured, capsys: pytest.CaptureFixture[str]) -> None:
    text = told(capsys, report(slow, command="shardkit x"), "a\x1b[2J\nb")

    assert "\x1b" not in text
    assert text.startswith("a\\x1b[2J\\nb: Decoding")


def test_a_terminal_without_blocks_gets_plain_characters(
    slow: Measured, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("shardkit.cli.doctor_report.can_show", str.isascii)
    text = told(capsys, report(slow))

    assert "#" * 22 in text
    assert text.isascii()


def test_a_trial_that_helps_is_reported(slow: Measured, capsys: pytest.CaptureFixture[str]) -> None:
    trial = Trial(
        images=64,
        batch_size=8,
        before=100.0,
        after=310.0,
        ratios=(3.0, 3.1, 3.2),
        bytes_before=100,
        bytes_after=30,
    )
    text = told(capsys, report(slow, trial=trial, command="shardkit convert"))

    assert "trial     3.10x (3.00x to 3.20x in 3 rounds) on 64 images in batches of 8" in text
    assert "does not help" not in text
    none = told(capsys, report(slow, trial_note="no conversion was found that would help"))
    assert "trial     none: no conversion was found" in none


def test_json_holds_all_of_it(slow: Measured) -> None:
    trial = Trial(
        images=64,
        batch_size=8,
        before=1.0,
        after=3.0,
        ratios=(3.0,),
        bytes_before=9,
        bytes_after=3,
    )
    found = json.loads(json.dumps(as_json(report(slow, trial=trial))))

    assert found["subject"]["path"] == "made"
    assert found["diagnosis"]["bottleneck"] == "decode"
    assert found["measured"]["profile"]["warm"]["decode"] == 0.0078
    assert found["measured"]["changes"][0]["recipe"]["resize"] == [256, 256]
    assert found["facts"]["memory"] == facts().memory
    assert found["trial"]["gain"] == 3
    assert "waits" not in found["seen"]
    alone = as_json(DoctorReport(request=DoctorRequest(), facts=facts(), findings=check(facts())))
    assert alone["subject"] is alone["seen"] is alone["trial"] is None


@pytest.mark.parametrize(
    ("changed", "text"),
    [
        ({}, "this machine: nothing stands in the way"),
        ({"turbojpeg": False}, "this machine: nothing stands in the way"),
        ({"libjpeg_turbo": False}, "this machine: something costs speed here"),
    ],
)
def test_the_machine_only(
    changed: dict[str, Any], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    given = facts(place=None, **changed)
    show(DoctorReport(request=DoctorRequest(), facts=given, findings=ordered(check(given))))

    assert capsys.readouterr().out.startswith(f"{text}\n")
