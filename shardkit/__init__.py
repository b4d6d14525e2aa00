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
        DiskFull,
        LoaderFailed,
        MeasurementFailed,
        Problem,
        ShardkitError,
        StateMismatch,
        TransformFailed,
        UsageError,
    )
    from shardkit.examine import Finding
    from shardkit.manifest import Manifest
    from shardkit.measure.comparison.bench import BenchOptions, bench
    from shardkit.measure.comparison.report import BenchReport
    from shardkit.measure.tuning.tune import TuneReport, TuneRequest, tune
    from shardkit.order import Blocks, Order
    from shardkit.pool import Progress
    from shardkit.recipe import Recipe
    from shardkit.share import Share
    from shardkit.sources.imagefolder import Scan, scan_imagefolder
    from shardkit.torch.collate import BatchView, collate
    from shardkit.torch.datasets import (
        HDF5Dataset,
        LMDBDataset,
        ShardDataset,
        TarDataset,
        open_dataset,
    )
    from shardkit.torch.iterable import (
        IterableHDF5Dataset,
        IterableLMDBDataset,
        IterableShardDataset,
        IterableTarDataset,
    )
    from shardkit.torch.lightning import ShardDataModule as ShardDataModule
    from shardkit.torch.loader import Loader, make_loader
    from shardkit.torch.monitor import ThroughputMonitor, ThroughputReport
    from shardkit.torch.ops import CenterCrop, ImageOp, RandomResizedCrop, Resize
    from shardkit.torch.options import LoaderOptions
    from shardkit.torch.prefetch import DevicePrefetcher, Normalise
    from shardkit.torch.reading import with_rng
    from shardkit.torch.sampler import EpochBatchSampler
    from shardkit.verbs.against import SourceReport
    from shardkit.verbs.convert import Converted, convert, dry_run
    from shardkit.verbs.describe import describe
    from shardkit.verbs.reindex import reindex
    from shardkit.verbs.repair import Repaired, repair
    from shardkit.verbs.verify import Verification, verify

__version__ = "0.1.0"

_WHERE = {
    "BadImage": "shardkit.errors",
    "BadImages": "shardkit.errors",
    "BatchView": "shardkit.torch.collate",
    "BenchOptions": "shardkit.measure.comparison.bench",
    "BenchReport": "shardkit.measure.comparison.report",
    "Blocks": "shardkit.order",
    "CenterCrop": "shardkit.torch.ops",
    "ConversionFailed": "shardkit.errors",
    "ConvertOptions": "shardkit.conversion.plan",
    "Converted": "shardkit.verbs.convert",
    "CorruptDataset": "shardkit.errors",
    "CorruptRecord": "shardkit.errors",
    "CorruptShard": "shardkit.errors",
    "DevicePrefetcher": "shardkit.torch.prefetch",
    "DiskFull": "shardkit.errors",
    "EpochBatchSampler": "shardkit.torch.sampler",
    "Finding": "shardkit.examine",
    "HDF5Dataset": "shardkit.torch.datasets",
    "ImageOp": "shardkit.torch.ops",
    "IterableHDF5Dataset": "shardkit.torch.iterable",
    "IterableLMDBDataset": "shardkit.torch.iterable",
    "IterableShardDataset": "shardkit.torch.iterable",
    "IterableTarDataset": "shardkit.torch.iterable",
    "LMDBDataset": "shardkit.torch.datasets",
    "Loader": "shardkit.torch.loader",
    "LoaderFailed": "shardkit.errors",
    "LoaderOptions": "shardkit.torch.options",
    "Manifest": "shardkit.manifest",
    "MeasurementFailed": "shardkit.errors",
    "Normalise": "shardkit.torch.prefetch",
    "Order": "shardkit.order",
    "Plan": "shardkit.conversion.plan",
    "Problem": "shardkit.errors",
    "Progress": "shardkit.pool",
    "RandomResizedCrop": "shardkit.torch.ops",
    "Recipe": "shardkit.recipe",
    "Repaired": "shardkit.verbs.repair",
    "Resize": "shardkit.torch.ops",
    "Scan": "shardkit.sources.imagefolder",
    "ShardDataModule": "shardkit.torch.lightning",
    "ShardDataset": "shardkit.torch.datasets",
    "ShardkitError": "shardkit.errors",
    "Share": "shardkit.share",
    "SourceReport": "shardkit.verbs.against",
    "StateMismatch": "shardkit.errors",
    "TarDataset": "shardkit.torch.datasets",
    "ThroughputMonitor": "shardkit.torch.monitor",
    "ThroughputReport": "shardkit.torch.monitor",
    "TransformFailed": "shardkit.errors",
    "TuneReport": "shardkit.measure.tuning.tune",
    "TuneRequest": "shardkit.measure.tuning.tune",
    "UsageError": "shardkit.errors",
    "Verification": "shardkit.verbs.verify",
    "bench": "shardkit.measure.comparison.bench",
    "collate": "shardkit.torch.collate",
    "convert": "shardkit.verbs.convert",
    "describe": "shardkit.verbs.describe",
    "dry_run": "shardkit.verbs.convert",
    "make_loader": "shardkit.torch.loader",
    "open_dataset": "shardkit.torch.datasets",
    "reindex": "shardkit.verbs.reindex",
    "repair": "shardkit.verbs.repair",
    "scan_imagefolder": "shardkit.sources.imagefolder",
    "tune": "shardkit.measure.tuning.tune",
    "verify": "shardkit.verbs.verify",
    "with_rng": "shardkit.torch.reading",
}

_EXTRAS = ("lightning",)
"""Packages that are installed only if asked for, each by the extra of its name."""

__all__ = [
    "BadImage",
    "BadImages",
    "BatchView",
    "BenchOptions",
    "BenchReport",
    "Blocks",
    "CenterCrop",
    "ConversionFailed",
    "ConvertOptions",
    "Converted",
    "CorruptDataset",
    "CorruptRecord",
    "CorruptShard",
    "DevicePrefetcher",
    "DiskFull",
    "EpochBatchSampler",
    "Finding",
    "HDF5Dataset",
    "ImageOp",
    "IterableHDF5Dataset",
    "IterableLMDBDataset",
    "IterableShardDataset",
    "IterableTarDataset",
    "LMDBDataset",
    "Loader",
    "LoaderFailed",
    "LoaderOptions",
    "Manifest",
    "MeasurementFailed",
    "Normalise",
    "Order",
    "Plan",
    "Problem",
    "Progress",
    "RandomResizedCrop",
    "Recipe",
    "Repaired",
    "Resize",
    "Scan",
    "ShardDataset",
    "ShardkitError",
    "Share",
    "SourceReport",
    "StateMismatch",
    "TarDataset",
    "ThroughputMonitor",
    "ThroughputReport",
    "TransformFailed",
    "TuneReport",
    "TuneRequest",
    "UsageError",
    "Verification",
    "__version__",
    "bench",
    "collate",
    "convert",
    "describe",
    "dry_run",
    "make_loader",
    "open_dataset",
    "reindex",
    "repair",
    "scan_imagefolder",
    "tune",
    "verify",
    "with_rng",
]


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module 'shardkit' has no attribute {name!r}")
    try:
        return getattr(import_module(_WHERE[name]), name)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.split(".")[0] not in _EXTRAS:
            raise
        extra = error.name.split(".")[0]
        raise ModuleNotFoundError(
            f"shardkit.{name} needs {extra}: pip install 'shardkit[{extra}]'", name=extra
        ) from error


def __dir__() -> list[str]:
    return __all__
