"""A change of fields killed at any call: readers see the old or new dataset, a rerun ends it."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest
from campaign import cases, points
from faulty import Bench, compiler
from helpers import FORMATS, jpeg, make_tree
from oracle import Case, Oracle, kill_points

from shardkit import open_dataset

pytestmark = pytest.mark.skipif(compiler() is None, reason="it needs Linux and gcc")

VERBS = ("add", "replace", "remove", "undo", "append")


class FieldOracle(Oracle):
    """Changes the fields of a dataset of two layers."""

    @property
    def tables(self) -> Path:
        return self.bench.folder / "tables"

    def prepare(self, before: Path) -> None:
        """Convert the images, and add a field to them."""
        made = before / "out"
        options = ("--to", self.case.to, "--shard-samples", "4", "--workers", "1")
        self.make("convert", "imagefolder", self._sources / self.case.source, made, *options)
        self.tables.mkdir(exist_ok=True)
        make_tree(self.tables.parent / "more", {"cat/new.jpg": jpeg(seed=90)})
        paths = sorted(open_dataset(made).paths)
        for name, values in (("first", "abc"), ("second", "xyz"), ("label", ("dog", "cow"))):
            rows = [f"{path},{values[n % len(values)]}{n}\n" for n, path in enumerate(paths)]
            if name == "label":
                rows = [f"{path},{values[n % 2]}\n" for n, path in enumerate(paths)]
            (self.tables / f"{name}.csv").write_text(f"path,{name}\n{''.join(rows)}")
        self.make("fields", "add", made, *self.given("first"))

    def given(self, name: str) -> list[object]:
        return ["--from", self.tables / f"{name}.csv", "--field", name, "--workers", "1"]

    @property
    def command(self) -> list[object]:
        """The command under test."""
        more: dict[str, list[object]] = {
            "add": self.given("second"),
            "replace": self.given("label"),
            "remove": ["first"],
        }
        if self.case.name == "append":
            options = ["--missing", "skip", "--workers", "1", "--json"]
            return ["append", self.target, "--from", self.tables.parent / "more", *options]
        return ["fields", self.case.name, self.target, *more.get(self.case.name, []), "--json"]


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    bench = Bench(tmp_path_factory.mktemp("crash-fields"))
    yield bench
    bench.close()


@pytest.mark.parametrize(("verb", "to"), cases(itertools.product(VERBS, FORMATS), len(VERBS)))
def test_a_killed_change_is_finished_by_the_same_command(bench: Bench, verb: str, to: str) -> None:
    case = Case(
        name=verb, source="photos", options=(), shards=1, older=True, others="notes.txt", to=to
    )
    oracle = FieldOracle(bench, case)
    for fault in kill_points(oracle, points(2, 20)):
        point = oracle.disturb(fault)
        assert point.outcome.killed, (fault, point.outcome.story())
        assert not point.wrong, (fault, point.wrong)
