"""The staging directory, in which a dataset is built, and the steps that publish the dataset.

A conversion writes only to ``DST/.shardkit-work``. Once the dataset is complete, it is exchanged
with the old one in one step (`shardkit.conversion.exchange`), or moved up file by file, manifests
last. So readers never see a partial dataset, an old one stays intact until the new one is ready,
and rerunning the command resumes an interrupted conversion.
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
from collections.abc import Callable, Collection, Iterable, Iterator
from pathlib import Path, PurePath

from shardkit.contracts import Source
from shardkit.conversion.disk import as_failure
from shardkit.conversion.exchange import FolderExchange, files_of
from shardkit.conversion.fingerprint import ConversionFingerprint, differences, saved_digest
from shardkit.conversion.lock import locked
from shardkit.dataset.index import INDEX_DIRECTORY
from shardkit.dataset.manifest import MANIFEST_NAME, PARTS, is_of_layer, require_file_name
from shardkit.dataset.opened import OpenedDirectory
from shardkit.errors import ConversionFailed, ShardkitError, UsageError, located, setting
from shardkit.record import dump_json, load_json
from shardkit.system.files import (
    as_name,
    is_temporary,
    overlap,
    read_small,
    require_local,
    sync,
    write_atomically,
)
from shardkit.system.safe_paths import (
    NO_PATH,
    UNFIT,
    exists,
    is_file,
    make_folder,
    move,
    opened,
    remove,
    remove_empty,
    remove_tree,
    require_removable,
    split_path,
    status_of,
    walk,
)

_LOG = logging.getLogger(__name__)

WORK_NAME = ".shardkit-work"

TRASH_NAME = ".shardkit-trash"
"""Name of a discarded work folder, so that no remainder of it counts as unfinished work."""

STATE = f"{WORK_NAME}/state"
DATASET = f"{WORK_NAME}/dataset"
"""The folders in the work folder, relative to the target."""

_SCRATCH = f"{WORK_NAME}/scratch"
"""The folder for temporary files."""

RETIRED = f"{STATE}/retired.json"
"""The list of an old dataset's files, while they are removed one by one: name, inode, size and
modification time. Only files with all of these are removed: anybody may have written the list."""


class StagingDirectory:
    """The work folder of one conversion."""

    def __init__(self, target: Path) -> None:
        self.target = target
        self._made = [path for path in (target, *target.parents) if not exists(path)]
        self.folder = target / WORK_NAME
        self.dataset = target / DATASET
        """The new dataset, with the paths that it will have in the target."""
        self.state = target / STATE
        """Notes about the work; never part of the dataset."""
        self._exchange = FolderExchange(target, work=WORK_NAME)

    def folder_of(self, split: str) -> Path:
        """Return the folder of a split's new dataset."""
        return self.dataset / as_name(split)

    def result_folder(self, split: str, number: int) -> Path:
        """Return the folder for the result of a shard: its segment of the index, and more."""
        return self.state / "parts" / as_name(split) / f"{number:06d}"

    @contextlib.contextmanager
    def publishing(self, fingerprint: ConversionFingerprint, *, force: bool) -> Iterator[bool]:
        """Start a run, or resume one; at the end of the block, publish the dataset.

        Yields whether the block must make the dataset. An earlier run may have been interrupted
        while it published the same one. If the block saves no manifest, nothing is published. The
        fingerprint is everything that determines the result. Another unfinished run is a
        UsageError; ``force`` discards it.
        """
        self.start(fingerprint, force=force)
        is_ready = self.is_ready
        yield not is_ready
        if is_ready or self.is_complete:
            self.publish()

    @contextlib.contextmanager
    def scratch(self) -> Iterator[Path]:
        """Provide an empty folder on the dataset's disk.

        The folder is removed at the end, or by the next process if this one is killed.
        """
        try:
            remove_tree(self.target, _SCRATCH)
            make_folder(self.target, _SCRATCH)
            yield self.target / _SCRATCH
        finally:
            with contextlib.suppress(OSError):
                remove_tree(self.target, _SCRATCH)
                if set(os.listdir(self.folder)) <= {"lock", "owner"}:  # no unfinished conversion
                    remove_tree(self.target, WORK_NAME)
                    self._remove_parents()

    def start(self, fingerprint: ConversionFingerprint, *, force: bool) -> None:
        """Resume an earlier run with the same fingerprint, or start from nothing.

        A run also resumes if only bad files that the earlier run reported were fixed or removed, or
        are now skipped. The caller must then check the input of each finished shard. UsageError if
        there is an unfinished run with another fingerprint, without ``force``.
        """
        self._exchange.take_back()
        if not self.is_ready:
            remove(self.target, f"{STATE}/ready")  # the complete dataset was removed
        earlier = saved_digest(self.state)
        if earlier is None or earlier != fingerprint.digest:
            self._settle(earlier, fingerprint, force=force)
            make_folder(self.target, STATE)
            fingerprint.save(self.state)
        make_folder(self.target, DATASET)
        # Without these, a power cut could lose the folders during publication.
        _sync_all({self.folder, self.target, *self._above})

    @property
    def _above(self) -> set[Path]:
        """The parents of the folders that were created for the target."""
        return {path.parent for path in self._made}

    def _settle(
        self, earlier: str | None, fingerprint: ConversionFingerprint, *, force: bool
    ) -> None:
        """Publish, keep or discard the work of an earlier run with another fingerprint."""
        if self.is_ready:
            self._move()
            if not force:
                self.discard()
                raise UsageError(
                    f"{self.target} now contains the dataset of an earlier run, which was "
                    "interrupted while publishing it;",
                    remedy=f"{setting('force', True)} replaces it",
                )
        elif earlier is not None:
            reasons = differences(self.state, fingerprint, self._bad_files())
            if not reasons:
                return
            if not force:
                done = self.count_finished()
                shards = f", discarding {done:,} finished shard{'s' * (done != 1)}" if done else ""
                raise UsageError(
                    f"{self.target} contains an unfinished conversion, which this command cannot "
                    f"resume: {'; '.join(reasons)}.",
                    remedy=f"{setting('force', True)} starts over{shards}",
                )
        remove(self.target, f"{STATE}/plan.json")  # first, so the rest does not count as work
        for folder in (STATE, DATASET):
            remove_tree(self.target, folder)

    def _files(self, folder: str) -> list[str]:
        """Return the files in a folder below the target, relative to the target."""
        try:
            return [name for name, is_folder in walk(self.target, folder) if not is_folder]
        except FileNotFoundError:
            return []

    def count_finished(self) -> int:
        """Return the number of finished shards."""
        saved = (name for name in self._files(STATE) if "/." not in name[1:])
        return sum(name.endswith("/result.json") for name in saved)

    def _bad_files(self) -> Collection[str]:
        try:
            return frozenset(
                load_json(read_small(self.state / "bad.json", root=self.target))["files"]
            )
        except (*UNFIT, ValueError, TypeError, KeyError):
            return frozenset()

    def save_bad_files(self, bad: Collection[str]) -> None:
        """Save the names of bad files, which may be changed before the next run."""
        write_atomically(self.state / "bad.json", dump_json({"files": sorted(bad)}))

    def prune(self, wanted: Collection[Path]) -> None:
        """Remove all files of the new dataset that are not in ``wanted``."""
        for name in self._files(DATASET):
            if self.target / name not in wanted:
                remove(self.target, name)

    @property
    def is_complete(self) -> bool:
        """Whether the manifest is there, which is written last."""
        return is_file(self.target, f"{DATASET}/{MANIFEST_NAME}")

    @property
    def is_ready(self) -> bool:
        """Whether the dataset is complete, so that only `publish` remains."""
        if not all(is_file(self.target, f"{STATE}/{name}") for name in ("ready", "plan.json")):
            return False
        return (
            self.is_complete
            or is_file(self.target, RETIRED)  # it is moved up file by file
            or self._exchange.is_begun
            or self._exchange.is_done
        )

    def publish(self) -> None:
        """Move the complete dataset to the target, replacing an old one; may be repeated."""
        self._remove_temporaries()
        entries = walk(self.target, DATASET)
        _sync_all({self.dataset, *(self.target / name for name, is_folder in entries if is_folder)})
        if not self.is_ready:
            self._require_readable()
            write_atomically(self.state / "ready", b"")
        self._move()
        self.discard()

    def _require_readable(self) -> None:
        """Read the manifests of the new dataset as readers will."""
        try:
            new = OpenedDirectory(self.dataset)
            new.manifests()
            for store in new.stores:
                _ = store.manifest
        except ShardkitError as error:
            raise ConversionFailed(
                f"{self.target} is unchanged, since readers would refuse the new dataset: "
                f"{error.problem}",
                remedy=error.remedy,
            ) from error

    def _remove_temporaries(self) -> None:
        """Remove the files that `published` left when it was killed."""
        for name in filter(is_temporary, self._files(DATASET)):
            remove(self.target, name)

    def finish(self) -> None:
        """Complete the publication of an earlier run, which had made everything ready."""
        self._exchange.take_back()
        self._move()
        self.discard()

    def _move(self) -> None:
        new_files = [PurePath(name).relative_to(DATASET) for name in self._files(DATASET)]
        if self._exchanged(new_files):
            return
        self._retire(new_files)
        folders = {self.target}
        for folder in {path.parent for path in new_files} - {PurePath()}:
            make_folder(self.target, str(folder))
            folders.add(self.target / folder)
        # Manifests last, and the top one last of all: it commits everything.
        new_files.sort(key=lambda path: (path.name == MANIFEST_NAME, -len(path.parts), path))
        for path in new_files:
            if path.name == MANIFEST_NAME:
                _sync_all(folders)
            move(self.target, f"{DATASET}/{path}", str(path))
        _sync_all({*folders, self.target.parent, *self._above})

    def _exchanged(self, new_files: Collection[PurePath]) -> bool:
        """Replace an old dataset in one step; return whether that was possible."""
        if not self._exchange.is_done:
            if is_file(self.target, RETIRED):
                return False  # an earlier run started to remove it file by file
            old = files_of(self.target)
            self._require_vacant(set(map(str, new_files)).difference(old))
            _require_removable(self.target, old)
            if not old or not self._exchange.carry_out(old):
                return False
        self._exchange.remove_old(old_files(self.target, self._exchange.listed), _SCRATCH)
        return True

    def discard(self) -> None:
        """Remove the work folder, and empty parents that were created for it."""
        clear_trash(self.target)
        move(self.target, WORK_NAME, TRASH_NAME)
        sync(self.target)
        error = clear_trash(self.target)
        sync(self.target)
        if error:
            _LOG.warning(
                "%s cannot be removed: %s. The dataset is complete; delete that folder.",
                self.target / TRASH_NAME,
                error,
            )
        self._remove_parents()

    def _remove_parents(self) -> None:
        """Remove the folders that were created for the target, if they are empty."""
        with contextlib.suppress(OSError):
            for path in self._made:
                path.rmdir()

    def _require_vacant(self, names: Iterable[str]) -> None:
        """Refuse to publish over files that are not of the old dataset: they are the user's."""
        for name in sorted(names):
            with contextlib.suppress(FileNotFoundError):
                there = status_of(self.target, name)
                # After a power cut, a file may have both names.
                if not os.path.samestat(there, status_of(self.target, f"{DATASET}/{name}")):
                    raise UsageError(
                        f"{self.target / name} is not part of the dataset that is being replaced",
                        remedy="Move it to another folder, and rerun.",
                    )

    def _retire(self, new_files: Collection[PurePath]) -> None:
        """Remove the old dataset, manifests first; the list survives an interruption."""
        listed = self.target / RETIRED
        if not is_file(self.target, RETIRED):
            entries = ([name, *_identity(self.target, name)] for name in files_of(self.target))
            write_atomically(listed, dump_json(list(entries)))
        old = old_files(self.target, RETIRED, pinned=True)
        self._require_vacant(set(map(str, new_files)).difference(old))
        _require_removable(self.target, old)
        manifests = [name for name in old if PurePath(name).name == MANIFEST_NAME]
        for name in manifests:
            remove(self.target, name)
        # Without this, a power cut could restore the manifests but not the files they list.
        _sync_all({(self.target / name).parent for name in manifests})
        for name in old:
            remove(self.target, name)
        for above in {"", *(str(PurePath(name).parent) for name in old)} - {"."}:
            with contextlib.suppress(FileNotFoundError), opened(self.target, above) as inside:
                for name in filter(is_temporary, os.listdir(inside)):
                    remove(self.target, f"{above}/{name}".lstrip("/"))
        folders = {folder for name in old for folder in PurePath(name).parents} - {PurePath()}
        for folder in sorted(folders, key=lambda folder: -len(folder.parts)):
            remove_empty(self.target, str(folder))
        # Without this, a power cut could restore files that no list contains.
        _sync_all({self.target, *(self.target / folder for folder in folders)})
        write_atomically(listed, b"[]")


