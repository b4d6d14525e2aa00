"""shardkit: convert image folders to open shards, prove every byte, and train from them.

Names are imported on first use: ``import shardkit`` imports neither torch nor h5py nor lmdb.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from shardkit._version import __version__

if TYPE_CHECKING:
    from shardkit.contracts import Source
    from shardkit.conversion.append import Appended, append
    from shardkit.conversion.attach import Attached, attach
    from shardkit.conversion.convert import Converted, convert
    from shardkit.conversion.download import download
    from shardkit.conversion.merge import merge
    from shardkit.conversion.plan import Plan
    from shardkit.conversion.upload import upload
    from shardkit.dataset.manifest import Manifest
    from shardkit.dataset.splitting import split
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
    from shardkit.exporting.export import Exported, export
    from shardkit.measure.bench.bench import bench
    from shardkit.measure.bench.report import BenchReport
    from shardkit.measure.doctor.doctor import DoctorReport, doctor
    from shardkit.measure.tune.tune import TuneReport, tune
    from shardkit.record import Field
    from shardkit.reporting.report import DatasetReport, report
    from shardkit.sampling.order import BlockShuffle, Order
    from shardkit.sampling.ranks import RankShard
    from shardkit.sources.samples import Sample
    from shardkit.system.pool import Progress
    from shardkit.torch.batch_size import FoundBatchSize, find_batch_size
    from shardkit.torch.data.collate import BatchView, collate
    from shardkit.torch.data.datasets import (
        HDF5Dataset,
        LMDBDataset,
        ShardDataset,
        TarDataset,
        open_dataset,
    )
    from shardkit.torch.data.iterable import (
        IterableHDF5Dataset,
        IterableLMDBDataset,
        IterableShardDataset,
        IterableTarDataset,
    )
    from shardkit.torch.data.ops import CenterCrop, ImageOp, RandomResizedCrop, Resize
    from shardkit.torch.data.read_context import with_rng
    from shardkit.torch.data.samplers import Balanced, Mixture, Weighted
    from shardkit.torch.engine.options import LoaderOptions
    from shardkit.torch.lightning import ShardDataModule as ShardDataModule
    from shardkit.torch.loader import Loader, make_loader
    from shardkit.torch.monitor import ThroughputMonitor, ThroughputReport
    from shardkit.torch.prefetch import DevicePrefetcher, Normalize
    from shardkit.torch.sampler import EpochBatchSampler
    from shardkit.verification.describe import describe
    from shardkit.verification.diff import ChangedRecord, DatasetDifference, Differences, diff
    from shardkit.verification.reindex import reindex
    from shardkit.verification.repair import Repaired, repair
    from shardkit.verification.shard_check import Finding
    from shardkit.verification.source_comparison import SourceReport
    from shardkit.verification.verify import Verification, verify

_WHERE = {
    "Appended": "shardkit.conversion.append",
    "Attached": "shardkit.conversion.attach",
    "BadImage": "shardkit.errors",
    "BadImages": "shardkit.errors",
    "Balanced": "shardkit.torch.data.samplers",
    "BatchView": "shardkit.torch.data.collate",
    "BenchReport": "shardkit.measure.bench.report",
    "BlockShuffle": "shardkit.sampling.order",
    "CenterCrop": "shardkit.torch.data.ops",
    "ChangedRecord": "shardkit.verification.diff",
    "ConversionFailed": "shardkit.errors",
    "Converted": "shardkit.conversion.convert",
    "CorruptDataset": "shardkit.errors",
    "CorruptRecord": "shardkit.errors",
    "CorruptShard": "shardkit.errors",
    "DatasetDifference": "shardkit.verification.diff",
    "DatasetReport": "shardkit.reporting.report",
    "DevicePrefetcher": "shardkit.torch.prefetch",
    "Differences": "shardkit.verification.diff",
    "DiskFull": "shardkit.errors",
    "DoctorReport": "shardkit.measure.doctor.doctor",
    "EpochBatchSampler": "shardkit.torch.sampler",
    "Exported": "shardkit.exporting.export",
    "Field": "shardkit.record",
    "Finding": "shardkit.verification.shard_check",
    "FoundBatchSize": "shardkit.torch.batch_size",
    "HDF5Dataset": "shardkit.torch.data.datasets",
    "ImageOp": "shardkit.torch.data.ops",
    "IterableHDF5Dataset": "shardkit.torch.data.iterable",
    "IterableLMDBDataset": "shardkit.torch.data.iterable",
    "IterableShardDataset": "shardkit.torch.data.iterable",
    "IterableTarDataset": "shardkit.torch.data.iterable",
    "LMDBDataset": "shardkit.torch.data.datasets",
    "Loader": "shardkit.torch.loader",
    "LoaderFailed": "shardkit.errors",
    "LoaderOptions": "shardkit.torch.engine.options",
    "Manifest": "shardkit.dataset.manifest",
    "MeasurementFailed": "shardkit.errors",
    "Mixture": "shardkit.torch.data.samplers",
    "Normalize": "shardkit.torch.prefetch",
    "Order": "shardkit.sampling.order",
    "Plan": "shardkit.conversion.plan",
    "Problem": "shardkit.errors",
    "Progress": "shardkit.system.pool",
    "RandomResizedCrop": "shardkit.torch.data.ops",
    "RankShard": "shardkit.sampling.ranks",
    "Repaired": "shardkit.verification.repair",
    "Resize": "shardkit.torch.data.ops",
    "Sample": "shardkit.sources.samples",
    "ShardDataModule": "shardkit.torch.lightning",
    "ShardDataset": "shardkit.torch.data.datasets",
    "ShardkitError": "shardkit.errors",
    "Source": "shardkit.contracts",
    "SourceReport": "shardkit.verification.source_comparison",
    "StateMismatch": "shardkit.errors",
    "TarDataset": "shardkit.torch.data.datasets",
    "ThroughputMonitor": "shardkit.torch.monitor",
    "ThroughputReport": "shardkit.torch.monitor",
    "TransformFailed": "shardkit.errors",
    "TuneReport": "shardkit.measure.tune.tune",
    "UsageError": "shardkit.errors",
    "Verification": "shardkit.verification.verify",
    "Weighted": "shardkit.torch.data.samplers",
    "append": "shardkit.conversion.append",
    "attach": "shardkit.conversion.attach",
    "bench": "shardkit.measure.bench.bench",
    "collate": "shardkit.torch.data.collate",
    "convert": "shardkit.conversion.convert",
    "describe": "shardkit.verification.describe",
    "diff": "shardkit.verification.diff",
    "doctor": "shardkit.measure.doctor.doctor",
    "download": "shardkit.conversion.download",
    "export": "shardkit.exporting.export",
    "find_batch_size": "shardkit.torch.batch_size",
    "make_loader": "shardkit.torch.loader",
    "merge": "shardkit.conversion.merge",
    "open_dataset": "shardkit.torch.data.datasets",
    "reindex": "shardkit.verification.reindex",
    "split": "shardkit.dataset.splitting",
    "repair": "shardkit.verification.repair",
    "report": "shardkit.reporting.report",
    "tune": "shardkit.measure.tune.tune",
    "upload": "shardkit.conversion.upload",
    "verify": "shardkit.verification.verify",
    "with_rng": "shardkit.torch.data.read_context",
}

_EXTRAS = ("lightning",)
"""Optional packages, each installed by the extra of its name."""

__all__ = [
    "Appended",
    "Attached",
    "BadImage",
    "BadImages",
    "Balanced",
    "BatchView",
    "BenchReport",
    "BlockShuffle",
    "CenterCrop",
    "ChangedRecord",
    "ConversionFailed",
    "Converted",
    "CorruptDataset",
    "CorruptRecord",
    "CorruptShard",
    "DatasetDifference",
    "DatasetReport",
    "DevicePrefetcher",
    "Differences",
    "DiskFull",
    "DoctorReport",
    "EpochBatchSampler",
    "Exported",
    "Field",
    "Finding",
    "FoundBatchSize",
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
    "Mixture",
    "Normalize",
    "Order",
    "Plan",
    "Problem",
    "Progress",
    "RandomResizedCrop",
    "RankShard",
    "Repaired",
    "Resize",
    "Sample",
    "ShardDataset",
    "ShardkitError",
    "Source",
    "SourceReport",
    "StateMismatch",
    "TarDataset",
    "ThroughputMonitor",
    "ThroughputReport",
    "TransformFailed",
    "TuneReport",
    "UsageError",
    "Verification",
    "Weighted",
    "__version__",
    "append",
    "attach",
    "bench",
    "collate",
    "convert",
    "describe",
    "diff",
    "doctor",
    "download",
    "export",
    "find_batch_size",
    "make_loader",
    "merge",
    "open_dataset",
    "reindex",
    "repair",
    "report",
    "split",
    "tune",
    "upload",
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
