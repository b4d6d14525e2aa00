"""State files of an interrupted conversion, which a rerun reads."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from scripts.fuzzing.target import BrokenPromiseError, Target
from shardkit.contracts import Entry, Images
from shardkit.conversion.build import ShardTask
from shardkit.conversion.fingerprint import ConversionFingerprint
from shardkit.conversion.lock import require_dead
from shardkit.conversion.staging import (
    DATASET,
    RETIRED,
    STATE,
    WORK_NAME,
    StagingDirectory,
    old_files,
)
from shardkit.conversion.task import load_result
from shardkit.errors import ShardkitError
from shardkit.kinds.field import default_schema
from shardkit.recipe import Recipe
from shardkit.record import dump_json
from shardkit.sources.imagefolder import ImageFolder
from shardkit.system.safe_paths import make_folder

_SHARD = b"a shard"
_TERMS = ConversionFingerprint(settings={}, images={}, files={}, on_error="fail")


_STATE = (
    "plan.json",
    "retired.json",
    "exchanged",
    "sibling",
    "bad.json",
    "files.jsonl",
    "../owner",
)
"""Files of the work folder that a conversion reads before it looks at shards."""


class StateTarget(Target):
    """The state of a conversion: whatever it holds, no file outside of the target is touched.

    The result of a finished shard is reused, or the shard is rebuilt.
    """

    name = "state"
    allowed = (ShardkitError,)
    tokens = (
        *b'"entry" "bad" "notes" "name" "rows" "bytes" "sha256" "machine" "\\ud800" "7"'.split(),
        *b"null [] {} NaN 7 -1 1e999 true 0 7.0 ../victim /etc/passwd".split(),
        *(b"shardkit.json", b"index/rows.npy", b"9" * 5000, b"[" * 3000),
    )

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        entry = {"name": "shard-000000.tar", "bytes": len(_SHARD), "sha256": "aa", "rows": 1}
        bad = [{"path": "a.jpg", "reason": "it is empty"}]
        self._task = ShardTask(
            split="",
            number=0,
            folder=folder,
            result_folder=folder / "part",
            format="webdataset",
            recipe=Recipe(),
            schema=default_schema(None),
            source=Images(ImageFolder(folder), "", (Entry("a.jpg", "a", 0, 1, 0),)),
            meta={},
            software={},
            keep=True,
        )
        result = {"entry": entry, "bad": bad, "notes": {}}
        result |= {"made_of": self._task.digest, "part": {}}
        self.seeds = [
            dump_json({**result, "bad": []}),
            dump_json(result),
            dump_json({**result, "entry": None}),
            dump_json(["shardkit.json", "train/index/rows.npy", "shard-000000.tar"]),
            dump_json(["../victim", "/victim", "victim/../../victim", ".shardkit-work/lock"]),
            dump_json({"files": ["a.jpg"]}),
            dump_json({"machine": "another", "process": 7}),
        ]
        self._target = folder / "target"
        make_folder(folder, "target")
        make_folder(self._target, STATE)
        make_folder(self._target, DATASET)
        self._task.result_folder.mkdir(exist_ok=True)
        self._task.path.write_bytes(_SHARD)

    def check(self, data: bytes) -> str:
        (self._task.result_folder / "result.json").write_bytes(data)
        result = load_result(self._task)
        self._check_work(data)
        return "rebuilt" if result is None else "reused"

    def _check_work(self, data: bytes) -> None:
        """Plant ``data`` as every state file, and let a conversion and a lock meet it."""
        for name in (*_STATE, "ready"):
            (self._target / STATE / name).write_bytes(data)
        place = StagingDirectory(self._target)
        with contextlib.suppress(ShardkitError):
            place.start(_TERMS, force=False)
        make_folder(self._target, STATE)
        (self._target / RETIRED).write_bytes(data)
        with contextlib.suppress(ShardkitError):
            for name in old_files(self._target, RETIRED):
                if not os.path.abspath(self._target / name).startswith(f"{self._target}{os.sep}"):
                    raise BrokenPromiseError(f"a name leads elsewhere: {name!r}")
        with contextlib.suppress(ShardkitError):
            require_dead(self._target, f"{WORK_NAME}/owner")
