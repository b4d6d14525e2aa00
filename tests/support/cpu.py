"""Plugin: the CPU time of each test with its children, and the limit of a fast test.

The clock depends on what else runs on a machine; CPU time hardly does.
"""

from __future__ import annotations

import os
import resource
from collections.abc import Generator
from contextlib import suppress
from pathlib import Path

import pytest

LIMIT = 1.0
"""CPU seconds of a fast test and its children, without fixtures that other tests share."""

_TICKS = os.sysconf("SC_CLK_TCK")


def used() -> float:
    """Return the CPU seconds of this process and all its descendants, also of those that ended."""
    own, ended = map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    seconds = own.ru_utime + own.ru_stime + ended.ru_utime + ended.ru_stime
    return seconds + _used_by_children(os.getpid())


def _used_by_children(pid: int) -> float:
    seconds = 0.0
    with suppress(OSError):  # it has ended, or this is not Linux
        for thread in Path(f"/proc/{pid}/task").iterdir():
            for child in (thread / "children").read_text().split():
                with suppress(OSError):
                    status = Path(f"/proc/{child}/stat").read_text("utf-8", "replace")
                    # utime, stime, cutime, cstime: proc_pid_stat(5)
                    fields = status.rpartition(")")[2].split()[11:15]
                    seconds += sum(map(int, fields)) / _TICKS
                seconds += _used_by_children(int(child))
    return seconds


class Meter:
    """Measures tests, and fails those that are not marked `slow` and use more than the limit."""

    def __init__(self, limit: float) -> None:
        self._limit = limit
        self._shared = 0.0
        self._before = 0.0

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(
        self, fixturedef: pytest.FixtureDef[object]
    ) -> Generator[None, object, object]:
        """Charge no test with a fixture that others use, too."""
        before = used() if fixturedef.scope != "function" else None
        try:
            return (yield)
        finally:
            if before is not None:
                self._shared += used() - before

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_setup(self) -> Generator[None, None, None]:
        """Start to measure."""
        self._shared = 0.0
        self._before = used()
        return (yield)

    @pytest.hookimpl(wrapper=True, trylast=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Generator[None, None, None]:
        """Fail a test that took too much."""
        yield
        seconds = used() - self._before - self._shared
        item.user_properties.append(("cpu", seconds))
        if seconds > self._limit and not exempt(item):
            pytest.fail(
                f"a fast test used {seconds:.2f} CPU s, more than {self._limit:g}: make it "
                "cheaper, or mark it `slow`, which leaves it to scripts/test --all",
                pytrace=False,
            )


class Summary:
    """Prints the tests that are near the limit or, without one, the most expensive ones."""

    def __init__(self, limit: float) -> None:
        self._limit = limit
        self._seconds: dict[str, float] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Collect what the tests used; with xdist, from its workers."""
        seconds = dict(report.user_properties).get("cpu")
        if report.when == "call" and isinstance(seconds, float):
            self._seconds[report.nodeid] = seconds

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Print them."""
        largest = sorted(self._seconds.items(), key=lambda item: -item[1])[:10]
        largest = [item for item in largest if item[1] > self._limit / 2]
        if largest:
            terminalreporter.section("most CPU seconds")
            for name, seconds in largest:
                terminalreporter.line(f"{seconds:6.2f} {name}")


def exempt(item: pytest.Item) -> bool:
    """Return whether a test may use more than a fast one."""
    return any(item.get_closest_marker(name) for name in ("slow", "measures"))


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option."""
    parser.addoption(
        "--cpu-limit",
        type=float,
        default=LIMIT,
        help="CPU seconds of a test that is not marked slow (default: %(default)s)",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Measure where tests run, and print where they are reported."""
    limit = config.getoption("--cpu-limit")
    config.pluginmanager.register(Meter(limit), "cpu-meter")
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(Summary(limit), "cpu-summary")
