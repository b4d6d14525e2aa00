"""Rows shared by several tables: shardkit's configurations, and the other libraries."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from harness import NEAR, Contender

from shardkit.registry import format_names

ENGINES = ("thread", "process")


@dataclass(frozen=True)
class Bench:
    """A run of the benchmarks."""

    work: Path
    """Where the material is."""
    rounds: int
    copies: int


@dataclass(frozen=True)
class Rows:
    """Makes the rows of one table: all read the same folder and must deliver the same."""

    kind: str
    folder: str
    reference: str
    near: float = 0.0
    """What `Contender.near` is for decoders that are exact."""

    def other(self, name: str, adapter: str, peer: str = "", **options: Any) -> Contender:
        """Return a row of an adapter, in the environment of ``peer`` or in shardkit's own."""
        return Contender(
            name=name,
            adapter=adapter,
            kind=self.kind,
            folder=self.folder,
            reference=self.reference,
            near=self.near,
            environment=peer or "shardkit",
            peer=peer,
            options=options,
        )

    def shardkit(self, name: str, **options: Any) -> Contender:
        """Return a row of shardkit."""
        return self.other(f"shardkit {name}", "shardkit_", **options)

    def every_format(self, label: str = "", **options: Any) -> list[Contender]:
        """Return rows of all formats with both engines."""
        return [
            self.shardkit(f"{name}, {engine}{label}", format=name, engine=engine, **options)
            for name in format_names()
            for engine in ENGINES
        ]

    def planes(self) -> list[Contender]:
        """Return rows of shardkit that store the planes of JPEGs."""
        return self.every_format(", planes", planes=True)

    def ffcv(self) -> Contender:
        """Return a row of FFCV, which decodes with fast transforms."""
        near = 0.0 if self.kind in ("raw", "latent") else NEAR
        return replace(self.other("FFCV", "ffcv_", "ffcv"), near=near)

    def libraries(self) -> list[Contender]:
        """Return rows of the libraries that decode with Pillow, in Python; WebDataset is first."""
        return [
            self.other("WebDataset", "webdataset_", "webdataset"),
            self.other("LitData", "litdata_", "litdata"),
        ]
