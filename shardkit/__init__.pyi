# Made by scripts/make_stub.py from __init__.py.
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor
from os import PathLike
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from shardkit._version import __version__ as __version__
from shardkit.attaching.attach import Attached
from shardkit.changes.append import Appended
from shardkit.changes.fields import Changed
from shardkit.changes.merge import merge as merge
from shardkit.codecs.image import Color
from shardkit.contracts import Source
from shardkit.conversion.convert import Converted
from shardkit.errors import ShardkitError as ShardkitError
from shardkit.exporting.export import Exported, LayoutName
from shardkit.kinds.field import Field as Field
from shardkit.measure.bench.report import BenchReport
from shardkit.measure.doctor.examination import Watch as _Watch
from shardkit.measure.doctor.report import DoctorReport
from shardkit.measure.runner.rounds import Watch
from shardkit.measure.tune.report import TuneReport
from shardkit.orders.buckets import Buckets as Buckets
from shardkit.orders.samplers import Balanced as Balanced
from shardkit.orders.samplers import Mixture as Mixture
from shardkit.orders.samplers import Weighted as Weighted
from shardkit.orders.windows import Windows as Windows
from shardkit.recipe import Recipe
from shardkit.registry import open_source as open_source
from shardkit.remote.download import download as download
from shardkit.remote.upload import upload as upload
from shardkit.reporting.describe import describe as describe
from shardkit.reporting.report import report as report
from shardkit.sampling.order import BlockShuffle as BlockShuffle
from shardkit.sampling.ranks import Rank as Rank
from shardkit.system.pool import Report
from shardkit.torch.batch_size import find_batch_size as find_batch_size
from shardkit.torch.data.collate import collate as collate
from shardkit.torch.data.crops import CenterCrop as CenterCrop
from shardkit.torch.data.crops import RandomCrop as RandomCrop
from shardkit.torch.data.crops import RandomResizedCrop as RandomResizedCrop
from shardkit.torch.data.crops import Resize as Resize
from shardkit.torch.data.datasets import HDF5Dataset as _HDF5Dataset
from shardkit.torch.data.datasets import LMDBDataset as _LMDBDataset
from shardkit.torch.data.datasets import ShardDataset as _ShardDataset
from shardkit.torch.data.datasets import TarDataset as _TarDataset
from shardkit.torch.data.images import Decode
from shardkit.torch.data.iterable import IterableHDF5Dataset as _IterableHDF5Dataset
from shardkit.torch.data.iterable import IterableLMDBDataset as _IterableLMDBDataset
from shardkit.torch.data.iterable import IterableShardDataset as _IterableShardDataset
from shardkit.torch.data.iterable import IterableTarDataset as _IterableTarDataset
from shardkit.torch.data.ops import ImageOp
from shardkit.torch.data.read_context import with_rng as with_rng
from shardkit.torch.data.reader_options import Function, Transforms
from shardkit.torch.lightning import ShardDataModule as _ShardDataModule
from shardkit.torch.loader import Loader
from shardkit.torch.monitor import ThroughputMonitor as ThroughputMonitor
from shardkit.torch.prefetch import DevicePrefetcher as DevicePrefetcher
from shardkit.torch.prefetch import Normalize as Normalize
from shardkit.torch.sampler import EpochBatchSampler as _EpochBatchSampler
from shardkit.verification.diff import diff as diff
from shardkit.verification.repair import repair as repair
from shardkit.verification.verify import Verification

__all__: list[str]

class fields:  # noqa: N801 - a namespace
    """Add, replace and remove fields of a dataset without rewriting its shards (`shardkit fields`).

    Each change is a layer: see `shardkit.dataset.manifest.Layer`. The dataset is replaced as by
    `append`: its files are linked into the new one, which is published in one step.
    """
    @staticmethod
    def add(
        directory: str | Path,
        values: Any,
        *,
        key: str | None = None,
        field: Sequence[str] = (),
        schema: Mapping[str, Field | str] | None = None,
        missing: Literal["fail", "skip"] = "fail",
        unknown: Literal["fail", "skip"] = "fail",
        dry_run: bool = False,
        force: bool = False,
        workers: int = 1,
        on_progress: Report | None = None,
    ) -> Changed:
        """Add fields to a dataset without rewriting its shards.

        The values are stored in shards of their own, in ``layers`` of the dataset's directory. Readers
        see the old dataset until the new one replaces it in one step. Repeat an interrupted call to
        resume it. `undo` reverts the change.

        Args:
            directory: The dataset, perhaps of splits.
            values: A table (.csv, .tsv, .jsonl, .parquet), or an .npy file in row order; with splits, a
                folder with a file for each, such as train.npy. Or a dict with the values of each field:
                an array, sequence or iterable in row order, or a function that maps a dict with a
                sample's fields to the value.
            key: Table column with the key or path of each row; with splits, these may start with the
                split and a slash. Default: key or path.
            field: Field to create from a table column, as for ``keep`` of `convert table`; for an .npy
                file, the field's name. Repeatable.
            schema: Fields of Python values by name, each a `shardkit.Field` or a kind; others are
                inferred from the first value.
            missing: fail: write nothing if the table lacks rows of DATASET. skip: leave these rows
                without the field, or remove the values that they had. One of ``fail``, ``skip``.
            unknown: fail: write nothing if DATASET lacks rows of the table. skip: ignore these rows.
                One of ``fail``, ``skip``.
            dry_run: Show fields, classes and unmatched keys; write nothing.
            force: Discard the work of a different unfinished run.
            workers: Number of processes; small jobs use fewer. The result does not depend on it.
            on_progress: Called with the work done since the last call.

        Raises:
            UsageError: If there is no dataset, it has a field of that name, or values do not match.
            BadImages: If a value does not fit its field, or a function raises an exception.
            CorruptDataset: If a manifest or an index is damaged.
            ConversionFailed: If writing fails.
        """
    @staticmethod
    def remove(
        directory: str | Path,
        names: Sequence[str],
    ) -> Changed:
        """Remove fields from a dataset. Its shards keep their values, but a copy of it does not.

        Args:
            directory: The dataset, perhaps of splits.
            names: Names of the fields.

        Raises:
            UsageError: If there is no dataset or no such field, or no field would remain.
            CorruptDataset: If a manifest or an index is damaged.
            ConversionFailed: If writing fails.
        """
    @staticmethod
    def replace(
        directory: str | Path,
        values: Any,
        *,
        key: str | None = None,
        field: Sequence[str] = (),
        schema: Mapping[str, Field | str] | None = None,
        missing: Literal["fail", "skip"] = "fail",
        unknown: Literal["fail", "skip"] = "fail",
        dry_run: bool = False,
        force: bool = False,
        keep_classes: bool = False,
        workers: int = 1,
        on_progress: Report | None = None,
    ) -> Changed:
        """Replace fields of a dataset, such as its labels, without rewriting its shards.

        The shards keep the old values; ``convert dataset`` makes a dataset without them. Labels that
        are names get the classes of the new values: existing ones in their order, then new ones. Labels
        that are numbers are positions in the existing classes. Everything else is as for `add`.

        Args:
            directory: The dataset, perhaps of splits.
            values: The values, as for `add`.
            key: Table column with the key or path of each row; with splits, these may start with the
                split and a slash. Default: key or path.
            field: Field to create from a table column, as for ``keep`` of `convert table`; for an .npy
                file, the field's name. Repeatable.
            schema: Fields of Python values by name, each a `shardkit.Field` or a kind; others are
                inferred from the first value.
            missing: fail: write nothing if the table lacks rows of DATASET. skip: leave these rows
                without the field, or remove the values that they had. One of ``fail``, ``skip``.
            unknown: fail: write nothing if DATASET lacks rows of the table. skip: ignore these rows.
                One of ``fail``, ``skip``.
            dry_run: Show fields, classes and unmatched keys; write nothing.
            force: Discard the work of a different unfinished run.
            keep_classes: Keep classes that no new label has.
            workers: Number of processes; small jobs use fewer. The result does not depend on it.
            on_progress: Called with the work done since the last call.

        Raises:
            UsageError: If there is no dataset or no such field, or values do not match.
            BadImages: If a value does not fit its field, or a function raises an exception.
            CorruptDataset: If a manifest or an index is damaged.
            ConversionFailed: If writing fails.
        """
    @staticmethod
    def undo(
        directory: str | Path,
    ) -> Changed:
        """Undo the last change to the fields of a dataset. Repeating the call does nothing.

        Args:
            directory: The dataset, perhaps of splits.

        Raises:
            UsageError: If there is no dataset.
            CorruptDataset: If a manifest or an index is damaged.
            ConversionFailed: If writing fails.
        """

