"""A kind of field is one module: nothing else needs to know it."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from refusals import refused

from shardkit import Field, Sample, convert, export, open_dataset, verify
from shardkit.dataset.shardset import open_shards
from shardkit.kinds import field as fields
from shardkit.kinds.field import KINDS, Kind, Packed, Stack, all_kinds, get_kind
from shardkit.reporting.records import describe_record

PACKAGE = Path(fields.__file__).parents[1]


class Interval(Kind):
    """Start and length, given as a pair."""

    name = "interval"
    is_named_so = True
    column_type = np.dtype("<f8")
    is_variable = True

    def pack(self, name: str, field: Field, value: Any) -> tuple[None, Any]:
        start, stop = value
        if stop < start:
            raise ValueError(f"it stops at {stop}, before {start}")
        return None, [float(start), float(stop)]

    def width(self, field: Field) -> int:
        return 2

    def pack_column(self, field: Field, value: Any) -> Packed:
        return Packed(np.array(value, "<f8").tobytes())

    def is_listed(self, field: Field) -> bool:
        return False

    def stack(
        self, field: Field, values: npt.NDArray[Any], ends: npt.NDArray[np.int64] | None
    ) -> Stack:
        return Stack(np.array(values.reshape(-1, 2)))


@pytest.fixture
def interval(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fields, "KINDS", (*KINDS, Interval.name))
    known = get_kind
    monkeypatch.setattr(
        fields, "get_kind", lambda name: Interval() if name == Interval.name else known(name)
    )


@pytest.mark.usefixtures("interval")
@pytest.mark.parametrize("to", ["lmdb", "hdf5", "webdataset"])
def test_a_new_kind_is_converted_verified_read_and_exported(tmp_path: Path, to: Any) -> None:
    samples = [Sample(f"r{n}", interval=(n, n + 0.5), number=n) for n in range(5)]

    convert(samples, tmp_path / "out", to=to, schema={"interval": Field("interval")}, workers=1)

    assert verify(tmp_path / "out", level="decode").ok
    dataset = open_dataset(tmp_path / "out", fields=("interval", "number"))
    (found, numbers) = dataset.__getitems__([0, 1, 2, 3, 4]).batch
    assert torch.equal(found[:, 0], numbers.double())
    assert torch.equal(found[:, 1], numbers + 0.5)
    shards = open_shards(tmp_path / "out")
    row = [*shards.keys].index("r3")
    assert describe_record(shards, row)["fields"]["interval"] == [3.0, 3.5]
    export(tmp_path / "out", tmp_path / "table", layout="parquet")


@pytest.mark.usefixtures("interval")
def test_a_bad_value_of_a_new_kind_is_named(tmp_path: Path) -> None:
    with refused(Exception, "1", "2"):
        convert([{"interval": (2, 1)}], tmp_path / "out", to="lmdb")


def test_each_module_has_a_kind_of_its_name() -> None:
    for name, kind in zip(KINDS, all_kinds(), strict=True):
        assert kind.name == name
        assert kind.stored_apart == (kind.suffix in ("npy", "bin") or kind.is_picture)


def test_few_lines_outside_of_kinds_compare_a_kind() -> None:
    """A kind is asked what it does; its name is compared only to show it."""
    places = []
    for path in sorted(PACKAGE.rglob("*.py")):
        if path.parent.name == "kinds":
            continue
        source = path.read_text("utf-8")
        if not re.search(r"\.kind\b.* (==|!=|in) ", source):
            continue
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.Compare):
                names = {
                    part.value
                    for side in node.comparators
                    for part in ast.walk(side)
                    if isinstance(part, ast.Constant) and isinstance(part.value, str)
                }
                if ".kind" in ast.unparse(node.left) and names & set(KINDS):
                    places.append(f"{path.relative_to(PACKAGE)}:{node.lineno}")
    assert len(places) <= 25, "\n".join(places)
