"""shardkit: convert image folders to open shards, prove every byte, and train from them.

Names are imported on first use: ``import shardkit`` imports neither torch nor h5py nor lmdb.
scripts/make_stub.py writes ``__init__.pyi``, for type checkers, from this module.
"""

from importlib import import_module
from importlib.util import find_spec
from typing import Any

from shardkit._version import __version__ as __version__

_PUBLIC = {
    "changes.append": "append",
    "attaching.attach": "attach",
    "conversion.convert": "convert",
    "changes.merge": "merge",
    "changes.splitting": "split",
    "errors": "ShardkitError",
    "exporting.export": "export",
    "kinds.field": "Field",
    "measure.bench.bench": "bench",
    "measure.doctor.doctor": "doctor",
    "measure.tune.tune": "tune",
    "registry": "open_source",
    "reporting.report": "report",
    "sampling.order": "BlockShuffle",
    "sampling.ranks": "Rank",
    "torch.batch_size": "find_batch_size",
    "orders.buckets": "Buckets",
    "torch.data.collate": "collate",
    "torch.data.datasets": "HDF5Dataset LMDBDataset ShardDataset TarDataset open_dataset",
    "torch.data.iterable": (
        "IterableHDF5Dataset IterableLMDBDataset IterableShardDataset IterableTarDataset"
    ),
    "torch.data.crops": "CenterCrop RandomCrop RandomResizedCrop Resize",
    "torch.data.read_context": "with_rng",
    "orders.samplers": "Balanced Mixture Weighted",
    "orders.windows": "Windows",
    "torch.lightning": "ShardDataModule",
    "torch.loader": "make_loader",
    "torch.monitor": "ThroughputMonitor",
    "torch.prefetch": "DevicePrefetcher Normalize",
    "torch.sampler": "EpochBatchSampler",
    "remote.download": "download",
    "remote.upload": "upload",
    "reporting.describe": "describe",
    "verification.diff": "diff",
    "verification.repair": "repair",
    "verification.verify": "verify",
}
"""The public names of each module: what users type. Types of results are in the modules."""

_NAMESPACES = {"fields": "changes.fields"}
"""Modules whose functions are public, such as ``shardkit.fields.add``."""

_WHERE = {name: module for module, names in _PUBLIC.items() for name in names.split()}
_WHERE |= _NAMESPACES

__all__ = sorted([*_WHERE, "__version__"])  # noqa: PLE0605 - type checkers read __init__.pyi
if find_spec("lightning") is None:  # else `from shardkit import *` would fail
    __all__.remove("ShardDataModule")


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module 'shardkit' has no attribute {name!r}")
    try:
        module = import_module(f"shardkit.{_WHERE[name]}")
    except ModuleNotFoundError as error:
        if error.name is None or error.name.split(".")[0] != "lightning":
            raise
        message = f"shardkit.{name} needs lightning: pip install 'shardkit[lightning]'"
        raise ModuleNotFoundError(message, name="lightning") from error
    return module if name in _NAMESPACES else getattr(module, name)


def __dir__() -> list[str]:
    return __all__
