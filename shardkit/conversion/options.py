"""The options of a conversion as users write them: ``256MiB``, ``224x224``, ``white``."""

from __future__ import annotations

import re

from PIL import ImageColor

from shardkit.errors import UsageError
from shardkit.system import formatting


def refuse_without_resize(
    *, resize_mode: str | None, filter_: str, resizer: str, dct_scaling: bool, enlarge: bool
) -> None:
    """Refuse options that have no effect without ``resize``, unless they have their defaults.

    Raises:
        UsageError: If an option has no effect.
    """
    changed = {
        "--resize-mode": resize_mode is not None,
        "--enlarge": enlarge,
        "--filter": filter_ != "bicubic",
        "--resizer": resizer != "pillow",
        "--dct-scaling": dct_scaling,
    }
    for name, is_changed in changed.items():
        if is_changed:
            raise UsageError(f"{name} requires --resize")


def parse_size(resize: int | tuple[int, int] | str | None) -> tuple[tuple[int, int] | None, str]:
    """Return height and width of the box, and the default resize mode.

    Raises:
        UsageError: If ``resize`` is neither a number of pixels nor a height and a width.
    """
    if resize is None:
        return None, "shorter"
    if isinstance(resize, (int, str)):
        match = re.fullmatch(r"([0-9]{1,9})(?:[xX]([0-9]{1,9}))?", str(resize))
        if match is None:
            raise UsageError(
                f"--resize {str(resize)[:40]!r} is neither a number of pixels (256) nor "
                "HxW (224x224)"
            )
        height, width = match.groups()
        return (int(height), int(width or height)), "crop" if width else "shorter"
    return resize, "crop"


def parse_bytes(size: int | str) -> int:
    """Return a number of bytes, given as a number or a text such as ``256MiB`` or ``1GB``.

    Raises:
        UsageError: If it is not a size.
    """
    found = formatting.parse_bytes(size)
    if found is None:
        raise UsageError(
            f"--shard-size {str(size)[:40]!r} is not a size such as 256MiB, 1GB or 500000"
        )
    return found


def parse_color(color: str | tuple[int, int, int]) -> tuple[int, int, int]:
    """Return an RGB color, given as one or as a name or code.

    Raises:
        UsageError: If the name is unknown.
    """
    if not isinstance(color, str):
        return color
    try:
        return ImageColor.getrgb(color)[:3]
    except ValueError:
        raise UsageError(
            f"--background {color!r} is not a color such as white, #808080 or rgb(124,116,104)"
        ) from None