class HDF5Dataset(ShardDataset, _HDF5Dataset):
    """`ShardDataset` for HDF5 files."""

class LMDBDataset(ShardDataset, _LMDBDataset):
    """`ShardDataset` for LMDB files."""

class ShardDataset(_ShardDataset):
    """The rows of a dataset of any format: images and labels, or any other fields.

    It opens shards on first use and holds only its path and options. So it is cheap to pickle, and
    works in threads and under fork, spawn and forkserver.

    ``dataset[row]`` returns ``(image, label)``; the label is an int, -1 in an unlabeled dataset.
    Negative rows count from the end. A list, an array or a slice of rows returns a `BatchView`, as
    ``__getitems__`` does for PyTorch's ``DataLoader``.

    With ``fields`` it returns those fields: images and masks as set by ``decode``; arrays as
    tensors; boxes as float64 of shape (N, 4), or (N, 5) with labels; keypoints as float64 of shape
    (N, 3), or (objects, points, 3) with names; several labels as float32 with 1 for each class; one
    label as an int; numbers as NumPy scalars; text as str, JSON values and bytes. A missing value
    is None, and a missing label is -1.

    Raises:
        UsageError: If there is no dataset at ``path``, or an option is unknown.
        CorruptDataset: If the dataset's manifest is damaged.
    """
    def __init__(
        self,
        path: str | PathLike[str],
        transform: Function | ImageOp | Transforms | None = None,
        target_transform: Function | None = None,
        decode: Decode | Mapping[str, Decode] = "pil",
        *,
        fields: Sequence[str] | None = None,
        follow: Sequence[str] = (),
        as_dict: bool = False,
        verify: bool | None = None,
        view: int = 0,
        windows: Windows | None = None,
        split: str | None = None,
        cache: str | PathLike[str] | None = None,
        cache_limit: int | str | None = None,
        root: str | PathLike[str] | None = None,
    ) -> None:
        """Open a dataset.

        Args:
            path: The dataset's directory, or the directory of its splits; or its URL in an object
                store: ``s3://``, ``gs://``, ``az://`` or ``https://``.
            transform: Applied to each image. An `ImageOp` works as if passed as ``decode``. A mapping
                sets the transform of each field, or of several together: ``{("image", "mask"):
                function}`` calls ``function(image, mask)``, which returns both.
            target_transform: Applied to each label.
            decode: Type of the images: ``pil`` for RGB images, ``numpy`` for uint8 of shape (height,
                width, 3), ``torch`` for uint8 of shape (3, height, width) in channels-last memory,
                ``bytes`` for the stored bytes. Images of other types (``--pixels``) keep their channels
                and dtype, also in operations; ``pil`` requires a type that Pillow supports. An
                `ImageOp`, such as ``RandomResizedCrop(224)``, crops while decoding and returns images
                as ``torch`` does; it selects one crop for all images, masks, boxes and keypoints of a
                row. A mapping sets each field separately; boxes and keypoints then follow ``image``.
                Masks have the shape (height, width) and keep their values.
            fields: Names of the fields to read, in this order. None means image and label, or all
                fields of a dataset without images.
            follow: Array fields of shape (channels, height, width), such as latents and heat maps, that
                an `ImageOp` crops, scales and flips along with the image. They keep their grid: a
                latent with one value per 8 x 8 pixels also has one per 8 x 8 pixels of the crop.
            as_dict: Whether samples and batches are dicts by field name instead of tuples.
            verify: Whether each read verifies the record's checksum. None does so for encoded images,
                which costs about 3%, but not for raw pixels and arrays of one shape.
            view: Number of this view, starting at 0. Datasets over the same images draw different
                random numbers if their views differ, for example for two crops of each image.
            windows: Neighboring rows that each sample contains; see `Windows`. Samples are then dicts,
                images are tensors, and a transform receives a window.
            split: Name of a split, such as ``train``: the folder of that name in ``path``.
            cache: A local folder for shards of a dataset in an object store. Whole shards are fetched
                ahead of time, once for all processes.
            cache_limit: Maximum bytes of shards in the cache, as a number or a text such as ``"50GB"``.
                The least recently used shards are evicted. None means no limit.
            root: Folder of the archives of an attached dataset; None means where `shardkit.attach`
                found them.
        """

class TarDataset(ShardDataset, _TarDataset):
    """`ShardDataset` for WebDataset tar files."""

class IterableHDF5Dataset(IterableShardDataset, _IterableHDF5Dataset):
    """`IterableShardDataset` for HDF5 files."""

class IterableLMDBDataset(IterableShardDataset, _IterableLMDBDataset):
    """`IterableShardDataset` for LMDB files."""

