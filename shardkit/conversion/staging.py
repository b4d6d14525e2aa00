"""The hidden folder in which a dataset is made, and the steps that put it in its place.

Everything is made in ``DST/.shardkit-work``. When all of it is ready, it is exchanged with an older
dataset in one step (`shardkit.conversion.exchange`), or moved up, the manifests last. So a reader
never finds half a dataset, an older one stays intact until the new one is ready, and the same
command resumes after an interruption.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
from collections.abc import Callable, Collection, Iterator
from pathlib import Path, PurePath

from shardkit.conversion.disk import as_failure
from shardkit.conversion.exchange import FolderExchange
from shardkit.conversion.fingerprint import ConversionFingerprint, differences, saved_digest
from shardkit.conversion.lock import locked
from shardkit.dataset.index import INDEX_DIRECTORY
from shardkit.dataset.manifest import (
    MANIFEST_NAME,
    SplitsManifest,
    dataset_directories,
    load_any_manifest,
    load_manifest,
    require_file_name,
)
from shardkit.errors import ShardkitError, UsageError
from shardkit.record import dump_json, load_json
from shardkit.system.files import read_small, require_local, sync, write_atomically
from shardkit.system.safe_paths import (
    is_file,
    make_folder,
    move,
    parts_of,
    remove,
    remove_empty,
    remove_tree,
    require_removable,
    walk,
)

WORK_NAME = ".shardkit-work"

TRASH_NAME = ".shardkit-trash"
"""What the work folder is called once it is of no use, so that no rest of it is taken for work."""

STATE, DATASET = f"{WORK_NAME}/state", f"{WORK_NAME}/dataset"
"""The folders in it, relative to the target."""

RETIRED = f"{STATE}/retired.json"
"""The list of an older dataset's files, while they are removed one by one."""


