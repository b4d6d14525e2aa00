"""Hypothesis strategies for keys, field names and records, including extreme valid ones."""

from __future__ import annotations

from math import prod

from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

from shardkit.record import LABEL_FIELD, Record, make_keys

_FORBIDDEN = frozenset((b"", b".", b".."))
_SUFFIXES = (b"", b".jpg", b".JPG", b".png", b".tar.gz", b".")


def paths() -> SearchStrategy[str]:
    """Generate relative paths that a file system may hold: UTF-8 or not, some very long."""
    raw = st.binary(min_size=1, max_size=40)
    text = st.text(st.characters(exclude_categories=["Cs"]), max_size=20).map(str.encode)
    usual = st.sampled_from([b"a", b"a.b", b"__x__", b"_", b".hidden", b"%41", b" ", b"n" * 250])
    part = (raw | text | usual).map(lambda part: part.translate(None, b"/\0"))
    name = st.builds(bytes.__add__, part, st.sampled_from(_SUFFIXES))
    parts = st.lists(name.filter(lambda part: part not in _FORBIDDEN), min_size=1, max_size=4)
    return parts.map(lambda parts: b"/".join(parts).decode("utf-8", "surrogateescape"))


def keys(*, min_size: int = 0, max_size: int = 8) -> SearchStrategy[list[str]]:
    """Generate lists of distinct keys from `shardkit.record.make_keys`."""
    return st.lists(paths(), min_size=min_size, max_size=max_size, unique=True).map(make_keys)


def field_names() -> SearchStrategy[str]:
    """Generate names of fields with arbitrary bytes: all but ``cls`` and ``raw``."""
    usual = st.sampled_from(
        ["jpg", "png", "json", "txt", "npy", "0", "key", "data", "a_", "x" * 32]
    )
    allowed = usual | st.from_regex(r"[a-z0-9][a-z0-9_]{0,31}", fullmatch=True)
    return allowed.filter(lambda name: name not in (LABEL_FIELD, "raw"))


@st.composite
def records(
    draw: st.DrawFn,
    *,
    min_size: int = 0,
    max_size: int = 8,
    raw_shape: tuple[int, int, int] | None = None,
) -> list[Record]:
    """Generate the records of one shard, with different fields and some without a label.

    Args:
        draw: From hypothesis.
        min_size: Minimum number of records.
        max_size: Maximum number of records.
        raw_shape: Height, width and channels of the field ``raw`` of most records; None omits it.
    """
    generated = []
    names = draw(st.lists(field_names(), min_size=1, max_size=3, unique=True))
    for key in draw(keys(min_size=min_size, max_size=max_size)):
        fields = {name: draw(st.binary(max_size=700)) for name in names if draw(st.booleans())}
        if draw(st.booleans()):
            fields[LABEL_FIELD] = b"%d" % draw(st.integers(0, 999_999_999))
        if raw_shape is not None and draw(st.integers(0, 7)):
            size = prod(raw_shape)
            fields["raw"] = draw(st.binary(min_size=size, max_size=size))
        generated.append(Record(key, fields or {names[0]: b""}))
    return generated
