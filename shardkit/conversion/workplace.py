"""The hidden folder in which a dataset grows, and the steps by which it takes its place.

Everything is made in ``DST/.shardkit-work`` and moved up when all of it is ready, the manifests
last. So a reader never meets half a dataset, an older one stays whole until the new one is, and
after an interruption the same command finds what is done.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
from collections.abc import Collection, Iterator
from pathlib import Path

from shardkit.conversion.lock import locked
from shardkit.conversion.terms import Terms, differences, saved_digest
from shardkit.errors import UsageError
from shardkit.files import sync, write_atomically
from shardkit.manifest import (
    MANIFEST_NAME,
    SplitsManifest,
    dataset_directories,
    load_any_manifest,
    load_manifest,
)
from shardkit.record import dump_json, load_json

WORK_NAME = ".shardkit-work"

TRASH_NAME = ".shardkit-trash"
"""What the work folder is called once it is of no use, so that no rest of it is taken for work."""


class Workplace:
    """The place where one conversion works."""

    def __init__(self, target: Path) -> None:
        self.target = target
        self._made = [path for path in (target, *target.parents) if not os.path.exists(path)]
        self.folder = target / WORK_NAME
        self.dataset = self.folder / "dataset"
        """What will be moved to the target, laid out as there."""
        self.state = self.folder / "state"
        """What is known of the work, and never becomes part of the dataset."""
        self._plan = self.state / "plan.json"
        self._bad = self.state / "bad.json"
        self._ready = self.state / "ready"

    def begin(self, terms: Terms, *, force: bool) -> None:
        """Take up an earlier run on the same terms, or start with nothing.

        The same are also terms on which bad files, that the earlier run named, were mended, taken
        away, or are now to be left out. What each shard was made of must then be looked at.

        Raises:
            UsageError: If there is an unfinished run on other terms, and not ``force``.
        """
        earlier = saved_digest(self.state)
        if earlier != terms.digest:
            self._settle(earlier, terms, force=force)
            self.state.mkdir(exist_ok=True)
            terms.save(self.state)
        self.dataset.mkdir(exist_ok=True)
        # Or a power cut could take the folders, and with them that the dataset is being published.
        _sync_all({self.folder, self.target, *self._above})

    @property
    def _above(self) -> set[Path]:
        """The folders that hold those which were made for the target."""
        return {path.parent for path in self._made}

    def _settle(self, earlier: str | None, terms: Terms, *, force: bool) -> None:
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
                done = sum(1 for _ in self.state.rglob("result.json"))
                shards = f"; {done:,} finished shard{'s' * (done != 1)} would go" if done else ""
                raise UsageError(
                    f"{self.target} holds an unfinished conversion, which this command does not "
                    f"continue: {'; '.join(found)}. --force starts over{shards}"
                )
        self._plan.unlink(missing_ok=True)  # first: what is left must not pass for work of a plan
        for folder in (self.state, self.dataset):
            if folder.exists():
                shutil.rmtree(folder)

    def _forgiven(self) -> Collection[str]:
        try:
            return frozenset(load_json(self._bad.read_bytes())["files"])
        except (OSError, ValueError, TypeError, KeyError):
            return frozenset()

    def keep_for_mending(self, bad: Collection[str]) -> None:
        """Note which files are bad; the next run goes on although these were changed."""
        write_atomically(self._bad, dump_json({"files": sorted(bad)}))

    def prune(self, wanted: Collection[Path]) -> None:
        """Remove from the dataset to be all files but those of ``wanted``."""
        for path in self.dataset.rglob("*"):
            if not path.is_dir() and path not in wanted:
                path.unlink()

    @property
    def is_ready(self) -> bool:
        """Whether all is made, so that only `publish` remains, or a part of it."""
        return self._ready.exists() and self._plan.exists()

    def publish(self) -> None:
        """Put the finished dataset in its place, instead of an older one; may be repeated."""
        _sync_all({self.dataset, *(path for path in self.dataset.rglob("*") if path.is_dir())})
        write_atomically(self._ready, b"")
        self._move()
        self.discard()

    def _move(self) -> None:
        self._retire()
        made = [path for path in self.dataset.rglob("*") if path.is_file()]
        folders = {self.target / path.parent.relative_to(self.dataset) for path in made}
        for folder in folders:
            folder.mkdir(parents=True, exist_ok=True)
        # Manifests last, and the outermost last of all: it commits everything.
        made.sort(key=lambda path: (path.name == MANIFEST_NAME, -len(path.parts), path))
        for path in made:
            if path.name == MANIFEST_NAME:
                _sync_all(folders)
            path.replace(self.target / path.relative_to(self.dataset))
        _sync_all({*folders, self.target, self.target.parent, *self._above})

    def discard(self) -> None:
        """Remove the work folder, and the folders above it that were made for it and are empty."""
        trash = self.target / TRASH_NAME
        shutil.rmtree(trash, ignore_errors=True)
        self.folder.rename(trash)
        sync(self.target)
        shutil.rmtree(trash, ignore_errors=True)
        sync(self.target)
        with contextlib.suppress(OSError):
            for path in self._made:
                path.rmdir()

    def _retire(self) -> None:
        """Remove the older dataset, manifests first; the list survives an interruption."""
        listed = self.state / "retired.json"
        if not listed.exists():
            write_atomically(listed, dump_json(_files_of(self.target)))
        old = [self.target / name for name in json.loads(listed.read_bytes())]
        manifests = [path for path in old if path.name == MANIFEST_NAME]
        for path in manifests:
            path.unlink(missing_ok=True)
        # Or a power cut could bring the manifests back, and not what they name.
        _sync_all({path.parent for path in manifests if path.parent.exists()})
        for path in old:
            path.unlink(missing_ok=True)
        folders = {folder for path in old for folder in path.parents} - {
            self.target,
            *self.target.parents,
        }
        for folder in sorted(folders, key=lambda folder: -len(folder.parts)):
            with contextlib.suppress(OSError):
                folder.rmdir()
        # Or a power cut could bring back files that nobody knows of any more.
        _sync_all({folder for folder in (self.target, *folders) if folder.exists()})
        write_atomically(listed, b"[]")


@contextlib.contextmanager
def workplace(target: Path, *, force: bool) -> Iterator[Workplace]:
    """Give the place to make a dataset in ``target``, to one process at a time.

    Raises:
        UsageError: If ``target`` holds something else, or a dataset without ``force``, cannot be
            written, or another conversion works there.
    """
    place = Workplace(target)
    shutil.rmtree(target / TRASH_NAME, ignore_errors=True)  # of a run that was killed in the end
    with locked(place.folder, lambda: check_target(target, force=force)):
        yield place


def _sync_all(folders: set[Path]) -> None:
    for folder in folders:
        try:
            sync(folder)
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
    _refuse_split(target)
    try:
        names = sorted(os.listdir(target))
    except FileNotFoundError:
        return
    except NotADirectoryError:
        raise UsageError(f"{target}: a file stands where a directory must be") from None
    except OSError as error:
        raise UsageError(f"{target} cannot be read: {error.strerror}") from error
    if Workplace(target).is_ready:
        return  # an earlier run ended while it put its dataset in place
    if MANIFEST_NAME in names:
        if not force:
            raise UsageError(f"{target} holds a dataset already; --force replaces it")
        _files_of(target)  # a damaged manifest does not say what may be replaced
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
                f"{target} is a split of the dataset in {parent}; convert all of its splits anew, "
                "or choose another directory"
            )


def _files_of(target: Path) -> list[str]:
    """Return the files of the dataset in ``target``, if there is one, manifests first."""
    if not (target / MANIFEST_NAME).exists():
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
