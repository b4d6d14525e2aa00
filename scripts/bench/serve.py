"""Run one candidate in its own process and environment: a line of JSON in, a line of JSON out.

    python serve.py '{"adapter": "imagefolder", "kind": "crop", "folder": ..., "sets": ...}'

It answers ``prepare``, ``check`` (with a reference) and ``epoch``. What the libraries print goes to
standard error.
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from contenders.adapter import Adapter, Task


class Server:
    """Answers requests on one adapter."""

    def __init__(self, task: Task, kind: type[Adapter]) -> None:
        self.adapter = kind(task)

    def prepare(self, _: dict[str, Any]) -> dict[str, Any]:
        """Make the dataset and the loader."""
        self.adapter.prepare()
        return {"version": version(self.adapter.distribution)}

    def epoch(self, _: dict[str, Any]) -> dict[str, Any]:
        """Read one epoch."""
        begun = time.perf_counter()
        images = sum(len(labels) for _, labels in self.adapter.shuffled())
        return {"images": images, "seconds": time.perf_counter() - begun}

    def check(self, request: dict[str, Any]) -> dict[str, Any]:
        """Compare all images and labels with a reference: in order, and those of an epoch.

        Returns:
            ``images``; ``labels_wrong``; ``difference``, the largest and the mean of the images'
            mean absolute differences (0 to 255); ``worst``, where the
            largest is; ``epoch_difference``, the largest between the sorted digests of an epoch
            and of the reference (None where pieces are random); ``epoch_labels_wrong``.
        """
        truth = Reference(Path(request["reference"]))
        rows = [truth.rows[path] for path in self.adapter.delivered()]
        differences: list[float] = []
        labels: list[int] = []
        for images, given in self.adapter.ordered():
            places = rows[len(labels) : len(labels) + len(given)]
            differences += truth.differences(images, places)
            labels += given.tolist()
        complete = len(labels) == len(rows) and sorted(rows) == list(range(len(truth.labels)))
        expected = truth.labels[rows].tolist()
        worst = int(np.argmax(differences)) if differences else 0
        return {
            "images": len(labels) if complete else -len(labels),
            "labels_wrong": sum(a != b for a, b in zip(labels, expected, strict=False)),
            "difference": [float(np.max(differences)), float(np.mean(differences))],
            "worst": self.adapter.delivered()[worst],
            **self._check_epoch(truth),
        }

    def _is_in_order(self, labels: list[int], truth: Reference) -> bool:
        """Tell whether an epoch is not shuffled, and the next neither: one may be so by chance."""
        order = truth.labels.tolist()
        if len(set(labels)) <= 1 or labels != order:
            return False
        again = [label for _, given in self.adapter.shuffled() for label in given.tolist()]
        return bool(again == order)

    def _check_epoch(self, truth: Reference) -> dict[str, Any]:
        seen = 0
        digests: list[float] = []
        labels: list[int] = []
        for images, given in self.adapter.shuffled():
            seen += len(given)
            digests += digests_of(images)
            labels += given.tolist()
        whole = sorted(labels) == sorted(truth.labels.tolist())
        found: dict[str, Any] = {"epoch_labels_wrong": not whole}
        found["epoch_in_order"] = self._is_in_order(labels, truth)
        found["epoch_difference"] = None
        if self.adapter.task.kind != "random" and seen == len(truth.labels):
            apart = np.abs(np.sort(digests) - np.sort(truth.digests))
            found["epoch_difference"] = float(apart.max())
        return found


class Reference:
    """The images that all must deliver: in a folder, made by `material`."""

    def __init__(self, folder: Path) -> None:
        self.labels: npt.NDArray[np.int64] = np.load(folder / "labels.npy")
        paths = json.loads((folder / "paths.json").read_text("utf-8"))
        self.rows = {path: row for row, path in enumerate(paths)}
        self._images = np.load(folder / "images.npy", mmap_mode="r")
        self.digests: npt.NDArray[np.float64] = np.load(folder / "digests.npy")

    def differences(self, images: Any, rows: list[int]) -> list[float]:
        """Return the mean absolute difference of each image, 0 to 255."""
        given = images.permute(0, 2, 3, 1).numpy()
        if given.dtype == np.float16:
            return [
                255.0 * bool(np.any(a != b)) for a, b in zip(given, self._images[rows], strict=True)
            ]
        return [
            float(np.abs(image.astype(np.int16) - self._images[row]).mean())
            for image, row in zip(given, rows, strict=True)
        ]


def digests_of(images: Any) -> list[float]:
    """Return the mean of each image."""
    return [float(image.mean(dtype=np.float64)) for image in images.numpy()]


def serve(given: dict[str, Any], answer: Callable[[dict[str, Any]], None]) -> None:
    """Answer requests until standard input ends."""
    name = given.pop("adapter")
    folder, sets = Path(given.pop("folder")), Path(given.pop("sets"))
    try:
        module = import_module(f"contenders.{name}")
        server = Server(Task(folder=folder, sets=sets, **given), module.Adapter)
    except ModuleNotFoundError as error:
        answer({"missing": str(error.name)})
        return
    for line in sys.stdin:
        request = json.loads(line)
        try:
            answer(getattr(server, request["ask"])(request))
        except Exception as error:
            traceback.print_exc()
            answer({"failed": f"{type(error).__name__}: {error}".splitlines()[0][:200]})


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # so that nothing that a library prints is taken for an answer

    def answer(found: dict[str, Any]) -> None:
        print(json.dumps(found), file=answers, flush=True)

    serve(json.loads(sys.argv[1]), answer)


if __name__ == "__main__":
    main()
