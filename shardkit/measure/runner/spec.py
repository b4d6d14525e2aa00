"""Descriptions of measurements, as text and numbers that travel between processes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple, get_args, get_type_hints

from shardkit.errors import UsageError, setting
from shardkit.options import require_integer
from shardkit.torch.engine.options import ENGINES, LoaderOptions

PLAIN = "plain"
"""PyTorch's own DataLoader, as people write it: the baseline."""


@dataclass(frozen=True, kw_only=True)
class Subject:
    """The data to read, and how samples are made."""

    path: str = ""
    """A dataset or an image folder; empty with ``loader``."""
    decode: str = "pil"
    """Image type before the transform, or an operation, such as ``RandomResizedCrop(224)``."""
    transform: str | None = None
    """``module:name`` of a transform."""
    limit: int | None = None
    """Maximum images to read, drawn at random; None reads all."""
    loader: str | None = None
    """``module:callable`` that returns an iterable of batches, such as a DataLoader."""


@dataclass(frozen=True, kw_only=True)
class LoaderSpec:
    """Engine and options of a loader. The default of an option is that of the engine."""

    engine: str = "auto"
    """One of `shardkit.torch.engine.options.ENGINES`, or `PLAIN`."""
    batch_size: int = 64
    num_workers: int | None = None
    prefetch_factor: int | None = None
    pin_memory: bool | None = None
    persistent_workers: bool | None = None
    batched: bool | None = None
    """Let the dataset return whole batches to `PLAIN`."""
    start_method: str | None = None
    sharing_strategy: str | None = None
    priority: str | None = None
    device: str | None = None
    """Device of a `DevicePrefetcher` around the loader; None uses none."""

    def __post_init__(self) -> None:
        require_integer("batch_size", self.batch_size, 1)
        for name, value in self.options.items():
            if type(value) is not _TYPES[name]:
                raise UsageError(f"{setting(name, value)} must be {_MEANINGS[_TYPES[name]]}")
        if self.engine != PLAIN:
            self.loader_options()  # raises for invalid values

    def __str__(self) -> str:
        settings = [f"{name}={str(value).lower()}" for name, value in self.options.items()]
        return f"{self.engine}:{','.join(settings)}" if settings else self.engine

    @property
    def workers(self) -> int:
        """Number of workers; 0 if it is the engine's default."""
        return self.num_workers or 0

    @property
    def options(self) -> dict[str, Any]:
        """Options that are set: of `LoaderOptions`, or for `PLAIN` of PyTorch's DataLoader."""
        values = {name: getattr(self, name) for name in _TYPES}
        return {name: value for name, value in values.items() if value is not None}

    def loader_options(self) -> LoaderOptions:
        """Return the options for `make_loader`."""
        return LoaderOptions(engine=self.engine, **self.options)


_TYPES: dict[str, type] = {
    name: get_args(hint)[0]  # of int | None, for example
    for name, hint in get_type_hints(LoaderSpec).items()
    if name not in ("engine", "batch_size", "device")
}
_MEANINGS = {bool: "true or false", int: "a non-negative integer", str: "text"}
_PLAIN_OPTIONS = list(_TYPES)[:5]
_WORDS: dict[str, Any] = {"true": True, "false": False}


@dataclass(frozen=True, kw_only=True)
class StepSpec:
    """The use of each batch: none, a wait, or a training step."""

    milliseconds: float = 0.0
    """Length of a wait: an accelerator computes while the CPUs are free to load."""
    model: str | None = None
    """``module:name`` of a model to train on the accelerator, if any; ``small`` is built in."""
    arrive: bool = False
    """Wait until the batch is on the accelerator; no effect without one."""

    def __post_init__(self) -> None:
        if not 0 <= self.milliseconds < 1e7:
            raise UsageError(f"a step of {self.milliseconds} ms is out of range")
        if (self.milliseconds > 0) + (self.model is not None) + self.arrive > 1:
            raise UsageError(
                "a step has either a time in ms or a model, not both;", remedy="pass one of them"
            )


class LoadCost(NamedTuple):
    """Seconds of one thread to load an image on an idle machine: in all, on a CPU, with the GIL."""

    seconds: float
    computing: float
    held: float


@dataclass(frozen=True, kw_only=True)
class StopCondition:
    """When a measurement ends."""

    seconds: float = 1.0
    """It ends with the first batch after this time."""
    epochs: int | None = None
    """It ends after this many epochs, if that is earlier."""
    turn: int = 1
    """Batches of a turn of all workers. Whole turns count, since a turn may end in a burst, and the
    first two do not. A dataset that is a sample is repeated for that."""
    whole: bool = False
    """Measure from the start of the loader; otherwise the first fifth does not count."""


def parse_loader(text: str, batch_size: int) -> LoaderSpec:
    """Parse a loader such as ``thread`` or ``process:num_workers=4,start_method=fork``."""
    engine, _, settings = text.strip().partition(":")
    if engine not in (*ENGINES, PLAIN):
        raise UsageError(
            f"loader {engine!r} is unknown;", remedy=f"choose from {', '.join((*ENGINES, PLAIN))}"
        )
    names = _PLAIN_OPTIONS if engine == PLAIN else [name for name in _TYPES if name != "batched"]
    options: dict[str, Any] = {}
    for item in filter(None, map(str.strip, settings.split(","))):
        name, equals, value = map(str.strip, item.partition("="))
        if not equals:
            raise UsageError(
                f"{item!r} in loader {text!r} must be option=value, such as num_workers=4"
            )
        if name not in names:
            raise UsageError(f"loader {engine} has no option {name!r}; it has {', '.join(names)}")
        if name in options:
            raise UsageError(f"loader {text!r} sets {name} twice")
        options[name] = int(value) if value.isdecimal() else _WORDS.get(value.lower(), value)
    return LoaderSpec(engine=engine, batch_size=batch_size, **options)
