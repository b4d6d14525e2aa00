"""The targets, one module for each parser."""

from __future__ import annotations

import contextlib
from importlib import import_module
from pathlib import Path

from scripts.fuzzing.target import Target
from scripts.fuzzing.targets.arrow import ArrowTarget, ParquetTableTarget, ParquetTarget
from scripts.fuzzing.targets.columns import LitDataTarget, MdsTarget
from scripts.fuzzing.targets.dataset import HDF5_DATASET, LMDB_DATASET, TAR_DATASET
from scripts.fuzzing.targets.fields import FieldsTarget
from scripts.fuzzing.targets.hdf5 import Hdf5Target
from scripts.fuzzing.targets.image import ImageTarget
from scripts.fuzzing.targets.index import IndexTarget
from scripts.fuzzing.targets.lists import (
    CocoTarget,
    CsvTarget,
    JsonLinesTarget,
    PairsTarget,
    VocTarget,
    YoloTarget,
)
from scripts.fuzzing.targets.lmdb import LmdbTarget
from scripts.fuzzing.targets.manifest import ManifestTarget
from scripts.fuzzing.targets.native import NativeTarget
from scripts.fuzzing.targets.sources import (
    BetonTarget,
    IdxTarget,
    NpyRowsTarget,
    NpyTarget,
    NpzSampleTarget,
    NpzTarget,
    SourceTarTarget,
    TFRecordTarget,
    ZipTarget,
)
from scripts.fuzzing.targets.state import StateTarget
from scripts.fuzzing.targets.tar import TarTarget

TARGETS: dict[str, type[Target]] = {
    target.name: target
    for target in (
        ManifestTarget,
        IndexTarget,
        TarTarget,
        LmdbTarget,
        Hdf5Target,
        ImageTarget,
        FieldsTarget,
        StateTarget,
        NativeTarget,
        LMDB_DATASET,
        HDF5_DATASET,
        TAR_DATASET,
        SourceTarTarget,
        ZipTarget,
        TFRecordTarget,
        BetonTarget,
        MdsTarget,
        LitDataTarget,
        IdxTarget,
        NpyTarget,
        NpyRowsTarget,
        NpzTarget,
        NpzSampleTarget,
        CsvTarget,
        JsonLinesTarget,
        CocoTarget,
        VocTarget,
        YoloTarget,
        PairsTarget,
        ParquetTarget,
        ArrowTarget,
        ParquetTableTarget,
    )
}


def make(name: str, folder: Path) -> Target:
    """Return the target of this name, or ``module:class``, to work in ``folder``."""
    target = _class(name)(folder)
    for seed in target.seeds[:2]:  # what is loaded or made at first use is so now, not under guard
        with contextlib.suppress(*target.allowed):
            target.check(seed)
    return target


def _class(name: str) -> type[Target]:
    if name in TARGETS:
        return TARGETS[name]
    module, _, attribute = name.partition(":")
    found: type[Target] = getattr(import_module(module), attribute)
    return found
