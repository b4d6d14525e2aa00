"""Lists of images as JSON: what was written is read, and anything else is refused."""

from __future__ import annotations

from typing import Any

from refusals import refused
from table import for_each

from shardkit.contracts import Entry
from shardkit.conversion.entry_files import dump_entries, load_entries
from shardkit.record import MAX_KEY_BYTES, NO_LABEL, dump_json

ENTRY = Entry("cat/gr\u00f6\u00dfe\udcff.jpg", "cat/key", NO_LABEL, 1 << 40, -5, 7, '{"age": 1}')


def test_entries_survive_a_round_trip() -> None:
    assert load_entries(dump_entries([ENTRY] * 2)) == [ENTRY] * 2


@for_each(
    ("field", "wrong"),
    [
        ("key", ""),
        ("key", "a" * (MAX_KEY_BYTES + 1)),
        ("key", "a\ud800"),
        ("values", "a\ud800"),
        ("path", 1),
        ("label", NO_LABEL - 1),
        ("label", True),
        ("bytes", -1),
        ("place", 1 << 63),
        ("stamp", 2.5),
    ],
)
def test_a_value_that_no_source_lists_is_refused(field: str, wrong: Any) -> None:
    content = dump_entries([ENTRY, ENTRY._replace(**{field: wrong})])
    with refused(ValueError):
        load_entries(content)


@for_each("value", [{}, {"entries": 1}, {"entries": [1]}, {"entries": [["a"]]}])
def test_anything_but_entries_is_refused(value: dict[str, Any]) -> None:
    with refused(ValueError):
        load_entries(dump_json(value))
