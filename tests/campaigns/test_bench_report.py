"""What a report says: statistics of made-up rounds, and the words of the answer."""

from __future__ import annotations

import dataclasses
import json
import math

import pytest
from bench_reports import outcome, report, usual

from shardkit.measure.bench.report import Spread, percentile
from shardkit.system.machine import OtherLoad


@pytest.mark.parametrize(
    ("percent", "value"), [(50, 50.0), (95, 95.0), (99, 99.0), (100, 100.0), (1, 1.0)]
)
def test_a_percentile_is_one_of_the_values(percent: int, value: float) -> None:
    assert percentile([float(each) for each in range(1, 101)], percent) == value


def test_percentiles_of_few_values() -> None:
    assert percentile([3.0], 50) == percentile([3.0], 99) == 3.0
    assert percentile([1.0, 2.0], 50) == 1.0
    assert percentile([1.0, 2.0], 95) == 2.0
    assert math.isnan(percentile([], 50))


def test_numbers_of_a_line() -> None:
    found = usual().lines[2].measured
    assert found is not None

    assert found.images_per_second == Spread(median=200, lowest=160, highest=250)
    assert list(found.rounds) == [200, 250, 160]
    assert found.megabytes_per_second == pytest.approx(200 * 0.05)
    assert [found.wait_p50, found.wait_p95, found.wait_p99] == [10, 10, 10]
    assert found.batches == 300
    assert found.processors == pytest.approx(1.5)
    assert found.processors_per_worker == pytest.approx(0.5)
    assert found.peak_memory == 300 << 20
    assert found.peak_memory_per_worker == 200 << 20
    seconds = 1000 / 200 + 1000 / 250 + 1000 / 160
    assert found.waiting == pytest.approx(300 * 0.01 / seconds)


def test_a_gain_compares_round_with_round() -> None:
    """The machine became four times as fast; the dataset was twice as fast all the time."""
    made = report(outcome("a", rates=(100, 200, 400)), outcome("b", rates=(200, 400, 800)))
    found = made.lines[1].measured
    assert found is not None

    assert found.gain == Spread(median=2, lowest=2, highest=2)


def test_the_answer_about_a_folder() -> None:
    made = usual()

    assert made.against_folder
    assert made.headline == (
        "Converting makes loading 2.0 x as fast from memory and 3.0 x as fast from disk."
    )
    assert made.details == (
        "warm: dataset with auto, compared with photos with plain:num_workers=2: "
        "2.00x (2.00x to 2.00x in 3 rounds).",
        "cold: dataset with auto, compared with photos with plain:num_workers=2: "
        "3.00x (3.00x to 3.00x in 3 rounds).",
    )
    assert not made.failed


def test_on_a_noisy_machine_the_figures_of_the_verdict_are_shown() -> None:
    """The median rate is 2.5 times as high, but only because of one round: 0.9x is the verdict."""
    made = report(
        outcome("photos", rates=(100, 100, 300)),
        outcome("dataset", rates=(90, 250, 270)),
    )

    (text, *_) = made.details
    assert text.endswith(": 0.90x (0.90x to 2.50x in 3 rounds).")
    assert "250" not in text
    assert "no more than the first line" in made.headline


def test_no_gain_is_claimed_within_the_spread() -> None:
    made = report(
        outcome("photos", rates=(100, 100, 100)),
        outcome("dataset", rates=(95, 110, 112)),
        folders=["photos"],
    )

    assert made.headline == (
        "Converting makes loading neither faster nor slower from memory, beyond what the rounds "
        "differ by."
    )


def test_a_loss_is_told() -> None:
    made = report(outcome("photos"), outcome("dataset", rates=(50, 52, 48)), folders=["photos"])

    assert made.headline == "Converting makes loading 0.5 x as fast from memory."


def test_the_answer_about_loaders_of_one_dataset() -> None:
    slow, fast = outcome("a"), outcome("a", "thread", rates=(300, 300, 300))

    assert report(slow, fast).headline == (
        "The best of the others gives 3.0 x as much as the first line from memory."
    )
    assert report(fast, slow).headline == (
        "The best of the others gives no more than the first line from memory."
    )
    assert report(fast).headline == "It gives 300 images/s from memory."


