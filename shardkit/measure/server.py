"""The process in which one contender is measured; `shardkit.measure.runner.process` starts it.

A process of its own keeps contenders from sharing memory, threads and started workers, and what a
user's transform does to it ends with it. It answers one JSON object in a line with another.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from shardkit.errors import ShardkitError, UsageError
from shardkit.measure.doctor.changes import predict
from shardkit.measure.doctor.place import place_of
from shardkit.measure.doctor.profiling import Plan, profile
from shardkit.measure.runner import material
from shardkit.measure.runner import page_cache as pages
from shardkit.measure.runner.gil import held_share
from shardkit.measure.runner.spec import LoaderSpec, Subject
from shardkit.measure.runner.steps import Step, StepSpec, make_step, step_seconds
from shardkit.measure.runner.timing import StopCondition, look
from shardkit.system.pool import end_with_parent
from shardkit.torch.engine.preflight import why_processes

_DROPS, _PAUSE, _DROPPED = 5, 0.1, 0.01
"""Drops, seconds between them, and the part of the pages that may stay: threads of the look before,
in this process or another, may still be reading their last batch."""


class MeasurementServer:
    """Answers what it is asked about one subject."""

    def __init__(self) -> None:
        self._subject = Subject()
        self._dataset: Any = None
        self._files: list[Path] = []
        self._steps: dict[StepSpec, Step] = {}
        self._looks = 0
        self._answers: dict[str, Callable[..., dict[str, Any]]] = {
            "open": self._open,
            "look": self._look,
            "step": self._step,
            "held": self._held,
            "drop": self._drop,
            "warm": self._warm,
            "place": self._place,
            "profile": self._profile,
            "predict": self._predict,
            "limit": self._limit,
            "resident": self._resident,
        }

    def answer(self, asked: dict[str, Any]) -> dict[str, Any]:
        """Return the answer to a request, or why there is none."""
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                found = self._answers[asked.pop("ask")](**asked)
            except UsageError as error:
                found = {"refused": str(error)}
            except ShardkitError as error:
                found = {"failed": last_words(str(error))}
            except Exception as error:
                found = {"failed": last_words(f"{type(error).__name__}: {error}")}
        told = [
            str(each.message) for each in caught if each.category in (UserWarning, RuntimeWarning)
        ]
        return {**found, "warnings": list(dict.fromkeys(told))}

    def _open(self, subject: dict[str, Any]) -> dict[str, Any]:
        """Open what is to be read."""
        self._subject = Subject(**subject)
        self._dataset = material.open_subject(self._subject)
        self._files = material.files_of(self._dataset)
        return {
            "split": material.split_name(self._dataset, self._subject.path),
            "images": len(self._dataset),
            "total": material.total(self._dataset),
            "mean_bytes": material.mean_bytes(self._dataset),
            "bytes": material.total_bytes(self._dataset, self._files),
            "processes": why_processes(self._dataset) or "",
        }

    def _look(
        self, loading: dict[str, Any], span: dict[str, Any], step: dict[str, Any]
    ) -> dict[str, Any]:
        """Make a loader, look at it, and close it."""
        self._looks += 1
        use, length = self._use(step), StopCondition(**span)
        dataset = material.first_rows(self._dataset, length.rows)
        loader = material.build_loader(dataset, LoaderSpec(**loading), seed=self._looks)
        try:
            seen = look(loader, length, use)
        finally:
            material.close_loader(loader)
        bare = material.bare_loader(loader)
        return {
            "look": dataclasses.asdict(seen),
            "engine": getattr(bare, "engine", ""),
            "reason": getattr(bare, "reason", ""),
            "workers": getattr(bare, "num_workers", 0),
        }

    def _step(self, loading: dict[str, Any], step: dict[str, Any]) -> dict[str, Any]:
        """Time a step by itself, on a batch that is there."""
        alone = LoaderSpec(**loading).changed(num_workers=0)
        loader = material.build_loader(self._dataset, alone)
        try:
            batch = next(iter(loader))
        finally:
            material.close_loader(loader)
        return {"seconds": step_seconds(self._use(step), batch)}

    def _drop(self) -> dict[str, Any]:
        """Drop the files' pages; say which part is in memory nevertheless."""
        for _ in range(_DROPS):
            pages.drop(self._files)
            resident = pages.resident(self._files)
            if resident is None or resident < _DROPPED:
                break
            time.sleep(_PAUSE)
        return {"resident": resident}

    def _warm(self) -> dict[str, Any]:
        """Read the stored bytes of every row."""
        stored = dataclasses.replace(self._subject, decode="bytes", transform=None)
        dataset = material.open_subject(stored)
        for row in range(len(dataset)):  # type: ignore[arg-type]
            dataset[row]
        return {}

    def _place(self) -> dict[str, Any]:
        """Say where the files lie, and what loading them will take, before any is read."""
        return place_of(self._dataset, self._files)

    def _profile(self, plan: dict[str, Any]) -> dict[str, Any]:
        """Time the stages of a sample."""
        return {"profile": dataclasses.asdict(profile(self._dataset, Plan(**plan)))}

    def _predict(self, crop: int | None) -> dict[str, Any]:
        """Measure on some images what storing them in another way would change."""
        return {"changes": [dataclasses.asdict(each) for each in predict(self._dataset, crop)]}

    def _limit(self, threads: int) -> dict[str, Any]:
        """Let an operation of PyTorch take so many threads; say how many it took."""
        before = torch.get_num_threads()
        torch.set_num_threads(threads)
        return {"before": before}

    def _resident(self) -> dict[str, Any]:
        """Look which part of the files is in memory; of many files a part stands for all."""
        return {"resident": pages.resident_of_many(self._files)}

    def _held(self, seconds: float) -> dict[str, Any]:
        """Look how much making samples one by one holds the interpreter's lock."""
        rows = itertools.cycle(range(len(self._dataset)))
        return {"share": held_share(lambda: self._dataset[next(rows)], seconds)}

    def _use(self, step: dict[str, Any]) -> Step:
        spec = StepSpec(**step)
        if spec not in self._steps:
            self._steps[spec] = make_step(spec)
        return self._steps[spec]


def last_words(message: str) -> str:
    """Return what an error says: of one that PyTorch brought from a worker, without the traceback.

    It puts the whole traceback into the message; lines of one are indented, and what was raised
    comes last.
    """
    words = message
    if "\nOriginal Traceback" in message:
        lines = message.strip().splitlines()
        told = max(number for number, line in enumerate(lines) if line.startswith(" ")) + 1
        words = "\n".join(lines[told:]) or lines[0]
    unequal = any(text in words for text in _UNEQUAL) and "crop them" not in words
    return f"{words}. {_CROP_THEM}" if unequal else words


_UNEQUAL = ("stack expects each tensor to be equal size", "resize storage that is not resizable")
"""What PyTorch says of images of several sizes; the second in a worker process."""

_CROP_THEM = "The images differ in size: crop them by --decode 'CenterCrop(224)' or a transform"


def main(arguments: list[str]) -> None:
    """Answer requests until nobody asks any more, or the process that asks is gone.

    Args:
        arguments: The descriptors to read requests from and to write answers to, and the process
            id of the parent.
    """
    incoming, outgoing, parent = map(int, arguments)
    end_with_parent(parent)
    os.set_inheritable(incoming, False)
    os.set_inheritable(outgoing, False)
    child = MeasurementServer()
    with open(incoming, encoding="utf-8") as asked, open(outgoing, "w", encoding="utf-8") as told:
        for line in asked:
            told.write(json.dumps(child.answer(json.loads(line))) + "\n")
            told.flush()
