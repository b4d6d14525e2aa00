"""``views=[op, ...]``: each view equals a dataset with that operation; images are decoded once."""

from __future__ import annotations

import functools
import itertools
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers import jpeg, pixels, png
from PIL.ImageFile import ImageFile
from refusals import refused
from torch.utils.data import ConcatDataset, DataLoader, Dataset, Subset, TensorDataset

from shardkit import (
    CenterCrop,
    EpochBatchSampler,
    Field,
    IterableShardDataset,
    RandomResizedCrop,
    ShardDataset,
    collate,
    convert,
    make_loader,
    open_dataset,
    with_rng,
)
from shardkit.errors import UsageError

ROWS, SEED, BATCH = 8, 3, 3

LARGE, SMALL = RandomResizedCrop(40, scale=(0.4, 1)), RandomResizedCrop(12, scale=(0.05, 0.4))
VIEWS = [LARGE, CenterCrop(24, resize=30), SMALL, LARGE, CenterCrop(300), SMALL]
"""Operations that decode JPEGs at several scales, completely, and with a black border."""

FIELDS = ("image", "mask", "boxes", "label")

ENGINES = [("thread", 0), ("thread", 2), ("helper", 2), ("process", 2)]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return converted(tmp_path_factory.mktemp("views") / "made")


def converted(folder: Path, **options: Any) -> Path:
    """Return a dataset of JPEGs of several sizes, PNGs and raw pixels, with masks and boxes."""
    samples: list[dict[str, Any]] = []
    for number in range(ROWS):
        width, height = ((130, 97), (97, 200), (250, 33), (96, 93))[number % 4]
        image: Any = jpeg(width, height, number, quality=88, subsampling=number % 3)
        if number % 4 == 3:
            image = pixels(width, height, number) if number < 5 else png(width, height, number)
        mask = np.arange(width * height).reshape(height, width) % 200
        boxes = [[1.0, 2.0, width - 3.0, height - 4.0]]
        sample = {"image": image, "mask": mask.astype(np.uint8), "boxes": boxes}
        samples.append({**sample, "label": number % 2})
    schema = {"mask": Field("mask"), "label": Field("label", classes=("a", "b"))}
    convert(samples, folder, to="lmdb", schema=schema, shuffle=False, workers=1, **options)
    return folder


def prints(batch: Any) -> Any:
    """Return the values of a batch as something that can be compared."""
    if isinstance(batch, torch.Tensor):
        return batch.dtype, batch.shape, batch.contiguous().numpy().tobytes()
    return [prints(value) for value in batch]


def expected(
    path: Path,
    epoch: int,
    fields: tuple[str, ...] = FIELDS,
    *,
    views: tuple[Any, ...] = tuple(VIEWS),
    **changed: Any,
) -> Any:
    """Return the batches of an epoch, each view read by a loader of its operation alone."""
    batches: dict[Any, Any] = {}
    for op in set(views):
        dataset = open_dataset(path, decode=op, fields=fields, **changed)
        loader = loaded(dataset, views=len(views))
        loader.set_epoch(epoch)
        batches[op] = list(map(prints, loader))
    numbers = range(len(batches[views[0]]))
    return [[batches[op][number][view] for view, op in enumerate(views)] for number in numbers]


expected_once = functools.cache(expected)


def opened(path: Path, **options: Any) -> ShardDataset:
    return open_dataset(path, **{"decode": "torch", "fields": FIELDS, **options})


def loaded(dataset: Any, engine: tuple[str, int] = ENGINES[0], **options: Any) -> Any:
    options = {"shuffle": True, "seed": SEED, "views": VIEWS, **options}
    return make_loader(dataset, BATCH, engine=engine[0], num_workers=engine[1], **options)  # type: ignore[arg-type]


@pytest.mark.slow
@pytest.mark.usefixtures("implementation")
def test_each_view_equals_its_operation_alone(path: Path) -> None:
    loader = loaded(opened(path))

    batches = list(loader)
    assert all(isinstance(batch, tuple) for batch in batches)
    assert list(map(prints, batches)) == expected(path, 0)
    assert [prints(batch) for batch in loader] == expected(path, 1)


@pytest.fixture(scope="module")
def planes(tmp_path_factory: pytest.TempPathFactory, with_native: None) -> Path:
    return converted(tmp_path_factory.mktemp("views") / "planes", encode="planes")


@pytest.mark.usefixtures("implementation")
def test_planes_are_read_the_same(planes: Path) -> None:
    assert list(map(prints, loaded(opened(planes)))) == expected(planes, 0)


@with_rng
def noisy(image: torch.Tensor, rng: np.random.Generator) -> torch.Tensor:
    image //= 2  # in place: the views share no memory
    return image + torch.from_numpy(rng.integers(0, 9, image.shape, np.uint8))


def joint(image: Any, mask: Any) -> Any:
    image[:, 0] = 0
    mask[0] = 7
    return image, mask


@pytest.mark.parametrize("transform", [{"image": noisy}, {("image", "mask"): joint}])
@pytest.mark.usefixtures("implementation")
def test_transforms_see_each_view(path: Path, transform: Any) -> None:
    views = (CenterCrop(24, resize=30), SMALL)
    found = list(map(prints, loaded(opened(path, transform=transform), views=list(views))))

    assert found == expected(path, 0, views=views, transform=transform)


class Wrapped(Dataset[Any]):
    """Reads its dataset one by one."""

    def __init__(self, dataset: ShardDataset) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, row: int) -> Any:
        return self.dataset[row]


