"""Where data lie, and what loading them takes of the machine, seen by the measuring process."""

from __future__ import annotations

import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from shardkit.dataset.manifest import MANIFEST_NAME, Manifest, SplitsManifest, load_any_manifest
from shardkit.measure.runner import page_cache as pages
from shardkit.system.machine import filesystem
from shardkit.torch.data.datasets import ShardDataset
from shardkit.torch.engine.workers import choose_start_method


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where data lie, and how they will travel."""

    path: str
    filesystem: str
    """Its kind, such as ext4; empty if the system does not tell."""
    mount: str
    """Where it is mounted."""
    bytes: int
    """Of all files that an epoch reads."""
    resident: float | None
    """Which part of them was in the kernel's memory at first, 0 to 1; None if it cannot be told."""
    engine: str = "thread"
    """``thread`` or ``process``: what the loader works with."""
    wanted: str = "thread"
    """What it would work with if nothing stood in its way."""
    shared_needed: int = 0
    """Bytes of shared memory that batches under way take with worker processes."""
    files_needed: int = 0
    """Descriptors that they take."""
    worker_unique: int = 0
    """Bytes of memory that one worker shared with no other process, at the most; 0 without worker
    processes."""
    start: str = "fork"
    """How a loader would start worker processes."""
    threads: list[str] = field(default_factory=list)
    """Names of the threads that importing the transform began."""
    cuda_begun: bool = False
    """Whether it began to use CUDA, so that no process can fork."""
    opencv_threads: int | None = None
    """Threads that one operation of OpenCV takes; None if the transform did not load it."""


def place_of(dataset: Any, files: Sequence[Path]) -> dict[str, Any]:
    """Return what can be told of a dataset before it is read, as JSON values.

    Args:
        dataset: The dataset or image folder.
        files: That an epoch reads.
    """
    root = dataset.path if isinstance(dataset, ShardDataset) else dataset.root
    kind, mount = filesystem(root)
    manifest = dataset.manifest if isinstance(dataset, ShardDataset) else None
    return {
        "filesystem": kind,
        "mount": mount,
        "resident": pages.resident(pages.sample(files)),
        "start": choose_start_method(),
        "threads": [
            each.name for each in threading.enumerate() if each is not threading.main_thread()
        ],
        "cuda_begun": torch.cuda.is_initialized(),  # type: ignore[no-untyped-call]
        "opencv_threads": _opencv_threads(),
        "made": None if manifest is None else _made(dataset.path, manifest),
    }


def _made(path: Path, manifest: Manifest) -> dict[str, Any]:
    """Return the fields of `shardkit.measure.doctor.command.Made`."""
    parent = path.resolve().parent
    splits = (parent / MANIFEST_NAME).exists()
    return {
        "path": str(path),
        "format": manifest.format,
        "recipe": dict(manifest.recipe),
        "source": dict(manifest.source),
        "classes": None if manifest.classes is None else list(manifest.classes),
        "counts": None if manifest.class_counts is None else list(manifest.class_counts),
        "skipped": bool(manifest.skipped),
        "splits": splits and isinstance(load_any_manifest(parent), SplitsManifest),
    }


def _opencv_threads() -> int | None:
    """Ask OpenCV where the transform's module was imported, which may have set the number."""
    opencv = sys.modules.get("cv2")
    return None if opencv is None else int(opencv.getNumThreads())
