"""Rows shared by several tables: shardkit's configurations, and the other libraries."""

from __future__ import annotations

from dataclasses import dataclass
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

    def shardkit(self, name: str, **options: Any) -> Contender:
        """Return a row of shardkit."""
        return Contender(
            name=f"shardkit {name}",
            adapter="shardkit_",
            kind=self.kind,
            folder=self.folder,
            reference=self.reference,
            near=self.near,
            options=options,
        )

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

    def other(self, name: str, adapter: str, **options: Any) -> Contender:
        """Return a row of something that shardkit's own environment has."""
        return Contender(
            name=name,
            adapter=adapter,
            kind=self.kind,
            folder=self.folder,
            reference=self.reference,
            near=self.near,
            options=options,
        )

    def ffcv(self, name: str = "FFCV", **options: Any) -> Contender:
        """Return a row of FFCV, which decodes with fast transforms."""
        return Contender(
            name=name,
            adapter="ffcv_",
            kind=self.kind,
            folder=self.folder,
            reference=self.reference,
            near=0.0 if self.kind in ("raw", "latent") else NEAR,
            environment="ffcv",
            peer="ffcv",
            options=options,
        )

    def libraries(self) -> list[Contender]:
        """Return rows of the libraries that decode with Pillow, in Python; WebDataset is first."""
        known = {
            "webdataset": ("WebDataset", "webdataset_"),
            "litdata": ("LitData", "litdata_"),
        }
        return [
            Contender(
                name=name,
                adapter=adapter,
                kind=self.kind,
                folder=self.folder,
                reference=self.reference,
                environment=peer,
                peer=peer,
                near=self.near,
            )
            for peer, (name, adapter) in known.items()
        ]
