"""A dataset in memory: batches equal those of other loaders, and everything else is refused."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers import make_dataset, make_tree, png
from loading import same
from refusals import refused
from torch.utils.data import ConcatDataset, Dataset, Subset, default_collate

from shardkit import (
    CenterCrop,
    DevicePrefetcher,
    Field,
    IterableShardDataset,
    Mixture,
    RandomCrop,
    RandomResizedCrop,
    Rank,
    Resize,
    ShardDataset,
    Weighted,
    convert,
    make_loader,
    open_dataset,
    with_rng,
)
from shardkit.errors import UsageError
from shardkit.sampling.order import Draws
from shardkit.system import compiled
from shardkit.torch import prefetch
from shardkit.torch.data.images import Decode
from shardkit.torch.data.ops import Crop, ImageOp
from shardkit.torch.data.read_context import draws_key
from shardkit.torch.engine import resident as module
from shardkit.torch.engine import resident_rows

ROWS, BATCH = 23, 4
WIDTH, HEIGHT = 12, 9

SCHEMA = {
    "label": Field("label", classes=["a", "b", "c"]),
    "tags": Field("labels", classes=["x", "y"]),
    "mask": Field("mask"),
    "deep": Field("mask"),
    "boxes": Field("boxes"),
}


def sample_of(number: int) -> dict[str, Any]:
    rng = np.random.default_rng(number)
    return {
        "image": rng.integers(0, 256, (HEIGHT, WIDTH, 3), np.uint8),
        "label": "abc"[number % 3],
        "tags": ["x", "y"][: number % 3],
        "mask": rng.integers(0, 256, (HEIGHT, WIDTH), np.uint8),
        "deep": rng.integers(256, 65536, (HEIGHT, WIDTH), np.uint16),
        "latent": rng.normal(size=(2, 5)).astype(np.float16),
        "price": number / 4,
        "caption": f"picture {number}",
        "boxes": [[1, 2, 5, 6]] * (number % 3),
    }


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("resident") / "data"
    convert([*map(sample_of, range(ROWS))], path, to="lmdb", schema=SCHEMA)
    return path


TENSORS = ("deep", "image", "label", "latent", "mask", "price", "tags")


def assert_equal(dataset: Any, batch_size: int = BATCH, epochs: int = 2, **options: Any) -> None:
    """Compare batches with those of the ordinary loader, also in their layout in memory."""
    options = {"shuffle": True, "seed": 3, **options}
    if options.get("sampler") is not None:
        options["shuffle"] = None
    plain_options: dict[str, Any] = {"num_workers": 0, **options}
    plain = make_loader(dataset, batch_size, **plain_options)
    resident = make_loader(dataset, batch_size, resident="cpu", **options)
    assert len(plain) == len(resident)
    for _ in range(epochs):
        for expected, found in itertools.zip_longest(plain, resident):
            if isinstance(dataset, ConcatDataset):  # whose samples another loader stacks, in a list
                assert same(*map(as_tuples, (found, expected)))
            else:
                assert same(found, expected)
                assert strides(found) == strides(expected)
        assert resident.state_dict() == plain.state_dict()


def as_tuples(batch: Any) -> Any:
    return tuple(map(as_tuples, batch)) if isinstance(batch, (list, tuple)) else batch


def strides(batch: Any) -> Any:
    if isinstance(batch, torch.Tensor):
        return batch.stride()
    parts = batch.values() if isinstance(batch, dict) else batch
    return [strides(part) for part in parts]


@pytest.mark.parametrize("as_dict", [False, True])
def test_all_fields_of_tensors_are_held(path: Path, as_dict: bool) -> None:
    for decode in ("torch", "numpy", RandomCrop((8, 10), padding=3)):
        assert_equal(open_dataset(path, decode=decode, fields=TENSORS, as_dict=as_dict), epochs=1)


@pytest.mark.parametrize("has_module", [True, False])
def test_crops_are_those_of_numpy(
    path: Path, has_module: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiled, "is_available", lambda: has_module)
    key = draws_key(0, 5, 0)
    crops = (
        RandomCrop((HEIGHT, WIDTH), padding=4),
        RandomCrop((3, 1), flip=1),
        RandomCrop((1, 7), padding=1, flip=0),
        RandomCrop((20, 17)),
    )
    for op in crops:
        dataset = open_dataset(path, decode=op, fields=("image", "price"))
        (height, width), border = op.fixed_size, 20
        around = (border, border), (border, border), (0, 0)
        for images, prices, rows in make_loader(
            dataset, 7, shuffle=True, seed=5, resident="cpu", with_rows=True
        ):
            assert images.is_contiguous(memory_format=torch.channels_last)
            for image, price, row in zip(images, prices.tolist(), rows.tolist(), strict=True):
                crop = op.crop(WIDTH, HEIGHT, Draws(key, row))
                padded = np.pad(sample_of(int(4 * price))["image"], around)
                top, left = crop.top + border, crop.left + border
                expected = padded[top : top + height, left : left + width]
                expected = expected[:, ::-1] if crop.flip else expected
                assert np.array_equal(image.permute(1, 2, 0).numpy(), expected)


def test_fields_may_have_operations_of_their_own(path: Path) -> None:
    crop = RandomCrop(8, padding=2)
    decode: dict[str, Any] = {"image": crop, "mask": crop, "deep": "torch"}
    fields = ("image", "mask", "deep")
    assert_equal(open_dataset(path, decode=decode, fields=fields, view=5))
    decode = {"image": RandomCrop(8), "mask": CenterCrop(8), "deep": RandomCrop(4, flip=1)}
    assert_equal(open_dataset(path, decode=decode, fields=fields))


def test_it_takes_the_options_of_the_ordinary_loader(path: Path) -> None:
    dataset = open_dataset(path, decode=RandomCrop(10, padding=2))
    given: tuple[dict[str, Any], ...] = (
        {"sampler": Weighted([1.0] * 10 + [5.0] * 13), "with_rows": True},
        {"sampler": range(0, ROWS, 2)},
        {"shuffle": False, "drop_last": True},
        {"rank": Rank(rank=1, world_size=3, remainder="exact"), "with_rows": True},
        {"rank": Rank(rank=2, world_size=3, remainder="pad"), "with_rows": True, "views": 2},
        {"num_workers": 2, "views": 2, "prefetch_factor": 1},
        {"batch_size": 1},
        {"batch_size": 100},
    )
    for options in given:
        assert_equal(dataset, **options)


def listed(samples: Sequence[Any]) -> list[Any]:
    return list(samples)


def mixed(samples: Sequence[Any]) -> Any:
    images, labels = default_collate([*samples])
    return images[torch.randperm(len(images))], labels + np.random.random()


@pytest.mark.parametrize(
    ("decode", "collate_fn"),
    [("torch", mixed), ("numpy", listed), (RandomCrop(8), listed)],
    ids=["torch", "numpy", "crop"],
)
def test_a_collate_function_gets_the_same_samples(
    path: Path, decode: Any, collate_fn: Callable[..., Any]
) -> None:
    options: dict[str, Any] = {"shuffle": True, "collate_fn": collate_fn}
    dataset = open_dataset(path, decode=decode, as_dict=collate_fn is listed)
    plain = make_loader(dataset, BATCH, num_workers=0, **options)
    before = torch.get_rng_state()
    for expected, found in zip(
        plain, make_loader(dataset, BATCH, resident="cpu", **options), strict=True
    ):
        for one, other in zip(found, expected, strict=True):
            values = [one, other]
            if isinstance(one, dict):
                assert type(one["label"]) is type(other["label"]) is int
                assert type(one["image"]) is type(other["image"])
                values = [torch.as_tensor(sample["image"]) for sample in values]
            assert torch.equal(*values)
    assert torch.equal(before, torch.get_rng_state())


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Images of the same size in a folder of classes."""
    root = tmp_path_factory.mktemp("other")
    make_tree(root / "files", {f"{'abc'[n % 3]}/{n}.png": png(WIDTH, HEIGHT, n) for n in range(11)})
    return make_dataset(root / "files", root / "data", to="webdataset")


