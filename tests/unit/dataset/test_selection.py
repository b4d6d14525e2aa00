"""Rows of a dataset by expression and by list."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from fields import LACKING, make_fields

from shardkit.dataset.selection import LIST_HEAD, listed, matching, select
from shardkit.dataset.shardset import ShardSet, open_shards
from shardkit.errors import UsageError


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> ShardSet:
    """Ten rows: `fields.sample_of` of their numbers."""
    return open_shards(make_fields(tmp_path_factory.mktemp("fields") / "made"))


@pytest.mark.parametrize(
    ("expression", "rows"),
    [
        ('label == "ant"', [0, 3, 6, 9]),
        ('label in ("ant", "cat")', [0, 2, 3, 5, 6, 8, 9]),
        ('label != "ant" and price < 1', [1, 2]),
        ("price >= 1.75", [8, 9]),
        ("1 < price <= 1.5", [5, 6]),
        ("not price >= 0.5", [0, 1, LACKING]),
        ('"wet" in tags', [2, 3, 6]),
        ('"red" not in tags', [0, 4, 8]),
        ('caption == "number 3 äß★"', [3]),
        ('"8" in caption or key == "000000001"', [1, 8]),
        ("width == 26 and height == 20", [2, 8]),
        ('path > "000000007"', [8, 9]),
        ("price in (0.25, 0.5)", [1, 2]),
    ],
)
def test_an_expression_selects_rows(shards: ShardSet, expression: str, rows: list[int]) -> None:
    assert np.flatnonzero(matching(shards, expression)).tolist() == rows


@pytest.mark.parametrize(
    ("expression", "reason"),
    [
        ("", "invalid syntax"),
        ('label == "bee', "unterminated"),
        ("label", "label is not a comparison"),
        ("label == price", "does not compare a column with a value"),
        ("1 == 1", "does not compare a column with a value"),
        ("size > 3", "'size' is not one of its columns: label, tags, price, caption, key, path"),
        ("extra == 3", "'extra' is not one of its columns"),
        ('label == "wasp"', "label has no class 'wasp'; it has 'ant', 'bee', 'cat'"),
        ("label == 0", "its values are class names"),
        ('price > "1"', "its values are numbers"),
        ('label in "ant"', "is not a list of values"),
        ('"1" in price', "not of the type of price"),
        ("1 in price", "price has one value in each row"),
        ('__import__("os").system("exit") == 1', "does not compare a column with a value"),
        ("price.__class__ == 1", "does not compare a column with a value"),
        ("price > (lambda: 1)()", "malformed node"),
        ("price > 9**9**9", "malformed node"),
        ("not " * 400 + "price > 1", "nest|deep|complex|memory|not"),
        ("(" * 1990 + "price", "nest|parenthes|many"),
        ("price > 1 or " * 300, "over 2000 characters"),
        ("price is None", "does not compare"),
        ("tags > 3", "its values are class names"),
        ('tags > "wet"', "not supported between"),
    ],
)
def test_other_expressions_are_refused(shards: ShardSet, expression: str, reason: str) -> None:
    if expression.startswith("not not"):
        matching(shards, expression)  # deep, but within the limits
        return
    with pytest.raises(UsageError, match="--where") as caught:
        matching(shards, expression)
    assert any(each in str(caught.value) for each in reason.split("|")), caught.value


def test_a_file_lists_rows_or_keys(shards: ShardSet, tmp_path: Path) -> None:
    file = tmp_path / "rows.txt"
    for text in ("7\n2\n", "# comment\n000000002\r\n\n000000007"):
        file.write_text(text)
        assert np.flatnonzero(listed(shards, file, "--rows")).tolist() == [2, 7]
    file.write_text(f"{LIST_HEAD}{shards.manifest.content_digest}\n4\n")
    assert np.flatnonzero(listed(shards, file, "--rows")).tolist() == [4]
    assert np.flatnonzero(select(shards, where="price > 0.5", rows=file)).tolist() == [4]
    file.write_text("key:000000007\n")
    assert np.flatnonzero(listed(shards, file, "--rows")).tolist() == [7]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "lists nothing"),
        ("# nothing", "lists nothing"),
        ("1\n10\n11\n", "2 of 3 lines name nothing in .*: '10', '11'"),
        ("000000001\nsomething", "1 of 2 lines name nothing in .*: 'something'"),
        ("-1", "1 of 1 lines name nothing in .*: '-1'"),
        ("3\n3", "lists 1 names twice: '3'"),
        ("9" * 30, "name nothing"),
        (LIST_HEAD + "0" * 64 + "\n1", "lists rows of another dataset"),
    ],
)
def test_other_lists_are_refused(shards: ShardSet, tmp_path: Path, text: str, reason: str) -> None:
    (tmp_path / "rows.txt").write_text(text)
    with pytest.raises(UsageError, match=f"rows=.*{reason}"):
        listed(shards, tmp_path / "rows.txt", "--rows")


def test_a_list_must_be_readable_text(shards: ShardSet, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"rows=.*cannot be read: No such file"):
        listed(shards, tmp_path / "none", "--rows")
    (tmp_path / "bytes").write_bytes(b"\xff\xfe")
    with pytest.raises(UsageError, match="not UTF-8"):
        listed(shards, tmp_path / "bytes", "--rows")
