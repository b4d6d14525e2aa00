"""`scripts/test --all` repeats failed tests once, and names them; nothing else is repeated."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import cpu
import pytest
from helpers import DEADLINE, make_tree

pytestmark = pytest.mark.slow

SCRIPT = Path(__file__).parents[2] / "scripts/test"

PASSES = b"#!/bin/sh\n"

FAILS = b"#!/bin/sh\nexit 3\n"

PYTHON = f"""#!/bin/sh
case "$1" in scripts/*) ;; *) exec {sys.executable} "$@" ;; esac
""".encode()

SETTINGS = b"""
[tool.pytest.ini_options]
markers = ["slow", "measures"]
"""

TESTS = b"""
from pathlib import Path

import pytest

def test_passes():
    pass

def test_fails_once():
    seen = Path(__file__).with_suffix(".seen")
    again = seen.exists()
    seen.touch()
    assert again

@pytest.mark.measures
def test_measures():
    assert False
"""


def run_script(place: Path, files: dict[str, bytes], *arguments: str) -> tuple[int, str]:
    """Run the script in a project of a few tests; return the exit status and what it prints."""
    tools = {
        **{f".venv/bin/{name}": PASSES for name in ("ruff", "mypy", "mkdocs")},
        ".venv/bin/python": PYTHON,
        "scripts/setup": PASSES,
        "scripts/test": SCRIPT.read_bytes(),
    }
    cpu_limit = Path(cpu.__file__).read_bytes()
    tests = {"tests/unit/test_a.py": TESTS, "tests/campaigns/test_c.py": TESTS}
    make_tree(
        place, {**tools, **tests, "pyproject.toml": SETTINGS, "conftest.py": cpu_limit, **files}
    )
    for name in tools:
        (place / name).chmod(0o755)
    done = subprocess.run(
        [place / "scripts/test", "--all", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=DEADLINE,
        check=False,
        env={
            **os.environ,
            "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
            "PYTEST_PLUGINS": "xdist.plugin",
            "PYTEST_ADDOPTS": "",
        },
    )
    return done.returncode, done.stdout


def named_by(text: str) -> list[str]:
    """Return the tests that are said to have needed a second try."""
    _, _, after = text.partition("== tests that needed a second try\n")
    return sorted(line for line in after.split() if line.startswith("tests/"))


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"tests/unit/test_b.py": b"def test_fails(): assert False\n"}, 1),
        ({".venv/bin/mypy": FAILS}, 3),
        ({"tests/unit/test_b.py": b"import nothing\n"}, 2),
    ],
    ids=["a test fails", "a check fails", "a file of tests is broken"],
)
def test_what_fails_twice_has_failed(
    tmp_path: Path, files: dict[str, bytes], expected: int
) -> None:
    code, text = run_script(tmp_path, files)
    assert code == expected, text


def test_tests_that_fail_once_are_named(tmp_path: Path) -> None:
    code, text = run_script(tmp_path, {})
    assert code == 0, text
    assert named_by(text) == [
        f"tests/{name}::test_fails_once" for name in ("campaigns/test_c.py", "unit/test_a.py")
    ]
