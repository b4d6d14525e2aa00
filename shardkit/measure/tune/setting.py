"""One setting of a loader that `shardkit tune` measures."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from shardkit.measure.runner.spec import LoaderSpec
from shardkit.torch.engine.options import LoaderOptions


@dataclass(frozen=True, kw_only=True)
class Setting:
    """Engine, workers, prefetch and batch size of `make_loader`."""

    engine: str
    """``thread`` or ``process``."""
    workers: int
    batch_size: int
    prefetch_factor: int | None = None
    """None uses the engine's default."""

    def __str__(self) -> str:
        text = f"{self.engine}, {self.workers} worker{'s' * (self.workers != 1)}"
        if self.prefetch_factor is not None:
            text += f", prefetch factor {self.prefetch_factor}"
        return f"{text}, batches of {self.batch_size}"

    def changed(self, **fields: Any) -> Setting:
        """Return a copy with some fields changed."""
        return dataclasses.replace(self, **fields)

    def options(self) -> dict[str, Any]:
        """Return the fields of `LoaderOptions` that it sets."""
        options: dict[str, Any] = {"engine": self.engine, "num_workers": self.workers}
        if self.prefetch_factor is not None:
            options["prefetch_factor"] = self.prefetch_factor
        return options

    def loader(self) -> LoaderSpec:
        """Return what the runner measures."""
        options = {"num_workers": self.workers, "prefetch_factor": self.prefetch_factor}
        return LoaderSpec(engine=self.engine, batch_size=self.batch_size, options=options)

    @property
    def ahead(self) -> int:
        """Batches in progress or ready."""
        settings = LoaderOptions(**self.options()).resolved(self.workers, pinned=False)
        return settings.thread_prefetch if self.engine == "thread" else settings.process_prefetch

    @property
    def cost(self) -> tuple[int, ...]:
        """Sort key: of two settings that are fast enough, the one with the lower cost is better.

        Processes cost more than threads: they need time to start and memory of their own.
        """
        return self.engine == "process", self.workers, self.ahead * self.batch_size
