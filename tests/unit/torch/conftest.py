"""Datasets that tests of loaders only read."""

from __future__ import annotations

from pathlib import Path

import pytest
from loading import make_datasets


@pytest.fixture(scope="session")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dataset of 23 images in six shards, in each format."""
    return make_datasets(tmp_path_factory.mktemp("loading"))


@pytest.fixture(params=["native", "python"])
def implementation(request: pytest.FixtureRequest) -> None:
    """What reads: the compiled module or Python."""
    if request.param == "python":
        request.getfixturevalue("without_native")
