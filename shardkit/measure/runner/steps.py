"""What is done with each batch while loading is measured: nothing, a wait, or a training step."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from shardkit.errors import UsageError
from shardkit.measure.runner.material import load_reference
from shardkit.torch.prefetch import Normalize

Step = Callable[[Any], None]
"""Uses a batch."""


@dataclass(frozen=True, kw_only=True)
class StepSpec:
    """What is done with a batch, as text and numbers."""

    milliseconds: float = 0.0
    """A wait of this length: a device that computes, while the processors are free to load."""
    model: str | None = None
    """``module:name`` of a model, or of a function without arguments that makes one; ``small`` is
    a network of our own. It is trained, on the accelerator if there is one."""
    arrive: bool = False
    """A wait until the batch is on the accelerator; nothing where there is none."""

    def __post_init__(self) -> None:
        if not 0 <= self.milliseconds < 1e7:
            raise UsageError(f"a step of {self.milliseconds} ms is out of range")
        if (self.milliseconds > 0) + (self.model is not None) + self.arrive > 1:
            raise UsageError("a step has a length, a model, or neither, not both")


def device() -> torch.device:
    """Return the accelerator that a model is trained on, or the processor."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def make_step(spec: StepSpec) -> Step:
    """Return what is done with each batch.

    Raises:
        UsageError: If the model cannot be found or made.
    """
    if spec.model is not None:
        return Training(small_model() if spec.model == "small" else load_model(spec.model))
    if spec.milliseconds:
        return Wait(spec.milliseconds / 1000)
    return _arrive if spec.arrive and device().type == "cuda" else _nothing


def step_seconds(step: Step, batch: Any, repeats: int = 5) -> float:
    """Return the median time of a step on a batch that is there already, in seconds."""
    step(batch)
    times = []
    for _ in range(repeats):
        begun = time.perf_counter()
        step(batch)
        times.append(time.perf_counter() - begun)
    return statistics.median(times)


class Wait:
    """Waits, as a training loop does for its device."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    def __call__(self, batch: Any) -> None:
        """Wait."""
        time.sleep(self._seconds)


class Training:
    """One step of training: forwards, loss, backwards, and the optimiser; it waits for the end."""

    def __init__(self, model: nn.Module) -> None:
        self._device = device()
        self._model = model.to(self._device).train()
        parameters = [each for each in self._model.parameters() if each.requires_grad]
        self._optimiser = torch.optim.SGD(parameters, lr=1e-3) if parameters else None
        self._normalize = Normalize()

    def __call__(self, batch: Any) -> None:
        """Train with a batch of images, uint8 or float of shape (N, 3, H, W), and labels."""
        images, labels = batch[0], batch[1]
        images = images.to(self._device, non_blocking=True)
        if images.dtype == torch.uint8:
            images = self._normalize(images)
        output = self._model(images)
        output = output[0] if isinstance(output, (tuple, list)) else output
        scores = output.flatten(1)
        labels = torch.as_tensor(labels).to(self._device, non_blocking=True) % scores.shape[1]
        loss = nn.functional.cross_entropy(scores, labels)
        if self._optimiser is not None:
            self._optimiser.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            self._optimiser.step()
        loss.item()  # a device computes on its own: this waits for it


def load_model(text: str) -> nn.Module:
    """Return a model, or what a function makes.

    Raises:
        UsageError: If it is not one.
    """
    found = load_reference(text, "model")
    if not isinstance(found, nn.Module) and callable(found):
        try:
            found = found()
        except TypeError as error:
            raise UsageError(
                f"--model {text!r} cannot be called without arguments: {error}"
            ) from None
    if not isinstance(found, nn.Module):
        raise UsageError(f"--model {text!r} gives a {type(found).__name__}, not a torch.nn.Module")
    return found


def small_model(classes: int = 10) -> nn.Module:
    """Return a small convolutional network for RGB images of any size: 0.1 million weights."""

    def block(inside: int, outside: int) -> list[nn.Module]:
        return [
            nn.Conv2d(inside, outside, 3, stride=2, padding=1, bias=False),
            nn.BatchNorm2d(outside),
            nn.ReLU(),
        ]

    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 16, 7, stride=4, padding=3),
        nn.ReLU(),
        *block(16, 32),
        *block(32, 64),
        *block(64, 128),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(128, classes),
    )


def _nothing(batch: Any) -> None:
    """Use no batch."""


def _arrive(batch: Any) -> None:
    """Have a batch on the accelerator; one that a prefetcher brought is there already."""
    for part in (batch[0], batch[1]):
        if isinstance(part, torch.Tensor):
            part.to(device(), non_blocking=True)
    torch.cuda.current_stream().synchronize()
