"""Bugs that are seeded into the writer and the checker make tests fail."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]


def load() -> Any:
    spec = importlib.util.spec_from_file_location("mutate", ROOT / "scripts/mutate.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["mutate"] = module
    spec.loader.exec_module(module)
    return module


mutate = load()


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("mutants")
    mutate.copy_to(folder)
    return folder


@pytest.mark.parametrize("mutant", mutate.MUTANTS, ids=lambda mutant: mutant.name)
def test_a_seeded_bug_is_caught(mutant: Any, copy: Path) -> None:
    assert mutate.outcome(mutant, copy) == "caught"


def test_a_change_that_is_no_bug_survives(copy: Path) -> None:
    """Or tests that always fail would catch everything."""
    harmless = mutate.Mutant(
        "a comment", "files.py", "_PIECES = 512\n", "_PIECES = 511\n", "tests/test_files.py"
    )
    assert mutate.outcome(harmless, copy).startswith("survived")
    assert "not exactly once" in mutate.outcome(harmless._replace(old="nowhere"), copy)