class IterableShardDataset(_IterableShardDataset):
    """The rows of a dataset of any format, one after the other.

    Ranks and workers divide samples, not shards: whatever their number, each sample is read once.

    With a ``batch_size`` it yields batches, for ``DataLoader(dataset, batch_size=None)``, in the
    same order for any number of workers. Without one, it yields samples; the ``batch_size`` of a
    ``DataLoader`` then groups samples of one worker.

    ``len`` is the number of batches or samples of this rank in an epoch. Call ``set_epoch`` before
    each epoch, as for ``DistributedSampler``; `shardkit.make_loader` does so automatically.

    Raises:
        UsageError: If there is no dataset at ``path``, or an option is unknown.
        CorruptDataset: If the dataset's manifest is damaged.
    """
    def __init__(
        self,
        path: str | PathLike[str] | ShardDataset,
        transform: Function | ImageOp | Transforms | None = None,
        target_transform: Function | None = None,
        decode: Decode | Mapping[str, Decode] = "pil",
        *,
        fields: Sequence[str] | None = None,
        follow: Sequence[str] = (),
        as_dict: bool = False,
        verify: bool | None = None,
        view: int = 0,
        windows: Windows | None = None,
        split: str | None = None,
        cache: str | PathLike[str] | None = None,
        cache_limit: int | str | None = None,
        root: str | PathLike[str] | None = None,
        shuffle: bool | BlockShuffle | None = None,
        seed: int | None = None,
        rank: Rank | None = None,
        batch_size: int | None = None,
    ) -> None:
        """Open a dataset.

        Args:
            path: The dataset's directory or URL, or an open map-style dataset with its own options.
            batch_size: Samples in a batch; None yields single samples.
            transform: Applied to each image. An `ImageOp` works as if passed as ``decode``. A mapping
                sets the transform of each field, or of several together: ``{("image", "mask"):
                function}`` calls ``function(image, mask)``, which returns both.
            target_transform: Applied to each label.
            decode: Type of the images: ``pil`` for RGB images, ``numpy`` for uint8 of shape (height,
                width, 3), ``torch`` for uint8 of shape (3, height, width) in channels-last memory,
                ``bytes`` for the stored bytes. Images of other types (``--pixels``) keep their channels
                and dtype, also in operations; ``pil`` requires a type that Pillow supports. An
                `ImageOp`, such as ``RandomResizedCrop(224)``, crops while decoding and returns images
                as ``torch`` does; it selects one crop for all images, masks, boxes and keypoints of a
                row. A mapping sets each field separately; boxes and keypoints then follow ``image``.
                Masks have the shape (height, width) and keep their values.
            fields: Names of the fields to read, in this order. None means image and label, or all
                fields of a dataset without images.
            follow: Array fields of shape (channels, height, width), such as latents and heat maps, that
                an `ImageOp` crops, scales and flips along with the image. They keep their grid: a
                latent with one value per 8 x 8 pixels also has one per 8 x 8 pixels of the crop.
            as_dict: Whether samples and batches are dicts by field name instead of tuples.
            verify: Whether each read verifies the record's checksum. None does so for encoded images,
                which costs about 3%, but not for raw pixels and arrays of one shape.
            view: Number of this view, starting at 0. Datasets over the same images draw different
                random numbers if their views differ, for example for two crops of each image.
            windows: Neighboring rows that each sample contains; see `Windows`. Samples are then dicts,
                images are tensors, and a transform receives a window.
            split: Name of a split, such as ``train``: the folder of that name in ``path``.
            cache: A local folder for shards of a dataset in an object store. Whole shards are fetched
                ahead of time, once for all processes.
            cache_limit: Maximum bytes of shards in the cache, as a number or a text such as ``"50GB"``.
                The least recently used shards are evicted. None means no limit.
            root: Folder of the archives of an attached dataset; None means where `shardkit.attach`
                found them.
            shuffle: False reads in stored order, True fully shuffles each epoch, and `BlockShuffle`
                shuffles blocks of neighboring rows. None means False, or for a loader of an iterable
                dataset, the dataset's setting. The same holds for the next two arguments.
            seed: Selects the order and the random numbers of each epoch; None means 0.
            rank: This rank's subset of each epoch. None uses the rank from ``torch.distributed``.
        """

class IterableTarDataset(IterableShardDataset, _IterableTarDataset):
    """`IterableShardDataset` for WebDataset tar files."""

class ShardDataModule(_ShardDataModule):
    """The loaders of a training and a validation dataset.

    Lightning's checkpoints include the training loader's state, and ``trainer.fit(ckpt_path=...)``
    resumes with exactly the next batch. The rank comes from the trainer's process group. Lightning
    does not change the loaders, since they are not PyTorch DataLoaders. With ``overfit_batches``,
    each epoch reads the first batches of the first epoch.

    Raises:
        UsageError: If a dataset is missing, an option is unknown, or options contradict each other.
    """
    def __init__(
        self,
        train: Any,
        validation: Any = None,
        *,
        shuffle: bool | BlockShuffle | None = True,
        seed: int | None = None,
        rank: Rank | None = None,
        sampler: Any = None,
        drop_last: bool | None = None,
        samples_per_epoch: int | None = None,
        aug_repeats: int = 1,
        views: int | Sequence[ImageOp] = 1,
        endless: bool = False,
        collate_fn: Callable[[Sequence[Any]], Any] | None = None,
        engine: Literal["auto", "thread", "helper", "process"] = "auto",
        resident: Literal["cpu", "cuda"] | None = None,
        num_workers: int | None = None,
        priority: Literal["normal", "low"] = "normal",
        prefetch_factor: int | None = None,
        timeout: float = 300.0,
        with_rows: bool = False,
        on_bad: Literal["raise", "drop"] = "raise",
        max_bad: int = 100,
        pin_memory: bool | None = None,
        start_method: Literal["auto", "fork", "forkserver", "spawn"] = "auto",
        persistent_workers: bool = True,
        sharing_strategy: str | None = None,
        batch_size: int = 64,
    ) -> None:
        """Create a data module, with the options of `shardkit.make_loader`.

        Args:
            train: A dataset for `make_loader`; or its directory, which is opened with
                ``decode="torch"``. Or a function that returns a new loader, such as
                ``partial(make_loader, dataset, 64)``; it is called once the trainer's process group
                exists, and no option of this module applies to it.
            validation: The same for validation; every sample is read once, in stored order. (A
                function needs ``Rank(remainder="exact")`` for that.) Only ``seed`` and the options
                that do not select samples apply.
            batch_size: Samples in a batch of each rank.
            shuffle: How the training dataset is shuffled, as in `make_loader`; leave it None with a
                ``sampler``.
            seed: Selects the order and the random numbers of each epoch; None means 0.
            rank: This rank's subset of each epoch. None uses the rank from ``torch.distributed``.
            sampler: Selects the rows of each epoch, instead of ``shuffle``: `Weighted`, `Balanced`,
                `Mixture`, `Buckets`, or a PyTorch sampler that yields rows. Its random numbers depend
                on seed and epoch, and ranks divide its rows.
            drop_last: Whether to drop a smaller last batch; None uses the setting of ``rank``.
            samples_per_epoch: Samples in an epoch, over all ranks; the next epoch continues where this
                one ended. None means the length of the dataset or sampler.
            aug_repeats: Repeated augmentation: each sample appears this many times, with different
                random numbers, on neighboring ranks in the same step.
            views: If more than 1, each batch is a tuple of this many batches of the same samples, with
                different random numbers. A list of operations, such as ``[RandomResizedCrop(224),
                RandomResizedCrop(96)]``, sets the ``decode`` of each view; each image is decoded once.
                (With an int, a batch of `EpochBatchSampler` holds the views one after the other, and
                ``images.chunk(views)`` separates them.)
            endless: Whether an iteration continues with the next epoch instead of ending.
            collate_fn: Function that combines samples into a batch. None uses `collate`, which passes
                on a block of images without copying it.
            engine: ``thread`` decodes in threads of this process into reused memory, which is fastest.
                ``helper`` runs these threads in one child process, so that they do not delay the kernel
                launches of the training loop. ``process`` uses a PyTorch ``DataLoader`` with worker
                processes, for transforms that hold the GIL. ``auto`` uses processes if something in the
                dataset may hold the GIL, otherwise threads; ``Loader.reason`` gives the reason. One of
                ``auto``, ``thread``, ``helper``, ``process``.
            resident: Memory that holds the whole dataset, decoded when the loader is created: ``cpu``
                or ``cuda``, the current device. Batches and states are the same as without it. Each
                rank holds all rows. Images must have one size, and only `RandomCrop` may draw random
                numbers. One of ``cpu``, ``cuda``.
            num_workers: Number of threads, or of processes with the ``process`` engine. None uses one
                for each CPU that this process may use, divided by ``LOCAL_WORLD_SIZE``; or 0 with
                ``resident``. 0 reads in the main thread, on request.
            priority: CPU priority of the loader's threads or processes. ``low`` is nice 19: they yield
                to the training loop, which launches kernels with less delay, but also to other
                programs. Other threads keep their priority. Linux only: elsewhere, or with 0 workers,
                ``low`` warns and has no effect. One of ``normal``, ``low``.
            prefetch_factor: Batches that each worker prepares ahead, as in PyTorch. None means 2 for
                processes, and ``num_workers + 2`` batches in total for threads. The thread engine holds
                at most two more: the batch in use and the one before it. The helper holds another two,
                in transit to this process. Without transforms, a thread or process reads several small
                batches at once, up to 8 MiB, or 20 MiB if nothing is decoded, and None counts them as
                one.
            timeout: Seconds to wait for a batch before raising an error; 0 waits forever.
            with_rows: Whether each batch ends with its row numbers: int64 of shape (N,), -1 for
                padding. For a ``Subset`` they are rows of its dataset; for a ``ConcatDataset``, its
                own.
            on_bad: What to do with a sample whose record is damaged or cannot be decoded. ``drop``
                leaves it out of its batch, which is then smaller: no other sample takes its place, and
                a batch without samples is left out. ``Loader.bad`` lists such rows. One of ``raise``,
                ``drop``.
            max_bad: Maximum number of bad rows with ``on_bad='drop'``; if there are more, the iteration
                raises `LoaderFailed`.
            pin_memory: Whether batches are in pinned memory. None pins them if a CUDA device is
                available. True without one warns and has no effect.
            start_method: How worker processes start: ``fork``, ``forkserver`` or ``spawn``. ``auto``
                forks on Linux while no other thread runs and CUDA is not initialized; otherwise it uses
                a fork server that has already imported torch. If that cannot run the transform or the
                main file, as in a notebook, the ``auto`` engine uses threads and warns. One of
                ``auto``, ``fork``, ``forkserver``, ``spawn``.
            persistent_workers: Whether worker processes survive between epochs: starting them takes 0.1
                to 2 s.
            sharing_strategy: How worker processes share tensors, as in
                ``torch.multiprocessing.set_sharing_strategy``. None keeps the current strategy.
                ``file_system`` needs fewer open files, but leaves files behind after a crash.
        """