def test_parts_of_datasets(path: Path, other: Path) -> None:
    op = RandomCrop((6, 8), padding=3)
    one, two = open_dataset(path, decode=op), open_dataset(other, decode=op, view=1)
    assert_equal(Subset(one, [5, 0, 5, 22, -1, 7]), with_rows=True)
    assert_equal(one.select(np.arange(ROWS)[::-2]))
    assert_equal(Subset(one.select([4, 4, 9]), [2, 1, 0]))
    assert_equal(ConcatDataset([one, Subset(two, range(1, 9)), one]), 5, with_rows=True)
    mixture = Mixture({one: 3, two: 1})
    assert_equal(mixture.dataset, sampler=mixture)
    flipped = open_dataset(other, decode=RandomCrop((6, 8), padding=9, flip=1))
    assert_equal(ConcatDataset([flipped, two, one]), 7, views=2)
    assert_equal(IterableShardDataset(one, shuffle=True), shuffle=None, seed=None)
    assert_equal(one.select([]))


def test_a_changed_batch_does_not_change_the_dataset(path: Path) -> None:
    for decode in ("torch", RandomCrop(12, padding=2)):
        dataset = open_dataset(path, decode=decode, fields=TENSORS)
        loader = make_loader(dataset, BATCH, resident="cpu")
        for batch in loader:
            for values in batch:
                values.zero_()
        loader.set_epoch(0)
        for found, expected in zip(loader, make_loader(dataset, BATCH), strict=True):
            assert same(found, expected)


