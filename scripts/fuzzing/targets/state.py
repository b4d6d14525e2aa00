"""What a conversion that was interrupted left behind, and reads when it goes on."""

from __future__ import annotations

from pathlib import Path

from scripts.fuzzing.target import Target
from shardkit.conversion.build import ShardTask, load_result
from shardkit.errors import ShardkitError
from shardkit.recipe import Recipe
from shardkit.record import dump_json, load_json
from shardkit.sources.imagefolder import ImageFolder

_SHARD = b"a shard"


class StateTarget(Target):
    """The result of a finished shard: whatever it holds, it is taken or the shard is made anew."""

    name = "state"
    allowed = (ShardkitError,)
    tokens = (
        *(
            b'"entry"',
            b'"bad"',
            b'"fields"',
            b'"labels"',
            b'"notes"',
            b"null",
            b"[]",
            b"{}",
            b"NaN",
        ),
        *(b'"name"', b'"rows"', b'"bytes"', b'"sha256"', b"7", b"-1", b"9" * 5000, b"[" * 3000),
        *(b"1e999", b"true", b'"\\ud800"', b"0", b'"7"', b"7.0"),
    )

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        entry = {"name": "shard-000000.tar", "bytes": len(_SHARD), "sha256": "aa", "rows": 1}
        counts = {"fields": {"jpg": 1}, "labels": {"0": 1}, "notes": {}}
        bad = [{"path": "a.jpg", "reason": "it is empty"}]
        self.seeds = [
            dump_json({"entry": entry, "bad": [], **counts}),
            dump_json({"entry": entry, "bad": bad, **counts}),
            dump_json({"entry": None, "bad": bad, **counts}),
        ]
        self._task = ShardTask(
            split="",
            number=0,
            folder=folder,
            part=folder / "part",
            format="webdataset",
            recipe=Recipe(),
            source=ImageFolder(folder, ()),
            meta={},
            software={},
            keep=True,
        )
        made_of = {"made_of": self._task.digest, "part": {}}
        self.seeds = [dump_json({**load_json(seed), **made_of}) for seed in self.seeds]
        self._task.part.mkdir(exist_ok=True)
        self._task.path.write_bytes(_SHARD)

    def check(self, data: bytes) -> str:
        (self._task.part / "result.json").write_bytes(data)
        result = load_result(self._task)
        return "made anew" if result is None else "taken"