class EpochBatchSampler(_EpochBatchSampler):
    """Batches of rows in shardkit's order, for ``DataLoader(dataset, batch_sampler=...)``.

    The order is that of `shardkit.make_loader`: different in each epoch, divided among ranks, and
    the same for any number of workers. Each iteration reads the next epoch; ``set_epoch`` selects
    one. A batch of rows carries its epoch and seed to the shardkit datasets that it is read from,
    inside any wrapper, so several samplers of one dataset are independent. The dataset's own epoch
    is set as well, for code that turns a batch into a plain list.

    ``torchdata``'s ``StatefulDataLoader`` saves and restores its state.

    Raises:
        UsageError: If options contradict each other.
    """
    def __init__(
        self,
        dataset: Any,
        batch_size: int,
        *,
        shuffle: bool | BlockShuffle | None = None,
        seed: int | None = None,
        rank: Rank | None = None,
        sampler: Any = None,
        drop_last: bool | None = None,
        samples_per_epoch: int | None = None,
        aug_repeats: int = 1,
        views: int | Sequence[ImageOp] = 1,
        endless: bool = False,
    ) -> None:
        """Create a sampler, with the options of `shardkit.make_loader`.

        Args:
            dataset: The dataset of the ``DataLoader``.
            batch_size: Samples in a batch of this rank.
            shuffle: False reads in stored order, True fully shuffles each epoch, and `BlockShuffle`
                shuffles blocks of neighboring rows. None means False, or for a loader of an iterable
                dataset, the dataset's setting. The same holds for the next two arguments.
            seed: Selects the order and the random numbers of each epoch; None means 0.
            rank: This rank's subset of each epoch. None uses the rank from ``torch.distributed``.
            sampler: Selects the rows of each epoch, instead of ``shuffle``: `Weighted`, `Balanced`,
                `Mixture`, `Buckets`, or a PyTorch sampler that yields rows. Its random numbers depend
                on seed and epoch, and ranks divide its rows.
            drop_last: Whether to drop a smaller last batch; None uses the setting of ``rank``.
            samples_per_epoch: Samples in an epoch, over all ranks; the next epoch continues where this
                one ended. None means the length of the dataset or sampler.
            aug_repeats: Repeated augmentation: each sample appears this many times, with different
                random numbers, on neighboring ranks in the same step.
            views: If more than 1, each batch is a tuple of this many batches of the same samples, with
                different random numbers. A list of operations, such as ``[RandomResizedCrop(224),
                RandomResizedCrop(96)]``, sets the ``decode`` of each view; each image is decoded once.
                (With an int, a batch of `EpochBatchSampler` holds the views one after the other, and
                ``images.chunk(views)`` separates them.)
            endless: Whether an iteration continues with the next epoch instead of ending.
        """

def attach(
    archives: str | Path | Source,
    target: str | Path,
    *,
    grouping: Literal["webdataset", "huggingface", "basename"] = "webdataset",
    image: str | None = None,
    label: str | None = None,
    keep: str | None = None,
    classes: str | PathLike[str] | None = None,
    check: Literal["header", "decode"] = "header",
    on_error: Literal["fail", "skip"] = "fail",
    quick: bool = False,
    force: bool = False,
    workers: int = 1,
    on_progress: Report | None = None,
) -> Attached:
    """Index tar archives of samples where they are, as a dataset in ``target``.

    Nothing is written next to the archives. Rows are in the order of the archives, as after a
    conversion without shuffling. Repeat the call to resume an interrupted one, or to add archives.
    Archives with the same size and modification time as before are not read again.

    Args:
        archives: A tar file, a folder of them, or a pattern with ``{000..999}``, ``*`` or ``?``; or
            an opened source of kind ``ffcv``, ``hdf5``, ``litdata``, ``lmdb``, ``mds`` or ``zip``,
            which has its own options instead of ``grouping`` to ``classes``.
        target: A directory that is new, is empty, or contains the result of an earlier call.
        grouping: Rule for splitting names. webdataset: at the first dot. huggingface: the same,
            with case-sensitive suffixes. basename: at the last dot. One of ``webdataset``,
            ``huggingface``, ``basename``.
        image: Suffix of the image. Default: the only image suffix.
        label: Location of the label: a member with an integer or text, a value in a JSON member, or
            the folder in the name. Default: cls, or another common name, or none.
        keep: Additional fields to keep, such as caption=txt,age=json:/age:int64,mask=mask.png:mask.
            A field with ? may be missing.
        classes: File with one class name per line, for labels 0, 1, ... or in label order; or a
            folder of class folders.
        check: Depth of image validation. One of ``header``, ``decode``.
        on_error: fail: list all findings and write nothing. skip: leave bad samples out and record
            each. One of ``fail``, ``skip``.
        quick: Identify archives by size and modification time instead of SHA-256.
        force: Replace the dataset in INDEX_DIR and index everything again.
        workers: Number of processes; small jobs use fewer. The result does not depend on it.
        on_progress: Called with the work done since the last call.

    Returns:
        The manifest of the dataset, and how much of an earlier one was kept.

    Raises:
        UsageError: If an option is invalid, archives are missing or compressed, or ``target``
            cannot be used.
        BadImages: If archives are damaged or samples are bad, and ``on_error`` is ``fail``.
        ConversionFailed: If writing fails, or an archive changes meanwhile.
    """

