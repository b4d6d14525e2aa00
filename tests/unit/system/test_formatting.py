"""Readable numbers and names."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
from bench_reports import HOSTILE, SETTINGS

from shardkit.system.formatting import (
    amount,
    percent,
    sample_words,
    significant,
    size,
    speedup_words,
    step_words,
)
from shardkit.system.text import as_command, printable, shell, shortened


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


@pytest.mark.parametrize(
    ("value", "text"), [(0.0412, "0.04"), (1.234, "1.23"), (12.34, "12.3"), (1234.5, "1,234")]
)
def test_numbers_have_only_significant_digits(value: float, text: str) -> None:
    assert significant(value) == text


def test_sizes_and_counts() -> None:
    for count, text in {
        0: "0 bytes",
        1023: "1023 bytes",
        1024: "1.0 KiB",
        5 << 20: "5.0 MiB",
        3 << 29: "1.5 GiB",
        1 << 40: "1.0 TiB",
        2.5 * 2**40: "2.5 TiB",
        1 << 50: "1024.0 TiB",
    }.items():
        assert size(count) == text
    for number, noun, text in (
        *((1, "image", "1 image"), (0, "image", "0 images"), (2000, "image", "2,000 images")),
        *((2, "class", "2 classes"), (2, "entry", "2 entries"), (2, "bad file", "2 bad files")),
    ):
        assert amount(number, noun) == text


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


def test_texts_are_printable_and_commands_can_be_copied() -> None:
    assert printable("größe ★") == "größe ★"
    assert printable("a\nb\tc\x1b[31m\udcff") == "a\\nb\\tc\\x1b[31m\\udcff"
    assert as_command("work", Path("my data"), "--claim") == "`shardkit work 'my data' --claim`"
    for word in ("a\nb", "it's\t\\n", "\x9b1é\n", "b\udcff x", "\n9a", "$(x) `y`\r", "", "a b'c"):
        command = shell("printf", "%s", word)
        assert command.isprintable()
        shown = subprocess.run(["bash", "-c", command], capture_output=True, check=True)
        assert shown.stdout == os.fsencode(word)
    assert printable("a" * 600 + "b" * 600) == "a" * 500 + " ... " + "b" * 500
