"""Texts for people: untrusted ones made safe to print, commands, and numbers with their units."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Collection, Iterable
from difflib import get_close_matches

from shardkit.errors import UsageError, setting

_LONGEST = 80
"""Maximum characters of a quoted name: enough to recognize it."""

_LISTED = 30
"""Maximum names in a list: a file may have thousands."""

_LONGEST_NAME = 1000
"""Maximum characters of a name in a table or summary: most paths are shorter."""

_UNITS = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12} | {
    "kib": 2**10,
    "mib": 2**20,
    "gib": 2**30,
    "tib": 2**40,
}


_LEAST_BYTES = 64 << 10
"""Minimum of a number without a unit: whoever writes ``256`` means MiB."""


def printable(text: str, longest: int = _LONGEST_NAME) -> str:
    """Return text that cannot break or flood a line, a terminal or an encoding.

    Control characters, writing-direction marks and undecodable bytes are escaped. Text of more than
    ``longest`` characters loses its middle.
    """
    if len(text) > longest:
        half = longest // 2
        text = f"{text[:half]} ... {text[-half:]}"
    if text.isprintable():
        return text
    return "".join(
        character if character.isprintable() else ascii(character)[1:-1] for character in text
    )


def shortened(text: str, width: int) -> str:
    """Return a printable name of at most ``width`` characters, with dots for its middle."""
    text = printable(text)
    if len(text) <= width:
        return text
    end = max(1, 2 * (width - 3) // 3)
    return f"{text[: max(0, width - 3 - end)]}...{text[-end:]}"


def as_command(*words: object) -> str:
    """Return a command to copy from a message, in backticks; paths are quoted for the shell."""
    return f"`{shell('shardkit', *words)}`"


def shell(*words: object) -> str:
    """Return words of a command to paste into a shell, in one printable line."""
    return " ".join(map(_shell_word, map(str, words)))


def _shell_word(word: str) -> str:
    if word.isprintable():
        return shlex.quote(word)
    # Bash, Zsh and POSIX 2024 know this form. Bytes would also do for characters, illegibly.
    escaped = ("\\" + c if c in "\\'" else c if c.isprintable() else _escaped(c) for c in word)
    return f"$'{''.join(escaped)}'"


def _escaped(character: str) -> str:
    return "".join(f"\\x{byte:02x}" for byte in os.fsencode(character))


def quoted(value: object) -> str:
    """Return the `repr` of a name or value from a file, in at most 80 printable characters."""
    if isinstance(value, str | bytes) and len(value) > 2 * _LONGEST:  # repr needs 4 times as much
        value = value[:_LONGEST] + value[-_LONGEST:]  # type: ignore[operator]
    try:
        return shortened(repr(value), _LONGEST)
    except ValueError:  # Python does not convert integers of thousands of digits
        return f"<{type(value).__name__} of too many digits>"


def fault(error: BaseException) -> str:
    """Return what is wrong with values from a file, of which parsing raised an exception."""
    if isinstance(error, KeyError):
        return f"{quoted(*error.args)} is missing"
    return (isinstance(error, OSError) and error.strerror) or str(error)


def name_list(names: Iterable[object]) -> str:
    """Return names from a file, separated by commas; of very many, the first ones."""
    texts = [printable(str(name), _LONGEST) for name in names]
    more = len(texts) - _LISTED
    return ", ".join(texts[:_LISTED]) + (f" and {more:,} more" if more > 0 else "")


def is_within(path: str, folders: Collection[str]) -> bool:
    """Return whether ``path``, or a folder above it, is in ``folders``; ``/`` separates parts."""
    while path and folders:
        if path in folders:
            return True
        path = path.rpartition("/")[0]
    return False


def suggestion(name: str, names: Iterable[str]) -> str:
    """Return the one of ``names`` that another name may mean, as a sentence; "" for none."""
    close = get_close_matches(name.lower(), list(names), 1)
    return f" Did you mean {close[0]}?" if close else ""


class ByteCount(int):
    """A number of bytes that was parsed, of any size."""


def parse_bytes(size: int | str, option: str) -> ByteCount:
    """Return a number of bytes, given as one or as ``256MiB`` or ``1GB``.

    UsageError, which names ``option``, if it is neither, or a number under 64 KiB without a unit.
    """
    if isinstance(size, ByteCount):
        return size
    match = re.fullmatch(r"\s*([0-9]{1,15}(?:\.[0-9]{1,9})?)\s*([a-z]*)\s*", str(size).lower())
    if match is None or match[2] not in _UNITS:
        raise UsageError(
            f"{setting(option, str(size)[:40])} must be a size such as 256MiB, 1GB or 500000"
        )
    number, unit = match.groups()
    count = ByteCount(float(number) * _UNITS[unit])
    if not unit and 0 < count < _LEAST_BYTES:
        raise UsageError(
            f"{setting(option, size)} means bytes",
            remedy=f"add a unit, as in {number}MiB or {number}B",
        )
    return count


def size(count: float) -> str:
    """Format a number of bytes: "21.3 MiB"."""
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "bytes" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


def amount(count: int, noun: str) -> str:
    """Return a count with its noun: "1 image", "2,000 images"."""
    return f"{count:,} {noun if count == 1 else plural(noun)}"


def plural(noun: str) -> str:
    """Return the plural of a noun."""
    return f"{noun[:-1]}ies" if noun.endswith("ry") else f"{noun}{'es' if noun[-1] == 's' else 's'}"
