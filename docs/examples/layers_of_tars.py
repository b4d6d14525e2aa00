"""Read the fields of a dataset of tar files with layers, with tarfile alone."""

from __future__ import annotations

import json
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path


def records(folder: Path) -> Iterator[tuple[str, dict[str, bytes]]]:
    """Yield the key and the fields of each record in the shards of a folder, in order."""
    for shard in sorted(folder.glob("shard-*.tar")):
        with tarfile.open(shard, "r:") as archive:
            found: dict[str, dict[str, bytes]] = {}
            for member in archive.getmembers()[1:]:
                key, _, field = member.name.partition(".")
                found.setdefault(key, {})[field] = archive.extractfile(member).read()
            yield from found.items()


dataset = Path(sys.argv[1])
manifest = json.loads((dataset / "shardkit.json").read_text())
layering = manifest.get("layering", {"layers": []})
layers = [layer for layer in layering["layers"] if layer["files"]]
folders = [dataset, *(dataset / "layers" / layer["name"] for layer in layers)]
for rows in zip(*map(records, folders), strict=True):
    keys = {key for key, _ in rows}
    assert len(keys) == 1  # all layers have the same rows
    fields = {name: value for _, record in rows for name, value in record.items()}
    print(*keys, sorted(fields.keys() - {"json"}))
