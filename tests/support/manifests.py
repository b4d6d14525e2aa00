"""A manifest with all its entries, and manifests with any content and its correct digest."""

from __future__ import annotations

import hashlib
import json
from typing import Any

from shardkit import Field
from shardkit.dataset.manifest import FieldEntry, FileEntry, Manifest, ShardEntry
from shardkit.errors import Problem


def make_manifest() -> Manifest:
    return Manifest(
        format="lmdb",
        rows=5,
        content_digest="dd",
        shards=(
            ShardEntry(name="shard-000000.lmdb", bytes=10, sha256="aa", rows=3),
            ShardEntry(name="shard-000001.lmdb", bytes=9, sha256="bb", rows=2),
        ),
        files=(FileEntry(name="index/rows.npy", bytes=288, sha256="cc"),),
        fields={"cls": 5, "jpg": 5},
        schema=(
            FieldEntry.of("image", Field("image"), 5),
            FieldEntry.of("label", Field("label", classes=("a",)), 5),
        ),
        classes=("bär", "ant\n", "\udcff"),
        class_counts=(2, 3, 0),
        raw_shape=(4, 5, 3),
        recipe={"encode": "keep", "background": [1, 2, 3]},
        source={"kind": "imagefolder", "limit": None},
        notes={"orientation": 1},
        skipped=(Problem(path="a/b.jpg", reason="it is empty"),),
        ignored={"hidden": 2},
        software={"shardkit": "0"},
    )


def canonical(value: object) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()


def sealed(value: dict[str, Any]) -> bytes:
    """Return a manifest as a forger would write it, with the digest that fits."""
    body = {name: part for name, part in value.items() if name != "digest"}
    body["digest"] = hashlib.sha256(canonical(body)).hexdigest()
    return json.dumps(body, indent=1, sort_keys=True).encode() + b"\n"
