"""Buffers are lent again, unless they are too large to keep."""

from __future__ import annotations

import pytest

from shardkit.system import scratch as module
from shardkit.system.scratch import scratch


def test_a_buffer_is_lent_again_unless_it_is_too_large(monkeypatch: pytest.MonkeyPatch) -> None:
    free: list[memoryview] = []
    monkeypatch.setattr(module, "_FREE", free)
    monkeypatch.setattr(module, "_KEEP", 1 << 16)
    with scratch(100) as small:
        assert len(small) >= 100
    assert free == [small]
    with scratch(1 << 16) as again:
        assert again is small
    with scratch((1 << 16) + 1) as large:
        assert len(large) > 1 << 16
    assert free == []
