"""`bench --steps`: the loaders, and their speedups."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
from bench_reports import result
from helpers import make_folder

from shardkit import bench, convert
from shardkit.measure.bench.steps import lines_of_steps, make_steps


def test_each_step_contains_all_before_it() -> None:
    steps = list(make_steps(4, 32, accelerator=True).values())
    options = [step.options for step in steps]
    assert options[0] == {"num_workers": 0}
    pairs = list(itertools.pairwise(options[:6]))
    for lower, upper in pairs[1:]:
        assert lower.items() <= upper.items()
    new = [set(upper) - set(lower) for lower, upper in pairs]
    assert new == [{"prefetch_factor"}, {"pin_memory"}, {"persistent_workers"}, set(), {"batched"}]
    assert [step.device for step in steps] == [None] * 4 + ["cuda"] * 3
    assert [step.engine for step in steps] == ["plain"] * 6 + ["auto"]
    assert options[6] == {"num_workers": 4}


def test_without_an_accelerator_steps_do_not_need_it() -> None:
    steps = make_steps(4, 32, accelerator=False)

    names = ["no workers", "+ 4 workers", "+ persistent workers", "+ batched __getitems__"]
    assert list(steps) == [*names, "+ shardkit's engine"]
    assert {step.device for step in steps.values()} == {None}
    assert steps[names[-1]].options.keys() >= {"persistent_workers", "batched"}


def test_a_line_is_compared_with_the_first_and_the_one_above() -> None:
    results = [result("a", rates=(rate, rate)) for rate in (100, 200, 300, 600)]
    results[2] = result("a", problem="a disk hangs")

    lines = lines_of_steps(["no workers", "+ a", "+ b", "+ c"], results)

    names = ["no workers", "+ a (2.00x the row above)", "+ b", "+ c"]
    assert [line.loader for line in lines] == names
    assert [line.baseline for line in lines] == [True, False, False, False]
    speedups = [line.measured and line.measured.speedup for line in lines]
    assert [each and each.median for each in speedups] == [None, 2, None, 6]


@pytest.mark.measures
def test_a_dataset_is_measured_with_a_model(tmp_path: Path) -> None:
    made = tmp_path / "made"
    convert(make_folder(tmp_path / "photos"), made, to="lmdb", workers=1)

    report = bench(
        [made],
        steps=True,
        decode="CenterCrop(8)",
        batch_size=2,
        model="small",
        rounds=1,
        seconds=0.03,
    )

    assert len(report.measured) == len(report.lines)
    assert report.lines[-1].title.endswith(" workers")
    assert 4 <= report.sources[0].images <= report.sources[0].total == 6
