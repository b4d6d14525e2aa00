"""The small texts of a record: the label and the JSON object."""

from __future__ import annotations

from pathlib import Path

from scripts.fuzzing.target import Target, broken
from shardkit.contracts import ShardSpec
from shardkit.dataset.index import save_index
from shardkit.dataset.index_builder import index_shard
from shardkit.errors import CorruptShard
from shardkit.formats.webdataset import FORMAT
from shardkit.record import Record

_META = b'{"path":"a/b.jpg","width":12,"height":9}'


class FieldsTarget(Target):
    """An input is a letter, ``c`` for the label and else for the object, and the field's bytes."""

    name = "fields"
    allowed = (CorruptShard,)
    tokens = (
        *b'{"path": "path" "width": "height": "\\ud800" "1" 1.5 4294967296 0x1 null true'.split(),
        *b"NaN Infinity -1 1e999 1e308 \xff\xfe \xef\xbb\xbf \0".split(),
        *(b"[" * 500, b'{"a":' * 300, b"9" * 400, b"9" * 5000, "٣".encode()),
    )

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.seeds = [
            b"j" + _META,
            b'j{"path":"\\udc80","width":1,"height":1,"frames":2}',
            b'j{"path":{"a":[1,2]},"width":"7","height":1.0}',
            b"j" + b'{"a":' * 200 + b"1" + b"}" * 200,
            b'j{"path":"\\ud800","width":1,"height":1}',
            b"c0",
            b"c17",
            b"c999999999",
        ]

    def check(self, data: bytes) -> str:
        name, value = ("cls" if data[:1] == b"c" else "json"), data[1:]
        record = Record("a", {"gif": b"GIF89a", "json": _META, name: value})
        outcome = self._parse(record, name)
        path = self.folder / "shard.tar"
        path.unlink(missing_ok=True)
        writer = FORMAT.write(path, ShardSpec())
        writer.write(record)
        writer.close()
        part = index_shard(FORMAT, path)
        save_index([part], self.folder)
        if outcome == "refused":
            broken("a field that a record refuses is indexed", value)
        if name == "cls" and b"%d" % part.rows[0]["label"] != value:
            broken("the index has another label", value)
        return "indexed"

    def _parse(self, record: Record, name: str) -> str:
        try:
            _ = record.label if name == "cls" else record.meta
        except ValueError:
            return "refused"
        return "parsed"
