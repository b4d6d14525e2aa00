"""Reports of made-up measurements: numbers, answers and doubts."""

from __future__ import annotations

import dataclasses
import json
import math

import pytest
from bench_reports import OPENED, hostile, report, result, usual

from shardkit.system.machine import OtherLoad


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


def test_the_answer_about_loaders_of_one_dataset() -> None:
    slow, fast = result("a"), result("a", "thread", rates=(300, 300, 300))

    assert report(slow, fast).headline == (
        "Compared with the baseline, the best loader is 3.00x as fast from memory."
    )
    assert "0.33x as fast" in report(fast, slow).headline
    assert report(fast).headline == "It reads 300 images/s from memory."
    one = report(result("a", rates=(1,)), complete=1)
    assert one.headline == "It reads 1 image/s from memory."
    assert "  measured  1 round of " in one.describe()


def test_a_folder_read_in_another_way_is_not_a_conversion() -> None:
    made = report(
        result("photos"),
        result("photos", "process", rates=(900, 900, 900)),
        result("dataset", rates=(200, 200, 200)),
        folders=["photos"],
    )

    assert made.headline == "Converting makes loading 2.00x as fast from memory."


@pytest.mark.parametrize(("resident", "shown"), [(1.0, "100%"), (None, "an unknown fraction")])
def test_files_that_stayed_cached_are_not_cold(resident: float | None, shown: str) -> None:
    cold = result("dataset", cache="cold", rates=(900, 900, 900), resident=resident)
    made = report(
        result("photos", rates=(100, 100, 100)),
        result("photos", cache="cold", resident=0.0),
        result("dataset", rates=(200, 200, 200)),
        cold,
        folders=["photos"],
    )

    assert made.headline == "Converting makes loading 2.00x as fast from memory."
    assert f"cold: {shown} of dataset stayed cached, not read from disk." in made.details
    assert report(cold).headline == "It reads 900 images/s from memory."


def test_failures_are_reported() -> None:
    lost = result("photos", problem="the disk is gone")
    made = report(lost, result("dataset"), folders=["photos"])

    assert made.failed
    assert made.headline == "Nothing can be compared; the lines show why."
    assert made.details == ("1 of 2 lines could not be measured.",)
    assert "failed: the disk is gone" in made.table()
    assert report(lost).headline == "Nothing could be measured."


def test_samples_rounds_interruptions_and_other_load_are_doubts() -> None:
    many = dataclasses.replace(OPENED, total=5000)
    made = report(
        result("a", opened=many, rates=(100, 200)),
        result("a", "auto", opened=many, rates=(100, 100)),
        rounds=2,
        complete=2,
    )
    assert made.details == (
        "1,000 of 5,000 images of a were read.",
        "1 of 2 lines vary by more than 1.6x between rounds: measure again on an idle machine.",
    )
    busy = dataclasses.replace(usual(), load=OtherLoad(busy=1.5, present=2))
    assert busy.details == (
        "Other processes used 1.5 of 2 CPUs at the start: measure again on an idle machine.",
    )
    ended = report(result("a"), interrupted=True, complete=3, rounds=5)
    assert ended.details == ("Interrupted: the table shows 3 of 5 rounds.",)


def test_a_split_is_named() -> None:
    opened = dataclasses.replace(OPENED, split="train\x1b")

    assert "dataset, split train\\x1b, 1,000 images" in report(result("a", opened=opened)).table()


def test_it_is_json() -> None:
    made = usual()
    line, found = made.measured[0]
    odd = dataclasses.replace(line, measured=dataclasses.replace(found, wait_p50=math.nan))
    value = dataclasses.replace(made, lines=(odd, *made.lines[1:])).as_dict()

    assert json.loads(json.dumps(value, allow_nan=False))["headline"].startswith("Converting")
    assert value["lines"][0]["measured"]["wait_p50"] is None
    assert value["lines"][2]["measured"]["speedup"]["median"] == 2
    assert value["environment"]["versions"]["torch"]
