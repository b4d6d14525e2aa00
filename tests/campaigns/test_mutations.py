"""Bugs seeded into the writer and the checker make tests fail."""

from __future__ import annotations

from pathlib import Path

import pytest

from scripts import mutate


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("mutants")
    mutate.copy_to(folder)
    return folder


@pytest.mark.parametrize("mutant", mutate.MUTANTS, ids=lambda mutant: mutant.name)
def test_a_seeded_bug_is_caught(mutant: mutate.Mutant, copy: Path) -> None:
    assert mutate.outcome(mutant, copy) == "caught"


def test_a_change_that_is_no_bug_survives(copy: Path) -> None:
    """Or tests that always fail would catch everything."""
    harmless = mutate.Mutant(
        "a comment",
        "system/files.py",
        "_PIECES = 512\n",
        "_PIECES = 511\n",
        "tests/unit/system/test_files.py",
    )
    assert mutate.outcome(harmless, copy).startswith("survived")
    assert "not exactly once" in mutate.outcome(harmless._replace(old="nowhere"), copy)
