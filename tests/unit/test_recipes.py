"""The claims of docs/recipes.md: which values are equal, repeat or differ.

That each of them runs is seen by tests/unit/test_docs.py.
"""

from __future__ import annotations

import importlib
import itertools
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from helpers import jpeg, make_dataset, make_tree
from loading import Prints, crc, prints, prints_of
from torch.utils.data import DataLoader

from shardkit import RandomResizedCrop, make_loader, open_dataset, with_rng

PAGE = Path(__file__).parents[2] / "docs" / "recipes.md"
ROWS = 96

Recipe = Callable[..., ModuleType]

PLAIN = np.random.default_rng(0).integers(0, 256, (60, 60, 3), np.uint8)
"""An image; what is drawn for it decides alone what becomes of it."""


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dataset of 96 images of different sizes in four classes, as in the recipes."""
    root = tmp_path_factory.mktemp("recipes")
    files: dict[str, bytes | None] = {
        f"{'abcd'[n % 4]}/{n:03d}.jpg": jpeg(60 + n % 7, 64, n) for n in range(ROWS)
    }
    return make_dataset(make_tree(root / "photos", files), root / "dataset")


@pytest.fixture(scope="module", autouse=True)
def albumentations() -> None:
    """Import it once, which takes longer than any test."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NO_ALBUMENTATIONS_UPDATE", "1")  # it would ask the net for its version
        importlib.import_module("albumentations")


@pytest.fixture
def recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Recipe]:
    """Imports the block of Python below a heading of the page, as a user's module."""
    monkeypatch.setenv("NO_ALBUMENTATIONS_UPDATE", "1")  # it would ask the net for its version
    monkeypatch.syspath_prepend(tmp_path)
    made: list[str] = []

    def load(heading: str, number: int = 0) -> ModuleType:
        sections = re.split(r"^## ", PAGE.read_text("utf-8"), flags=re.MULTILINE)
        (text,) = (part for part in sections if part.startswith(f"{heading}\n"))
        blocks = re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
        made.append(f"recipe_{len(made)}_{tmp_path.name}")
        (tmp_path / f"{made[-1]}.py").write_text(blocks[number], "utf-8")
        return importlib.import_module(made[-1])

    yield load
    for name in made:
        sys.modules.pop(name, None)


def options(engine: str = "thread", num_workers: int = 2, **others: Any) -> dict[str, Any]:
    return {"engine": engine, "num_workers": num_workers, "start_method": "fork", **others}


def epochs(loader: Any, count: int = 2) -> list[list[Prints]]:
    """Return the fingerprints of the next epochs."""
    return [prints_of(loader) for _ in range(count)]


def stop_and_go(make: Callable[[], Any], after: int) -> list[Prints]:
    """Return an epoch that is stopped after some batches and resumed by another loader."""
    first, second = make(), make()
    batches = iter(first)
    seen = prints_of(itertools.islice(batches, after))
    state = first.state_dict()
    first.close()
    second.load_state_dict(state)
    return seen + prints_of(second)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_plain_dataloader_gives_the_batches_of_make_loader(
    path: Path, recipe: Recipe, num_workers: int
) -> None:
    ours = make_loader(open_dataset(path, decode=RandomResizedCrop(48)), 16, shuffle=True, seed=1)

    loader = recipe("PyTorch's DataLoader").loader_of(path, num_workers)

    assert type(loader) is DataLoader
    assert epochs(loader) == epochs(ours)


@pytest.mark.slow
def test_albumentations_draw_the_same_in_any_worker_and_resumed_run(
    path: Path, recipe: Recipe
) -> None:
    augment = recipe("Albumentations").augment

    def make(engine: str = "thread", num_workers: int = 2) -> Any:
        dataset = open_dataset(path, augment, decode="numpy")
        return make_loader(dataset, 16, shuffle=True, **options(engine, num_workers))

    one, two = expected = epochs(make(num_workers=0))

    assert epochs(make("thread", 3)) == expected
    assert epochs(make("process", 2)) == expected
    assert stop_and_go(make, 2) == one
    assert not {found for batch in one for found in batch} & {f for batch in two for f in batch}
    assert make_loader(open_dataset(path, augment, decode="numpy"), 16).engine == "thread"


