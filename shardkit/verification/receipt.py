"""Receipts: proof of a comparison with the source, to check the dataset against later."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from shardkit._version import __version__
from shardkit.dataset.manifest import MANIFEST_NAME, build_typed
from shardkit.dataset.opened import OpenedDirectory
from shardkit.errors import CorruptDataset, ShardkitError, UsageError
from shardkit.record import dump_json, load_json
from shardkit.system.files import as_text, read_small, write_atomically
from shardkit.system.packages import version_of
from shardkit.system.text import quoted
from shardkit.system.user_files import remove_leftovers
from shardkit.verification.findings import Finding
from shardkit.verification.source_comparison import SourceReport
from shardkit.verification.verify import Verification

_KIND = "shardkit receipt"
_VERSION = 1
_LIBRARIES = ("numpy", "pillow", "simplejpeg", "h5py", "lmdb", "torch")


@dataclass(frozen=True, kw_only=True)
class _Dataset:
    """A receipt's description of a dataset."""

    name: str
    digest: str
    manifests: dict[str, str]
    rows: dict[str, int]
    content: dict[str, str]
    files: dict[str, str]


@dataclass(frozen=True, kw_only=True)
class _Receipt:
    """The types of a receipt's entries."""

    kind: str
    version: int
    time: str
    level: str
    software: dict[str, str]
    dataset: _Dataset
    source: SourceReport


def require_new(path: Path, directory: Path) -> None:
    """Refuse a path for a new receipt that exists or cannot be written.

    A receipt of this dataset is accepted: an earlier run of the same command may have written it.
    """
    if os.path.lexists(path):
        try:
            receipt = load_receipt(path)
            dataset = _describe(OpenedDirectory(directory))
        except ShardkitError:
            raise _exists(path) from None
        if receipt["dataset"] != dataset:
            raise _exists(path)
        return
    try:
        with tempfile.TemporaryFile(dir=path.parent):
            pass
    except OSError as error:
        raise UsageError(f"the receipt {path} cannot be written: {error.strerror}") from error


def _exists(path: Path) -> UsageError:
    return UsageError(
        f"{path} already exists;",
        remedy=f"choose another file, or check that receipt with --check-receipt {path}",
        where=path,
    )


def save_receipt(path: Path, directory: Path, result: Verification) -> None:
    """Write a receipt of a successful comparison with the source: JSON with its own digest.

    UsageError if ``path`` exists (a receipt that states the same stays), or ``result`` proves
    nothing. CorruptDataset if the dataset was replaced since the verification.
    """
    if not result.ok or result.source is None:
        raise UsageError("a receipt requires a verification against a source, without findings")
    dataset = _describe(OpenedDirectory(directory))
    if dataset["manifests"] != result.manifests:
        raise CorruptDataset(
            f"{directory} was rewritten during the verification, so no receipt was written;",
            remedy="verify it again",
        )
    require_new(path, directory)
    body = {
        "kind": _KIND,
        "version": _VERSION,
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "level": result.level,
        "software": _software(),
        "dataset": dataset,
        "source": asdict(result.source),
    }
    if os.path.lexists(path):
        earlier = load_receipt(path)
        if any(earlier[name] != body[name] for name in ("level", "dataset", "source")):
            raise _exists(path)
        return
    text = json.dumps({**body, "digest": _digest(body)}, indent=1) + "\n"
    try:
        remove_leftovers(path)
        write_atomically(path, text.encode())
    except OSError as error:
        raise ShardkitError(f"the receipt {path} cannot be written: {error.strerror}") from error


def load_receipt(path: Path) -> dict[str, Any]:
    """Read a receipt; CorruptDataset if it was changed after it was written."""
    try:
        value = load_json(read_small(Path(os.path.realpath(path))))
    except OSError as error:
        raise UsageError(
            f"the receipt {path} cannot be read: {error.strerror or error}",
            remedy="Write one with --against SRC --write-receipt FILE.",
        ) from error
    except ValueError as error:
        raise UsageError(f"{path} is not a receipt: {error}") from error
    if value.get("kind") != _KIND:
        raise UsageError(f"{path} is not a shardkit receipt")
    version = value.get("version")
    if type(version) is not int or version != _VERSION:
        raise UsageError(
            f"{path} has version {quoted(version)}; this shardkit reads version {_VERSION}"
        )
    digest = value.pop("digest", None)
    if digest is None or digest != _digest(value):
        raise CorruptDataset(f"the receipt {path} was changed after it was written")
    try:
        build_typed(_Receipt, value)  # a digest does not say who made it
    except (TypeError, ValueError) as error:
        raise CorruptDataset(f"{path} is not a valid receipt: {error}") from error
    return value


def check_receipt(
    receipt: dict[str, Any], directory: Path, verified: Mapping[str, str]
) -> list[Finding]:
    """Return the differences between a receipt and the dataset in ``directory``.

    ``verified`` are digests of the manifests used in the verification, by split name.
    """
    dataset = OpenedDirectory(directory)
    then = receipt["dataset"]
    now = _describe(dataset)
    if then["digest"] == now["digest"] and then["manifests"] == now["manifests"] == verified:
        return []
    before = then["files"]
    after = now["files"]
    shards = {
        split.prefix + shard.name
        for split in dataset.splits.values()
        for shard in split.manifest.shards
    }
    # Two datasets may have index files in common, but no shards. Archives are not in receipts.
    chosen = shards & after.keys() or after.keys()
    if all(before.get(name) != after[name] for name in chosen):
        rows = sum(then["rows"].values())
        reason = f"the receipt describes another dataset: {then['name']}, with {rows:,} images"
        if then["content"] == now["content"]:
            reason += " and the same content digest; to prove these files, verify --against"
        return [Finding(file=MANIFEST_NAME, reason=reason, receipt=True)]
    reasons = dict.fromkeys(after.keys() - before.keys(), "it was added since the receipt")
    reasons |= dict.fromkeys(before.keys() - after.keys(), "it was removed since the receipt")
    reasons |= {
        name: "it was changed since the receipt"
        for name in before.keys() & after.keys()
        if before[name] != after[name]
    }
    reasons[MANIFEST_NAME] = f"it was changed since the receipt of {receipt['time']}"
    return [
        Finding(file=name, reason=reason, receipt=True) for name, reason in sorted(reasons.items())
    ]


def _describe(dataset: OpenedDirectory) -> dict[str, Any]:
    manifests = {name: split.manifest for name, split in dataset.splits.items()}
    return {
        "name": as_text(dataset.path.resolve().name),
        "digest": dataset.manifest.digest,
        "manifests": {name: manifest.digest for name, manifest in manifests.items()},
        "rows": {name: manifest.rows for name, manifest in manifests.items()},
        "content": {name: manifest.content_digest for name, manifest in manifests.items()},
        "files": {
            split.prefix + entry.name: entry.sha256
            for split in dataset.splits.values()
            for entry in split.manifest.entries
        },
    }


def _digest(body: dict[str, Any]) -> str | None:
    try:
        return hashlib.sha256(dump_json(body)).hexdigest()
    except (RecursionError, ValueError):  # pragma: no cover - Pythons that nest less on writing
        return None


def _software() -> dict[str, str]:
    versions = {"shardkit": __version__, "python": platform.python_version()}
    installed = {name: version_of(name) for name in _LIBRARIES}
    return versions | {name: version for name, version in installed.items() if version is not None}
