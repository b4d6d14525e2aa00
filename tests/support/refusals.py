"""Refusals: a test states the type and the facts of an error; one golden file has its wording.

`tests/golden/messages.json` has each message once for each test that meets it. After rewording,
`scripts/test --update-messages` writes it again, and the difference shows what changed.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from helpers import run_main

from shardkit import ShardkitError

ROOT = Path(__file__).parents[2]
GOLDEN = ROOT / "tests/golden/messages.json"

Messages = dict[str, dict[str, list[str]]]
"""Messages by test file and test, in the order in which the test meets them."""


@contextmanager
def refused(
    error: type[BaseException] | tuple[type[BaseException], ...], *facts: object
) -> Iterator[pytest.ExceptionInfo[BaseException]]:
    """Expect an error whose message has these facts, and the wording of the golden file.

    Args:
        error: Type of the error.
        facts: Paths, rows, options, values: what the message must say, however it is worded.
    """
    with pytest.raises(error) as caught:
        yield caught
    text = _message_of(caught.value)
    for fact in facts:
        assert str(fact) in f"{caught.value}\n{text}", f"{fact!r} is not in: {caught.value}"
    _check(text, ())


def refuses(
    code: int, *arguments: object, facts: tuple[object, ...] = ()
) -> subprocess.CompletedProcess[str]:
    """Expect the command to end with an exit code; check what it prints to stderr likewise."""
    done = run_main(*arguments)
    assert done.returncode == code, done.stderr
    _check(_without_places(done.stderr), facts)
    return done


def _message_of(error: BaseException) -> str:
    """Return type and message without the words of other libraries, which other versions change."""
    text = str(error)
    cause: BaseException | None = error
    while cause := cause.__cause__ or cause.__context__ if cause else None:
        words = str(cause)
        if not isinstance(cause, (ShardkitError, OSError)) and len(words) > 3:
            text = text.replace(words, f"<{type(cause).__name__}>")
    return _without_places(f"{type(error).__name__}: {text}")


def _without_places(text: str) -> str:
    text = text.replace(str(ROOT), "ROOT")
    temporary = re.escape(str(Path(tempfile.gettempdir()).resolve()))
    # pytest: tmp/pytest-of-USER/pytest-N/popen-gwN/NAMEn
    text = re.sub(rf"{temporary}/pytest-of-[^/]+/pytest-\d+(/popen-gw\d+)?/[^/\s'\"]*", "TMP", text)
    return re.sub(rf"{temporary}/[\w.-]+", "TMP", text)


def _check(message: str, facts: tuple[object, ...]) -> None:
    for fact in facts:
        assert str(fact) in message, f"{fact!r} is not in: {message}"
    recorder.check(message)


class Recorder:
    """Compares messages with the golden file, or collects them to write it."""

    def __init__(self) -> None:
        self.updates = False
        self.met: Messages = {}
        self._numbers = Counter[str]()
        self._golden: Messages | None = None

    def check(self, message: str) -> None:
        """Compare the next message of the test that runs."""
        name = os.environ["PYTEST_CURRENT_TEST"].rpartition(" ")[0]
        file, _, test = name.partition("::")
        messages = self.met.setdefault(file, {}).setdefault(test, [])
        messages.append(message)
        if self.updates or os.environ.get("SHARDKIT_MESSAGES") == "off":
            return
        if self._golden is None:
            self._golden = json.loads(GOLDEN.read_text("utf-8"))
        expected = self._golden.get(file, {}).get(test, [])[len(messages) - 1 :][:1]
        assert [message] == expected, "reworded? scripts/test --update-messages"


recorder = Recorder()