@pytest.mark.parametrize("kind", ["marked", "left alone"])
def test_a_pipeline_left_alone_draws_the_same_in_two_workers(
    path: Path, recipe: Recipe, kind: str
) -> None:
    import albumentations

    marked = recipe("Albumentations")
    alone = albumentations.Compose([albumentations.ColorJitter()])
    transforms: dict[str, Callable[..., Any]] = {
        "marked": with_rng(lambda _, rng: marked.augment(PLAIN, rng)),
        "left alone": lambda _: torch.from_numpy(alone(image=PLAIN)["image"].copy()),
    }
    dataset = open_dataset(path, transforms[kind], decode="bytes")

    loader = make_loader(dataset, 16, **options("process", 2))
    distinct = {crc(image) for images, _ in loader for image in images}

    if kind == "left alone":
        assert len(distinct) <= ROWS / 2
    else:
        assert len(distinct) > ROWS * 0.85, "few coincide by chance"


def test_steps_of_albumentations_draw_independently_of_each_other(recipe: Recipe) -> None:
    import albumentations

    module = recipe("Albumentations")
    module.own.pipeline = albumentations.Compose(
        [albumentations.RandomCrop(48, 48), albumentations.HorizontalFlip()]
    )
    image = np.zeros((60, 60, 3), np.uint8)
    image[..., 0], image[..., 1] = np.mgrid[0:60, 0:60]

    drawn = []
    for seed in range(500):
        made = module.augment(image, np.random.default_rng(seed))
        left, right = int(made[1, 0, 0]), int(made[1, 0, -1])
        drawn.append((int(made[0, 0, 0]), min(left, right), left > right))

    # Of as many independent draws, one in a million correlates as much.
    assert np.abs(np.corrcoef(np.array(drawn, float).T) - np.eye(3)).max() < 0.22


@pytest.mark.slow
def test_mixing_in_the_loop_repeats_with_the_position(path: Path, recipe: Recipe) -> None:
    module = recipe("Mixup and other batch transforms")

    def run(batches: Any, number: int) -> list[torch.Tensor]:
        mixed = (module.mix(*each) for each in module.seeded(batches, "cpu"))
        return [torch.cat([x.flatten(), t.flatten()]) for x, t in itertools.islice(mixed, number)]

    first = module.batches_of(path)
    one, two = run(first, 6), run(first, 6)
    assert not any(map(torch.equal, one, two))
    stopped = module.batches_of(path)
    head = run(stopped, 2)
    again = module.batches_of(path)
    again.load_state_dict(stopped.state_dict())
    assert all(map(torch.equal, head + run(again, 6), one))
    labels = torch.arange(16)
    images = labels.float().reshape(16, 1, 1, 1).expand(16, 3, 9, 11)  # of one value each
    generator, cut = torch.Generator(), 0
    for seed in range(40):
        mixed, targets = module.mix(images, labels, generator.manual_seed(seed), 16)
        torch.testing.assert_close(targets.sum(1), torch.ones(16))
        torch.testing.assert_close(mixed.mean((1, 2, 3)), targets @ labels.float())
        cut += bool((mixed.amax((1, 2, 3)) > mixed.amin((1, 2, 3))).any())
    assert 10 < cut < 30