def append(
    directory: str | Path,
    source: Any,
    *,
    skip_existing: bool = False,
    missing: Literal["fail", "skip"] = "fail",
    on_error: Literal["fail", "skip"] = "fail",
    shard_size: int | str = 268435456,
    shard_samples: int | None = None,
    force: bool = False,
    schema: Mapping[str, Field | str] | None = None,
    workers: int = 1,
    on_progress: Report | None = None,
) -> Appended:
    """Append images to a dataset, as new shards, with the recipe of the dataset.

    Existing rows keep their numbers and shards. The labels of new classes follow the existing ones.
    If the dataset was divided by ``val`` or ``test``, the same rule divides the new images.
    Readers see the old dataset until the new one replaces it in one step; loaders that have it open
    continue with the old one or report that it was replaced. Repeat an interrupted call to resume
    it. Repeating a finished call does nothing.

    Without ``skip_existing``, it is an error if the dataset already contains an image, or its
    conversion left it out. Content is not compared, except for sizes if the dataset stores images
    unchanged.

    Args:
        directory: The dataset, perhaps of splits.
        source: A path of the same kind as that of the dataset, read with the same options; Python
            samples with keys of their own; or a source of any kind with the same splits as the
            dataset.
        skip_existing: Leave out images whose path or key is already in DATASET, such as the old
            images of a folder that has grown.
        missing: fail: append nothing if SRC lacks fields of DATASET. skip: append the images
            without these fields. One of ``fail``, ``skip``.
        on_error: fail: write nothing if an image is bad. skip: leave bad images out and record
            each. One of ``fail``, ``skip``.
        shard_size: Approximate size of the images in a shard, such as 256MiB.
        shard_samples: Images per shard, instead of ``shard_size``.
        force: Discard the work of a different unfinished run.
        schema: Fields of Python samples that differ from those of the dataset, such as a label with
            new classes after the existing ones.
        workers: Number of processes; small jobs use fewer. The result does not depend on it.
        on_progress: Called with the work done since the last call.

    Raises:
        UsageError: If there is no dataset, or ``source`` does not match it.
        BadImages: If images are bad and ``on_error`` is ``fail``.
        CorruptDataset: If a manifest or an index is damaged, or a shard has the wrong size.
        ConversionFailed: If writing fails.
    """

def split(
    directory: str | Path,
    *,
    val: float = 0.0,
    test: float = 0.0,
    stratify: bool = False,
    group: str | None = None,
    seed: int = 0,
) -> dict[str, npt.NDArray[np.int64]]:
    """Divide the rows of the dataset in ``directory``, for ``dataset.select(rows)``.

    The split of a row depends only on its source path and the seed. So images that are added later
    do not move others, and fractions are approximate. ``stratify`` divides the images of each class
    exactly; images that are added later may then move a few others. With ``group``, fractions apply
    to groups, or with ``stratify``, to images as far as groups permit.

    Args:
        directory: The dataset.
        val: Fraction of images for the val split, such as 0.1.
        test: Fraction of images for the test split.
        stratify: Split each class separately, with exact fractions.
        group: Keep images of the same folder, or with the same value in COLUMN, in one split.
        seed: Seed of the split.

    Returns:
        Rows of ``train``, ``val`` and ``test``, in order: int64 of shape (N,).

    Raises:
        UsageError: If there is no dataset, it has splits, an option is invalid, or one of the three
            would be empty.
        CorruptDataset: If the manifest or index is damaged.
    """

