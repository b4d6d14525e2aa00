"""A power cut at any call, on a disk that keeps only synced data."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace

import pytest
from campaign import cases, points
from faulty import Bench, compiler
from helpers import FORMATS
from oracle import NAMES, Oracles, cut_power, power_cuts

pytestmark = pytest.mark.skipif(compiler() is None, reason="it needs Linux and gcc")


@pytest.fixture(scope="module")
def oracles(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Oracles]:
    bench = Bench(tmp_path_factory.mktemp("power"))
    yield Oracles(bench)
    bench.close()


@pytest.mark.parametrize(("name", "to"), cases(itertools.product(NAMES, FORMATS), 3))
def test_what_a_power_cut_takes_is_made_again(oracles: Oracles, name: str, to: str) -> None:
    oracle = oracles.of(name, to)
    for at, cut in power_cuts(oracle, points(3, 20)):
        point = cut_power(oracle, at, cut)
        assert not point.wrong, (at, oracle.first.calls, cut, point.wrong)


@pytest.mark.parametrize("deaf", ["files", "folders"])
def test_without_its_syncs_a_dataset_would_be_lost(oracles: Oracles, deaf: str) -> None:
    oracle = oracles.of(NAMES[0], "webdataset")
    found: list[str] = []
    for at, cut in power_cuts(oracle, 0):
        found += cut_power(oracle, at, replace(cut, deaf=deaf)).wrong
    assert "a conversion that had succeeded was lost" in found
