"""`scripts/campaigns`: what it runs, with which points, and how it repeats a failure."""

from __future__ import annotations

import itertools
import re
import shutil
import subprocess
import sys
from pathlib import Path

import campaign
import pytest
from campaign import cases
from helpers import DEADLINE, execute, make_tree

ROOT = Path(__file__).parents[2]
CAMPAIGNS = [path.stem.removeprefix("test_") for path in (ROOT / "tests/campaigns").glob("test_*")]


def campaigns(*arguments: str, root: Path = ROOT) -> subprocess.CompletedProcess[str]:
    command = [str(root / "scripts/campaigns"), *arguments]
    return execute(*command, timeout=2 * DEADLINE)


def test_usage_errors_start_nothing() -> None:
    for arguments in (["nothing"], ["crash", "nothing::test_x"]):
        done = campaigns(*arguments)
        assert (done.returncode, done.stdout) == (2, "")
        assert {"'nothing'", "measures"} <= {*re.findall(r"[^\s;,]+", done.stderr)}
        assert {*CAMPAIGNS} <= {*done.stderr.split()}
    for arguments in (["--seed"], ["--seed", "x"], ["--minutes", "-1"], ["--more"]):
        done = campaigns(*arguments)
        assert (done.returncode, done.stdout) == (2, "")
        assert arguments[0] in done.stderr


def test_a_seed_draws_its_own_points(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = []
    monkeypatch.setattr(campaign, "FULL", False)
    for seed in (1, 2, 1):
        monkeypatch.setattr(campaign, "SEED", seed)
        drawn.append((campaign.draw("a", 3).random(), cases(range(1000), 9)))
    assert drawn[0] == drawn[2]
    assert all(one != other for one, other in zip(drawn[0], drawn[1], strict=True))
    assert campaign.draw("a", 3).random() != campaign.draw("a", 4).random()


def test_a_share_has_as_many_values_of_each_axis_as_can_be(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(campaign, "FULL", False)
    every = list(itertools.product("abcd", "xyz", (1, 2)))
    chosen = cases(every, 4)
    assert [len({*axis}) for axis in zip(*chosen, strict=True)] == [4, 3, 2]
    assert chosen == sorted(chosen, key=every.index)
    assert {case[1:] for case in cases(every, 6)} == {*itertools.product("xyz", (1, 2))}


PLANTED = b"""
import pytest
from campaign import SEED, draw

@pytest.mark.parametrize("name", ["a b", "c"])
def test_fails(name):
    assert not name, f"drawn: {SEED} {draw(name).random()}"

@pytest.mark.measures
def test_measures():
    print("it measures")
"""


PYTHON = f"""#!/bin/sh
exec {sys.executable} "$@" -p no:cacheprovider -n 0
"""


@pytest.fixture
def planted(tmp_path: Path) -> Path:
    """A repository with a campaign that fails."""
    files: dict[str, bytes | None] = {
        "scripts/setup": b"#!/bin/sh\n",
        ".venv/bin/python": PYTHON.encode(),
        "pyproject.toml": b"[tool.pytest.ini_options]\npythonpath = ['tests/support']\n"
        b"markers = ['slow', 'measures']\n",
        "tests/conftest.py": b"pytest_plugins = ['campaign']\n",
        "tests/unit/test_other.py": b"def test_other(): assert False\n",
        "tests/campaigns/test_planted.py": PLANTED,
    }
    make_tree(tmp_path, files)
    (tmp_path / "tests/support").mkdir()
    shutil.copy(campaign.__file__, tmp_path / "tests/support")
    shutil.copy(ROOT / "scripts/campaigns", tmp_path / "scripts")
    for name in ("scripts/setup", ".venv/bin/python"):
        (tmp_path / name).chmod(0o755)
    return tmp_path


@pytest.mark.slow
def test_a_failure_is_repeated_by_the_command_that_is_printed(planted: Path) -> None:
    whole = campaigns("--seed", "77", root=planted)
    assert whole.returncode == 1, whole.stderr
    assert "seed of the campaigns: 77" in whole.stdout
    assert "1 passed" in whole.stdout  # what measures; unit tests that do not are not run
    command = "scripts/campaigns --seed 77 'planted::test_fails[a b]'"
    assert command in whole.stdout.splitlines()

    again = campaigns("--seed", "77", "planted::test_fails[a b]", root=planted)
    assert again.returncode == 1
    (drawn,) = {*re.findall(r"drawn: 77 [\d.]+", again.stdout)}
    assert drawn in whole.stdout
