"""The loop of a measurement process: receive a function, call it, send the result."""

from __future__ import annotations

import os
import pickle
import signal
import sys
import traceback
import warnings
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

from shardkit.errors import ShardkitError, UsageError
from shardkit.measure.runner.session import Session
from shardkit.system.pool import end_with_parent

_UNEQUAL = ("stack expects each tensor to be equal size", "resize storage that is not resizable")
"""PyTorch's messages about images of several sizes; the second comes from a worker process."""

_CROP_THEM = "The images differ in size: crop them with --decode 'CenterCrop(224)' or a transform"


def answer(
    session: Session, function: Callable[..., Any], arguments: dict[str, Any]
) -> tuple[str, Any, tuple[str, ...]]:
    """Call a function with the session.

    Returns:
        ``done`` with the result, or ``refused`` or ``failed`` with a message; and the warnings.
    """
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        kind, value = "failed", ""
        try:
            kind, value = "done", function(session, **arguments)
        except UsageError as error:
            kind, value = "refused", str(error)
        except ShardkitError as error:
            value = last_words(str(error))
        except Exception as error:
            traceback.print_exc()  # into the log, for whoever debugs this
            value = last_words(f"{type(error).__name__}: {error}")
    told = [str(each.message) for each in caught if each.category in (UserWarning, RuntimeWarning)]
    return kind, value, tuple(dict.fromkeys(told))


def last_words(message: str) -> str:
    """Return an error's message; of one from a PyTorch worker, without the traceback in it.

    Lines of a traceback are indented, and the error comes last.
    """
    words = message
    if "\nOriginal Traceback" in message:
        lines = message.strip().splitlines()
        after = max(number for number, line in enumerate(lines) if line.startswith(" ")) + 1
        words = "\n".join(lines[after:]) or lines[0]
    unequal = any(text in words for text in _UNEQUAL) and "crop them" not in words
    return f"{words}. {_CROP_THEM}" if unequal else words


def main(descriptor: int, parent: int) -> None:
    """Answer requests until the parent closes the connection or is gone.

    Args:
        descriptor: File descriptor of the connection.
        parent: Process ID of the parent.
    """
    end_with_parent(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the parent, which decides
    os.set_inheritable(descriptor, False)
    session, connection = Session(), Connection(descriptor)
    while True:
        try:
            function, arguments = connection.recv()
        except EOFError:
            return
        found = answer(session, function, arguments)
        try:
            connection.send(found)
        except (pickle.PicklingError, TypeError, AttributeError) as error:
            connection.send(("failed", f"the result cannot be sent: {error}", ()))
        sys.stderr.flush()