def test_a_run_continues_in_either_loader(path: Path) -> None:
    dataset = open_dataset(path, decode=RandomCrop(8, padding=2))
    options: dict[str, Any] = {"shuffle": True, "seed": 8, "with_rows": True}
    for first, second in (("cpu", None), (None, "cpu")):
        loader = make_loader(dataset, BATCH, resident=first, **options)  # type: ignore[arg-type]
        batches = iter(loader)
        for _ in range(2):
            next(batches)
        state = loader.state_dict()
        again = make_loader(dataset, BATCH, resident=second, **options)  # type: ignore[arg-type]
        again.load_state_dict(state)
        assert same([*batches], [*again])


def test_the_dataset_is_read_once(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loader = make_loader(open_dataset(path, decode=RandomCrop(8)), BATCH, resident="cpu")
    monkeypatch.setattr(ShardDataset, "__getitems__", None)
    monkeypatch.setattr(ShardDataset, "announce", None)
    assert sum(len(labels) for _, labels in loader) == ROWS
    assert (loader.engine, loader.num_workers) == ("thread", 0)
    assert loader.reason == "the decoded dataset is in memory (cpu)"


def test_another_device_is_used_throughout(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The code of a CUDA device, with a device that every machine has."""
    monkeypatch.setattr(module, "_device", lambda resident: torch.device("cpu", 0))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    memory = partial(torch.empty, dtype=torch.uint8)
    monkeypatch.setattr(
        resident_rows, "_new_block", lambda shape, device: memory(shape, device=device)
    )
    dataset = open_dataset(path, decode=RandomCrop(8, padding=2), fields=TENSORS)
    resident = make_loader(dataset, BATCH, shuffle=True, resident="cuda")
    assert not resident.pin_memory
    monkeypatch.undo()
    for found, expected in zip(resident, make_loader(dataset, BATCH, shuffle=True), strict=True):
        assert same(found, expected)


def test_the_rows_are_on_the_current_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another one may be current later: each rank sets its own."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    assert module._device("cuda") == torch.device("cuda", 3)
    assert module._device("cpu") == torch.device("cpu")


def test_places_are_copied_from_pinned_memory_without_waiting(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Any other copy would make the training process wait for the device in each batch."""
    calls: list[Any] = []

    def pin_memory(tensor: torch.Tensor) -> torch.Tensor:
        calls.append("pinned")
        return tensor

    def to(tensor: torch.Tensor, *where: Any, **how: Any) -> torch.Tensor:
        calls.append((where, how))
        return tensor

    monkeypatch.setattr(torch.Tensor, "pin_memory", pin_memory)
    monkeypatch.setattr(torch.Tensor, "to", to)
    device = torch.device("cuda", 3)
    assert resident_rows.on_device(np.array([2, 1]), device).tolist() == [2, 1]
    assert calls == ["pinned", ((device,), {"non_blocking": True})]
    assert resident_rows.on_device(np.array([2, 1]), torch.device("cpu")).tolist() == [2, 1]
    assert len(calls) == 2


def test_memory_that_pytorch_keeps_for_reuse_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (600, 1000))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 300)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 100)
    device = torch.device("cuda", 3)
    resident_rows.require_memory(800, device)
    with refused(UsageError, "'cuda'", "801 bytes", "800 bytes"):
        resident_rows.require_memory(801, device)


