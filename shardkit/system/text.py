"""Untrusted text made safe to print: escaped, and limited in length."""

from __future__ import annotations

import os
import shlex
from collections.abc import Collection, Iterable
from difflib import get_close_matches

_LONGEST = 80
"""Maximum characters of a quoted name: enough to recognize it."""

_LISTED = 30
"""Maximum names in a list: a file may have thousands."""

_LONGEST_NAME = 1000
"""Maximum characters of a name in a table or summary: most paths are shorter."""


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
