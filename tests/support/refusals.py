"""Refusals: a test states the type and the facts of an error; one golden file has its wording.

`tests/golden/messages.json` has the messages that each test meets, in order. After rewording,
`scripts/test --all --update-messages` writes it again, and its difference shows what changed.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import hypothesis
import pytest
from helpers import run_main

from shardkit import ShardkitError

ROOT = Path(__file__).parents[2]
GOLDEN = ROOT / "tests/golden/messages.json"

COMPARES = sys.platform == "linux" and sys.version_info[:2] == (3, 11)
"""Other systems and versions word their part of a message differently."""

Messages = dict[str, dict[str, list[str]]]
"""Messages by test file and test."""


def refused(
    error: type[BaseException] | tuple[type[BaseException], ...], *facts: object
) -> Refusal:
    """Expect an error whose message has these facts, and the wording of the golden file.

    Args:
        error: Type of the error.
        facts: Paths, rows, options, values: what the message must have, however it is worded.
    """
    return Refusal(error, facts)


class Refusal:
    """A context like `pytest.raises`, which also checks the message."""

    def __init__(self, error: Any, facts: tuple[object, ...]) -> None:
        """Expect an error of a type."""
        self._raises: Any = pytest.raises(error)
        self._facts = facts

    def __enter__(self) -> pytest.ExceptionInfo[Any]:
        """Return what will hold the error."""
        caught: pytest.ExceptionInfo[Any] = self._raises.__enter__()
        return caught

    def __exit__(self, *raised: Any) -> bool:
        """Check the type, then the message."""
        if not self._raises.__exit__(*raised):
            return False
        value = raised[1]
        check_facts(str(value), self._facts)
        recorder.check(f"{type(value).__name__}: {_without_other_words(value)}")
        return True


def refuses(
    code: int, *arguments: object, facts: tuple[object, ...] = ()
) -> subprocess.CompletedProcess[str]:
    """Expect the command to end with an exit code; check what it prints to stderr likewise."""
    done = run_main(*arguments)
    assert done.returncode == code, done.stderr
    check_facts(done.stderr, facts)
    recorder.check(f"{code}: {done.stderr}")
    return done


def check_facts(message: str, facts: tuple[object, ...]) -> None:
    """Fail unless the message has all facts."""
    for fact in facts:
        assert str(fact) in message, f"{fact!r} is not in: {message}"


def _without_other_words(error: BaseException) -> str:
    """Return the message without the words of other libraries, which other versions change."""
    text = str(error)
    causes: list[BaseException] = [error]
    while (cause := causes[-1].__cause__ or causes[-1].__context__) and cause not in causes:
        causes.append(cause)
        if not isinstance(cause, (ShardkitError, OSError)) and len(str(cause)) > len("'x'"):
            text = text.replace(str(cause), f"<{type(cause).__name__}>")
    return text


def _without_places(text: str) -> str:
    """Return a message without what is different in each run: folders, ports, processes."""
    text = text.replace(str(ROOT), "ROOT")
    temporary = re.escape(str(Path(tempfile.gettempdir()).resolve()))
    # pytest: /tmp/pytest-of-USER/pytest-N/popen-gwN/NAMEn
    text = re.sub(
        rf"{temporary}/pytest-of-[^/]+/pytest-\d+(/popen-gw\d+)?/[^/\s'\",]*", "TMP", text
    )
    text = re.sub(rf"{temporary}(/[\w.-]+|\b(?!/))", "TMP", text)
    text = re.sub(r"(127\.0\.0\.1|localhost):\d+", r"\1:PORT", text)
    text = text.replace(" (SIGKILL)", "")  # an executor may not know it yet
    text = re.sub(r"\d{4}-\d\d-\d\dT[\d:]+\+00:00", "TIME", text)
    text = re.sub(r"\b[0-9a-f]{16}\.tmp\b", "ID.tmp", text)
    text = re.sub(r"[\d,.]+ MiB are free", "N MiB are free", text)
    text = re.sub(r"\.py, line \d+", ".py, line N", text)
    return re.sub(r"\bprocess \d+", "process N", re.sub(r"0x[0-9a-f]{6,}", "0xN", text))


class Recorder:
    """Compares messages with the golden file, or collects them to write it."""

    def __init__(self) -> None:
        self.updates = False
        self.met: Messages = {}
        self._golden: Messages | None = None
        self._process = os.getpid()

    def check(self, message: str) -> None:
        """Compare the next message of the test that runs."""
        if os.getpid() != self._process or hypothesis.currently_in_test_context():
            return  # their messages are not the same in each run
        name = os.environ["PYTEST_CURRENT_TEST"].rpartition(" ")[0]
        file, _, test = name.partition("::")
        messages = self.met.setdefault(file, {}).setdefault(test, [])
        messages.append(_without_places(message))
        if self.updates or not COMPARES or os.environ.get("SHARDKIT_MESSAGES") == "off":
            return
        if self._golden is None:
            self._golden = json.loads(GOLDEN.read_text("utf-8"))
        expected = self._golden.get(file, {}).get(test, [])[len(messages) - 1 :][:1]
        advice = "reworded? scripts/test --all --update-messages writes the golden file"
        assert messages[-1:] == expected, advice

    def write(self, messages: Messages) -> None:
        """Put messages into the golden file, and remove those of tests that are gone."""
        golden: Messages = json.loads(GOLDEN.read_text("utf-8")) if GOLDEN.exists() else {}
        for file, tests in messages.items():
            golden[file] = golden.get(file, {}) | tests
        kept = {
            file: {test: tests[test] for test in sorted(tests) if _exists(file, test)}
            for file, tests in sorted(golden.items())
        }
        text = json.dumps({file: tests for file, tests in kept.items() if tests}, indent=1)
        GOLDEN.write_text(f"{text}\n", "utf-8")


def _exists(file: str, test: str) -> bool:
    path, (name, *_) = ROOT / file, test.split("[")
    return path.exists() and f"def {name.rpartition('::')[2]}(" in path.read_text("utf-8")


recorder = Recorder()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option."""
    help_text = "write the golden file of messages instead of comparing with it"
    parser.addoption("--update-messages", action="store_true", help=help_text)


def pytest_configure(config: pytest.Config) -> None:
    """Read the option."""
    recorder.updates = config.getoption("--update-messages")
    recorder._process = os.getpid()


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Forget what a test met that runs again."""
    file, _, test = item.nodeid.partition("::")
    recorder.met.get(file, {}).pop(test, None)


def pytest_testnodedown(node: Any) -> None:
    """Collect the messages of a worker of xdist."""
    for file, tests in getattr(node, "workeroutput", {}).get("messages", {}).items():
        recorder.met.setdefault(file, {}).update(tests)


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Write the file, or pass the messages on."""
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["messages"] = recorder.met
    elif recorder.updates:
        recorder.write(recorder.met)
