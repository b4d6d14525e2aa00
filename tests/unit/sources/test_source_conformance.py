"""Every registered source passes the conformance suite."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from shardkit.contracts import SourceKind
from shardkit.registry import get_source, source_names
from shardkit.testing import SourceConformance


def image_folder(folder: Path, images: Mapping[str, bytes]) -> Path:
    for name, data in images.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(data)
    return folder


SOURCES = {"imagefolder": image_folder}
"""Source to the function that makes one."""


class TestRegisteredSources(SourceConformance):
    @pytest.fixture(params=source_names())
    def kind(self, request: pytest.FixtureRequest) -> SourceKind:
        self.name = str(request.param)
        return get_source(self.name)

    def make(self, folder: Path, images: Mapping[str, bytes]) -> Path:
        return SOURCES[self.name](folder, images)

    def spoil(self, path: Path, image: str) -> None:
        (path / image).write_bytes(b"not an image")
