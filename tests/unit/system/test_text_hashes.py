"""Equal texts are found, however few are compared at a time."""

from __future__ import annotations

from collections import Counter

import pytest

from shardkit.system import text_hashes
from shardkit.system.text_hashes import TextHashes


@pytest.mark.parametrize(("buffered", "at_once"), [(1 << 16, 1 << 19), (8, 5), (3, 100)])
@pytest.mark.parametrize("count", [0, 1, 7, 300])
def test_hashes_of_repeated_and_single_texts(
    monkeypatch: pytest.MonkeyPatch, buffered: int, at_once: int, count: int
) -> None:
    monkeypatch.setattr(text_hashes, "_BUFFERED", buffered)
    monkeypatch.setattr(text_hashes, "_AT_ONCE", at_once)
    texts = [str(number * 7919 % max(1, count * 2 // 3)) for number in range(count)]
    hashes = TextHashes()
    for text in texts:
        hashes.add(text)
    for _ in range(2):  # more texts may follow
        counts = Counter(texts)
        assert hashes.repeated() == {hash(text) for text in texts if counts[text] > 1}
        assert hashes.single() == {hash(text) for text in texts if counts[text] == 1}
        hashes.add("new")
        texts.append("new")