def convert(
    source: str | Path | Any,
    target: str | Path,
    *,
    to: Literal["hdf5", "lmdb", "webdataset"],
    shard_size: int | str = 268435456,
    shard_samples: int | None = None,
    shuffle: bool | None = None,
    seed: int = 0,
    limit: int | None = None,
    on_error: Literal["fail", "skip"] = "fail",
    resize: int | tuple[int, int] | str | None = None,
    resize_mode: Literal["shorter", "longer", "crop", "pad", "stretch"] | None = None,
    filter: Literal["bicubic", "bilinear", "lanczos", "box"] = "bicubic",
    dct_scaling: bool = False,
    enlarge: bool = False,
    max_pixels: int | None = None,
    encode: Literal["keep", "jpeg", "png", "webp", "raw", "planes"] = "keep",
    quality: int | None = None,
    pixels: Literal["rgb", "gray", "keep"] = "rgb",
    background: str | Color = (255, 255, 255),
    orient: bool = False,
    check: Literal["decode", "header", "none"] = "decode",
    tolerate_damage: bool = False,
    class_order: str | os.PathLike[str] = "plain",
    splits: bool | None = None,
    classes: bool = False,
    schema: Mapping[str, Field | str] | None = None,
    fields: Sequence[str] | None = None,
    val: float = 0.0,
    test: float = 0.0,
    stratify: bool = False,
    group: str | None = None,
    exclude: str | Path | Sequence[str | Path] = (),
    workers: int = 1,
    on_progress: Report | None = None,
    executor: Executor | None = None,
    facts: bool = False,
    force: bool = False,
    staging: str | Path | None = None,
    recipe: Recipe | None = None,
) -> Converted:
    """Convert a folder of images to a dataset, or to one dataset per split.

    The options are those of ``shardkit convert``. Repeat an interrupted call to resume it:
    finished shards are kept. The result does not depend on interruptions or on ``workers``.
    Repeating a finished call does nothing.

    Args:
        source: A folder, or its URL in an object store, with one folder per class, or only images,
            or splits of either; or another `shardkit.contracts.Source`; or samples: a sequence or
            iterable, such as a PyTorch dataset, of tuples or dicts (perhaps with a ``key``) of
            images (bytes, paths, PIL images), arrays, tensors, numbers and texts. An iterable is
            read once, into a temporary file.
        target: A directory that is new, is empty, or (with ``force``) contains a dataset to
            replace. The old dataset stays intact until the new one is ready. Or, with ``staging``,
            a URL in an object store (``s3://``, ``gs://``, ``az://``) that contains no dataset yet.
        recipe: The image options, as one object instead of keywords.
        to: Shard format: lmdb, hdf5 or webdataset.
        shard_size: Approximate size of the images in a shard, such as 256MiB.
        shard_samples: Images per shard, instead of ``shard_size``.
        shuffle: Store images in random order, so that sequential reading is well mixed, or in the
            source's order. Default: shuffle, unless the source is a dataset.
        seed: Seed of the random order, and of ``val`` and ``test``.
        limit: Convert only N images of each split, as a trial run.
        on_error: fail: write nothing if an image is bad. skip: leave bad images out and record
            each. One of ``fail``, ``skip``.
        resize: Scale one side of each image to N pixels, or the image to height x width.
        resize_mode: shorter, longer: scale that side to N, or cover HxW or fit into it. crop: cover
            HxW and crop the excess. pad: fit into HxW and pad. stretch: ignore the aspect ratio.
            One of ``shorter``, ``longer``, ``crop``, ``pad``, ``stretch``. Default: shorter for N,
            crop for HxW.
        filter: Interpolation; all filters are antialiased. One of ``bicubic``, ``bilinear``,
            ``lanczos``, ``box``.
        dct_scaling: Decode JPEGs at reduced size if their sides are at least 4x the target's. This
            is 2.5x faster for 2000-pixel photographs, but not exact: over 200 photographs, the PSNR
            was at least 38 dB, with a median of at least 50 dB.
        enlarge: Enlarge images that are smaller than the target.
        max_pixels: Read images of up to N pixels, if memory allows. Default: 178956970.
        encode: Encoding of stored images. keep: leave bytes unchanged unless pixels must change.
            raw: store unencoded pixels; all images must have one size. planes: store JPEGs as
            decoded Y4M planes, which readers convert to RGB. The pixels are the same, the files are
            about 4.5x as large, and center crops are 6x faster. Other images keep their bytes
            unless pixels must change. One of ``keep``, ``jpeg``, ``png``, ``webp``, ``raw``,
            ``planes``.
        quality: JPEG and WebP quality; re-encodes all JPEG and WebP images. Default: 90 where an
            image must be encoded.
        pixels: Channels and dtype of stored images. rgb: 8-bit RGB, with the upper eight bits of
            16-bit images. gray: one 8-bit channel. keep: as in the first image; images of another
            type count as bad files. One of ``rgb``, ``gray``, ``keep``.
        background: Color under transparent pixels and around padded images.
        orient: Apply the EXIF orientation, even if nothing else changes.
        check: Depth of image validation. One of ``decode``, ``header``, ``none``.
        tolerate_damage: Store damaged JPEGs that Pillow can decode; readers return Pillow's pixels.
        class_order: Label order. plain: as in torchvision. natural: numbers by value. FILE: one
            class per line, in this order.
        splits: Treat the folders of SRC as splits (train, val, ...), one dataset for each. Default:
            by name.
        classes: Use the folders as classes, even if they look like another kind of source.
        schema: Fields of samples by name, each a `shardkit.Field` or a kind; others are inferred
            from the first sample.
        fields: Names of the values in tuple samples; image and label for tuples of two values.
        val: Fraction of images for the val split, such as 0.1.
        test: Fraction of images for the test split.
        stratify: Split each class separately, with exact fractions.
        group: Keep images of the same folder, or with the same value in COLUMN, in one split.
        exclude: Leave out images whose keys or paths are listed in FILE, one per line, such as the
            lists from `shardkit report --exclude`. For a dataset, FILE may also list row numbers.
            Repeatable.
        workers: Number of processes; small jobs use fewer. The result does not depend on it.
        on_progress: Called with the work done since the last call.
        executor: Builds the shards instead of ``workers``, one per call: any executor whose
            processes see the paths of source and target, such as the executor of a Dask client.
        facts: Also measure the images for `shardkit.report`, as ``facts.npy``, which is not part of
            the dataset.
        force: Replace the dataset in DST once the new one is ready; discard a different unfinished
            conversion.
        staging: If DST is a URL (s3://, gs://, az://): build the dataset in DIR, then upload it.
            Optional for a plan of jobs.

    Returns:
        The plan and the manifests of the datasets.

    Raises:
        UsageError: If an option is invalid, ``target`` cannot be used, or it holds an unfinished
            conversion of something else.
        BadImages: If images are bad and ``on_error`` is ``fail``. Shards without bad images are
            kept for the next run.
        DiskFull: If the disk lacks space.
        ConversionFailed: If writing fails.
    """

def export(
    directory: str | Path,
    target: str | Path,
    *,
    layout: LayoutName = "imagefolder",
    raw_as_png: bool = False,
    on_progress: Report | None = None,
) -> Exported:
    """Write the images of a dataset as the files of its source, or as tables or tar archives.

    Every image has the bytes that the dataset stores, and is verified with its checksum. The files
    appear in ``target`` all at once, when they are complete; repeat an interrupted call to start
    over. Repeating a finished call compares the files and changes nothing.

    Args:
        directory: The dataset, perhaps of splits.
        target: A folder that does not exist, is empty, or contains exactly these files.
        layout: imagefolder: files of the source, by class. csv: images and metadata.csv. parquet:
            for Hugging Face datasets. webdataset: tar archives. yolo: images, labels and data.yaml.
            One of ``csv``, ``imagefolder``, ``parquet``, ``webdataset``, ``yolo``.
        raw_as_png: Export raw pixels and planes as PNG files with the same pixels.
        on_progress: Called with the progress since the last call.

    Raises:
        UsageError: If ``target`` is not empty, the layout cannot represent a field, a source path
            cannot be the name of a file below ``target``, or two of these names are the same.
        CorruptDataset: If the dataset is damaged.
        ConversionFailed: If writing fails.
    """

def bench(
    paths: Sequence[str | PathLike[str]],
    *,
    decode: str | None = None,
    transform: str | None = None,
    batch_size: int = 64,
    step_ms: float | None = None,
    model: str | None = None,
    loaders: Sequence[str] = (),
    steps: bool = False,
    caches: Sequence[str] = ("warm", "cold"),
    rounds: int = 5,
    seconds: float = 1.0,
    limit: int = 2000,
    watch: Watch = ...,
) -> BenchReport:
    """Measure how fast datasets and plain image folders are read.

    Every candidate is measured once per round. The baseline is a plain folder if there is one,
    otherwise the first candidate. Ctrl-C ends the measurement after the last complete round.

    Args:
        paths: shardkit datasets and folders of images.
        decode: Image type: pil, numpy, torch, bytes, or an operation such as 'CenterCrop(224)'.
            Default: RandomResizedCrop(224); pil with --transform; torch for raw pixels of one size.
        transform: Your transform for each image, from a module that may be in the current folder.
        batch_size: Samples per batch.
        step_ms: Duration of a training step in ms, during which the CPU is free.
        model: Model to train on each batch, or a function that returns one; 'small' is built in.
        loaders: Loaders such as ``thread`` or ``plain:num_workers=4``. By default, PyTorch's
            DataLoader with one worker per CPU, and for datasets also ``auto``.
        steps: Improve PyTorch's loader of one dataset or folder step by step, and show what each
            step gains.
        caches: ``warm``: files in memory; ``cold``: files on disk.
        rounds: Interleaved rounds to measure, after one warm-up round.
        seconds: Duration of a warm measurement. A cold measurement is one epoch of at most 10x this
            duration. With --steps, a measurement takes 3 epochs of about this duration.
        limit: Maximum number of images to read per DATASET, drawn at random.
        watch: Called before each measurement with its name, the work done, and all work.

    Raises:
        UsageError: If a path is missing or contains no images, or an option is invalid. Failures
            during a measurement are reported in the candidate's line.
        CorruptDataset: If a manifest is damaged.
        KeyboardInterrupt: If you press Ctrl-C before the first round is complete.
    """