@contextlib.contextmanager
def open_staging(target: Path, *, force: bool) -> Iterator[StagingDirectory]:
    """Open the staging directory of ``target``, for one process at a time.

    UsageError if ``target`` holds other files, or a dataset without ``force``, cannot be written,
    or another conversion is running there.
    """
    staging = StagingDirectory(target)
    clear_trash(target)  # of a run that was killed at the end
    with located(target), locked(staging.folder, lambda: check_target(target, force=force)):
        try:
            remove_tree(target, _SCRATCH)  # of a plan that was killed
            yield staging
        except OSError as error:
            raise as_failure(error, target) from error


def finish_interrupted(target: Path) -> None:
    """Complete the publication of an earlier run, and remove the leftovers of a killed one."""
    clear_trash(target)
    if StagingDirectory(target).is_ready:
        with open_staging(target, force=True) as staging:
            if staging.is_ready:
                staging.finish()


@contextlib.contextmanager
def scratch_folder(directory: Path, check: Callable[[], object]) -> Iterator[Path]:
    """Provide an empty folder on the dataset's disk, for one writer of the dataset at a time.

    ``check`` is as for `shardkit.conversion.lock.locked`.
    """
    target = _with_all_splits(directory)
    with located(directory), locked(target / WORK_NAME, check):
        try:
            with StagingDirectory(target).scratch() as scratch:
                yield scratch
        except OSError as error:
            raise as_failure(error, directory) from error


