"""shardkit: convert an image folder to open shards, prove every byte, train from them.

Names are loaded at first use: ``import shardkit`` imports neither torch nor h5py nor lmdb.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shardkit.conversion.plan import ConvertOptions, Plan
    from shardkit.errors import (
        BadImage,
        BadImages,
        ConversionFailed,
        CorruptDataset,
        CorruptRecord,
        CorruptShard,
        Problem,
        ShardkitError,
        UsageError,
    )
    from shardkit.examine import Finding
    from shardkit.manifest import Manifest
    from shardkit.pool import Progress
    from shardkit.recipe import Recipe
    from shardkit.sources.imagefolder import Scan, scan_imagefolder
    from shardkit.torch.collate import BatchView, collate
    from shardkit.torch.datasets import (
        HDF5Dataset,
        LMDBDataset,
        ShardDataset,
        TarDataset,
        open_dataset,
    )
    from shardkit.verbs.convert import Converted, convert, dry_run
    from shardkit.verbs.describe import describe
    from shardkit.verbs.reindex import reindex
    from shardkit.verbs.verify import Verification, verify

__version__ = "0.1.0"

_WHERE = {
    "BadImage": "shardkit.errors",
    "BadImages": "shardkit.errors",
    "BatchView": "shardkit.torch.collate",
    "ConversionFailed": "shardkit.errors",
    "ConvertOptions": "shardkit.conversion.plan",
    "Converted": "shardkit.verbs.convert",
    "CorruptDataset": "shardkit.errors",
    "CorruptRecord": "shardkit.errors",
    "CorruptShard": "shardkit.errors",
    "Finding": "shardkit.examine",
    "HDF5Dataset": "shardkit.torch.datasets",
    "LMDBDataset": "shardkit.torch.datasets",
    "Recipe": "shardkit.recipe",
    "Scan": "shardkit.sources.imagefolder",
    "ShardDataset": "shardkit.torch.datasets",
    "ShardkitError": "shardkit.errors",
    "TarDataset": "shardkit.torch.datasets",
    "Manifest": "shardkit.manifest",
    "Plan": "shardkit.conversion.plan",
    "Problem": "shardkit.errors",
    "Progress": "shardkit.pool",
    "UsageError": "shardkit.errors",
    "Verification": "shardkit.verbs.verify",
    "collate": "shardkit.torch.collate",
    "convert": "shardkit.verbs.convert",
    "describe": "shardkit.verbs.describe",
    "dry_run": "shardkit.verbs.convert",
    "open_dataset": "shardkit.torch.datasets",
    "reindex": "shardkit.verbs.reindex",
    "scan_imagefolder": "shardkit.sources.imagefolder",
    "verify": "shardkit.verbs.verify",
}

__all__ = [
    "BadImage",
    "BadImages",
    "BatchView",
    "ConversionFailed",
    "ConvertOptions",
    "Converted",
    "CorruptDataset",
    "CorruptRecord",
    "CorruptShard",
    "Finding",
    "HDF5Dataset",
    "LMDBDataset",
    "Manifest",
    "Plan",
    "Problem",
    "Progress",
    "Recipe",
    "Scan",
    "ShardDataset",
    "ShardkitError",
    "TarDataset",
    "UsageError",
    "Verification",
    "__version__",
    "collate",
    "convert",
    "describe",
    "dry_run",
    "open_dataset",
    "reindex",
    "scan_imagefolder",
    "verify",
]


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module 'shardkit' has no attribute {name!r}")
    return getattr(import_module(_WHERE[name]), name)


def __dir__() -> list[str]:
    return __all__
