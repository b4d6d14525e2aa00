"""Each bug of `scripts/mutate.py` can be seeded: its text is in the package once."""

from __future__ import annotations

from pathlib import Path

import shardkit
from scripts.mutate import MUTANTS


def test_each_bug_can_be_seeded() -> None:
    package = Path(shardkit.__file__).parent
    sources = {file: (package / file).read_text("utf-8") for file in {m.file for m in MUTANTS}}

    assert [m.name for m in MUTANTS if sources[m.file].count(m.old) != 1] == []