def _with_all_splits(directory: Path) -> Path:
    """Return the target of a conversion that replaces ``directory``: for a split, its parent."""
    parent = directory.absolute().parent
    try:
        splits = OpenedDirectory(parent).splits
    except ShardkitError:
        return directory
    return parent if directory.name in splits else directory


def clear_trash(target: Path) -> OSError | None:
    """Remove a discarded work folder; return the error if that is not possible."""
    try:
        remove_tree(target, TRASH_NAME)
    except OSError as error:
        return error
    return None


def old_files(target: Path, name: str, *, pinned: bool = False) -> list[str]:
    """Return the files of an old dataset to remove, from a list in the work folder.

    ``name`` is the path of the list, relative to the target. If ``pinned``, each entry also
    identifies the file: another file is not returned, nor one in a list of an earlier version,
    which has only names. UsageError if the list is damaged, or names anything but files of a
    dataset.
    """
    try:
        names = json.loads(read_small(target / name, root=target))
        if not isinstance(names, list):
            raise TypeError("it is not a list")
        identities = dict[str, list[object]]()
        for entry in names:
            first, *identity = entry if pinned and isinstance(entry, list) and entry else [entry]
            _require_old_name(first)
            identities[first] = identity
    except (*UNFIT, ValueError, TypeError, RecursionError) as error:
        raise UsageError(
            f"{target / name} is damaged: {error}",
            remedy=f"Remove {target / WORK_NAME} and start over.",
        ) from error
    if not pinned:
        return names
    return [
        name for name, identity in identities.items() if _identity(target, name) in ([], identity)
    ]


