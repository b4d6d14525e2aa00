"""The file that `shardkit tune --out` writes: loader settings for one machine and dataset."""

from __future__ import annotations

import dataclasses
import json
import os
import warnings
from dataclasses import dataclass, field
from os import PathLike
from pathlib import Path
from typing import Any

from shardkit.errors import UsageError
from shardkit.system.files import read_small
from shardkit.system.machine import usable_cpus
from shardkit.system.text import fault, quoted
from shardkit.system.user_files import write_result
from shardkit.torch.engine.options import ENGINE_KINDS, LoaderOptions
from shardkit.torch.engine.preflight import local_ranks, why_processes
from shardkit.torch.loader import Preset

VERSION = 1

TUNED_FIELDS = (
    "engine",
    "num_workers",
    "prefetch_factor",
    "priority",
    "pin_memory",
    "start_method",
    "sharing_strategy",
)
"""Fields of `LoaderOptions` that are tuned: those that affect only speed."""

_MOST_BYTES = 1 << 20
"""Maximum size of a file that is read."""


@dataclass(frozen=True, kw_only=True)
class Tuned(Preset):
    """The best settings measured."""

    batch_size: int
    settings: dict[str, Any]
    """Values of `TUNED_FIELDS`."""
    processors: int
    """Usable CPUs of the machine where it was measured; elsewhere, other settings may be better."""
    ranks: int = 1
    """Ranks that shared the machine when it was measured."""
    measured: dict[str, Any] = field(default_factory=dict)
    """The measurements and their subject, for readers."""
    path: str = field(default="", compare=False)
    """The file that it was read from."""

    def complete(
        self, options: LoaderOptions, dataset: Any, batch_size: int | None
    ) -> tuple[LoaderOptions, int, str]:
        """Warn if the settings may not suit machine or dataset; see `Preset`."""
        if self.processors != usable_cpus():
            warnings.warn(
                f"{self.path} was measured with {self.processors} CPUs, but this process may use "
                f"{usable_cpus()}: rerun `shardkit tune` to find the best settings here",
                RuntimeWarning,
                stacklevel=4,
            )
        options = self.options(options)
        self.warn_of_threads(why_processes(dataset))
        size = self.batch_size if batch_size is None else batch_size
        return options, size, f"tuned, in {self.path}"

    def options(self, given: LoaderOptions) -> LoaderOptions:
        """Return ``given`` with the tuned settings.

        If more ranks share the machine now than when it was measured, they divide the workers, at
        least 1 for each. Raises UsageError if ``given`` sets a tuned field to another value.
        """
        default = LoaderOptions()
        settings = self._shared(local_ranks())
        for name, value in settings.items():
            if getattr(given, name) not in (getattr(default, name), value):
                raise UsageError(
                    f"{name} is {getattr(given, name)!r} as an argument and {value!r} in tuned=",
                    remedy="leave out one of them",
                )
        return dataclasses.replace(given, **settings)

    def warn_of_threads(self, reason: str | None) -> None:
        """Warn if threads were measured without a transform that needs processes.

        ``reason`` is from `shardkit.torch.engine.preflight.why_processes`.
        """
        kind = ENGINE_KINDS.get(self.settings.get("engine", ""))
        shares = kind is not None and kind.shares_gil
        if reason and shares and not self.measured.get("processes"):
            warnings.warn(
                f"tuned= chose threads without this: {reason}. Measure it with `shardkit tune "
                "--transform`; in threads a transform without shardkit.with_rng does not draw "
                "repeatable random numbers",
                RuntimeWarning,
                stacklevel=5,
            )

    def _shared(self, ranks: int) -> dict[str, Any]:
        """Return the settings for one of ``ranks`` on this machine."""
        settings = dict(self.settings)
        if settings.get("num_workers"):
            workers = settings["num_workers"] * self.ranks // max(ranks, self.ranks)
            settings["num_workers"] = max(1, workers)
        return settings

    def save(self, path: str | PathLike[str]) -> None:
        """Write the settings to a file, replacing an existing one."""
        value = {"shardkit_tuned": VERSION, **dataclasses.asdict(self)}
        del value["path"]
        write_result(Path(path), (json.dumps(value, indent=1) + "\n").encode())


def require_replaceable(path: str | PathLike[str]) -> None:
    """Check that ``path`` is free or a file of `shardkit tune --out`, and writable."""
    file = Path(path)
    if file.exists() or file.is_symlink():
        try:
            load_tuned(file)
        except UsageError as error:
            raise UsageError(
                f"{error}. It was not changed", remedy="choose another name"
            ) from error
    elif not os.access(file.parent, os.W_OK):
        problem = "cannot be written to" if file.parent.is_dir() else "is not a folder"
        raise UsageError(f"{path} cannot be written: {file.parent} {problem}")


def load_tuned(path: str | PathLike[str]) -> Tuned:
    """Read a file of `shardkit tune --out`; UsageError if it is not one."""
    try:
        content = read_small(Path(os.path.realpath(path)), _MOST_BYTES)
    except OSError as error:
        raise UsageError(
            f"{path} cannot be read: {error.strerror or error}; `shardkit tune --out` writes it"
        ) from error
    try:
        return _parsed(json.loads(content), str(path))
    except (ValueError, TypeError, KeyError, RecursionError, UsageError) as error:
        raise UsageError(
            f"{path} was not written by this version of `shardkit tune --out`: {fault(error)}"
        ) from error


def _parsed(value: Any, path: str) -> Tuned:
    version = value.get("shardkit_tuned") if isinstance(value, dict) else None
    if type(version) is not int or version != VERSION:
        raise ValueError(f'it does not contain "shardkit_tuned": {VERSION}')
    settings = value["settings"]
    if not isinstance(settings, dict) or set(settings) - set(TUNED_FIELDS):
        raise ValueError(f"settings must be {', '.join(TUNED_FIELDS)}")
    LoaderOptions(**settings)  # raises for invalid values
    counts = {"ranks": 1, **value}
    for name in ("batch_size", "processors", "ranks"):
        if type(counts[name]) is not int or counts[name] < 1:
            raise ValueError(f"{name} is {quoted(counts[name])}")
    if not isinstance(value["measured"], dict):
        raise TypeError('"measured" is not an object')
    return Tuned(
        batch_size=value["batch_size"],
        settings=settings,
        processors=value["processors"],
        ranks=counts["ranks"],
        measured=value["measured"],
        path=path,
    )