@pytest.mark.parametrize("engine", ENGINES[1:], ids=str)
def test_engines_read_the_same(path: Path, engine: tuple[str, int]) -> None:
    with_rows = loaded(opened(path), engine, with_rows=True)

    assert [[view[:-1] for view in map(prints, batch)] for batch in with_rows] == expected_once(
        path, 0
    )
    with_rows.close()


@pytest.mark.parametrize("kind", ["subset", "concatenated", "selected", "wrapped", "iterable"])
def test_datasets_inside_others_read_the_same(path: Path, kind: str) -> None:
    dataset: Any = opened(path)
    if kind == "subset":
        dataset = Subset(dataset, range(ROWS))
    elif kind == "concatenated":
        dataset = ConcatDataset([dataset.select(range(5)), dataset.select(range(5, ROWS))])
    elif kind == "selected":
        dataset = dataset.select(range(ROWS))
    elif kind == "wrapped":
        dataset = Wrapped(dataset)
    else:
        dataset = IterableShardDataset(dataset)

    assert list(map(prints, loaded(dataset))) == expected_once(path, 0)


@pytest.mark.parametrize(
    ("kind", "workers"), [("dataset", 0), ("dataset", 2), ("subset", 2), ("concatenated", 0)]
)
def test_the_dataloader_of_pytorch_reads_the_same(path: Path, kind: str, workers: int) -> None:
    dataset: Any = opened(path)
    if kind != "dataset":
        dataset = Subset(dataset, range(ROWS)) if kind == "subset" else ConcatDataset([dataset])
    sampler = EpochBatchSampler(dataset, BATCH, shuffle=True, seed=SEED, views=VIEWS)
    loader = DataLoader(dataset, batch_sampler=sampler, num_workers=workers, collate_fn=collate)

    assert list(map(prints, loader)) == expected_once(path, 0)


def test_default_collate_returns_a_list_of_views(path: Path) -> None:
    dataset = opened(path, fields=("image", "label"))
    sampler = EpochBatchSampler(dataset, BATCH, shuffle=True, seed=SEED, views=VIEWS)

    batches = list(map(prints, DataLoader(dataset, batch_sampler=sampler)))
    assert batches == expected(path, 0, ("image", "label"))


def test_views_without_an_operation_share_no_memory(path: Path) -> None:
    dataset = open_dataset(path, decode="torch", fields=["image"])
    batches = make_loader(dataset, 3, views=2, num_workers=0, collate_fn=list)
    pairs = itertools.chain.from_iterable(zip(*batch, strict=True) for batch in batches)
    for row, ((first,), (second,)) in enumerate(pairs):
        (expected,) = dataset[row]
        first.zero_()
        assert torch.equal(second, expected)
        assert expected.any()


def test_one_operation_is_a_tuple_of_one(path: Path) -> None:
    plain = loaded(opened(path, decode=LARGE), views=1)

    assert [prints(batch) for (batch,) in loaded(opened(path), views=[LARGE])] == [
        prints(batch) for batch in plain
    ]


@pytest.mark.usefixtures("without_native")
def test_python_decodes_once_for_each_scale(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By Pillow, or by simplejpeg where it is installed."""
    decoded: list[Any] = []
    load = ImageFile.load

    def counting(image: ImageFile) -> Any:
        if not any(image is other for other in decoded):
            decoded.append(image)
        return load(image)

    monkeypatch.setattr(ImageFile, "load", counting)
    with suppress(ImportError):
        import simplejpeg

        decode_jpeg = simplejpeg.decode_jpeg

        def counting_too(data: Any, *arguments: Any, **options: Any) -> Any:
            decoded.append("JPEG")
            return decode_jpeg(data, *arguments, **options)

        monkeypatch.setattr(simplejpeg, "decode_jpeg", counting_too)
    unreduced = RandomResizedCrop(40, oversample=float("inf"))
    for decode, views in (("torch", [unreduced, CenterCrop(24)]), (unreduced, 2)):
        decoded.clear()
        list(loaded(opened(path, decode=decode, fields=("image",)), views=views))
        assert len(decoded) == ROWS
    decoded.clear()
    list(loaded(opened(path, fields=("image",))))
    kinds = [getattr(image, "format", image) for image in decoded]
    assert kinds.count("PNG") == 2  # only JPEGs have several scales
    assert len(decoded) > ROWS


WRONG: list[tuple[dict[str, Any], list[Any], tuple[str, ...]]] = [
    ({}, [], ("views=[]",)),
    ({}, [LARGE, "torch"], ("views[1]='torch'",)),
    ({}, [RandomResizedCrop], ("views[0]=<class",)),
    ({"decode": LARGE}, [SMALL, SMALL], ("decode=",)),
    ({"decode": "bytes"}, [SMALL, SMALL], ("decode='bytes'",)),
    ({"fields": ("label",)}, [SMALL, SMALL], ("('label',)", "fields=")),
]


def test_wrong_views_are_refused(path: Path) -> None:
    for (options, views, facts), make in itertools.product(WRONG, (make_loader, EpochBatchSampler)):
        with refused(UsageError, *facts):
            make(opened(path, **options), BATCH, views=views)


def test_datasets_of_others_are_refused(path: Path) -> None:
    foreign = TensorDataset(torch.zeros(4, 3))
    with refused(UsageError, "TensorDataset", "views=2"):
        make_loader(foreign, 2, views=[LARGE, SMALL])
    with refused(UsageError, "make_loader", "views=2"):
        EpochBatchSampler(Wrapped(opened(path)), 2, views=[LARGE, SMALL])