def test_a_folder_read_in_another_way_is_no_conversion() -> None:
    made = report(
        outcome("photos"),
        outcome("photos", "process", rates=(900, 900, 900)),
        outcome("dataset", rates=(200, 200, 200)),
        folders=["photos"],
    )

    assert made.headline == "Converting makes loading 2.0 x as fast from memory."


def test_files_that_stayed_in_memory_are_not_taken_for_cold() -> None:
    made = report(
        outcome("photos", rates=(100, 100, 100)),
        outcome("photos", cache="cold", resident=0.0),
        outcome("dataset", rates=(200, 200, 200)),
        outcome("dataset", cache="cold", rates=(900, 900, 900), resident=1.0),
        folders=["photos"],
    )
    alone = report(outcome("dataset", cache="cold", resident=0.5))

    assert made.headline == "Converting makes loading 2.0 x as fast from memory."
    assert any("100% of dataset stayed in memory" in text for text in made.details)
    assert alone.headline == "Nothing was read from disk: the files stayed in memory."


def test_what_the_system_does_not_tell_is_no_cold_reading_and_no_warm_one() -> None:
    alone = report(outcome("dataset", cache="cold", resident=None))

    assert alone.headline.startswith("Whether anything was read from disk is not known")
    assert any("it is not known whether dataset was read from disk" in t for t in alone.details)
    assert "%" not in "".join(alone.details)


def test_what_is_no_number_is_null_in_json() -> None:
    made = report(outcome("photos"))
    found = made.lines[0].measured
    assert found is not None
    odd = dataclasses.replace(found, rounds=(math.inf, 100.0, math.nan), wait_p50=math.nan)
    line = dataclasses.replace(made.lines[0], measured=odd)

    text = json.dumps(dataclasses.replace(made, lines=(line,)).as_dict(), allow_nan=False)

    told = json.loads(text)["lines"][0]["measured"]
    assert (told["rounds"], told["wait_p50"]) == ([None, 100.0, None], None)


def test_failures_are_told() -> None:
    lost = outcome("photos", problem="the disk is gone")
    made = report(lost, outcome("dataset"), folders=["photos"])

    assert made.failed
    assert made.headline == "Nothing can be compared; the lines tell why."
    assert made.details == ("1 of 2 lines could not be measured.",)
    assert report(lost).headline == "Nothing could be measured."


def test_a_sample_few_rounds_and_a_step_are_told() -> None:
    made = report(
        outcome("a", total=5000), outcome("a", "auto", total=5000), rounds=2, step_ms=10.0
    )

    assert "1,000 of 5,000 images of a were read." in made.details
    assert any("One or two rounds" in text for text in made.details)
    assert any("waits for data 10% and 10% of the time" in text for text in made.details)


def test_a_split_is_named() -> None:
    first = report(outcome("a", split="train\x1b")).sources[0]

    assert first.what == "dataset, split train\\x1b"
    assert report(outcome("a")).sources[0].what == "dataset"


def test_a_machine_that_others_use_is_told() -> None:
    made = report(outcome("a", rates=(100, 100, 200)), outcome("a", "auto"))

    assert any("In 1 of 2 lines the rounds differ" in text for text in made.details)

    steady = report(outcome("a"), outcome("a", "auto"))
    busy = dataclasses.replace(steady, load=OtherLoad(busy=1.5, present=2))
    assert "Other processes used 1.5 of 2 CPUs at the start: measure again when it is idle." in (
        busy.details
    )
    assert not any("Others" in text for text in steady.details)


def test_it_is_json_values() -> None:
    value = usual().as_dict()

    assert json.loads(json.dumps(value, allow_nan=False)) == json.loads(json.dumps(value))
    assert value["headline"].startswith("Converting")
    assert value["lines"][0]["measured"]["gain"]["median"] == 1
    assert value["lines"][0]["baseline"] is True
    assert value["environment"]["versions"]["torch"]
