"""Every registered source passes the conformance suite."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
from foreign import MAKERS, Maker

from shardkit.contracts import SourceKind
from shardkit.registry import get_source, source_names
from shardkit.testing import SourceConformance

SECOND = (
    *("cifar", "ffcv raw", "hdf5 arrays", "huggingface saved", "litdata", "litdata raw", "mds raw"),
    *("mnist", "npz", "voc"),
)
"""Second ways to make a source, and those that share all but a parser with another: VOC with COCO,
LitData with MDS, CIFAR and MNIST with HDF5 arrays; `test_same_samples` always checks them."""


class TestRegisteredSources(SourceConformance):
    how: Maker

    @pytest.fixture(
        params=[
            pytest.param(name, marks=pytest.mark.slow if name in SECOND else ())
            for name in sorted(MAKERS)
        ]
    )
    def maker(self, request: pytest.FixtureRequest) -> Maker:
        return MAKERS[request.param]

    @pytest.fixture
    def kind(self, maker: Maker) -> SourceKind:
        self.how, self.pixels, self.labels = maker, maker.pixels, maker.labels
        self.options, self.in_place = maker.options, maker.in_place
        return get_source(maker.kind)

    @pytest.fixture
    def images(self, maker: Maker) -> dict[str, bytes]:
        return maker.images()

    def make(self, folder: Path, images: Mapping[str, bytes]) -> Path:
        return self.how.make(folder, images)

    def spoil(self, path: Path, image: str) -> None:
        self.how.spoil(path, image)


def test_every_source_is_tested() -> None:
    assert {maker.kind for maker in MAKERS.values()} == set(source_names())
