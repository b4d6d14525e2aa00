"""The files in a tar archive, divided into samples as other readers of WebDataset divide them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from shardkit.sources.inputs import reading
from shardkit.sources.tar_members import members

_NAME = re.compile(r"((?:.*/)?[^./][^/.]*)\.([^/]*)\Z", re.DOTALL)
_META = re.compile(r"__[^/]*__($|/)")
"""Members that readers of WebDataset skip."""


class SampleFile(NamedTuple):
    """One file in an archive."""

    name: str
    key: str
    """Key of its sample; "" if readers skip it."""
    suffix: str
    start: int
    """Offset of its first header."""
    offset: int
    """Offset of its content; -1 in a sparse file."""
    size: int


def sample_files(path: Path) -> Iterator[SampleFile]:
    """Yield the files in an archive, in order.

    Raises:
        BadImage: If the archive cannot be read, is truncated or damaged.
    """
    with reading(str(path), ahead=True) as view:
        for member in members(view):
            if member.what:
                continue
            match = None if _META.match(member.name) else _NAME.match(member.name)
            key, suffix = match.groups() if match else ("", "")
            is_in_one_piece = len(member.pieces) == 1 and member.pieces[0].length == member.size
            offset = member.pieces[0].offset if is_in_one_piece else -1
            yield SampleFile(member.name, key, suffix, member.start, offset, member.size)
