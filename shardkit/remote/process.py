"""Calls in a process that talks to object stores.

The threads of `obstore` do not survive a fork, it refuses to work in a forked child, and data
loaders fork. So each process that reads has a helper of its own. Only messages pass between them:
the helper writes what it fetches to files. Other credentials in the environment start a new one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from shardkit.errors import ShardkitError, UsageError
from shardkit.system.helper import Helper

_R = TypeVar("_R")

_VARIABLES = ("AWS_", "AZURE_", "GOOGLE_", "SHARDKIT_", "XDG_")
"""Prefixes of the variables that clients read: new credentials, most likely."""


def _run(function: Callable[..., _R], *arguments: object) -> _R:
    try:
        return function(*arguments)
    except ShardkitError:
        raise
    except ImportError as error:
        if error.name != "obstore":
            raise ShardkitError(f"the object store cannot be read: {error}") from error
        raise UsageError(
            "object stores need the package obstore", remedy="pip install 'shardkit[s3]'"
        ) from error
    except Exception as error:
        raise ShardkitError(f"the object store cannot be used: {type(error).__name__}") from error


def _lost(_: str) -> ShardkitError:
    return ShardkitError(
        "the process that reads the object store ended unexpectedly; it may have run out of memory"
    )


_HELPER = Helper(_run, _lost, follows=_VARIABLES)

call = _HELPER.call
"""Call a function in the helper process; return its result, which is bytes or JSON."""

send = _HELPER.send
"""Call a function in the helper process some time later, and ignore its result."""
