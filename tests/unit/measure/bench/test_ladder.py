"""The ladder: its rungs, their speedups, and the report."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
from bench_reports import result
from helpers import make_dataset, make_folder

from shardkit.errors import MeasurementFailed
from shardkit.measure.bench.ladder import (
    LadderReport,
    compare,
    ladder,
    make_rungs,
)
from shardkit.system.machine import OtherLoad


def test_each_rung_contains_all_below_it() -> None:
    rungs = make_rungs(4, 32, accelerator=True)
    options = [rung.loader.options for rung in rungs]
    assert options[0] == {"num_workers": 0}
    pairs = list(itertools.pairwise(options[:6]))
    for lower, upper in pairs[1:]:
        assert lower.items() <= upper.items()
    new = [set(upper) - set(lower) for lower, upper in pairs]
    assert new == [{"prefetch_factor"}, {"pin_memory"}, {"persistent_workers"}, set(), {"batched"}]
    assert [rung.loader.device for rung in rungs] == [None] * 4 + ["cuda"] * 3
    assert [rung.loader.engine for rung in rungs] == ["plain"] * 6 + ["auto"]
    assert options[6] == {"num_workers": 4}


def test_without_an_accelerator_rungs_do_not_need_it() -> None:
    rungs = make_rungs(4, 32, accelerator=False)

    names = ["no workers", "4 workers, prefetch 2", "persistent workers", "batched __getitems__"]
    assert [rung.name for rung in rungs] == [*names, "shardkit's engine"]
    assert {rung.loader.device for rung in rungs} == {None}
    assert rungs[3].loader.options.keys() >= {"persistent_workers", "batched"}


def report_of(*rates: tuple[float, ...], failed: int | None = None) -> LadderReport:
    """Return a report of the five rungs without an accelerator."""
    rungs = make_rungs(4, 32, accelerator=False)
    results = [
        result("a", rates=each, problem="a disk\nhangs" if number == failed else "")
        for number, each in enumerate(rates)
    ]
    compare(rungs[: len(results)], results)
    return LadderReport(
        name="tutorial",
        images=512,
        rows=256,
        epochs=10,
        batch_size=32,
        workers=4,
        accelerator=False,
        rounds=len(rates[0]),
        model="small",
        step_seconds=0.016,
        rungs=rungs,
        load=OtherLoad(busy=0.1, present=2),
        interrupted=False,
    )


def test_speedups_are_over_the_baseline_and_the_last_measured_rung() -> None:
    rates = (90, 100, 150), (180, 200, 300), (540, 600, 900), (500,) * 3, (900, 1000, 1500)
    report = report_of(*rates)

    speedups = [rung.speedup.median if rung.speedup else None for rung in report.rungs]
    previous = [rung.over_previous.median if rung.over_previous else None for rung in report.rungs]
    assert speedups == [None, 2, 6, 5, 10]
    assert previous == [None, 2, 3, pytest.approx(500 / 600), 2]
    assert report.conclusion == (
        "10.0x with shardkit's engine (plain); largest improvement: persistent workers, 3.0x; "
        "the model alone trains 2,000 images/s"
    )
    assert not report.failed
    shown = report.describe()
    assert "tutorial: 256 of 512 images, 10 epochs, batches of 32, training small" in shown
    row = "+ persistent workers              600    6.00x    6.00..6.00       3.00x"
    assert row in shown
    assert "persistent workers gain less" in shown
    assert "no accelerator: without pinned memory" in shown
    assert "rates varied by up to" in shown


def test_a_rung_that_fails_is_reported_and_the_next_compares_with_the_one_below() -> None:
    report = report_of((100,), (200,), (300,), (400,), (600,), failed=3)

    assert report.failed
    assert report.rungs[-1].over_previous is not None
    assert report.rungs[-1].over_previous.median == 2
    assert r"note      batched __getitems__ failed: a disk\nhangs" in report.describe()
    with pytest.raises(MeasurementFailed, match="the baseline failed"):
        report_of((100,), (200,), failed=0)


def test_no_speedup_is_no_improvement() -> None:
    report = report_of((100,), (101,), (109,), (90,), (80,))

    assert report.conclusion.startswith("no improvement makes it faster")


@pytest.mark.slow
def test_a_dataset_is_measured_with_a_model(tmp_path: Path) -> None:
    made = make_dataset(make_folder(tmp_path / "photos"), tmp_path / "made")

    report = ladder(
        made, decode="CenterCrop(8)", batch_size=2, workers=1, model="small", rounds=1, seconds=0.1
    )

    assert all(rung.images_per_second for rung in report.rungs)
    assert report.rungs[-1].name == "shardkit's engine (thread)"
    assert (report.images, report.rows, report.step_seconds is not None) == (6, 6, True)
