"""The standard streams: the one place that prints, so that all text is checked on its way."""

from __future__ import annotations

import io
import json
import os
import sys
import warnings
from typing import Any

import click

from shardkit.system.formatting import json_value
from shardkit.system.text import printable

_LONGEST = 20_000
"""Characters of a line: more than any command prints of names of sensible length."""


def open_streams() -> None:
    """Make the standard streams usable, whatever the caller gave us; call this first.

    A stream that the caller closed is opened on nothing: otherwise a file of ours would get its
    number. Text that the stream's encoding lacks is escaped. A warning is one line.
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
    """Print one line, in which control characters, even line breaks, are escaped."""
    _write(printable(text, _LONGEST), err=err)


def emit(value: Any) -> None:
    """Print a value as JSON, for machines; null stands for a number that is not one."""
    _write(json.dumps(json_value(value), indent=1, allow_nan=False), err=False)  # ASCII alone


def show_usage_error(error: click.ClickException) -> None:
    """Print what Click says of wrong arguments, with the usage of the command."""
    text = io.StringIO()
    error.show(file=text)
    for line in text.getvalue().removesuffix("\n").split("\n"):
        say(line, err=True)


def can_show(text: str) -> bool:
    """Tell whether standard output has the characters of ``text``."""
    try:
        text.encode(sys.stdout.encoding or "ascii")
    except (UnicodeEncodeError, LookupError):
        return False
    return True


def _write(text: str, *, err: bool) -> None:
    try:
        click.echo(text, err=err)
    except BrokenPipeError:  # nobody reads on: the work and the exit code are what they would be
        stream = sys.stderr if err else sys.stdout
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, stream.fileno())
        os.close(null)


def _show_warning(message: Warning | str, *_: Any, **__: Any) -> None:
    say(f"shardkit: warning: {message}", err=True)
