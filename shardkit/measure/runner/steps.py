"""Steps that use each batch while loading is measured."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import nn

from shardkit.measure.runner.material import load_object
from shardkit.measure.runner.spec import StepSpec
from shardkit.torch.prefetch import Normalize

Step = Callable[[Any], None]
"""Uses a batch."""


def device() -> torch.device:
    """Return the accelerator that a model is trained on, or the CPU."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def make_step(spec: StepSpec) -> Step:
    """Return the function that uses each batch; a model is created once per process."""
    if spec.model is not None:
        return training_step(spec.model)
    if spec.milliseconds:
        return lambda batch: time.sleep(spec.milliseconds / 1000)
    return _arrive if spec.arrive and device().type == "cuda" else lambda batch: None


def step_seconds(step: Step, batch: Any, repeats: int = 5) -> float:
    """Return the median time of a step on a batch that is ready, in seconds."""
    step(batch)
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        step(batch)
        times.append(time.perf_counter() - start)
    return statistics.median(times)


@cache
def training_step(model: str) -> Step:
    """Return a step of forward, loss, backward and optimizer, which waits for the result."""
    network = make_model(model).to(device()).train()
    normalize = Normalize()
    parameters = [parameter for parameter in network.parameters() if parameter.requires_grad]
    optimizer = torch.optim.SGD(parameters, lr=1e-3) if parameters else None

    def train(batch: Any) -> None:
        images = batch[0].to(device(), non_blocking=True)
        if images.dtype == torch.uint8:
            images = normalize(images)
        output = network(images)
        output = output[0] if isinstance(output, (tuple, list)) else output
        scores = output.flatten(1)
        labels = torch.as_tensor(batch[1]).to(device(), non_blocking=True) % scores.shape[1]
        loss = nn.functional.cross_entropy(scores, labels)
        if optimizer is not None:
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
        loss.item()  # an accelerator computes asynchronously: this waits for it

    return train


def make_model(text: str) -> nn.Module:
    """Return the model that ``module:name`` refers to, or the built-in ``small``."""
    if text == "small":
        return small_model()
    model: nn.Module = load_object(text, "model", lambda value: isinstance(value, nn.Module))
    return model


def small_model() -> nn.Module:
    """Return a small convolutional network for RGB images of any size: 0.1 million weights."""
    torch.manual_seed(0)
    layers: list[nn.Module] = [nn.Conv2d(3, 16, 7, stride=4, padding=3), nn.ReLU()]
    for inputs, outputs in ((16, 32), (32, 64), (64, 128)):
        convolution = nn.Conv2d(inputs, outputs, 3, stride=2, padding=1, bias=False)
        layers += [convolution, nn.BatchNorm2d(outputs), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(128, 10))


def _arrive(batch: Any) -> None:
    """Wait until a batch is on the accelerator; a prefetcher may have copied it already."""
    for value in (batch[0], batch[1]):
        if isinstance(value, torch.Tensor):
            value.to(device(), non_blocking=True)
    torch.cuda.current_stream().synchronize()
