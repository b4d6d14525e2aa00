"""One run of a command: its time, and its result or error as text or one JSON object."""

from __future__ import annotations

import contextlib
import re
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import click

from shardkit.cli.console import emit
from shardkit.options import option


@dataclass(frozen=True, kw_only=True)
class Output:
    """How a command prints; every command has these options."""

    HEADING: ClassVar[str] = "Output"

    quiet: bool = option(
        False, help="Print only errors, findings of a failed check, and the object of --json."
    )
    json: bool = option(False, help="Print the result, or the error, as one JSON object.")


class Run:
    """One run of a command, from its start to its exit code.

    Args:
        json: Whether to print a JSON object, until the options are read and replace `output`.
    """

    def __init__(self, *, json: bool = False) -> None:
        self.output = Output(json=json)
        self._started = time.monotonic()
        self._fields: dict[str, Any] = {}
        self._ended = False
        self._hidden: list[Callable[[], object]] = []
        """What prints the results that `Output.quiet` hides."""

    @property
    def seconds(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self._started

    @property
    def is_text(self) -> bool:
        """Whether results are printed as text."""
        return not (self.output.quiet or self.output.json)

    def report(
        self, fields: Callable[[], Mapping[str, Any]], show: Callable[[], object] = lambda: None
    ) -> None:
        """Print a result as text, or add its fields to the JSON object that `end` prints."""
        if self.output.json:
            self._fields |= fields()
        elif self.output.quiet:
            self._hidden.append(show)
        else:
            show()

    def show_hidden(self) -> None:
        """Print the results that were hidden, as errors: they say why a check has failed."""
        with contextlib.redirect_stdout(sys.stderr):
            for show in self._hidden:
                show()

    def end(self, code: int, error: Mapping[str, Any] | None = None) -> None:
        """Print the JSON object, once. Fields called like the common ones are left out."""
        if self.output.json and not self._ended:
            self._ended = True
            common = {"exit_code": code, "seconds": round(self.seconds, 3), "error": error}
            emit({**common, **self._fields, **common})


def with_flags(message: str, ctx: click.Context) -> str:
    """Return a message with options as users of the command type them: ``--to x``, not ``to='x'``.

    Messages below ``cli`` name the options of their function as in Python: ``to='x'``,
    ``force=True``, or ``to=`` without a value.

    Args:
        message: The message. Other text, such as a path ``seed=0/a.jpg``, stays.
        ctx: The command, with its options and their values.
    """
    options = [param for param in ctx.command.params if param.opts[0][0] == "-"]
    flags = {option.name: option.opts[-1] for option in options}
    negative = {option.name: flag for option in options for flag in option.secondary_opts}
    given = {str(value) for value in ctx.params.values()}

    def flag(match: re.Match[str]) -> str:
        if match[1] not in flags or match[0] in given:
            return match[0]
        value = match[2].strip("'")
        if value == "False":
            return negative.get(match[1], match[0])
        return flags[match[1]] if value in ("", "True") else f"{flags[match[1]]} {value}"

    return re.sub(
        r"(?<![^\s(])(\w+)=('[^']*'|-?[\d.]*\d|True|False|/[^\s:;,]*|)(?=[\s:;,)]|\.?(?:\s|$))",
        flag,
        message,
    )


_VERBS = (
    "add append ask build check choose close compare convert copy correct create define delete "
    "divide download end finish fix free give group install keep leave make merge move name omit "
    "open pass pip plan put quote raise read remove rename repeat replace rerun restore retry run "
    "save select set start store try unpack unset update upload use verify wait write"
)

_REMEDY = re.compile(
    r"(?:[;:.]|\. )\s\(?((?:(?:if|to|for|for details|otherwise) ?[^;:.,]*, )?"
    rf"(?:(?:{'|'.join(_VERBS.split())})\b(?! (?:is|of|has)\b)|did you|--[a-z-]+ [a-z]+s\b).*)",
    re.IGNORECASE | re.DOTALL,
)
"""The end of a message that starts with what to do: errors give the problem, then the remedy."""


def error_fields(
    error: BaseException, message: str, *, where: str | None = None, remedy: str | None = None
) -> dict[str, Any]:
    """Return an error as JSON values.

    Args:
        error: The error.
        message: Its message: the problem, and perhaps the remedy.
        where: The file or option, if it is known; else that of the error, or one in the message.
        remedy: The remedy, if the message has none.
    """
    match = _REMEDY.search(message)
    if match:
        remedy = match[1]
        if message[match.start(1) - 1] == "(":
            remedy = remedy.removesuffix(")")
    return {
        "type": type(error).__name__,
        "what": message[: match.start()] if match else message,
        "where": where or getattr(error, "where", None) or _place(message),
        "remedy": remedy,
    }


def _place(message: str) -> str | None:
    """Return the word of the command line, or the path below it, that a message names."""
    for word in sorted(filter(None, sys.argv[1:]), key=len, reverse=True):
        start = r"(?<!\S)" if "/" in word or word.startswith("--") else "^"  # others are words, too
        if match := re.search(rf"{start}{re.escape(word)}(?![^\s:/;,.])[^\s:;,]*", message):
            return match[0]
    return None
