"""A path that can hold no dataset is refused with one message."""

from __future__ import annotations

from pathlib import Path

import pytest

from shardkit.dataset.opened import OpenedDirectory, open_one
from shardkit.errors import UsageError


@pytest.mark.parametrize("name", ["x" * 300, "loop", "file/below", "absent"])
def test_a_path_that_can_hold_nothing_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "file").touch()
    for opener in (open_one, OpenedDirectory):
        with pytest.raises(UsageError, match=r"cannot be read|is not a shardkit dataset"):
            opener(tmp_path / name)