def doctor(
    dataset: str | Path | None = None,
    *,
    decode: str | None = None,
    transform: str | None = None,
    batch_size: int = 64,
    step_ms: float | None = None,
    model: str | None = None,
    loader: str | None = None,
    workers: int | None = None,
    budget: float = 12.0,
    watch: _Watch | None = None,
) -> DoctorReport:
    """Find out whether the GPU waits for data and why, and measure what helps.

    Args:
        dataset: A dataset or a plain folder of images. None, without ``loader``, checks only the
            machine.
        decode: Image type: pil, numpy, torch, bytes, or an operation such as 'CenterCrop(224)'.
            Default: RandomResizedCrop(224); pil with --transform; torch for raw pixels of one size.
        transform: Your transform for each image, from a module that may be in the current folder.
        batch_size: Samples per batch; ``loader`` uses its own.
        step_ms: Duration of a training step in ms, during which the CPU is free.
        model: Model to train on each batch, or a function that returns one; 'small' is built in.
        loader: Function that returns your DataLoader or shardkit loader, instead of DATASET.
        workers: Number of workers that you plan to use. Default: as in make_loader.
        budget: Approximate duration in seconds.
        watch: Called with a description of each step.

    Raises:
        UsageError: If ``dataset`` does not exist, or options are invalid or need it.
        MeasurementFailed: If the data cannot be loaded.
        ShardkitError: If the dataset is damaged.
    """

def tune(
    dataset: str | PathLike[str],
    *,
    decode: str | None = None,
    transform: str | None = None,
    batch_size: int = 64,
    step_ms: float | None = None,
    model: str | None = None,
    budget: float = 60.0,
    watch: Watch = ...,
) -> TuneReport:
    """Find the fastest settings of `make_loader` for a dataset on this machine.

    With ``step_ms`` or ``model``, it chooses the cheapest settings that load fast enough. With
    ``model``, it then runs the training loop to decide about the priority, the helper and pinned
    memory.

    Args:
        dataset: A dataset or a plain folder of images.
        decode: Image type: pil, numpy, torch, bytes, or an operation such as 'CenterCrop(224)'.
            Default: RandomResizedCrop(224); pil with --transform; torch for raw pixels of one size.
        transform: Your transform for each image, from a module that may be in the current folder.
        batch_size: Samples per batch.
        step_ms: Duration of a training step in ms, during which the CPU is free.
        model: Model to train on each batch, or a function that returns one; 'small' is built in.
        budget: Time limit in seconds.
        watch: Called before each measurement with its name, the time, and the budget.

    Raises:
        UsageError: If the dataset, the transform, the model or an option is invalid.
        MeasurementFailed: If nothing can be measured.
    """

def open_dataset(
    path: str | PathLike[str],
    transform: Function | ImageOp | Transforms | None = None,
    target_transform: Function | None = None,
    decode: Decode | Mapping[str, Decode] = "pil",
    *,
    fields: Sequence[str] | None = None,
    follow: Sequence[str] = (),
    as_dict: bool = False,
    verify: bool | None = None,
    view: int = 0,
    windows: Windows | None = None,
    split: str | None = None,
    cache: str | PathLike[str] | None = None,
    cache_limit: int | str | None = None,
    root: str | PathLike[str] | None = None,
) -> ShardDataset:
    """Open a dataset of any format; the arguments are those of `ShardDataset`.

    Args:
        path: The dataset's directory, the directory of its splits, or its URL. A folder of images
            is read in place, as after ``shardkit attach imagefolder``. Its index is in the
            ``shardkit`` folder of ``$XDG_CACHE_HOME``, and is rebuilt if a name, size or time
            changes.
        transform: Applied to each image. An `ImageOp` works as if passed as ``decode``. A mapping
            sets the transform of each field, or of several together: ``{("image", "mask"):
            function}`` calls ``function(image, mask)``, which returns both.
        target_transform: Applied to each label.
        decode: Type of the images: ``pil`` for RGB images, ``numpy`` for uint8 of shape (height,
            width, 3), ``torch`` for uint8 of shape (3, height, width) in channels-last memory,
            ``bytes`` for the stored bytes. Images of other types (``--pixels``) keep their channels
            and dtype, also in operations; ``pil`` requires a type that Pillow supports. An
            `ImageOp`, such as ``RandomResizedCrop(224)``, crops while decoding and returns images
            as ``torch`` does; it selects one crop for all images, masks, boxes and keypoints of a
            row. A mapping sets each field separately; boxes and keypoints then follow ``image``.
            Masks have the shape (height, width) and keep their values.
        fields: Names of the fields to read, in this order. None means image and label, or all
            fields of a dataset without images.
        follow: Array fields of shape (channels, height, width), such as latents and heat maps, that
            an `ImageOp` crops, scales and flips along with the image. They keep their grid: a
            latent with one value per 8 x 8 pixels also has one per 8 x 8 pixels of the crop.
        as_dict: Whether samples and batches are dicts by field name instead of tuples.
        verify: Whether each read verifies the record's checksum. None does so for encoded images,
            which costs about 3%, but not for raw pixels and arrays of one shape.
        view: Number of this view, starting at 0. Datasets over the same images draw different
            random numbers if their views differ, for example for two crops of each image.
        windows: Neighboring rows that each sample contains; see `Windows`. Samples are then dicts,
            images are tensors, and a transform receives a window.
        split: Name of a split, such as ``train``: the folder of that name in ``path``.
        cache: A local folder for shards of a dataset in an object store. Whole shards are fetched
            ahead of time, once for all processes.
        cache_limit: Maximum bytes of shards in the cache, as a number or a text such as ``"50GB"``.
            The least recently used shards are evicted. None means no limit.
        root: Folder of the archives of an attached dataset; None means where `shardkit.attach`
            found them.

    Returns:
        A dataset of its format's class, or a `ShardDataset` for a format from another package.

    Raises:
        UsageError: If there is no dataset at ``path``, an option is unknown, or an object store
            denies access.
        CorruptDataset: If the dataset's manifest is damaged.
        ShardkitError: If an object store cannot be read.
    """