def test_batches_on_the_device_are_not_moved_on_another_stream(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing would make that stream wait for the batch."""
    loader = make_loader(open_dataset(path, decode="torch"), BATCH, resident="cpu")
    object.__setattr__(loader.options, "resident", "cuda")
    monkeypatch.setattr(prefetch, "_require_device", torch.device)
    prefetcher = DevicePrefetcher(loader, "cuda")
    prefetcher.device = torch.device("cpu")
    prefetcher._side_stream = None  # type: ignore[assignment, method-assign]
    assert len(list(prefetcher)) == 6


class Own(Dataset[int]):
    def __len__(self) -> int:
        return 3

    def __getitem__(self, row: int) -> int:
        return row


class Corner(ImageOp):
    """A random operation of another package."""

    @property
    def fixed_size(self) -> tuple[int, int]:
        return 2, 2

    def crop(self, width: int, height: int, draws: Any) -> Crop:
        return Crop(0, 0, 2, 2, (2, 2))


@with_rng
def jitter(image: Any, rng: np.random.Generator) -> Any:
    return image


def test_what_cannot_be_held_is_refused_by_name(path: Path) -> None:
    wrong: tuple[tuple[dict[str, Any], tuple[str, ...]], ...] = (
        ({"decode": "pil"}, ("decode='pil'", "torch")),
        ({"decode": "bytes"}, ("decode='bytes'", "torch")),
        ({"decode": RandomResizedCrop(8)}, ("RandomResizedCrop", "use RandomCrop")),
        ({"decode": Corner()}, ("Corner",)),
        ({"decode": "torch", "transform": jitter}, ("transform jitter",)),
        ({"decode": "torch", "target_transform": int}, ("target_transform int",)),
        ({"decode": "torch", "fields": ("image", "caption")}, ("'caption' (text)",)),
        ({"decode": "torch", "fields": ("boxes",)}, ("'boxes' (boxes)",)),
    )
    for options, facts in wrong:
        with refused(UsageError, "resident=", *facts):
            make_loader(open_dataset(path, **options), BATCH, resident="cpu")


def test_operations_of_views_are_refused(path: Path) -> None:
    dataset = open_dataset(path, decode="torch")
    with refused(UsageError, "resident=", "views=2", "decode=RandomCrop"):
        make_loader(dataset, BATCH, views=[RandomCrop(8), RandomCrop(9)], resident="cpu")


def test_datasets_of_others_are_refused(path: Path, other: Path) -> None:
    with refused(UsageError, "not Own"):
        make_loader(Own(), 1, resident="cpu")
    with refused(UsageError, "not Own"):
        make_loader(ConcatDataset([open_dataset(path, decode="torch"), Own()]), 1, resident="cpu")
    parts = [open_dataset(path, decode=RandomCrop(8)), open_dataset(other, decode=RandomCrop(9))]
    with refused(UsageError, path, other, "(8, 8, 3)", "(9, 9, 3)"):
        make_loader(ConcatDataset(parts), 1, resident="cpu")


def test_images_of_several_sizes_are_refused_with_the_remedy(tmp_path: Path) -> None:
    make_tree(tmp_path / "in", {f"a/{n}.png": png(10 + n % 2, 8, n) for n in range(6)})
    path = make_dataset(tmp_path / "in", tmp_path / "data")
    remedy = r"'image' has 2 sizes, such as 10 x 8 and 11 x 8: use decode=Resize.*--resize HxW"
    for decode in ("torch", RandomCrop(6), Resize(7)):
        expected = remedy if decode != Resize(7) else "'image' has 2 sizes"
        with pytest.raises(UsageError, match=expected):
            make_loader(open_dataset(path, decode=decode), 2, resident="cpu")
    assert_equal(open_dataset(path, decode=CenterCrop(6)))
    assert_equal(open_dataset(path, decode=Resize((6, 5))))
    one_size = [row for row, name in enumerate(open_dataset(path).paths) if int(name[2]) % 2]
    assert_equal(open_dataset(path, decode=RandomCrop(6)).select(one_size))


def test_values_that_make_no_block_are_refused(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    samples: list[dict[str, Any]] = [
        {
            "image": rng.integers(0, 256, (8, 8, 3), np.uint8),
            "mask": rng.integers(0, 256, (8, 8), np.uint16 if n == 3 else np.uint8),
            "low": rng.integers(0, 256, (6, 8, 3), np.uint8),
            "when": np.datetime64("2026-01-01") + np.arange(2),
        }
        for n in range(5)
    ]
    samples[3]["mask"] += 300
    del samples[4]["mask"]
    schema = {"mask": Field("mask"), "low": Field("image")}
    convert(samples, tmp_path / "data", to="lmdb", schema=schema)

    rows = open_dataset(tmp_path / "data").has("mask")
    cases: list[tuple[Decode, tuple[str, ...], Any, str]] = [
        ("torch", ("mask",), None, "1 row of"),
        ("torch", ("mask",), rows, "'mask'"),
        ("torch", ("when",), None, "'when'"),
        (RandomCrop(4), ("image", "low"), None, "'image' and 'low'"),
    ]
    for decode_all, fields, chosen, fact in cases:
        dataset = open_dataset(tmp_path / "data", decode=decode_all, fields=fields)
        with refused(UsageError, fact):
            make_loader(dataset if chosen is None else dataset.select(chosen), 2, resident="cpu")
    decode = {"image": RandomCrop(4), "low": RandomCrop(4)}
    assert_equal(open_dataset(tmp_path / "data", decode=decode, fields=("image", "low")), 2)


def test_too_little_memory_is_refused_with_both_sizes(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dataset = open_dataset(path, decode="torch")
    needed = ROWS * (3 * WIDTH * HEIGHT + 8)
    monkeypatch.setattr(resident_rows, "free_memory", lambda: needed)
    make_loader(dataset, BATCH, resident="cpu")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    with refused(UsageError, "2 ranks"):
        make_loader(dataset, BATCH, resident="cpu")
    monkeypatch.delenv("LOCAL_WORLD_SIZE")
    monkeypatch.setattr(resident_rows, "free_memory", lambda: needed - 1)
    with refused(UsageError, "'cpu'", "7.5 KiB"):
        make_loader(dataset, BATCH, resident="cpu")
    monkeypatch.setattr(resident_rows, "free_memory", lambda: needed + 3000)
    with pytest.raises(UsageError, match="needs"):  # margins count
        make_loader(open_dataset(path, decode=RandomCrop(8, padding=9)), BATCH, resident="cpu")


def test_wrong_options_are_refused(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for options, facts in (
        ({"resident": "cuda"}, ("'cuda'", "'cpu'")),
        ({"resident": "gpu"}, ("resident='gpu'", "cpu, cuda")),
        ({"resident": "cpu", "engine": "process"}, ("engine='process'",)),
        ({"resident": "cpu", "on_bad": "drop"}, ("on_bad='drop'",)),
        ({"resident": "cuda", "pin_memory": True}, ("pin_memory=",)),
        ({"resident": "cuda", "num_workers": 1}, ("num_workers=",)),
    ):
        with refused(UsageError, *facts):
            make_loader(open_dataset(path, decode="torch"), BATCH, **options)
