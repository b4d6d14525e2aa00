"""`shardkit doctor` names planted bottlenecks, and what helps, through the command.

The stages are timed without the time in which a thread waits for a CPU. The rates of loaders depend
on what else the machine does, so the tests measure them but judge others.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from helpers import invoke, jpeg, make_tree

from shardkit import convert
from shardkit.measure.doctor.examination import Examination
from shardkit.measure.doctor.pipeline import Remedy

pytestmark = [pytest.mark.measures, pytest.mark.timeout(600)]

PLANTED = """
import time

import torch
from shardkit import with_rng
from torch.utils.data import DataLoader, Dataset


@with_rng
def spin(image, rng):
    total = 0
    for number in range(100_000):
        total += number
    return torch.zeros(3, 8, 8)


@with_rng
def many_threads(image, rng):
    values = torch.ones(40_000)
    for _ in range(300):
        values = values.mul(1.01)
    return values


@with_rng
def sleep(image, rng):
    time.sleep(0.01)
    return torch.zeros(3, 8, 8)


class Noise(Dataset):
    def __len__(self):
        return 1000

    def __getitem__(self, row):
        return torch.zeros(3, 64, 64), row


def copying(samples):
    images = torch.empty(0, 3, 64, 64)
    for image, _ in samples:
        images = torch.cat([images, image[None]])
    return images.double().float(), torch.tensor([label for _, label in samples])


def loader():
    return DataLoader(Noise(), batch_size=64, collate_fn=copying)
"""


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A current folder with the planted module."""
    (tmp_path / "planted.py").write_text(PLANTED)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def small(place: Path) -> Path:
    """A dataset of small images."""
    files: dict[str, bytes | None] = {f"a/{n}.jpg": jpeg(64, 48, n) for n in range(32)}
    convert(make_tree(place / "photos", files), place / "small", to="lmdb", workers=1)
    return place / "small"


@pytest.fixture
def helping(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Words in the names of changes that triple the rate; no other change has an effect."""
    words: list[str] = []
    measure = Examination._rate

    def rate(examination: Examination, remedy: Remedy) -> float:
        assert measure(examination, remedy) > 0
        return 3000.0 if any(word in remedy.name for word in words) else 1000.0

    monkeypatch.setattr(Examination, "_rate", rate)
    return words


def diagnosed(*arguments: object) -> str:
    """Return what the command prints, in one line."""
    done = invoke("doctor", *arguments, "--step-ms", "1", "--budget", "5s")
    assert done.exit_code == 0, done.output
    assert len(done.stdout.splitlines()) <= 16
    return " ".join(done.stdout.split())


@pytest.mark.usefixtures("helping")
def test_a_python_transform_holds_the_gil(small: Path) -> None:
    text = diagnosed(small, "--transform", "planted:spin")

    assert "the transform spin takes" in text
    assert "holds the GIL" in text
    assert "so threads do not help" in text


def test_too_many_torch_threads_are_named(small: Path, place: Path, helping: list[str]) -> None:
    helping.append("1 PyTorch thread")
    module = place / "planted.py"
    module.write_text(f"{PLANTED}\ntorch.set_num_threads(16)\n")
    text = diagnosed(small, "--transform", "planted:many_threads")

    assert "PyTorch threads, which compete for the CPUs" in text
    assert "next torch.set_num_threads(1)" in text


def test_a_sleeping_transform_gets_more_workers(small: Path, helping: list[str]) -> None:
    helping.append("workers instead of")
    text = diagnosed(small, "--transform", "planted:sleep")

    assert "the transform sleep takes" in text
    assert "it waits" in text
    assert "next num_workers=" in text


def test_a_copying_collate_function_is_named(helping: list[str]) -> None:
    helping.append("default collate")
    text = diagnosed("--loader", "planted:loader")

    assert "the collate function copying takes" in text
    assert "next collate_fn=shardkit.collate" in text
