"""The manifest, and the use of accepted ones."""

from __future__ import annotations

import contextlib
import copy
import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import manifests
import numpy as np

from scripts.fuzzing.target import Change, Target, broken
from shardkit.dataset.manifest import (
    MANIFEST_NAME,
    Manifest,
    SplitsManifest,
    load_any_manifest,
    save_manifest,
)
from shardkit.dataset.opened import OpenedDirectory
from shardkit.dataset.shardset import open_shards
from shardkit.errors import CorruptDataset, UsageError
from shardkit.reporting.describe import describe
from shardkit.verification.verify import verify

NASTY: Sequence[Any] = (
    *(None, True, False, 0, 1, -1, 1.5, float("nan"), float("inf"), -0.0, 1e308),
    *(2**31, 2**32, 2**53, 2**63 - 1, 2**63, 2**64, 10**300, 10**4000),
    *("", ".", "..", "/etc/passwd", "../../secret", "a/../b", "a//b", "a\0b", "\ud800", "\udc80"),
    *("index/rows.npy", "shardkit.json", "shard-000000.lmdb", "x" * 5000, "__class__", "a\nb"),
    *("lmdb", "hdf5", "webdataset", "zip", "splits", "dataset", "os:system"),
    *([], {}, [[]], [None], {"": None}, [1, 2, 3], {"a": 1}, [{}], list(range(50))),
)


class ManifestTarget(Target):
    """A manifest, with a digest that fits or not."""

    name = "manifest"
    allowed = (UsageError, CorruptDataset)
    tokens = (
        *(b'"kind": "splits"', b'"format_version": 2', b'"rows"', b'"shards"', b'"name"', b"NaN"),
        *(b"[" * 2000, b'{"a":' * 2000, b"9" * 4400),
        *(b"-Infinity", b"\\ud800", b"../../", b"\\u0000"),
    )

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.place = folder / "dataset"
        self.copy = folder / "copy"
        self.place.mkdir(exist_ok=True)
        self.copy.mkdir(exist_ok=True)
        for manifest in (
            manifests.make_manifest(),
            SplitsManifest(splits={"train": "aa", "val": "bb"}),
        ):
            save_manifest(manifest, self.place)
            self.seeds.append((self.place / MANIFEST_NAME).read_bytes())

    def check(self, data: bytes) -> str:
        (self.place / MANIFEST_NAME).write_bytes(data)
        manifest = load_any_manifest(self.place)
        save_manifest(manifest, self.copy)
        if (self.copy / MANIFEST_NAME).read_bytes() != data:
            broken("a manifest was taken that is not written like that")
        for split in OpenedDirectory(self.place).splits.values():
            place = split.path
            if self.place not in (place, *place.parents) or ".." in place.parts:
                broken("a split leads elsewhere", str(place))
        with contextlib.suppress(UsageError, CorruptDataset):  # there is no index
            describe(self.place)
        if verify(self.place, "quick").ok and isinstance(manifest, Manifest) and manifest.entries:
            broken("files are missing and nobody says so")
        if isinstance(manifest, SplitsManifest):
            return "splits"
        self._use(manifest)
        return "dataset"

    def _use(self, manifest: Manifest) -> None:
        shards = open_shards(self.place)
        if not 0 <= len(shards) == manifest.rows:
            broken("another number of rows")
        for number in range(len(manifest.shards)):
            path = shards.files.path(number)
            if self.place.absolute() not in path.parents or ".." in path.parts:
                broken("a shard lies elsewhere", str(path))
        for action in (
            lambda: shards.find(np.arange(1)),
            lambda: shards.labels,
            lambda: shards.keys,
        ):
            try:
                action()
            except (UsageError, CorruptDataset, IndexError):
                continue
            if manifest.rows:
                broken("something is read where there is no index")

    def mutate(self, data: bytes, rng: random.Random, change: Change) -> bytes:
        """Change values of the JSON object more often than bytes."""
        try:
            value = json.loads(data)
        except (ValueError, RecursionError):
            value = None
        if not isinstance(value, dict) or rng.random() < 0.3:
            return super().mutate(data, rng, change)
        for _ in range(rng.choice((1, 1, 1, 2, 3))):
            _change(value, rng)
        return sealed(value) if rng.random() < 0.95 else json.dumps(value).encode()

    def mend(self, data: bytes, rng: random.Random) -> bytes:
        if rng.random() < 0.3:
            return data
        try:
            value = json.loads(data)
        except (ValueError, RecursionError):
            return data
        return sealed(value) if isinstance(value, dict) else data


def sealed(value: dict[str, Any]) -> bytes:
    """Return a manifest with the digest that fits, or an empty one if JSON cannot state it."""
    try:
        return manifests.sealed(value)
    except (ValueError, TypeError, RecursionError):
        return b"{}"


def _change(value: Any, rng: random.Random) -> None:
    """Change something in a JSON value: often deep inside, sometimes a name, sometimes all."""
    places = [place for place in _places(value) if rng.random() < 0.9 or len(place[0]) < 3]
    if not places:
        return
    holder, key = rng.choice(places)
    what = rng.random()
    if what < 0.1:
        del holder[key]
    elif what < 0.2 and isinstance(holder, dict):
        holder[rng.choice(("a", "", "rows", "name", "\ud800", "digest", "../x"))] = holder[key]
    elif what < 0.3 and isinstance(holder, list):
        holder.insert(key, _copied(holder[key]))
    elif what < 0.4:
        nested: Any = 1
        for _ in range(rng.choice((3, 60, 110, 200, 320, 450, 900))):
            nested = [nested] if rng.random() < 0.5 else {"a": nested}
        holder[key] = nested
    elif what < 0.5:
        other, name = rng.choice(places)
        holder[key] = _copied(other[name]) if other is not holder else 7
    else:
        holder[key] = _copied(rng.choice(NASTY))


def _places(value: Any, depth: int = 0) -> list[tuple[Any, Any]]:
    """Return every container of a JSON value with each of its keys or positions."""
    if depth > 20 or not isinstance(value, (dict, list)):
        return []
    keys: list[Any] = list(value) if isinstance(value, dict) else list(range(len(value)))
    return [(value, key) for key in keys] + [
        place for key in keys for place in _places(value[key], depth + 1)
    ]


def _copied(value: Any) -> Any:
    try:
        return copy.deepcopy(value)
    except RecursionError:
        return None
