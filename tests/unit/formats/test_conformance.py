"""Every registered storage format passes the conformance suite."""

from __future__ import annotations

import pytest

from shardkit.contracts import Format
from shardkit.registry import format_names, get_format
from shardkit.testing import FormatConformance


class TestRegisteredFormats(FormatConformance):
    @pytest.fixture(params=format_names())
    def storage(self, request: pytest.FixtureRequest) -> Format:
        return get_format(str(request.param))
