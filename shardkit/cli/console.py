"""Printing: the only module that writes to the standard streams, so all text is escaped."""

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
"""Maximum characters of a line: more than any output with names of sensible length."""


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


def emit(value: Any) -> None:
    """Print a value as JSON; NaN and infinity become null."""
    _write(json.dumps(json_value(value), indent=1, allow_nan=False), err=False)  # ASCII alone


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
