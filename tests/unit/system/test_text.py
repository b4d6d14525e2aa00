"""Untrusted names in messages are short and printable."""

from __future__ import annotations

import tracemalloc

import pytest

from shardkit.system.text import name_list, quoted


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("a/b.jpg", "'a/b.jpg'"),
        (b"\x1b[31m", r"b'\x1b[31m'"),
        ("\x1b]0;owned\x07\n", r"'\x1b]0;owned\x07\n'"),
        ("\udcff", r"'\udcff'"),
        (["a", 1], "['a', 1]"),
    ],
)
def test_a_name_is_quoted(value: object, expected: str) -> None:
    assert quoted(value) == expected


def test_a_long_name_shows_its_start_and_end() -> None:
    text = quoted("begin" + "x" * 1000 + "end")

    assert text.startswith("'begin")
    assert text.endswith("end'")
    assert len(text) == 80


def test_an_integer_too_large_for_text_is_quoted_by_its_type() -> None:
    assert quoted(10**5000) == "<int of too many digits>"
    assert quoted([10**5000]) == "<list of too many digits>"


def test_quoting_a_giant_name_takes_little_memory() -> None:
    giant = b"\0" * (8 << 20)
    tracemalloc.start()
    try:
        assert len(quoted(giant)) == 80
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_a_list_of_very_many_names_is_short() -> None:
    assert name_list(["a", 1, "\x1b"]) == r"a, 1, \x1b"
    assert name_list(map(str, range(30))).endswith(", 28, 29")
    assert name_list(map(str, range(15_030))).endswith(", 28, 29 and 15,000 more")
    assert len(name_list(["x" * 5000] * 40)) < 3000
