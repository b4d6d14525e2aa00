"""Rows of a dataset by expression and by list."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from fields import LACKING, make_fields
from refusals import refused

from shardkit import UsageError, open_dataset, open_source


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Ten rows: `fields.sample_of` of their numbers, which are their keys, too."""
    return make_fields(tmp_path_factory.mktemp("fields") / "made")


HEAD = "# rows of the dataset with the content digest "


def chosen(place: Path, **selection: Any) -> list[int]:
    """Return the rows that a source selects of a dataset."""
    scan = open_source("dataset", place, **selection).scan()
    return [int(entry.key) for entry in scan.splits[""].entries]


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
def test_an_expression_selects_rows(place: Path, expression: str, rows: list[int]) -> None:
    assert chosen(place, where=expression) == rows


OTHERS: dict[str, tuple[str, ...]] = {
    "": (),
    'label == "bee': (),
    "label": ("label",),
    "label == price": ("label == price",),
    "1 == 1": ("1 == 1",),
    "size > 3": ("'size'", "label, tags, price, caption, key, path"),
    "extra == 3": ("'extra'",),
    'label == "wasp"': ("label", "'wasp'", "'ant', 'bee', 'cat'"),
    "label == 0": ("label",),
    'price > "1"': ("price",),
    'label in "ant"': ("label", "list"),
    '"1" in price': ("price",),
    "1 in price": ("price",),
    '__import__("os").system("exit") == 1': ("__import__",),
    "price.__class__ == 1": ("price.__class__",),
    "price > (lambda: 1)()": (),
    "price > 9**9**9": (),
    "(" * 1990 + "price": (),
    "price > 1 or " * 300: ("2000",),
    "price is None": ("price is None",),
    "tags > 3": ("tags",),
    'tags > "wet"': (),
}


@pytest.mark.parametrize("expression", OTHERS)
def test_other_expressions_are_refused(place: Path, expression: str) -> None:
    with refused(UsageError, "--where", *OTHERS[expression]):
        chosen(place, where=expression)


def test_a_deep_expression_within_the_limits_is_allowed(place: Path) -> None:
    assert chosen(place, where="not " * 400 + "price > 1") == chosen(place, where="price > 1")


def test_a_file_lists_rows_or_keys(place: Path, tmp_path: Path) -> None:
    file, digest = tmp_path / "rows.txt", open_dataset(place).manifest.content_digest
    for text, rows in {
        "7\n2\n": [2, 7],
        "# comment\n000000002\r\n\n000000007": [2, 7],
        HEAD + f"{digest}\n4\n": [4],
        "key:000000007\n": [7],
        "3\n4\n": [3, 4],
    }.items():
        file.write_text(text)
        assert chosen(place, rows=file) == rows
    assert chosen(place, rows=file, where="price > 0.75") == [4]


LISTS = {
    "": (),
    "# nothing": (),
    "1\n10\n11\n": ("2 of 3", "'10', '11'"),
    "000000001\nsomething": ("1 of 2", "'something'"),
    "-1": ("1 of 1", "'-1'"),
    "3\n3": ("'3'",),
    "9" * 30: ("9" * 30,),
    HEAD + "0" * 64 + "\n1": (),
}


@pytest.mark.parametrize("text", LISTS)
def test_other_lists_are_refused(place: Path, tmp_path: Path, text: str) -> None:
    (tmp_path / "rows.txt").write_text(text)
    with refused(UsageError, "rows=", tmp_path / "rows.txt", *LISTS[text]):
        chosen(place, rows=tmp_path / "rows.txt")


def test_a_list_must_be_readable_text(place: Path, tmp_path: Path) -> None:
    (tmp_path / "bytes").write_bytes(b"\xff\xfe")
    for name in ("none", "bytes"):
        with refused(UsageError, "rows=", tmp_path / name):
            chosen(place, rows=tmp_path / name)
