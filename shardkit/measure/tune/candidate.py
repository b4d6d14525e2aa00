"""One setting of a loader that `shardkit tune` considers, and what it costs."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from shardkit.measure.runner.spec import LoaderSpec
from shardkit.torch.engine.options import LoaderOptions, Settings


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """Settings of `make_loader`, with an engine and a number of workers that are not left open."""

    engine: str
    """``thread`` or ``process``."""
    workers: int
    batch_size: int
    prefetch_factor: int | None = None
    """None is the engine's default."""
    start_method: str = "auto"
    sharing_strategy: str | None = None

    def __str__(self) -> str:
        parts = [f"{self.engine}, {self.workers} worker{'s' * (self.workers != 1)}"]
        parts += [f"batches of {self.batch_size}"]
        if self.prefetch_factor is not None:
            parts.append(f"prefetch factor {self.prefetch_factor}")
        if self.start_method != "auto":
            parts.append(f"start by {self.start_method}")
        if self.sharing_strategy is not None:
            parts.append(f"sharing by {self.sharing_strategy}")
        return ", ".join(parts)

    def changed(self, **fields: Any) -> Candidate:
        """Return the same with some fields changed."""
        return dataclasses.replace(self, **fields)

    def options(self) -> dict[str, Any]:
        """Return the fields of `LoaderOptions` that it sets, the engine among them."""
        options = {
            "engine": self.engine,
            "num_workers": self.workers,
            "prefetch_factor": self.prefetch_factor,
            "start_method": None if self.start_method == "auto" else self.start_method,
            "sharing_strategy": self.sharing_strategy,
        }
        return {name: value for name, value in options.items() if value is not None}

    def loading(self) -> LoaderSpec:
        """Return it as what is measured."""
        options = self.options()
        return LoaderSpec(engine=options.pop("engine"), batch_size=self.batch_size, options=options)

    @property
    def ahead(self) -> int:
        """Batches that are being made or ready."""
        settings = self._settings()
        threads = self.engine == "thread"
        return settings.thread_prefetch if threads else settings.process_prefetch

    @property
    def cost(self) -> tuple[int, ...]:
        """What is taken of a machine, to be compared: of two as fast the lesser one is better.

        A process costs more than any thread: memory of its own, and time to start. Then fewer
        workers, less memory, and fewer settings that somebody has to understand.
        """
        return (
            self.engine == "process",
            self.workers,
            self.ahead * self.batch_size,
            len(self.options()),
        )

    def _settings(self) -> Settings:
        return LoaderOptions(prefetch_factor=self.prefetch_factor).resolved(
            self.workers, pinned=False
        )