def _identity(target: Path, name: str) -> list[int]:
    """Return a file's inode, size and modification time; an empty list if it does not exist."""
    try:
        status = status_of(target, name)
    except (FileNotFoundError, NotADirectoryError):
        return []
    return [status.st_ino, status.st_size, status.st_mtime_ns]


def _require_old_name(name: object) -> None:
    if not isinstance(name, str):
        raise TypeError("an entry is not a name")
    *folders, last = split_path(name)
    if last == MANIFEST_NAME and len(folders) < 2 and not name.startswith(".shardkit"):
        return
    if folders and folders[0] != INDEX_DIRECTORY and not is_of_layer(name):  # a split
        name = "/".join([*folders[1:], last])
        split_path(folders[0])
        if folders[0].startswith(".shardkit"):
            raise ValueError(f"{folders[0]!r} is not a split")
    require_file_name(name)


def _require_removable(target: Path, names: Collection[str]) -> None:
    """Check that an old dataset can be removed, before removing its first file."""
    try:
        require_removable(target, names)
    except (*UNFIT, PermissionError) as error:
        raise UsageError(
            f"the dataset in {target} cannot be replaced: {error.filename}: {error.strerror}. "
            "It is unchanged",
            remedy="Choose another directory, or ask its owner to remove it.",
        ) from error


