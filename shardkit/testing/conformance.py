"""The conformance suite: what every storage format promises, as tests that any format can join.

A test reaches around what it tests: it compares what a reader gives with what was written, and
what a reader says of the file with the file's bytes.
"""

from __future__ import annotations

import pytest

from shardkit.contracts import Format
from shardkit.registry import get_format
from shardkit.testing.damage import DamageConformance
from shardkit.testing.datasets import DatasetConformance
from shardkit.testing.storage import StorageConformance


class FormatConformance(StorageConformance, DamageConformance, DatasetConformance):
    """What a storage format must do.

    To test one, subclass it in a test module::

        class TestZip(FormatConformance):
            name = "zip"

    The format must be registered, since some tests convert and read whole datasets.
    """

    name: str
    """The format's name in the registry."""

    @pytest.fixture
    def storage(self) -> Format:
        """The format to be tested; override it to choose one in another way."""
        return get_format(self.name)
