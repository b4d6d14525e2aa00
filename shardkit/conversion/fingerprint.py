"""Fingerprint of a conversion: whether a rerun may resume it, and if not, what changed."""

from __future__ import annotations

import hashlib
import io
import itertools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

from shardkit.errors import setting
from shardkit.record import dump_json, load_json
from shardkit.system.files import open_regular, published, read_small, write_atomically
from shardkit.system.safe_paths import UNFIT

COMMAND = "the command"
"""The setting with the command that does the work: the settings of another one say nothing."""

_NAMED = 3
"""Files that a message names; it counts the others."""

_PLAN = "plan.json"
_FILES = "files.jsonl"
_FILES_A_LINE = 1000

_UNMATCHED = 1_000_000
"""Files without a counterpart that a comparison holds in memory."""


class Files(Protocol):
    """A text for each file, by path: a dictionary, or what lists more than fit in memory."""

    def items(self) -> Iterable[tuple[str, str]]:
        """Return path and text of each file, in the same order each time."""
        ...


@dataclass(frozen=True)
class ConversionFingerprint:
    """Everything that determines the result of a conversion."""

    settings: dict[str, Any]
    """Options, classes and library versions, by their names in messages."""
    images: dict[str, int] = field(default_factory=dict)
    """Number of images before any limit, by split."""
    files: Files = field(default_factory=dict)
    """A text that changes with the file, by path (with splits, below the split's name)."""
    on_error: str = "fail"
    """Handling of bad images; changes no shard without bad images."""

    @cached_property
    def digest(self) -> str:
        """SHA-256 of all fields: two runs with equal digests do the same work."""
        return self._digest(lambda _: None)

    def save(self, folder: Path) -> None:
        """Write the fingerprint to ``folder``; the plan, with the digest, last."""
        with published(folder / _FILES) as temporary, temporary.open("xb") as file:
            digest = self._digest(file.write)
        vars(self)["digest"] = digest  # it is cached, so the files need not be listed again
        write_atomically(folder / _PLAN, dump_json({"digest": digest, **self._settings}))

    def _digest(self, write: Callable[[bytes], object]) -> str:
        """Return the digest, and write the lines with the files on the way."""
        digest = hashlib.sha256(dump_json(self._settings))
        for part in self.parts():
            line = dump_json(part) + b"\n"
            digest.update(line)
            write(line)
        return digest.hexdigest()

    @property
    def _settings(self) -> dict[str, Any]:
        return {"settings": self.settings, "images": self.images, "on_error": self.on_error}

    def parts(self) -> Iterator[dict[str, str]]:
        """Yield the files, some at a time: one line of JSON each."""
        files = iter(self.files.items())
        while part := dict(itertools.islice(files, _FILES_A_LINE)):
            yield part


def saved_digest(folder: Path) -> str | None:
    """Return the digest of the fingerprint in ``folder``, or None if there is none."""
    try:
        digest = load_json(read_small(folder / _PLAN)).get("digest")
    except (*UNFIT, ValueError):
        return None
    return digest if isinstance(digest, str) else None


def differences(folder: Path, now: ConversionFingerprint, bad: Collection[str]) -> list[str]:
    """Return the differences from the fingerprint in ``folder``, each in a few words.

    Files in ``bad`` may have been changed or removed.
    """
    try:
        plan = load_json(read_small(folder / _PLAN))
        settings = dict(plan["settings"])
        images = dict(plan["images"])
        with io.BufferedReader(open_regular(folder / _FILES)) as lines:
            compared = _compared(map(load_json, lines), now.parts())
    except (*UNFIT, ValueError, TypeError, KeyError):
        return ["the description of its source and options is damaged"]
    if settings.get(COMMAND) != now.settings.get(COMMAND):
        return [f"`shardkit {_value(settings.get(COMMAND))}` started it"]
    reasons = [
        # A setting that only one has, such as a library's version, follows from another one.
        _describe(name, settings[name], now.settings[name])
        for name in sorted(settings.keys() & now.settings.keys())
        if settings[name] != now.settings[name]
    ]
    reasons += _file_differences(compared, bad)
    same_names = compared is not None and not (compared["added"] or compared["removed"])
    if not reasons and same_names and images != now.images:
        reasons.append("the number of images in the source differs")
    return reasons


def _describe(name: str, before: Any, now: Any) -> str:
    if name in ("classes", "the fields"):
        return f"{name if name != 'classes' else 'the classes or their order'} differ"
    if name.startswith("--"):
        name = setting(name[2:].replace("-", "_"))
    return f"{name} was {_value(before)} and is now {_value(now)}"


def _value(value: Any) -> str:
    if isinstance(value, bool) or value is None:
        return {None: "not set", True: "on", False: "off"}[value]
    if isinstance(value, list):
        return ("x" if len(value) == 2 else ", ").join(map(str, value))
    return str(value)


def _compared(
    before: Iterable[Mapping[str, Any]], now: Iterable[Mapping[str, str]]
) -> dict[str, list[str]] | None:
    """Return the files that differ, by kind of difference; None if that is most of a large source.

    Both list files in the same order, so only files since the last difference are held in memory.
    """
    removed: dict[str, Any] = {}
    added: dict[str, str] = {}
    changed: list[str] = []
    nothing: Mapping[str, Any] = {}
    for old, new in itertools.zip_longest(before, now, fillvalue=nothing):
        removed.update(old)
        added.update(new)
        both = [name for name in {**old, **new} if name in removed and name in added]
        changed += [name for name in both if removed.pop(name) != added.pop(name)]
        if len(removed) + len(added) + len(changed) > _UNMATCHED:
            return None
    return {"changed": changed, "added": [*added], "removed": [*removed]}


def _file_differences(compared: dict[str, list[str]] | None, bad: Collection[str]) -> list[str]:
    if compared is None:
        return ["most files or their order differ"]
    reasons = []
    for kind, all_names in compared.items():
        names = sorted(name for name in all_names if name not in bad)
        if names:
            more = f" and {len(names) - _NAMED:,} more" if len(names) > _NAMED else ""
            files = f"{len(names):,} file{'s' * (len(names) > 1)}"
            reasons.append(f"{files} {kind} ({', '.join(names[:_NAMED])}{more})")
    return reasons