def _sync_all(folders: set[Path]) -> None:
    for folder in folders:
        try:
            sync(folder)
        except FileNotFoundError:
            pass  # it was removed with its files
        except OSError as error:
            # An unreadable parent, or a file system that cannot sync folders.
            if error.errno not in (errno.EACCES, errno.EPERM, errno.EINVAL):
                raise


def check_target(target: Path, *, force: bool) -> None:
    """Refuse a target that cannot hold a new dataset.

    That is a file, a broken link, or a folder with other files, or with a dataset without
    ``force``. CorruptDataset if the manifest of a dataset to be replaced is damaged.
    """
    require_local(target)
    _refuse_split(target)
    try:
        names = sorted(os.listdir(target))
    except FileNotFoundError:
        for path in (target, *target.parents):
            if path.is_symlink() and not path.exists():
                raise UsageError(f"{path} is a link whose target is missing", where=path) from None
        return
    except NotADirectoryError:
        raise UsageError(f"{target} is a file, not a directory") from None
    except OSError as error:
        if error.errno not in NO_PATH:
            raise
        raise UsageError(f"{target} cannot be read: {error.strerror}") from error
    if StagingDirectory(target).is_ready:
        return  # an earlier run was interrupted while publishing
    if MANIFEST_NAME in names:
        if not force:
            if _has_parts(target):
                raise UsageError(
                    f"{target} already contains a dataset, and `append` or `merge` has added rows "
                    "to it",
                    remedy=f"choose another directory, or use {setting('force', True)}, which "
                    "also discards those rows",
                )
            raise UsageError(
                f"{target} already contains a dataset;",
                remedy=f"{setting('force', True)} replaces it",
            )
        # This fails for a damaged manifest, which cannot list the files to replace.
        _require_removable(target, files_of(target))
    elif names and WORK_NAME not in names:
        examples = ", ".join(names[:5]) + (" ..." if len(names) > 5 else "")
        raise UsageError(
            f"{target} contains other files ({examples});",
            remedy="choose a new or empty directory",
        )


def _has_parts(target: Path) -> bool:
    """Return whether the dataset in ``target`` was appended to or merged."""
    try:
        manifests = OpenedDirectory(target).manifests()
    except ShardkitError:
        return False
    return any(manifest.source.get("kind") == PARTS for manifest in manifests.values())


def refuse_overlap(source: Source, target: Path) -> None:
    """Refuse a target that contains the source, or is in it."""
    for path in source.paths():
        if overlap(target, path):
            raise UsageError(
                f"{target} and the source {path} overlap",
                remedy="choose a directory outside of it, or a smaller source folder",
                where=target,
            )


def _refuse_split(target: Path) -> None:
    """Refuse to replace a single split: all splits share their classes."""
    parent = target.absolute().parent
    if is_file(parent, MANIFEST_NAME) and target.name in OpenedDirectory(parent).splits:
        raise UsageError(
            f"{target} is a split of the dataset in {parent}",
            remedy=f"pass {parent}, whose splits change together, or choose another directory",
        )
