"""The texts of options that the command line and Python share."""

from __future__ import annotations

from typing import Any

import pytest

from shardkit import UsageError
from shardkit.conversion.options import (
    parse_bytes,
    parse_color,
    parse_size,
    refuse_without_resize,
)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (None, (None, "shorter")),
        (256, ((256, 256), "shorter")),
        ("256", ((256, 256), "shorter")),
        ("24x32", ((24, 32), "crop")),
        ((24, 32), ((24, 32), "crop")),
    ],
)
def test_sizes_of_images(given: int | str | None, expected: object) -> None:
    assert parse_size(given) == expected


def test_sizes_of_shards() -> None:
    assert parse_bytes(500) == 500
    assert parse_bytes("256MiB") == 256 << 20
    assert parse_bytes(" 1.5 gb ") == 1_500_000_000


def test_colors() -> None:
    assert parse_color((1, 2, 3)) == (1, 2, 3)
    assert parse_color("white") == (255, 255, 255)
    assert parse_color("#80808000") == (128, 128, 128)


def test_other_texts_are_refused() -> None:
    for size in ("large", "-1", "24x", "1" * 10):
        with pytest.raises(UsageError, match="neither a number of pixels"):
            parse_size(size)
    for size in ("large", "-1", "1 XB"):
        with pytest.raises(UsageError, match="is not a size such as"):
            parse_bytes(size)
    with pytest.raises(UsageError, match="is not a color such as"):
        parse_color("whitish")


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("resize_mode", "pad"),
        ("enlarge", True),
        ("filter_", "lanczos"),
        ("resizer", "torch"),
        ("dct_scaling", True),
    ],
)
def test_options_of_resizing_require_it(option: str, value: Any) -> None:
    defaults: dict[str, Any] = {
        "resize_mode": None,
        "filter_": "bicubic",
        "resizer": "pillow",
        "dct_scaling": False,
        "enlarge": False,
    }
    refuse_without_resize(**defaults)
    name = option.strip("_").replace("_", "-")
    with pytest.raises(UsageError, match=f"--{name} requires --resize"):
        refuse_without_resize(**{**defaults, option: value})
