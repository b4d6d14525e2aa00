"""What a dataset states about itself, and the lock of its writer, as any program sees them."""

from __future__ import annotations

import fcntl
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from helpers import invoke
from manifests import sealed

MANIFEST = "shardkit.json"
WORK = ".shardkit-work"


def stated(place: Path) -> Any:
    """Return the manifest: its JSON values by attribute, and those of each shard, file and field.

    ``entries`` are all files: shards, then the others.
    """
    value = json.loads((place / MANIFEST).read_bytes())
    for name in ("shards", "files", "schema", "skipped"):
        value[name] = [SimpleNamespace(**each) for each in value.get(name, ())]
    return SimpleNamespace(**value, entries=[*value["shards"], *value["files"]])


def shards_of(place: Path) -> list[Path]:
    """Return the paths of the shards in order."""
    return [place / shard.name for shard in stated(place).shards]


@contextmanager
def being_written(place: Path) -> Iterator[None]:
    """Hold the lock of a conversion into ``place``."""
    (place / WORK).mkdir(parents=True, exist_ok=True)
    with (place / WORK / "lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def done(*words: object) -> str:
    """Call the command, which succeeds; return its output."""
    result = invoke(*words)
    assert result.exit_code == 0, (result.output, result.exception)
    return result.output


def has_compiled_module() -> bool:
    """Return whether the package has its compiled module, and uses it."""
    return "libjpeg-turbo" in done("--version")


def restate_json(place: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change the manifest's JSON values, and give it the digest of its new content."""
    value = json.loads((place / MANIFEST).read_bytes())
    change(value)
    (place / MANIFEST).unlink()  # it may be shared with another dataset
    (place / MANIFEST).write_bytes(sealed(value))
