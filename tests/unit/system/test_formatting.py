"""Readable numbers and names."""

from __future__ import annotations

import pytest
from bench_reports import HOSTILE, SETTINGS

from shardkit.system.formatting import (
    percent,
    sample_words,
    significant,
    size,
    speedup_words,
    step_words,
)
from shardkit.system.text import printable, shortened


@pytest.mark.parametrize("name", HOSTILE)
@pytest.mark.parametrize("width", [10, 40, 1000])
def test_a_name_fits_its_line_and_width(name: str, width: int) -> None:
    text = shortened(name, width)

    assert text.isprintable()
    assert len(text) <= width
    text.encode("utf-8")


def test_a_shortened_name_keeps_both_ends() -> None:
    text = shortened("beginning/of/a/long/path/to/the/end", 20)

    assert len(text) == 20
    assert text.startswith("begin")
    assert text.endswith("/to/the/end")
    assert shortened("short", 5) == "short"
    assert printable("a\tb") == "a\\tb"


@pytest.mark.parametrize(
    ("value", "text"), [(0.0412, "0.04"), (1.234, "1.23"), (12.34, "12.3"), (1234.5, "1,234")]
)
def test_numbers_have_only_significant_digits(value: float, text: str) -> None:
    assert significant(value) == text


def test_sizes() -> None:
    assert [size(each) for each in (12, 2048, 5 << 20)] == ["12 bytes", "2.0 KiB", "5.0 MiB"]


def test_settings_are_described() -> None:
    assert sample_words(SETTINGS) == "CenterCrop(8), batches of 10, in random order"
    both = sample_words({**SETTINGS, "decode": "pil", "transform": "a:b"})
    assert both == "pil then a:b, batches of 10, in random order"
    assert step_words(SETTINGS) == "none: batches are read and let go"
    assert step_words({**SETTINGS, "step_ms": 2.5}) == "a wait of 2.5 ms for each batch"
    assert step_words({**SETTINGS, "model": "small"}) == "training small with each batch"


def test_fractions_and_speedups() -> None:
    assert percent(0.784) == "78 %"
    assert speedup_words(1.5, 1.25, 2, 3) == "1.50x (1.25x to 2.00x in 3 rounds)"
    assert speedup_words(1.5, 1.5, 1.5, 1) == "1.50x (1.50x to 1.50x in 1 round)"


def test_large_sizes_and_long_texts() -> None:
    assert size(2.5 * 2**40) == "2.5 TiB"
    assert printable("a" * 600 + "b" * 600) == "a" * 500 + " ... " + "b" * 500
