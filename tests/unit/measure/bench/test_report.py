"""Reports of made-up measurements: numbers, answers and doubts."""

from __future__ import annotations

import dataclasses
import json
import math

import pytest
from bench_reports import OPENED, hostile, report, result, usual

from shardkit.measure.bench.report import BenchReport
from shardkit.measure.runner.other_load import OtherLoad


def test_the_table_shows_the_ratio_beside_the_rate() -> None:
    lines = usual().describe().splitlines()

    assert (
        "    warm       200       160..250  2.00x   2.00..2.00    10.0    10.0  20%     0.50"
        in "\n".join(lines)
    )
    assert "    warm       100        80..125      -            -" in "\n".join(lines)
    assert lines[-1] == (
        "Converting makes loading 2.00x as fast from memory and 3.00x as fast from disk."
    )
    shown = hostile().describe().splitlines()
    assert max(map(len, lines + shown)) <= 100
    assert all(line.isprintable() for line in shown)


def test_a_noisy_ratio_is_not_an_answer() -> None:
    """The median rate is 2.5 times as high, but only because of one round."""
    made = report(
        result("photos", rates=(100, 100, 300)),
        result("dataset", rates=(90, 250, 270)),
        folders=["photos"],
    )

    assert made.headline == (
        "Converting makes loading not clearly faster or slower from memory "
        "(0.90x (0.90x to 2.50x in 3 rounds))."
    )


SLOW, FAST = result("a"), result("a", "thread", rates=(300, 300, 300))
PHOTOS, LOST = result("photos"), result("photos", problem="the disk is gone")
TWICE = result("dataset", rates=(200, 200, 200))


@pytest.mark.parametrize(
    ("made", "facts"),
    [
        (report(SLOW, FAST), ("best loader", "3.00x as fast from memory")),
        (report(FAST, SLOW), ("0.33x as fast",)),
        (report(FAST), ("300 images/s from memory",)),
        (report(result("a", rates=(1,)), complete=1), ("1 image/s from memory",)),
        # A folder read in another way is not a conversion.
        (
            report(
                PHOTOS,
                result("photos", "process", rates=(900, 900, 900)),
                TWICE,
                folders=["photos"],
            ),
            ("Converting", "2.00x as fast from memory"),
        ),
        (report(LOST, result("dataset"), folders=["photos"]), ("Nothing", "the lines")),
        (report(LOST), ("Nothing",)),
    ],
)
def test_the_answer(made: BenchReport, facts: tuple[str, ...]) -> None:
    assert not [fact for fact in facts if fact not in made.headline], made.headline


@pytest.mark.parametrize(("resident", "shown"), [(1.0, "100%"), (None, "an unknown fraction")])
def test_files_that_stayed_cached_are_not_cold(resident: float | None, shown: str) -> None:
    cold = result("dataset", cache="cold", rates=(900, 900, 900), resident=resident)
    other = result("photos", cache="cold", resident=0.0)
    made = report(PHOTOS, other, TWICE, cold, folders=["photos"])

    assert made.headline.endswith(" 2.00x as fast from memory.")
    assert [each for each in made.details if each.startswith(f"cold: {shown} of dataset ")]
    assert "900 images/s from memory" in report(cold).headline


MANY = dataclasses.replace(OPENED, total=5000)


@pytest.mark.parametrize(
    ("made", "facts"),
    [
        (report(LOST, result("dataset"), folders=["photos"]), ["1 of 2 lines could not"]),
        (
            report(
                result("a", opened=MANY, rates=(100, 200)),
                result("a", "auto", opened=MANY, rates=(100, 100)),
                rounds=2,
                complete=2,
            ),
            ["1,000 of 5,000 images of a", "1 of 2 lines vary by more than 1.6x"],
        ),
        (
            dataclasses.replace(usual(), load=OtherLoad(busy=1.5, present=2)),
            ["Other processes used 1.5 of 2 CPUs"],
        ),
        (report(SLOW, interrupted=True, complete=3, rounds=5), ["Interrupted: ", "3 of 5 rounds"]),
    ],
)
def test_failures_samples_noise_and_interruptions_are_doubts(
    made: BenchReport, facts: list[str]
) -> None:
    assert made.details
    assert not [fact for fact in facts if fact not in " ".join(made.details)], made.details
    assert made.failed == ("could not" in facts[0])
    assert ("failed: the disk is gone" in made.table()) == made.failed


def test_a_split_is_named() -> None:
    opened = dataclasses.replace(OPENED, split="train\x1b")

    assert "dataset, split train\\x1b, 1,000 images" in report(result("a", opened=opened)).table()


def test_the_table_ends_with_the_settings() -> None:
    for settings, sample, step in (
        (
            {},
            "CenterCrop(8), batches of 10, in random order",
            "none: batches are read and discarded",
        ),
        ({"step_ms": 2.5}, "CenterCrop(8), batches", "a 2.5 ms wait for each batch"),
        ({"transform": "a:b"}, "CenterCrop(8) then a:b, batches", "none: "),
        ({"model": "small"}, "CenterCrop(8), batches", "training small with each batch"),
    ):
        lines = report(SLOW, **settings).table().splitlines()
        assert lines[-3].startswith(f"  sample    {sample}")
        assert lines[-2].startswith(f"  step      {step}")


def test_it_is_json() -> None:
    made = usual()
    line, found = made.measured[0]
    odd = dataclasses.replace(line, measured=dataclasses.replace(found, wait_p50=math.nan))
    value = dataclasses.replace(made, lines=(odd, *made.lines[1:])).as_dict()

    assert json.loads(json.dumps(value, allow_nan=False))["headline"].startswith("Converting")
    assert value["lines"][0]["measured"]["wait_p50"] is None
    assert value["lines"][2]["measured"]["speedup"]["median"] == 2
    assert value["environment"]["versions"]["torch"]