class StagingDirectory:
    """The place where one conversion works."""

    def __init__(self, target: Path) -> None:
        self.target = target
        self._made = [path for path in (target, *target.parents) if not os.path.exists(path)]
        self.folder = target / WORK_NAME
        self.dataset = target / DATASET
        """What will be moved to the target, laid out as there."""
        self.state = target / STATE
        """What is known of the work, and never becomes part of the dataset."""
        self._exchange = FolderExchange(target, work=WORK_NAME)

    def begin(self, terms: ConversionFingerprint, *, force: bool) -> None:
        """Take up an earlier run on the same terms, or start with nothing.

        The same are also terms on which bad files, that the earlier run named, were mended, taken
        away, or are now to be left out. What each shard was made of must then be looked at.

        Raises:
            UsageError: If there is an unfinished run on other terms, and not ``force``.
        """
        self._exchange.take_back()
        earlier = saved_digest(self.state)
        if earlier != terms.digest:
            self._settle(earlier, terms, force=force)
            make_folder(self.target, STATE)
            terms.save(self.state)
        make_folder(self.target, DATASET)
        # Or a power cut could take the folders, and with them that the dataset is being published.
        _sync_all({self.folder, self.target, *self._above})

    @property
    def _above(self) -> set[Path]:
        """The folders that hold those which were made for the target."""
        return {path.parent for path in self._made}

    def _settle(self, earlier: str | None, terms: ConversionFingerprint, *, force: bool) -> None:
        """Put in its place, keep, or give up, what an earlier run on other terms left here."""
        if self.is_ready:
            self._move()
            if not force:
                self.discard()
                raise UsageError(
                    f"{self.target} now holds the dataset of an earlier run, which had been "
                    "interrupted while it was put in its place; --force replaces it"
                )
        elif earlier is not None:
            found = differences(self.state, terms, self._forgiven())
            if not found:
                return
            if not force:
                done = sum(name.endswith("/result.json") for name in self._files(STATE))
                shards = f"; {done:,} finished shard{'s' * (done != 1)} would go" if done else ""
                raise UsageError(
                    f"{self.target} holds an unfinished conversion, which this command does not "
                    f"continue: {'; '.join(found)}. --force starts over{shards}"
                )
        remove(self.target, f"{STATE}/plan.json")  # first: the rest must not pass for planned work
        for folder in (STATE, DATASET):
            remove_tree(self.target, folder)

    def _files(self, folder: str) -> list[str]:
        """Return the files in a folder below the target, relative to the target."""
        try:
            return [name for name, is_folder in walk(self.target, folder) if not is_folder]
        except FileNotFoundError:
            return []

    def _forgiven(self) -> Collection[str]:
        try:
            return frozenset(
                load_json(read_small(self.state / "bad.json", root=self.target))["files"]
            )
        except (OSError, ValueError, TypeError, KeyError):
            return frozenset()

    def keep_for_mending(self, bad: Collection[str]) -> None:
        """Note which files are bad; the next run goes on although these were changed."""
        write_atomically(self.state / "bad.json", dump_json({"files": sorted(bad)}))

    def prune(self, wanted: Collection[Path]) -> None:
        """Remove from the dataset to be all files but those of ``wanted``."""
        for name in self._files(DATASET):
            if self.target / name not in wanted:
                remove(self.target, name)

    @property
    def is_ready(self) -> bool:
        """Whether all is made, so that only `publish` remains, or a part of it."""
        return all(is_file(self.target, f"{STATE}/{name}") for name in ("ready", "plan.json"))

    def publish(self) -> None:
        """Put the finished dataset in its place, instead of an older one; may be repeated."""
        found = walk(self.target, DATASET)
        _sync_all({self.dataset, *(self.target / name for name, is_folder in found if is_folder)})
        write_atomically(self.state / "ready", b"")
        self._move()
        self.discard()

    def _move(self) -> None:
        if self._exchanged():
            return
        self._retire()
        made = [PurePath(name).relative_to(DATASET) for name in self._files(DATASET)]
        folders = {self.target}
        for folder in {path.parent for path in made} - {PurePath()}:
            make_folder(self.target, str(folder))
            folders.add(self.target / folder)
        # Manifests last, and the outermost last of all: it commits everything.
        made.sort(key=lambda path: (path.name == MANIFEST_NAME, -len(path.parts), path))
        for path in made:
            if path.name == MANIFEST_NAME:
                _sync_all(folders)
            move(self.target, f"{DATASET}/{path}", str(path))
        _sync_all({*folders, self.target.parent, *self._above})

    def _exchanged(self) -> bool:
        """Replace an older dataset in one step; return whether that was possible."""
        if not self._exchange.is_done:
            if is_file(self.target, RETIRED):
                return False  # an earlier run began to remove it file by file
            old = _files_of(self.target)
            _require_removable(self.target, old)
            if not old or not self._exchange.carry_out(old):
                return False
        self._exchange.remove_old(old_files(self.target, self._exchange.listed))
        return True

    def discard(self) -> None:
        """Remove the work folder, and the folders above it that were made for it and are empty."""
        clear_trash(self.target)
        move(self.target, WORK_NAME, TRASH_NAME)
        sync(self.target)
        clear_trash(self.target)
        sync(self.target)
        with contextlib.suppress(OSError):
            for path in self._made:
                path.rmdir()

    def _retire(self) -> None:
        """Remove the older dataset, manifests first; the list survives an interruption."""
        listed = self.target / RETIRED
        if not is_file(self.target, RETIRED):
            write_atomically(listed, dump_json(_files_of(self.target)))
        old = old_files(self.target, RETIRED)
        _require_removable(self.target, old)
        manifests = [name for name in old if PurePath(name).name == MANIFEST_NAME]
        for name in manifests:
            remove(self.target, name)
        # Or a power cut could bring the manifests back, and not what they name.
        _sync_all({(self.target / name).parent for name in manifests})
        for name in old:
            remove(self.target, name)
        folders = {folder for name in old for folder in PurePath(name).parents} - {PurePath()}
        for folder in sorted(folders, key=lambda folder: -len(folder.parts)):
            remove_empty(self.target, str(folder))
        # Or a power cut could bring back files that nobody knows of any more.
        _sync_all({self.target, *(self.target / folder for folder in folders)})
        write_atomically(listed, b"[]")


@contextlib.contextmanager
def workplace(target: Path, *, force: bool) -> Iterator[StagingDirectory]:
    """Give the place to make a dataset in ``target``, to one process at a time.

    Raises:
        UsageError: If ``target`` holds something else, or a dataset without ``force``, cannot be
            written, or another conversion works there.
    """
    place = StagingDirectory(target)
    clear_trash(target)  # of a run that was killed in the end
    with locked(place.folder, lambda: check_target(target, force=force)):
        yield place


@contextlib.contextmanager
def scratch_folder(directory: Path, look: Callable[[], object]) -> Iterator[Path]:
    """Give an empty folder on the disk of the dataset, for one writer to that dataset at a time.

    It is removed at the end; if the process is killed, by the next writer.

    Args:
        directory: The dataset.
        look: As of `shardkit.conversion.lock.locked`.

    Raises:
        UsageError: If another process writes to the dataset, or this one may not.
        ConversionFailed: If the disk is full, or fails.
    """
    target = _with_all_splits(directory)
    name = f"{WORK_NAME}/scratch"
    with locked(target / WORK_NAME, look):
        others = set(os.listdir(target / WORK_NAME)) - {"lock", "owner", "scratch"}
        try:
            remove_tree(target, name)
            make_folder(target, name)
            yield target / name
        except OSError as error:
            raise as_failure(error, directory) from error
        finally:  # an unfinished conversion's work stays
            with contextlib.suppress(OSError):
                remove_tree(target, name if others else WORK_NAME)


