"""Fixtures of several campaigns."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture
def reachable() -> Iterator[Path]:
    """A folder that every user can reach; pytest closes its own to others whenever it starts."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        Path(folder).chmod(0o755)
        yield Path(folder)