@pytest.mark.parametrize(
    ("library", "heading"), [("kornia", "Kornia"), ("torchvision", "torchvision's transforms")]
)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_recipes_for_libraries_that_may_be_missing_run(
    path: Path, recipe: Recipe, library: str, heading: str
) -> None:
    pytest.importorskip(library, exc_type=ImportError)
    module = recipe(heading)
    if hasattr(module, "batches_of"):
        one, two = ([x.sum() for x, _ in module.batches_of(path)] for _ in range(2))
        assert len(one) == 6
        assert one == two


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
def test_trainer_reads_the_order_and_resumes_with_the_next_batch(
    path: Path, recipe: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("transformers", exc_type=ImportError)
    module = recipe("transformers.Trainer")
    seen: list[Prints] = []

    class Seen(module.Model):  # type: ignore[name-defined, misc]
        def forward(self, pixel_values: torch.Tensor, labels: torch.Tensor) -> Any:
            seen.append(prints((pixel_values, labels)))
            return super().forward(pixel_values, labels)

    monkeypatch.setattr(module, "Model", Seen)
    module.trainer_of(path, tmp_path / "run").train()
    whole = seen.copy()
    ours = make_loader(open_dataset(path, decode=RandomResizedCrop(48)), 16, shuffle=True, seed=42)
    assert whole == [*itertools.chain(*epochs(ours))][:9]
    seen.clear()
    module.trainer_of(path, tmp_path / "run").train(str(tmp_path / "run" / "checkpoint-4"))
    assert seen == whole[4:]


@pytest.fixture(scope="module")
def lopsided(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dataset with 90 images of one class and 6 of the other."""
    root = tmp_path_factory.mktemp("lopsided")
    files: dict[str, bytes | None] = {
        f"{'few' if n < 6 else 'many'}/{n:03d}.jpg": jpeg(60, 56, n) for n in range(ROWS)
    }
    return make_dataset(make_tree(root / "photos", files), root / "dataset")


def test_weights_give_the_shares_that_the_page_states(lopsided: Path, recipe: Recipe) -> None:
    module = recipe("Weights and balance")
    loader = module.weighted(lopsided)
    one, two = ([labels for _, labels in loader] for _ in range(2))
    for epoch in (one, two):  # sqrt(6) / (sqrt(6) + sqrt(90)) = 0.21
        assert 0.1 <= (torch.cat(epoch) == 0).float().mean() <= 0.35
    assert not torch.equal(torch.cat(one), torch.cat(two))


def test_parts_of_a_random_split_are_disjoint_and_independent(path: Path, recipe: Recipe) -> None:
    loaders_of = recipe("Splitting into training and validation").loaders_of
    training, validation = loaders_of(path)
    rows = [list(loader.dataset.indices) for loader in (training, validation)]
    assert sorted(rows[0] + rows[1]) == list(range(ROWS))
    assert [len(part) for part in rows] == [77, 19]
    alone = epochs(training), epochs(validation)

    training, validation = loaders_of(path)
    both: tuple[list[list[Prints]], list[list[Prints]]] = ([], [])
    for _ in range(2):
        both[0].append([])
        for batch in training:
            both[0][-1].append(prints(batch))
            if len(both[0][-1]) == 2:
                both[1].append(prints_of(validation))

    assert both == alone
    assert alone[1][0] == alone[1][1], "validation does not change"
    other, _ = loaders_of(path)
    other.load_state_dict(training.state_dict())


class Network(torch.nn.Module):
    """A model that always predicts class 1."""

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return torch.eye(4)[torch.ones(len(images), dtype=torch.int64)]


@pytest.mark.parametrize("world", [1, 2, 5])
def test_the_accuracy_counts_every_sample_once_on_any_number_of_ranks(
    path: Path, recipe: Recipe, monkeypatch: pytest.MonkeyPatch, world: int
) -> None:
    accuracy = recipe("Evaluation, every sample once").accuracy
    monkeypatch.setenv("WORLD_SIZE", str(world))

    shares = []
    for rank in range(world):
        monkeypatch.setenv("RANK", str(rank))
        shares.append(accuracy(Network(), path))

    assert sum(shares) == pytest.approx(1 / 4)
    assert len([share for share in shares if share > 0]) == world