def make_loader(
    dataset: Any,
    batch_size: int | None = None,
    *,
    shuffle: bool | BlockShuffle | None = None,
    seed: int | None = None,
    rank: Rank | None = None,
    sampler: Any = None,
    drop_last: bool | None = None,
    samples_per_epoch: int | None = None,
    aug_repeats: int = 1,
    views: int | Sequence[ImageOp] = 1,
    endless: bool = False,
    collate_fn: Callable[[Sequence[Any]], Any] | None = None,
    engine: Literal["auto", "thread", "helper", "process"] = "auto",
    resident: Literal["cpu", "cuda"] | None = None,
    num_workers: int | None = None,
    priority: Literal["normal", "low"] = "normal",
    prefetch_factor: int | None = None,
    timeout: float = 300.0,
    with_rows: bool = False,
    on_bad: Literal["raise", "drop"] = "raise",
    max_bad: int = 100,
    pin_memory: bool | None = None,
    start_method: Literal["auto", "fork", "forkserver", "spawn"] = "auto",
    persistent_workers: bool = True,
    sharing_strategy: str | None = None,
    tuned: str | PathLike[str] | None = None,
) -> Loader[Any]:
    """Return a loader of batches, with defaults for this machine and dataset.

    Options that PyTorch's ``DataLoader`` has too have the same name and meaning here.
    docs/benchmarks.md has the measurements behind the defaults.

    Args:
        dataset: A shardkit dataset, or any other with ``__len__`` and ``__getitem__``.
        batch_size: Samples in a batch of this rank; may be omitted if ``tuned`` sets it.
        tuned: A file written by ``shardkit tune --out``, for settings that other arguments leave
            open.
        shuffle: False reads in stored order, True fully shuffles each epoch, and `BlockShuffle`
            shuffles blocks of neighboring rows. None means False, or for a loader of an iterable
            dataset, the dataset's setting. The same holds for the next two arguments.
        seed: Selects the order and the random numbers of each epoch; None means 0.
        rank: This rank's subset of each epoch. None uses the rank from ``torch.distributed``.
        sampler: Selects the rows of each epoch, instead of ``shuffle``: `Weighted`, `Balanced`,
            `Mixture`, `Buckets`, or a PyTorch sampler that yields rows. Its random numbers depend
            on seed and epoch, and ranks divide its rows.
        drop_last: Whether to drop a smaller last batch; None uses the setting of ``rank``.
        samples_per_epoch: Samples in an epoch, over all ranks; the next epoch continues where this
            one ended. None means the length of the dataset or sampler.
        aug_repeats: Repeated augmentation: each sample appears this many times, with different
            random numbers, on neighboring ranks in the same step.
        views: If more than 1, each batch is a tuple of this many batches of the same samples, with
            different random numbers. A list of operations, such as ``[RandomResizedCrop(224),
            RandomResizedCrop(96)]``, sets the ``decode`` of each view; each image is decoded once.
            (With an int, a batch of `EpochBatchSampler` holds the views one after the other, and
            ``images.chunk(views)`` separates them.)
        endless: Whether an iteration continues with the next epoch instead of ending.
        collate_fn: Function that combines samples into a batch. None uses `collate`, which passes
            on a block of images without copying it.
        engine: ``thread`` decodes in threads of this process into reused memory, which is fastest.
            ``helper`` runs these threads in one child process, so that they do not delay the kernel
            launches of the training loop. ``process`` uses a PyTorch ``DataLoader`` with worker
            processes, for transforms that hold the GIL. ``auto`` uses processes if something in the
            dataset may hold the GIL, otherwise threads; ``Loader.reason`` gives the reason. One of
            ``auto``, ``thread``, ``helper``, ``process``.
        resident: Memory that holds the whole dataset, decoded when the loader is created: ``cpu``
            or ``cuda``, the current device. Batches and states are the same as without it. Each
            rank holds all rows. Images must have one size, and only `RandomCrop` may draw random
            numbers. One of ``cpu``, ``cuda``.
        num_workers: Number of threads, or of processes with the ``process`` engine. None uses one
            for each CPU that this process may use, divided by ``LOCAL_WORLD_SIZE``; or 0 with
            ``resident``. 0 reads in the main thread, on request.
        priority: CPU priority of the loader's threads or processes. ``low`` is nice 19: they yield
            to the training loop, which launches kernels with less delay, but also to other
            programs. Other threads keep their priority. Linux only: elsewhere, or with 0 workers,
            ``low`` warns and has no effect. One of ``normal``, ``low``.
        prefetch_factor: Batches that each worker prepares ahead, as in PyTorch. None means 2 for
            processes, and ``num_workers + 2`` batches in total for threads. The thread engine holds
            at most two more: the batch in use and the one before it. The helper holds another two,
            in transit to this process. Without transforms, a thread or process reads several small
            batches at once, up to 8 MiB, or 20 MiB if nothing is decoded, and None counts them as
            one.
        timeout: Seconds to wait for a batch before raising an error; 0 waits forever.
        with_rows: Whether each batch ends with its row numbers: int64 of shape (N,), -1 for
            padding. For a ``Subset`` they are rows of its dataset; for a ``ConcatDataset``, its
            own.
        on_bad: What to do with a sample whose record is damaged or cannot be decoded. ``drop``
            leaves it out of its batch, which is then smaller: no other sample takes its place, and
            a batch without samples is left out. ``Loader.bad`` lists such rows. One of ``raise``,
            ``drop``.
        max_bad: Maximum number of bad rows with ``on_bad='drop'``; if there are more, the iteration
            raises `LoaderFailed`.
        pin_memory: Whether batches are in pinned memory. None pins them if a CUDA device is
            available. True without one warns and has no effect.
        start_method: How worker processes start: ``fork``, ``forkserver`` or ``spawn``. ``auto``
            forks on Linux while no other thread runs and CUDA is not initialized; otherwise it uses
            a fork server that has already imported torch. If that cannot run the transform or the
            main file, as in a notebook, the ``auto`` engine uses threads and warns. One of
            ``auto``, ``fork``, ``forkserver``, ``spawn``.
        persistent_workers: Whether worker processes survive between epochs: starting them takes 0.1
            to 2 s.
        sharing_strategy: How worker processes share tensors, as in
            ``torch.multiprocessing.set_sharing_strategy``. None keeps the current strategy.
            ``file_system`` needs fewer open files, but leaves files behind after a crash.

    Raises:
        UsageError: If an option is out of range, options contradict each other or the dataset, or
            ``tuned`` is invalid.
    """

def verify(
    directory: str | Path,
    level: Literal["quick", "full", "decode"] = "full",
    *,
    against: Any = None,
    root: str | Path | None = None,
    workers: int = 1,
    on_progress: Report | None = None,
) -> Verification:
    """Check the dataset in ``directory``, or all of its splits.

    ``against`` is the folder, or the Python samples, that the dataset was created from; or a list
    of these, one per part. The dataset must contain exactly its files, each once, with the
    manifest's order and labels. Each record must equal its converted file: byte for byte, or, if
    other library versions encoded it, with a PSNR of at least `record_comparison.ALIKE_PSNR`. The
    records of an attached dataset are compared with the index, and the bytes of its archives with
    their SHA-256.

    Args:
        directory: The dataset, or its URL in an object store: shards are fetched to a temporary
            folder, one per worker at a time.
        level: quick: check manifest, files, sizes and index. full: also each shard's and record's
            checksum. decode: also each image's pixels. One of ``quick``, ``full``, ``decode``.
        against: Also compare each record with its file in SRC. Repeat the option for each part of a
            merged dataset, in order, unless all parts have the same source, and for the file of
            each field that was added later.
        root: Folder of the archives of an attached dataset. Default: where `attach` found them.
        workers: Number of processes.
        on_progress: Called with the progress since the last call.

    Raises:
        UsageError: If there is no dataset, its manifest has a newer version, or ``against`` cannot
            be its source.
    """
