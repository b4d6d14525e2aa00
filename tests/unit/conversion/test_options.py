"""The texts of options that the command line and Python share."""

from __future__ import annotations

from typing import Any

import pytest
from refusals import refused

from shardkit.conversion.plan import spell_bytes
from shardkit.errors import UsageError
from shardkit.recipe import Recipe, parse_color, parse_size, spell_color, spell_size
from shardkit.system.text import parse_bytes


@pytest.mark.parametrize(
    ("given", "expected"),
    [(256, 256), ("256", 256), ("24x32", (24, 32)), ((24, 32), (24, 32))],
)
def test_sizes_of_images(given: int | tuple[int, int] | str, expected: object) -> None:
    assert parse_size(given) == expected
    assert parse_size(spell_size(parse_size(given))) == expected


def test_sizes_of_shards() -> None:
    sizes: dict[int | str, int] = {
        0: 0,
        65536: 65536,
        "500000": 500_000,
        "256MiB": 256 << 20,
        " 1.5 gb ": 1_500_000_000,
        "500B": 500,
    }
    for given, count in sizes.items():
        assert parse_bytes(given, "size") == count
        assert parse_bytes(parse_bytes(given, "size"), "size") == count
        assert parse_bytes(spell_bytes(count), "size") == count
    bare: int | str
    for bare in (1, 256, 65535, "256", "1.5"):
        with refused(UsageError, f"size={bare!r}", f"{bare}MiB", f"{bare}B"):
            parse_bytes(bare, "size")


def test_colors() -> None:
    assert parse_color((1, 2, 3)) == (1, 2, 3)
    assert parse_color("white") == (255, 255, 255)
    assert parse_color("#80808000") == (128, 128, 128)
    assert [spell_color((255,) * 3), spell_color((1, 2, 255))] == ["white", "#0102ff"]


def test_other_texts_are_refused() -> None:
    for size in ("large", "-1", "24x", "1" * 10):
        with refused(UsageError):
            parse_size(size)
    for size in ("large", "-1", "1 XB", "MB", "1MB2", "1e6", "1,5MB", "0x10", "nan", "inf", ""):
        with refused(UsageError):
            parse_bytes(size, "shard_size")
    with refused(UsageError):
        parse_color("whitish")


def test_sizes_and_colors_are_tuples_of_integers() -> None:
    for size in ((16.0, 16), (16, True), [16, 16], (16, 16, 16), 16.0):
        with refused(UsageError, f"resize={size}"):
            Recipe(resize=size)  # type: ignore[arg-type]
    for color in ((0, 0, 0, 0), (0.5, 0, 0), ("red", 0, 0), 0):
        with refused(UsageError, f"background {color}"):
            Recipe(background=color)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("resize_mode", "pad"),
        ("enlarge", True),
        ("filter", "lanczos"),
        ("dct_scaling", True),
    ],
)
def test_options_of_resizing_require_it(option: str, value: Any) -> None:
    with pytest.raises(UsageError, match=f"{option}= requires resize="):
        Recipe(**{option: value})
