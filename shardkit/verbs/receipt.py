"""Receipts: what a comparison with the source proved, to be held against the dataset later."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import tempfile
from collections.abc import Mapping
from dataclasses import asdict
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from shardkit import __version__
from shardkit.errors import CorruptDataset, ShardkitError, UsageError
from shardkit.examine import Finding
from shardkit.files import write_atomically
from shardkit.manifest import MANIFEST_NAME, dataset_directories, load_any_manifest, load_manifest
from shardkit.record import dump_json, load_json
from shardkit.verbs.verify import Verification

_KIND = "shardkit receipt"
_VERSION = 1
_LIBRARIES = ("numpy", "pillow", "simplejpeg", "h5py", "lmdb", "torch")


def require_new(path: Path) -> None:
    """Refuse a place for a receipt where something stands, or where nothing can be written.

    Raises:
        UsageError: If it is one.
    """
    if os.path.lexists(path):
        raise UsageError(
            f"{path} exists already; choose another name for the new receipt, or leave out "
            "--against to hold the dataset against the old one"
        )
    try:
        with tempfile.TemporaryFile(dir=path.parent):
            pass
    except OSError as error:
        raise UsageError(f"the receipt {path} cannot be written: {error.strerror}") from error


def save_receipt(path: Path, directory: Path, result: Verification) -> None:
    """Write what was proved of the dataset in ``directory`` to ``path``.

    Args:
        path: The receipt to be: JSON, with a digest of its own.
        directory: The dataset.
        result: A verification against a source, without findings.

    Raises:
        UsageError: If something stands there meanwhile.
        ShardkitError: If it cannot be written.
        CorruptDataset: If the dataset is another one meanwhile.
    """
    assert result.ok
    assert result.source is not None
    dataset = _describe(directory)
    if dataset["manifests"] != result.manifests:
        raise CorruptDataset(
            f"{directory} was written anew while it was verified, so that there is no receipt; "
            "verify it again"
        )
    require_new(path)
    body = {
        "kind": _KIND,
        "version": _VERSION,
        "time": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "level": result.level,
        "software": _software(),
        "dataset": dataset,
        "source": asdict(result.source),
    }
    text = json.dumps({**body, "digest": _digest(body)}, indent=1) + "\n"
    try:
        write_atomically(path, text.encode())
    except OSError as error:
        raise ShardkitError(f"the receipt {path} cannot be written: {error.strerror}") from error


def load_receipt(path: Path) -> dict[str, Any]:
    """Read a receipt.

    Raises:
        UsageError: If there is none, or one of a newer version.
        CorruptDataset: If it was changed after it was written.
    """
    try:
        value = load_json(path.read_bytes())
    except OSError as error:
        raise UsageError(
            f"the receipt {path} cannot be read: {error.strerror}. (--receipt holds a dataset "
            "against a receipt; with --against SRC it writes one.)"
        ) from error
    except ValueError as error:
        raise UsageError(f"{path} is not a receipt: {error}") from error
    if value.get("kind") != _KIND:
        raise UsageError(f"{path} is not a receipt of shardkit")
    if value.get("version") != _VERSION:
        raise UsageError(f"{path} is of version {value.get('version')}; this shardkit reads 1")
    digest = value.pop("digest", None)
    if digest is None or digest != _digest(value):
        raise CorruptDataset(f"the receipt {path} was changed after it was written")
    if not _is_complete(value):
        raise CorruptDataset(f"{path} is a receipt that lacks something, or holds something else")
    return value


def _is_complete(receipt: dict[str, Any]) -> bool:
    """Tell whether all is there that is looked at later: a digest does not say who made it."""
    dataset, source = receipt.get("dataset"), receipt.get("source")
    if not isinstance(dataset, dict) or not isinstance(source, dict):
        return False
    tables = [dataset.get(name) for name in ("manifests", "files")]
    texts = [receipt.get("time"), dataset.get("digest"), source.get("name")]
    for table in tables:
        texts += table.values() if isinstance(table, dict) else [None]
    return all(isinstance(text, str) for text in texts)


def check_receipt(
    receipt: dict[str, Any], directory: Path, verified: Mapping[str, str]
) -> list[Finding]:
    """Return what the manifests of the dataset in ``directory`` say other than ``receipt`` does.

    Args:
        receipt: From `load_receipt`.
        directory: The dataset.
        verified: Split to the digest of the manifest that it was verified by.

    Raises:
        CorruptDataset: If a manifest is damaged.
        UsageError: If there is no dataset.
    """
    then, now = receipt["dataset"], _describe(directory)
    if then["digest"] == now["digest"] and then["manifests"] == now["manifests"] == verified:
        return []
    before, after = then["files"], now["files"]
    if not before.items() & after.items():
        rows = sum(then["rows"].values())
        reason = f"the receipt is of another dataset: {then['name']}, of {rows:,} images"
        return [Finding(file=MANIFEST_NAME, reason=reason)]
    reasons = dict.fromkeys(after.keys() - before.keys(), "it is new since the receipt")
    reasons |= dict.fromkeys(before.keys() - after.keys(), "it is gone since the receipt")
    reasons |= {
        name: "it is another file than at the time of the receipt"
        for name in before.keys() & after.keys()
        if before[name] != after[name]
    }
    reasons[MANIFEST_NAME] = f"it is not the manifest that the receipt of {receipt['time']} is of"
    return [Finding(file=name, reason=reason) for name, reason in sorted(reasons.items())]


def _describe(directory: Path) -> dict[str, Any]:
    places = {name: load_manifest(place) for name, place in dataset_directories(directory).items()}
    return {
        "name": directory.resolve().name,
        "digest": load_any_manifest(directory).digest,
        "manifests": {name: manifest.digest for name, manifest in places.items()},
        "rows": {name: manifest.rows for name, manifest in places.items()},
        "files": {
            f"{name}/{entry.name}" if name else entry.name: entry.sha256
            for name, manifest in places.items()
            for entry in manifest.entries
        },
    }


def _digest(body: dict[str, Any]) -> str | None:
    try:
        return hashlib.sha256(dump_json(body)).hexdigest()
    except (RecursionError, ValueError):  # too deep, or numbers too large: nothing of ours
        return None


def _software() -> dict[str, str]:
    found = {"shardkit": __version__, "python": platform.python_version()}
    for name in _LIBRARIES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found
