"""`scripts/test --all` repeats failed tests once, of each of its runs of pytest, and names them."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from helpers import DEADLINE, make_tree

pytestmark = pytest.mark.slow

SCRIPT = Path(__file__).parents[2] / "scripts/test"

TOOL = b"#!/bin/sh\n"
"""A check that passes."""

PYTHON = f"""#!/bin/sh
case "$1" in scripts/*) ;; *) exec {sys.executable} "$@" ;; esac
"""

COVERAGE = f"""#!/bin/sh
if [ "$1" = run ]; then shift; exec {sys.executable} "$@"; fi
"""

SETTINGS = b"""
[tool.pytest.ini_options]
testpaths = ["tests/unit"]
markers = ["slow"]
"""

PASSES = b"def test_passes(): pass\n"

FAILS = b"def test_fails(): assert False\n"

FAILS_ONCE = b"""
from pathlib import Path

def test_fails_once():
    seen = Path(__file__).with_suffix(".seen")
    again = seen.exists()
    seen.touch()
    assert again
"""

BREAKS = """#!/bin/sh
case "$*" in *--ignore=*) exit 3 ;; esac
"""
"""As Python, in front of which it stands; one run of pytest ends with an internal error."""

COVERED, OTHER, CAMPAIGN = (
    "tests/unit/formats/test_a.py",
    "tests/unit/cli/test_b.py",
    "tests/campaigns/test_c.py",
)


def run_script(place: Path, files: dict[str, bytes]) -> tuple[int, str]:
    """Run the script in a project of a few tests; return the exit code and what it prints."""
    packages = ["formats", "codecs", "dataset", "transfer"]
    packages += ["conversion", "verification", "system", "sources"]
    tools: dict[str, bytes | None] = {
        **{f".venv/bin/{name}": TOOL for name in ("ruff", "mypy", "mkdocs")},
        ".venv/bin/python": PYTHON.encode(),
        ".venv/bin/coverage": COVERAGE.encode(),
        "scripts/setup": TOOL,
    }
    tests: dict[str, bytes | None] = {
        **{f"tests/unit/{name}/test_{name}.py": PASSES for name in packages},
        **dict.fromkeys((COVERED, OTHER, CAMPAIGN), PASSES),
    }
    make_tree(place, {**tools, **tests, "pyproject.toml": SETTINGS, **files})
    shutil.copy(SCRIPT, place / "scripts/test")
    for name in tools:
        (place / name).chmod(0o755)
    done = subprocess.run(
        [place / "scripts/test", "--all"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=2 * DEADLINE,  # of five runs of pytest, with two workers each
        check=False,
        env={
            **os.environ,
            "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
            "PYTEST_PLUGINS": "xdist.plugin",
            "PYTEST_ADDOPTS": "",
        },
    )
    return done.returncode, done.stdout


def test_tests_that_fail_once_are_named(tmp_path: Path) -> None:
    names = (COVERED, OTHER, CAMPAIGN)
    code, text = run_script(tmp_path, dict.fromkeys(names, FAILS_ONCE))
    assert code == 0, text
    _, _, repeated = text.partition("== tests that needed a second try\n")
    assert sorted(repeated.split()) == sorted(f"{name}::test_fails_once" for name in names)


def test_a_test_that_fails_twice_has_failed(tmp_path: Path) -> None:
    code, text = run_script(tmp_path, {COVERED: FAILS, OTHER: FAILS_ONCE})
    assert code == 1, text


def test_a_second_try_hides_no_other_failure(tmp_path: Path) -> None:
    """A run of pytest that breaks is no failed test, which could pass later."""
    broken = (BREAKS + PYTHON.removeprefix("#!/bin/sh\n")).encode()
    code, text = run_script(tmp_path, {COVERED: FAILS_ONCE, ".venv/bin/python": broken})
    assert code == 3, text