def _with_all_splits(directory: Path) -> Path:
    """Return where a conversion that replaces ``directory`` works: for a split, its parent."""
    parent = directory.absolute().parent
    try:
        top = load_any_manifest(parent)
    except ShardkitError:
        return directory
    is_split = isinstance(top, SplitsManifest) and directory.name in top.splits
    return parent if is_split else directory


def clear_trash(target: Path) -> None:
    """Remove what is left of a work folder that is of no use, as far as this user may."""
    with contextlib.suppress(OSError):
        remove_tree(target, TRASH_NAME)


def old_files(target: Path, name: str) -> list[str]:
    """Return the files of an older dataset that are to be removed, from a list in the work folder.

    Args:
        target: The target.
        name: Name of the list, relative to it.

    Raises:
        UsageError: If it is damaged, or names anything but files of a dataset.
    """
    try:
        names = json.loads(read_small(target / name, root=target))
        if not isinstance(names, list):
            raise TypeError("it is not a list")
        for each in names:
            _require_old_name(each)
    except (OSError, ValueError, TypeError, RecursionError) as error:
        raise UsageError(
            f"{target / name} is damaged: {error}. Remove {target / WORK_NAME} and start over."
        ) from error
    return names


def _require_old_name(name: object) -> None:
    if not isinstance(name, str):
        raise TypeError("an entry is not a name")
    *folders, last = parts_of(name)
    if last == MANIFEST_NAME and len(folders) < 2 and not name.startswith(".shardkit"):
        return
    if len(folders) in (1, 2) and folders[0] != INDEX_DIRECTORY:
        name = "/".join([*folders[1:], last])
        parts_of(folders[0])
        if folders[0].startswith(".shardkit"):
            raise ValueError(f"{folders[0]!r} is not a split")
    require_file_name(name)


def _require_removable(target: Path, names: Collection[str]) -> None:
    """See that an older dataset can be removed, before its first file is.

    Raises:
        UsageError: If it cannot; it is as it was.
    """
    try:
        require_removable(target, names)
    except OSError as error:
        raise UsageError(
            f"the dataset in {target} cannot be replaced: {error.filename}: {error.strerror}. It "
            "is unchanged. Convert into another folder, or have its owner remove it."
        ) from error


def _sync_all(folders: set[Path]) -> None:
    for folder in folders:
        try:
            sync(folder)
        except FileNotFoundError:
            pass  # it held nothing but what was removed
        except OSError as error:
            # A folder above that may not be read, or a file system that syncs no folders.
            if error.errno not in (errno.EACCES, errno.EPERM, errno.EINVAL):
                raise


def check_target(target: Path, *, force: bool) -> None:
    """Refuse a place that a dataset cannot go to.

    Raises:
        UsageError: If ``target`` is a file, holds something else, or a dataset without ``force``.
        CorruptDataset: If the manifest of a dataset to be replaced is damaged.
    """
    require_local(target)
    _refuse_split(target)
    try:
        names = sorted(os.listdir(target))
    except FileNotFoundError:
        return
    except NotADirectoryError:
        raise UsageError(f"{target}: a file stands where a directory must be") from None
    except OSError as error:
        raise UsageError(f"{target} cannot be read: {error.strerror}") from error
    if StagingDirectory(target).is_ready:
        return  # an earlier run ended while it put its dataset in place
    if MANIFEST_NAME in names:
        if not force:
            raise UsageError(f"{target} holds a dataset already; --force replaces it")
        # A damaged manifest does not say what may be replaced.
        _require_removable(target, _files_of(target))
    elif names and WORK_NAME not in names:
        some = ", ".join(names[:5]) + (" ..." if len(names) > 5 else "")
        raise UsageError(
            f"{target} holds something else ({some}); choose a directory that is empty or new"
        )


def _refuse_split(target: Path) -> None:
    """Refuse to replace one split alone: its classes are those of the others."""
    parent = target.absolute().parent
    if (parent / MANIFEST_NAME).is_file():
        manifest = load_any_manifest(parent)
        if isinstance(manifest, SplitsManifest) and target.name in manifest.splits:
            raise UsageError(
                f"{target} is a split of the dataset in {parent}; convert all of its splits again, "
                "or choose another directory"
            )


def _files_of(target: Path) -> list[str]:
    """Return the files of the dataset in ``target``, if there is one, manifests first."""
    if not os.path.lexists(target / MANIFEST_NAME):
        return []
    top = load_any_manifest(target)
    manifests = [MANIFEST_NAME] if isinstance(top, SplitsManifest) else []
    others = []
    for name, directory in dataset_directories(target).items():
        prefix = f"{name}/" if name else ""
        if not (directory / MANIFEST_NAME).exists():
            continue
        manifest = load_manifest(directory)
        manifests.append(prefix + MANIFEST_NAME)
        others += [prefix + entry.name for entry in manifest.entries]
    return manifests + others
