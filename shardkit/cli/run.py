"""One run of a command: its time, and its result or error as text or one JSON object.

Only this module writes to the standard streams, so all text is escaped.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import sys
import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import click

from shardkit.options import option
from shardkit.system.numbers import json_value
from shardkit.system.text import printable, shell

_LONGEST = 20_000
"""Maximum characters of a line: more than any output with names of sensible length."""


@dataclass(frozen=True, kw_only=True)
class Output:
    """How a command prints; every command has these options."""

    HEADING: ClassVar[str] = "Output"

    quiet: bool = option(
        False, help="Print only errors, findings of a failed check, and the --json object."
    )
    json: bool = option(False, help="Print the result, or the error, as one JSON object.")


class Run:
    """One run of a command, from its start to its exit code.

    ``json`` states whether to print a JSON object, until the options are read and replace `output`.
    ``owns_process`` states that nothing else runs in this process.
    """

    def __init__(self, *, json: bool = False, owns_process: bool = False) -> None:
        self.output = Output(json=json)
        self.owns_process = owns_process
        self._started = time.monotonic()
        self._fields: dict[str, Any] = {}
        self._ended = False
        self.spell: Callable[[str, str], str] = "{}={}".format
        """Spells an option in a message."""
        self._hidden: list[Callable[[], object]] = []
        """Functions that print the results that `Output.quiet` hides."""

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
            value = json_value({**common, **self._fields, **common})  # NaN and infinity are null
            _write(json.dumps(value, indent=1, allow_nan=False), err=False)  # ASCII alone


def flags_of(ctx: click.Context) -> Callable[[str, str], str]:
    """Return a function that spells an option as users of a command type it: ``--to x``.

    Options that the command lacks stay as in Python.
    """
    options = [param for param in ctx.command.params if isinstance(param, click.Option)]
    flags = {option.name: option.opts[-1] for option in options}
    negative = {option.name: flag for option in options for flag in option.secondary_opts}

    def spell(name: str, value: str) -> str:
        plain = f"{name}={value}"
        if value == "False":
            return negative.get(name, plain)
        if name not in flags or value[:1] in _OF_PYTHON:
            return plain
        shown = "" if value == "True" else value.strip(_QUOTES)
        return f"{flags[name]} {shell(shown)}" if shown else flags[name]

    return spell


_QUOTES = "'\""
_OF_PYTHON = ("N", "[", "(", "{", "<")
"""First characters of values that no command takes: None, sequences, objects."""


def error_fields(
    error: BaseException, what: str, *, remedy: str | None = None, where: str | None = None
) -> dict[str, Any]:
    """Return an error as JSON values.

    ``where`` is the file or option that it concerns, if it is known.
    """
    return {"type": type(error).__name__, "what": what, "where": where, "remedy": remedy}


def hinted(error: click.UsageError, ctx: click.Context, hint: str) -> click.UsageError:
    """Return an error of Click with a suggestion, which is its remedy."""
    error_with_hint = click.UsageError(error.message + hint, ctx)
    if hint:
        vars(error_with_hint)["remedy"] = hint.strip()
    return error_with_hint


def open_streams() -> None:
    """Make the standard streams usable in any state that the caller left them; call this first.

    A closed stream is opened on ``/dev/null``: otherwise the next file that we open would get its
    number. Characters that a stream's encoding lacks are escaped. Warnings become single lines.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        stream = getattr(sys, name)
        if stream is None:
            stream = open(os.devnull, mode, encoding="utf-8")  # noqa: SIM115 - its number is the lowest
            os.set_inheritable(stream.fileno(), True)
            setattr(sys, name, stream)
        if name != "stdin" and isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    warnings.showwarning = _show_warning


def say(text: str = "", *, err: bool = False) -> None:
    """Print one line; control characters, even line breaks, are escaped."""
    _write(printable(text, _LONGEST), err=err)


def show_usage_error(error: click.ClickException) -> None:
    """Print Click's message about wrong arguments, with the command's usage."""
    text = io.StringIO()
    error.show(file=text)
    for line in text.getvalue().removesuffix("\n").split("\n"):
        say(line.replace("\t", "  "), err=True)  # Click indents choices by tabs


def _write(text: str, *, err: bool) -> None:
    try:
        click.echo(text, err=err)
    except BrokenPipeError:  # nobody reads the rest; work and exit code stay the same
        stream = sys.stderr if err else sys.stdout
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, stream.fileno())
        os.close(null)


def _show_warning(message: Warning | str, *_: Any, **__: Any) -> None:
    say(f"shardkit: warning: {message}", err=True)
