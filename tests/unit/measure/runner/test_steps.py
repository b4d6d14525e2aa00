"""What is done with each batch while loading is measured."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from clocks import Clock
from refusals import refused

from shardkit.errors import UsageError
from shardkit.measure.runner import steps
from shardkit.measure.runner.spec import StepSpec
from shardkit.measure.runner.steps import make_step, small_model, step_seconds, training_step

BATCH = torch.zeros(4, 3, 32, 32, dtype=torch.uint8), torch.tensor([0, 1, 2, 13])

MODELS = """
import torch
from torch import nn

ready = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(3, 2))

def make():
    return nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten())

def needs(size):
    return ready

class Pair(nn.Module):
    def forward(self, images):
        return make()(images), None

text = "no model"
"""


@pytest.fixture
def models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "somebodys_models.py").write_text(MODELS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(__import__("sys").modules, "somebodys_models", raising=False)


@pytest.mark.parametrize(
    "given",
    [
        {"milliseconds": -1.0},
        {"milliseconds": float("nan")},
        {"milliseconds": 1e9},
        {"milliseconds": 5.0, "model": "small"},
        {"model": "small", "arrive": True},
    ],
)
def test_an_invalid_step_is_refused(given: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        StepSpec(**given)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """The time of steps."""
    clock = Clock()
    monkeypatch.setattr(steps, "time", clock)
    return clock


@pytest.mark.usefixtures("clock")
def test_a_wait_waits_and_nothing_does_not() -> None:
    assert step_seconds(make_step(StepSpec(milliseconds=20)), BATCH) == pytest.approx(0.02)
    assert step_seconds(make_step(StepSpec()), None) == 0
    assert step_seconds(make_step(StepSpec(arrive=True)), BATCH) == 0


def test_the_time_of_a_step_is_a_median(clock: Clock) -> None:
    waits = iter([0.5, 0.0, 0.0, 0.3, 0.0, 0.0])

    def step(_: Any) -> None:
        clock.sleep(next(waits))

    assert step_seconds(step, BATCH) == 0


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32])
def test_training_changes_the_model(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    model = small_model()
    monkeypatch.setattr(steps, "make_model", lambda name: model)
    before = [each.clone() for each in model.parameters()]
    step = training_step(f"of {dtype}")
    step((BATCH[0].to(dtype), BATCH[1].tolist()))
    after = [each.cpu() for each in model.parameters()]
    assert any(not torch.equal(old, new) for old, new in zip(before, after, strict=True))
    assert sum(each.numel() for each in model.parameters()) < 200_000


@pytest.mark.usefixtures("models")
@pytest.mark.parametrize("name", ["ready", "make", "Pair"])
def test_a_users_model_is_trained(name: str) -> None:
    training_step.cache_clear()
    step = make_step(StepSpec(model=f"somebodys_models:{name}"))
    step(BATCH)

    assert make_step(StepSpec(model=f"somebodys_models:{name}")) is step


@pytest.mark.usefixtures("models")
@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("somebodys_models:needs", ()),
        ("somebodys_models:text", ()),
        ("somebodys_models:other", ("'other'",)),
        ("no_such_module_here:x", ()),
        ("small_", ()),
    ],
)
def test_an_invalid_model_is_refused(name: str, message: tuple[str, ...]) -> None:
    with refused(UsageError, *message):
        make_step(StepSpec(model=name))


def test_arrive_waits_for_the_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    """There may be no accelerator here: its stream is played, and the copies go to ``meta``."""
    waited: list[int] = []
    moved: list[torch.Tensor] = []

    class Stream:
        def synchronize(self) -> None:
            waited.append(len(moved))

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_stream", Stream)
    step = make_step(StepSpec(arrive=True))
    assert step is not make_step(StepSpec())
    monkeypatch.setattr(steps, "device", lambda: torch.device("meta"))
    to = torch.Tensor.to

    def recorded(tensor: torch.Tensor, *given: Any, **more: Any) -> torch.Tensor:
        moved.append(tensor)
        return to(tensor, *given, **more)

    monkeypatch.setattr(torch.Tensor, "to", recorded)
    step((BATCH[0], BATCH[1]))
    step((["a"], BATCH[1]))
    assert waited == [2, 3]
