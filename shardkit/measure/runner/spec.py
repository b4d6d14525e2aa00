"""What is measured, as values that travel between processes: what is read, and how it is loaded.

All of it is text and numbers, as a user gives it; `measure.runner.material` makes objects of it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from shardkit.errors import UsageError
from shardkit.torch.engine.options import ENGINES, LoaderOptions

PLAIN = "plain"
"""PyTorch's own DataLoader, as people write it: the baseline."""

_PLAIN_OPTIONS: dict[str, type] = {
    "num_workers": int,
    "prefetch_factor": int,
    "pin_memory": bool,
    "persistent_workers": bool,
    "batched": bool,
}
_SHARDKIT_OPTIONS: dict[str, type] = {
    "num_workers": int,
    "prefetch_factor": int,
    "in_order": bool,
    "reuse_buffers": bool,
    "pin_memory": bool,
    "start_method": str,
    "persistent_workers": bool,
    "sharing_strategy": str,
}


@dataclass(frozen=True, kw_only=True)
class Subject:
    """What is read, and what is made of each image."""

    path: str = ""
    """A dataset or an image folder; empty for a `case`."""
    decode: str = "pil"
    """What an image is before the transform: ``pil``, ``numpy``, ``torch``, ``bytes``, or an
    operation as it is written in Python, such as ``RandomResizedCrop(224)``."""
    transform: str | None = None
    """``module:name`` of a transform."""
    case: str | None = None
    """Name of a built-in synthetic dataset, instead of ``path``."""
    limit: int | None = None
    """Read only so many images, drawn at random from all; None reads all."""

    @property
    def name(self) -> str:
        """How it is called in tables."""
        return self.case or self.path


@dataclass(frozen=True, kw_only=True)
class LoaderSpec:
    """How batches are made of a subject.

    Raises:
        UsageError: If the engine or an option is unknown, or a value is of another type.
    """

    engine: str = "auto"
    """One of `shardkit.torch.engine.options.ENGINES`, or `PLAIN`."""
    batch_size: int = 64
    options: Mapping[str, Any] = field(default_factory=dict)
    """Those fields of `LoaderOptions` that differ from their defaults; for `PLAIN` arguments of
    DataLoader: ``num_workers``, ``prefetch_factor``, ``pin_memory``, ``persistent_workers``,
    and ``batched``, whether the dataset may read whole batches."""
    device: str | None = None
    """Where a `DevicePrefetcher` around the loader brings batches; None is no prefetcher."""

    def __post_init__(self) -> None:
        known = (*ENGINES, PLAIN)
        if self.engine not in known:
            raise UsageError(f"the loader {self.engine!r} is unknown; known are {', '.join(known)}")
        types = _PLAIN_OPTIONS if self.engine == PLAIN else _SHARDKIT_OPTIONS
        for name, value in self.options.items():
            if name not in types:
                raise UsageError(
                    f"the loader {self.engine} has no option {name!r}; it has {', '.join(types)}"
                )
            if value is not None and type(value) is not types[name]:
                raise UsageError(f"{name}={value!r} is not a value of type {types[name].__name__}")
        if type(self.batch_size) is not int or self.batch_size < 1:
            raise UsageError(f"batch_size={self.batch_size!r} is not an integer from 1 on")
        if self.engine != PLAIN:
            self.loader_options()
        elif any(self.options.get(name, 1) < 0 for name in ("num_workers", "prefetch_factor")):
            raise UsageError(f"a number in {self} is below 0")

    def __str__(self) -> str:
        parts = ",".join(f"{name}={_shown(value)}" for name, value in self.options.items())
        return f"{self.engine}:{parts}" if parts else self.engine

    def loader_options(self) -> LoaderOptions:
        """Return what `make_loader` takes; not for `PLAIN`.

        Raises:
            UsageError: If a value is out of range.
        """
        return LoaderOptions(engine=self.engine, **self.options)

    def changed(self, **options: Any) -> LoaderSpec:
        """Return the same with some options changed; None takes one away."""
        merged = {**self.options, **options}
        kept = {name: value for name, value in merged.items() if value is not None}
        return dataclasses.replace(self, options=kept)


def parse_loading(text: str, batch_size: int) -> LoaderSpec:
    """Return the loading that a text says: ``thread``, ``process:num_workers=4,start_method=fork``.

    Raises:
        UsageError: If it cannot be understood.
    """
    engine, _, rest = text.strip().partition(":")
    types = _PLAIN_OPTIONS if engine == PLAIN else _SHARDKIT_OPTIONS
    options: dict[str, Any] = {}
    for part in filter(None, (each.strip() for each in rest.split(","))):
        name, equals, value = (each.strip() for each in part.partition("="))
        if not equals:
            raise UsageError(
                f"{part!r} in the loader {text!r} is no option=value, such as num_workers=4"
            )
        if name in options:
            raise UsageError(f"{name} is given twice in the loader {text!r}")
        options[name] = _value(value, types.get(name, str), part)
    return LoaderSpec(engine=engine, batch_size=batch_size, options=options)


def _value(text: str, kind: type, part: str) -> Any:
    if kind is bool:
        if text.lower() not in ("true", "false"):
            raise UsageError(f"{part!r} is neither true nor false")
        return text.lower() == "true"
    if kind is int:
        try:
            return int(text)
        except ValueError:
            raise UsageError(f"{part!r} is not an integer") from None
    return text


def _shown(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
