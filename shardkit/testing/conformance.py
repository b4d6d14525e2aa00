"""The conformance suite for storage formats: tests of every promise in `shardkit.contracts`.

Tests compare a reader's results with the records written and with the bytes of the file.
"""

from __future__ import annotations

import pytest

from shardkit.contracts import Format
from shardkit.registry import get_format
from shardkit.testing.damage import DamageConformance
from shardkit.testing.datasets import DatasetConformance
from shardkit.testing.storage import StorageConformance


class FormatConformance(StorageConformance, DamageConformance, DatasetConformance):
    """Tests of a storage format.

    Subclass it in a test module::

        class TestZip(FormatConformance):
            name = "zip"

    The format must be registered, since some tests convert and read whole datasets.
    """

    name: str
    """The format's name in the registry."""

    @pytest.fixture
    def storage(self) -> Format:
        """The format under test; override the fixture to use an unregistered one."""
        return get_format(self.name)
