"""Targets with a faulty parser, which `scripts/fuzz` must detect."""

from __future__ import annotations

import os
import pickle
import signal
from collections import OrderedDict
from pathlib import Path

from scripts.fuzzing.target import Target, broken
from shardkit.dataset import manifest
from shardkit.dataset.manifest import (
    MANIFEST_NAME,
    SplitsManifest,
    load_any_manifest,
    save_manifest,
)
from shardkit.errors import CorruptDataset, UsageError
from shardkit.record import load_json


class FaultyTarget(Target):
    """The manifest, whose parser has a bug in inputs with more than one zero byte."""

    name = "faulty"
    allowed = (UsageError, CorruptDataset)

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        save_manifest(SplitsManifest(splits={"train": "aa"}), folder)
        self.seeds = [(folder / MANIFEST_NAME).read_bytes()]
        manifest.load_json = self._parse  # type: ignore[attr-defined]

    def check(self, data: bytes) -> str:
        (self.folder / MANIFEST_NAME).write_bytes(data)
        load_any_manifest(self.folder)
        return "read"

    def _parse(self, content: bytes) -> dict[str, object]:
        if content.count(b"\0") > 1:
            self.misbehave(content)
        return load_json(content)

    def misbehave(self, content: bytes) -> None:
        raise NotImplementedError


class Sound(FaultyTarget):
    def misbehave(self, content: bytes) -> None:
        """Do nothing wrong."""


class RaisesKeyError(FaultyTarget):
    def misbehave(self, content: bytes) -> None:
        raise KeyError("rows")


class Loops(FaultyTarget):
    def misbehave(self, content: bytes) -> None:
        while content:
            content = content[::-1]


class Allocates(FaultyTarget):
    def misbehave(self, content: bytes) -> None:
        bytearray(300 << 20)[:: 1 << 12] = b"x" * (300 << 8)


class AllocatesTooMuch(FaultyTarget):
    def misbehave(self, content: bytes) -> None:
        bytearray(1 << 40)


class OpensAnotherFile(FaultyTarget):
    def misbehave(self, content: bytes) -> None:
        (self.folder.parent / "other").touch()


class ReadsAnotherFile(FaultyTarget):
    def misbehave(self, content: bytes) -> None:
        Path("/etc/passwd").read_bytes()


class RemovesAnotherFile(FaultyTarget):
    def misbehave(self, content: bytes) -> None:
        (self.folder.parent / "other").unlink(missing_ok=True)


class Unpickles(FaultyTarget):
    def misbehave(self, content: bytes) -> None:
        pickle.loads(pickle.dumps(OrderedDict()))


class Executes(FaultyTarget):
    def misbehave(self, content: bytes) -> None:
        eval("1 + 1")


class RunsACommand(FaultyTarget):
    def misbehave(self, content: bytes) -> None:
        os.system("true")


class Crashes(FaultyTarget):
    def misbehave(self, content: bytes) -> None:
        os.kill(os.getpid(), signal.SIGSEGV)


class ReadsWrong(FaultyTarget):
    def misbehave(self, content: bytes) -> None:
        broken("another sample is read", len(content))
