"""What `shardkit tune` found, kept in a file: settings of a loader for one machine and dataset."""

from __future__ import annotations

import dataclasses
import io
import json
import os
import warnings
from dataclasses import dataclass, field
from os import PathLike
from pathlib import Path
from typing import Any

from shardkit.errors import UsageError
from shardkit.files import open_regular, write_result
from shardkit.machine import processors
from shardkit.torch.options import LoaderOptions
from shardkit.torch.preflight import local_ranks

VERSION = 1

TUNED_FIELDS = (
    "engine",
    "workers",
    "prefetch",
    "start_method",
    "sharing_strategy",
)
"""Fields of `LoaderOptions` that are tuned; what decides on samples and on lifetimes is not."""

_DIVIDED = ("workers", "prefetch")
"""Those that ranks on one machine share among them."""

_MOST_BYTES = 1 << 20
"""A file larger than this is none of ours."""


@dataclass(frozen=True, kw_only=True)
class Tuned:
    """Settings that were measured to be good."""

    batch_size: int
    settings: dict[str, Any]
    """Values of `TUNED_FIELDS`."""
    processors: int
    """Of the machine where it was measured: elsewhere something else may be better."""
    ranks: int = 1
    """Processes of a training that shared the machine when it was measured."""
    measured: dict[str, Any] = field(default_factory=dict)
    """What was measured with them, and of what; for people."""

    def options(self, given: LoaderOptions) -> LoaderOptions:
        """Return ``given`` with the tuned fields in it.

        Workers and prefetch were measured for as many ranks on the machine as there were then:
        where more of them share it now, each takes its part, 1 at the least.

        Raises:
            UsageError: If ``given`` has another value than the default in one of them.
        """
        default = LoaderOptions()
        settings = self._shared(local_ranks())
        for name, value in settings.items():
            if getattr(given, name) not in (getattr(default, name), value):
                raise UsageError(
                    f"{name} is {getattr(given, name)!r} in options= and {value!r} in tuned=: "
                    "leave one of them out"
                )
        return dataclasses.replace(given, **settings)

    def warn_of_threads(self, reason: str | None) -> None:
        """Warn if threads were chosen for something else than what asks for processes now.

        Args:
            reason: What asks for processes, as in `shardkit.torch.preflight.why_processes`.
        """
        if (
            reason
            and self.settings.get("engine") == "thread"
            and not self.measured.get("processes")
        ):
            warnings.warn(
                f"threads were found best without what is here: {reason}. `shardkit tune "
                "--transform` measures it; random numbers of a transform that is not marked with "
                "shardkit.with_rng do not repeat in threads",
                RuntimeWarning,
                stacklevel=3,
            )

    def _shared(self, ranks: int) -> dict[str, Any]:
        """Return the settings of one of so many ranks that share this machine."""
        settings = dict(self.settings)
        for name in _DIVIDED:
            if settings.get(name):
                settings[name] = max(1, settings[name] * self.ranks // max(ranks, self.ranks))
        return settings

    def save(self, path: str | PathLike[str]) -> None:
        """Write it to a file, replacing what stood there.

        Raises:
            ShardkitError: If it cannot be written.
        """
        value = {"shardkit_tuned": VERSION, **dataclasses.asdict(self)}
        write_result(Path(path), (json.dumps(value, indent=1) + "\n").encode())


def require_replaceable(path: str | PathLike[str]) -> None:
    """See that a file can be written where nothing else would be lost: a new one, or one of ours.

    Raises:
        UsageError: If there is something else, or no folder to write it to.
    """
    place = Path(path)
    if place.exists() or place.is_symlink():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of another machine: it is replaced
            try:
                load_tuned(place)
            except UsageError as error:
                raise UsageError(f"{error}. It is left as it is: give another name") from error
    elif not os.access(place.parent, os.W_OK):
        what = "cannot be written to" if place.parent.is_dir() else "is no folder"
        raise UsageError(f"{path} cannot be written: {place.parent} {what}")


def load_tuned(path: str | PathLike[str]) -> Tuned:
    """Read what `shardkit tune --out` wrote, and warn if it was measured on another machine.

    Raises:
        UsageError: If it cannot be read, or is no such file.
    """
    try:
        with io.BufferedReader(open_regular(Path(path))) as file:
            content = file.read(_MOST_BYTES + 1)
    except OSError as error:
        raise UsageError(
            f"{path} cannot be read: {error.strerror or error}; `shardkit tune --out` writes it"
        ) from error
    try:
        tuned = _parsed(json.loads(content))
    except (ValueError, TypeError, KeyError, RecursionError, UsageError) as error:
        raise UsageError(
            f"{path} is not what `shardkit tune --out` writes, or of another version: {error}"
        ) from error
    if tuned.processors != processors():
        warnings.warn(
            f"{path} was measured with {tuned.processors} processors, and this process may use "
            f"{processors()}: `shardkit tune` again finds what is best here",
            RuntimeWarning,
            stacklevel=3,
        )
    return tuned


def _parsed(value: Any) -> Tuned:
    version = value.get("shardkit_tuned") if isinstance(value, dict) else None
    if type(version) is not int or version != VERSION:
        raise ValueError(f'it does not say "shardkit_tuned": {VERSION}')
    settings = value["settings"]
    if not isinstance(settings, dict) or set(settings) - set(TUNED_FIELDS):
        raise ValueError(f"settings are other than {', '.join(TUNED_FIELDS)}")
    LoaderOptions(**settings)  # refuses values that are none
    counts = {"ranks": 1, **value}
    for name in ("batch_size", "processors", "ranks"):
        if type(counts[name]) is not int or counts[name] < 1:
            raise ValueError(f"{name} is {counts[name]!r}")
    if not isinstance(value["measured"], dict):
        raise TypeError("measured is no object")
    return Tuned(
        batch_size=value["batch_size"],
        settings=settings,
        processors=value["processors"],
        ranks=counts["ranks"],
        measured=value["measured"],
    )
