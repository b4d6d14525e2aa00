"""Records with several fields: samples, batches, crops of all fields alike, and selections."""

from __future__ import annotations

import io
import os
import pickle
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from fields import (
    CLASSES,
    LACKING,
    ROWS,
    SCHEMA,
    boxes_of,
    joints_of,
    make_fields,
    mask_of,
    pixels_of,
    sample_of,
    size_of,
)
from helpers import FORMATS, encoded, picture
from loading import same
from PIL import Image
from refusals import refused
from torch.utils.data import ConcatDataset, DataLoader, Subset, default_collate

from shardkit import (
    CenterCrop,
    DevicePrefetcher,
    EpochBatchSampler,
    Field,
    IterableShardDataset,
    RandomCrop,
    RandomResizedCrop,
    Resize,
    ShardDataset,
    collate,
    convert,
    make_loader,
    open_dataset,
    verify,
    with_rng,
)
from shardkit.errors import CorruptRecord, StateMismatch, TransformFailed, UsageError
from shardkit.torch.data.images import DecodeName

ALL = tuple(SCHEMA)
LISTED = ("caption", "extra", "boxes", "spots", "joints", "wave", "blob")
WHOLE = [row for row in range(ROWS) if row != LACKING]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("fields")
    for to in FORMATS:
        make_fields(root / to, to)
    return root


@pytest.fixture
def path(root: Path) -> Path:
    return root / "lmdb"


def expected(number: int) -> dict[str, Any]:
    """Return the sample of a row with ``decode="torch"``."""
    sample: dict[str, Any] = dict.fromkeys(ALL) | sample_of(number)
    sample["image"] = torch.from_numpy(pixels_of(number).copy()).permute(2, 0, 1)
    sample["label"] = CLASSES.index(sample["label"])
    if sample["mask"] is None:
        return sample
    sample["mask"] = torch.from_numpy(mask_of(number))
    tags = SCHEMA["tags"].classes or ()
    sample["tags"] = torch.tensor([float(tag in sample["tags"]) for tag in tags])
    sample["boxes"] = torch.tensor(boxes_of(number), dtype=torch.float64).reshape(-1, 5)
    sample["spots"] = torch.tensor(boxes_of(number + 1), dtype=torch.float64).reshape(-1, 5)[:, :4]
    sample["joints"] = torch.tensor(joints_of(number), dtype=torch.float64).reshape(-1, 3, 3)
    for name in ("latent", "wave"):
        sample[name] = torch.from_numpy(sample[name])
    return sample


def differing(found: dict[str, Any], wanted: dict[str, Any]) -> list[str]:
    """Return the names of values that differ in type or value."""
    return [
        name
        for name in wanted
        if not (isinstance(found[name], np.float32) and found[name] == wanted[name])
        and not same(found[name], wanted[name])
    ]


# Samples.


@pytest.mark.parametrize("to", FORMATS)
def test_each_kind_has_its_value(root: Path, to: str) -> None:
    dataset = open_dataset(root / to, fields=ALL, as_dict=True, decode="torch")
    for row in range(ROWS):
        assert differing(dataset[row], expected(row)) == []


@pytest.mark.parametrize("decode", ["pil", "numpy", "bytes"])
def test_decode_sets_the_type_of_images_and_masks(path: Path, decode: DecodeName) -> None:
    image, mask = open_dataset(path, decode=decode, fields=("image", "mask"))[4]
    if decode == "bytes":
        assert isinstance(image, bytes)
        mask = np.asarray(Image.open(io.BytesIO(mask)))
        image = pixels_of(4)
    elif decode == "pil":
        assert (image.mode, mask.mode) == ("RGB", "L")
    assert np.array_equal(np.asarray(image), pixels_of(4))
    assert np.array_equal(np.asarray(mask), mask_of(4))


def test_fields_come_in_the_requested_order(path: Path) -> None:
    sample = open_dataset(path, fields=("caption", "label"))[2]
    assert sample == (sample_of(2)["caption"], 2)
    assert isinstance(sample, tuple)
    sample = open_dataset(path, fields=("caption", "label"), as_dict=True)[2]
    assert list(sample.items()) == [("caption", sample_of(2)["caption"]), ("label", 2)]


@pytest.mark.usefixtures("without_native")
def test_only_requested_fields_are_read(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dataset = open_dataset(path, fields=("latent", "caption"))
    wanted = list(dataset[[1, 2]])
    monkeypatch.setattr(os, "preadv", reads := Mock(wraps=os.preadv))
    assert same(list(dataset[[1, 2]]), wanted)
    lengths = {call.args[2]: sum(map(len, call.args[1])) for call in reads.mock_calls}
    assert sum(lengths.values()) == 2 * 4 * 3 * 5 * 2  # two latents; captions are in the index


def test_a_dataset_without_images(tmp_path: Path) -> None:
    samples = [{"latent": np.full((2, 2), n, np.int16), "price": n / 2} for n in range(5)]
    convert(samples, tmp_path / "ds", to="webdataset", shuffle=False, workers=1)
    dataset = open_dataset(tmp_path / "ds", decode=RandomResizedCrop(8))  # applies to no field
    assert dataset.fields == ("latent", "price")
    loader = make_loader(dataset, 2, shuffle=True, engine="thread")
    found = {float(p): latent for latents, ps in loader for latent, p in zip(latents, ps)}  # noqa: B905
    assert all(latent.tolist() == [[2 * p, 2 * p]] * 2 for p, latent in found.items())
    assert len(found) == 5
    assert dataset.targets.tolist() == [-1] * 5


# Batches.


@pytest.mark.parametrize("to", FORMATS)
@pytest.mark.parametrize("as_dict", [False, True])
def test_a_batch_has_tensors_and_lists(root: Path, to: str, as_dict: bool) -> None:
    dataset = open_dataset(root / to, fields=ALL, as_dict=as_dict, decode=CenterCrop(8))
    view = dataset[WHOLE]
    batch = collate(view)
    assert type(batch) is (dict if as_dict else tuple)
    found: Any = batch if as_dict else dict(zip(ALL, batch, strict=True))
    for name in ALL:
        values = [dataset[row][name if as_dict else ALL.index(name)] for row in WHOLE]
        if name in LISTED:
            assert same(found[name], values)
        else:
            assert same(found[name], default_collate(values))
    # ConcatDataset has no __getitems__, so the samples arrive in a list.
    assert same(collate(list(view)), batch)


def test_equal_arrays_are_one_block(path: Path) -> None:
    view = open_dataset(path, fields=("latent", "half"))[WHOLE]
    latents, halves = collate(view)
    assert latents.data_ptr() == view[0][0].data_ptr()
    assert halves.dtype == torch.bfloat16
    assert latents.is_contiguous()


def test_subset_and_concat_dataset_in_any_loader(path: Path) -> None:
    dataset = open_dataset(path, fields=ALL, decode=CenterCrop(8))
    wanted = [collate(dataset[rows]) for rows in (WHOLE[:4], WHOLE[4:8], WHOLE[8:])]
    subset = Subset(dataset, WHOLE)
    joined: ConcatDataset[Any] = ConcatDataset(
        [Subset(dataset, WHOLE[:5]), Subset(dataset, WHOLE[5:])]
    )
    for each in (subset, joined):
        loader = DataLoader(each, 4, collate_fn=collate)
        assert same(list(loader), wanted)
        assert same(list(make_loader(each, 4, num_workers=0)), wanted)


def test_a_missing_value_names_the_row_and_the_remedy(path: Path) -> None:
    dataset = open_dataset(path, fields=("latent", "caption"))
    whole = pickle.loads(pickle.dumps(dataset[[1, 2]]))  # as a worker process sends it
    assert same(collate(whole)[0], collate(dataset[[1, 2]])[0])
    lacking = dataset[[1, LACKING]]
    for samples in (lacking, list(lacking), pickle.loads(pickle.dumps(lacking))):
        with refused(UsageError, f"(row {LACKING},", "'latent'", "has('latent')"):
            collate(samples)
    with refused(UsageError, f"(row {LACKING},", "'latent'"):
        list(make_loader(dataset, 2))
    kept = dataset.select(dataset.has("latent"))
    assert sum(len(texts) for _, texts in make_loader(kept, 2)) == ROWS - 1
    texts = open_dataset(path, fields=("caption",))
    assert collate(texts[[LACKING, 1]]) == ([None, sample_of(1)["caption"]],)


@pytest.mark.parametrize("engine", ["thread", "helper", "process"])
def test_a_missing_mask_is_named_by_every_engine(tmp_path: Path, engine: str) -> None:
    """PyTorch collates tensors in another way in worker processes."""
    mask = np.zeros((8, 8), np.uint8)
    samples = [{"image": np.zeros((8, 8, 3), np.uint8), "mask": mask, "rows": n} for n in range(4)]
    samples[2]["mask"] = None
    schema = {"mask": Field("mask")}
    convert(samples, tmp_path / "made", to="lmdb", schema=schema, shuffle=False, workers=1)
    fields = ("mask", "image")
    options: dict[str, Any] = {"engine": engine, "num_workers": 1}
    dataset = open_dataset(tmp_path / "made", decode="torch", fields=fields)
    for read in (dataset, Subset(dataset, range(4))):
        with refused(UsageError, "row 2,", "'mask'"):
            list(make_loader(read, 4, **options))


def test_rows_do_not_replace_a_field_of_this_name(tmp_path: Path) -> None:
    convert([{"rows": 7 * n} for n in range(4)], tmp_path / "made", to="lmdb", workers=1)
    options: dict[str, Any] = {"with_rows": True}
    for as_dict in (False, True):
        dataset = open_dataset(tmp_path / "made", as_dict=as_dict)
        if as_dict:
            with refused(UsageError, "'rows'", "with_rows"):
                next(iter(make_loader(dataset, 4, **options)))
        else:
            values, rows = next(iter(make_loader(dataset, 4, **options)))
            assert sorted(values.tolist()) == [0, 7, 14, 21]
            assert rows.tolist() == [0, 1, 2, 3]


def test_a_dict_batch_has_rows_and_moves_to_a_device(path: Path) -> None:
    dataset = open_dataset(path, fields=("latent", "boxes"), as_dict=True).select(WHOLE)
    loader = make_loader(dataset, 3, with_rows=True)
    for batch in DevicePrefetcher(loader, "cpu"):
        assert list(batch) == ["latent", "boxes", "rows"]
        assert len(batch["boxes"]) == len(batch["rows"])


# One crop for all fields.


def make_marked(path: Path, sizes: Iterable[tuple[int, int]]) -> Path:
    """Make images, masks, boxes and keypoints that show the same rectangle."""
    rng = np.random.default_rng(0)
    samples = []
    for width, height in sizes:
        left, top = rng.integers(0, 5), rng.integers(0, 5)
        right, bottom = rng.integers(left + 2, width), rng.integers(top + 2, height)
        mask = rng.integers(1, 8, (height, width), np.uint8)
        mask[top:bottom, left:right] |= 128
        samples.append(
            {
                "image": encoded(Image.fromarray(np.stack([mask] * 3, axis=-1)), "PNG"),
                "mask": mask,
                "boxes": [[left, top, right, bottom]],
                "points": [[left + 0.5, top + 0.5], [right - 0.5, top + 0.5]],
            }
        )
    points = Field("keypoints", classes=("left corner", "right corner"))
    schema = {"mask": Field("mask"), "boxes": Field("boxes"), "points": points}
    convert(samples, path, to="lmdb", schema=schema, shuffle=False, workers=1)
    return path


@pytest.fixture(scope="module")
def marked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    sizes = np.random.default_rng(1).integers(12, 20, (12, 2)).tolist()
    return make_marked(tmp_path_factory.mktemp("marked") / "ds", sizes)


SHOWN = ("image", "mask", "boxes", "points")


def test_one_window_crops_all_that_has_places(marked: Path) -> None:
    dataset = open_dataset(marked, decode=RandomCrop((6, 7), flip=0.5), fields=SHOWN)
    seen = shown = 0
    for epoch in range(4):
        dataset.set_epoch(epoch)
        for image, mask, boxes, (corners,) in dataset[:]:
            assert torch.equal(image[1], mask)
            inside = (mask & 128).nonzero()
            if len(boxes):
                seen += 1
                ((left, top, right, bottom),) = boxes.tolist()
                assert inside.min(0).values.tolist() == [top, left]
                assert (inside.max(0).values + 1).tolist() == [bottom, right]
                # Flipped or not, the left corner is on the left.
                for corner, place in zip(corners.tolist(), [left, right - 1], strict=True):
                    assert corner in ([place + 0.5, top + 0.5, 2], [0, 0, 0])
                shown += int(corners[:, 2].count_nonzero())
    assert seen > 20
    assert shown > 6


def test_a_resize_scales_all_that_has_places(tmp_path: Path) -> None:
    path = make_marked(tmp_path / "ds", [(20, 18)] * 6)
    larger = open_dataset(path, decode=Resize((54, 60)), fields=SHOWN)
    for stored, scaled in zip(open_dataset(path, fields=SHOWN)[:], larger[:], strict=True):
        _, mask, boxes, points = scaled
        assert mask.tolist() == np.asarray(stored[1]).repeat(3, 0).repeat(3, 1).tolist()
        assert torch.equal(boxes, stored[2] * 3)
        assert torch.equal(points, stored[3] * torch.tensor([3, 3, 1]))


def test_boxes_follow_images_that_are_not_read(marked: Path) -> None:
    op = RandomResizedCrop(16)
    with_images = open_dataset(marked, decode=op, fields=("image", "boxes"))
    alone = open_dataset(marked, decode=op, fields=("boxes",))
    for dataset in (with_images, alone):
        dataset.set_epoch(1)
    for row in range(len(alone)):
        assert torch.equal(with_images[row][1], alone[row][0])


def test_each_field_may_have_its_own_decoding(marked: Path) -> None:
    decode = {"image": RandomResizedCrop(16), "mask": RandomResizedCrop(8)}
    apart = open_dataset(marked, decode=decode, fields=("image", "mask", "boxes"))
    alike = open_dataset(marked, decode=RandomResizedCrop(16), fields=("image", "mask", "boxes"))
    equal = []
    for dataset in (apart, alike):
        dataset.set_epoch(2)
    for (image, mask, boxes), (same_image, larger, same_boxes) in zip(
        apart[:], alike[:], strict=True
    ):
        assert torch.equal(image, same_image)
        assert torch.equal(boxes, same_boxes)
        # The settings are equal but for the size, so both are of the same crop.
        assert mask.shape == (8, 8)
        equal.append(((mask >= 128) == (larger[::2, ::2] >= 128)).float().mean())
    assert np.mean(equal) > 0.85
    mixed = open_dataset(marked, decode={"mask": "bytes"}, fields=("image", "mask"))
    assert isinstance(mixed[0][0], Image.Image)
    assert isinstance(mixed[0][1], bytes)


def test_one_crop_of_images_of_two_sizes_is_refused(tmp_path: Path) -> None:
    sample = {"image": encoded(Image.new("RGB", (8, 9)), "PNG"), "tiny": picture(4, 4)}
    convert([sample], tmp_path / "ds", to="lmdb", schema={"tiny": Field("image")})
    dataset = open_dataset(tmp_path / "ds", decode=CenterCrop(2), fields=("image", "tiny"))
    with refused(UsageError, "'tiny'", "4 x 4", "'image'", "8 x 9", "decode={"):
        dataset[0]
    apart = {"image": CenterCrop(2), "tiny": CenterCrop(2)}
    dataset = open_dataset(tmp_path / "ds", decode=apart, fields=("image", "tiny"))
    expected = np.asarray(sample["tiny"])[1:3, 1:3]
    assert np.array_equal(np.asarray(dataset[0][1]).transpose(1, 2, 0), expected)


def test_sixteen_bits_are_int32(tmp_path: Path) -> None:
    depth = np.array([[0, 65535], [256, 7]], np.uint16)
    schema = {"depth": Field("mask")}
    convert([{"depth": depth}] * 2, tmp_path / "ds", to="lmdb", schema=schema)
    (depths,) = collate(open_dataset(tmp_path / "ds", decode="torch")[:])
    assert depths.dtype == torch.int32
    assert depths.tolist() == [depth.tolist()] * 2
    assert open_dataset(tmp_path / "ds", decode="numpy")[0][0].dtype == np.uint16


# Transforms.


def test_each_field_may_have_a_transform(path: Path) -> None:
    transform: dict[str, Callable[[Any], Any]] = {
        "caption": str.upper,
        "latent": torch.Tensor.float,
        "label": lambda label: label + 10,
        "mask": lambda mask: mask.long(),
    }
    names = ("caption", "latent", "label", "mask")
    dataset = open_dataset(path, transform, fields=names, decode=CenterCrop(6))
    captions, latents, labels, masks = collate(dataset[WHOLE])
    assert captions == [sample_of(row)["caption"].upper() for row in WHOLE]
    assert (latents.dtype, masks.dtype) == (torch.float32, torch.int64)
    assert labels.tolist() == [row % 3 + 10 for row in WHOLE]
    assert dataset[LACKING][0] is None  # nothing to transform
    broken = open_dataset(path, {"caption": int}, fields=("caption",))
    with refused(TransformFailed, "caption", "row 1"):
        broken[1]


def test_a_transform_of_several_fields_gets_and_returns_all(path: Path) -> None:
    @with_rng
    def augment(image: Any, mask: Any, joints: Any, rng: np.random.Generator) -> Any:
        return (
            (image.flip(-1), mask.flip(-1), -joints)
            if rng.uniform() < 0.5
            else (image, mask, joints)
        )

    fields = ("image", "mask", "joints", "caption")
    transform = {fields[:3]: augment, "caption": str.upper}
    plain, flipped = (
        open_dataset(path, each, decode=CenterCrop(6), fields=fields, as_dict=True).select(WHOLE)
        for each in (None, transform)
    )
    for engine in ("thread", "process"):
        options: dict[str, Any] = {"engine": engine, "num_workers": 2, "start_method": "fork"}
        flips: list[bool] = []
        for batch in make_loader(flipped, 3, **options):
            assert list(batch) == list(fields)
            for n, caption in enumerate(batch["caption"]):
                sample = plain[len(flips)]
                assert caption == sample["caption"].upper()
                flips.append(not torch.equal(batch["image"][n], sample["image"]))
                if flips[-1]:
                    sample |= {name: sample[name].flip(-1) for name in ("image", "mask")}
                    sample["joints"] *= -1
                for name in fields[:3]:
                    assert torch.equal(batch[name][n], sample[name])
        assert 1 < sum(flips) < len(plain) - 1


def test_a_transform_of_several_fields_gets_what_is_there_and_must_return_as_much(
    path: Path,
) -> None:
    def opened(function: Any) -> ShardDataset:
        return open_dataset(path, {("mask", "label"): function}, fields=("mask", "label"))

    assert opened(lambda mask, label: (label, mask))[LACKING] == (LACKING % 3, None)
    for function in (lambda mask, label: mask / 0, lambda mask, label: 1):
        with refused(TransformFailed, "mask, label", "row 1"):
            opened(function)[1]


def test_fields_draw_different_numbers(path: Path) -> None:
    @with_rng
    def draw(_: Any, rng: np.random.Generator) -> float:
        return float(rng.uniform())

    transform = dict.fromkeys(("image", "label", "caption", "price"), draw)
    dataset = open_dataset(path, transform, fields=tuple(transform)).select(WHOLE)
    batches = []
    for engine in ("thread", "process"):
        options: dict[str, Any] = {"engine": engine, "num_workers": 2, "start_method": "fork"}
        batches.append(list(make_loader(dataset, 4, shuffle=True, seed=3, **options)))
    assert same(*batches)
    drawn = torch.cat(
        [torch.stack([torch.as_tensor(part) for part in batch]) for batch in batches[0]], 1
    )
    assert len(set(drawn.flatten().tolist())) == drawn.numel()


# Selections.


def test_a_selection_has_the_same_methods(path: Path) -> None:
    dataset = open_dataset(path, decode="torch", fields=("image", "caption", "label"))
    rows = [8, 2, 2, -1]
    chosen = dataset.select(rows)
    assert isinstance(chosen, type(dataset))
    stored = [8, 2, 2, 9]
    assert len(chosen) == 4
    assert same(list(chosen[:]), [dataset[row] for row in stored])
    assert same(chosen[-1], chosen[3])
    assert chosen.targets.tolist() == [row % 3 for row in stored]
    assert list(chosen.keys) == [dataset.keys[row] for row in stored]
    assert chosen.paths[1:3] == [dataset.paths[2]] * 2
    assert chosen.column("price").tolist() == [row / 4 for row in stored]
    assert chosen.has("mask").tolist() == [True] * 4
    assert chosen.stored_rows(range(4)).tolist() == stored
    assert "4 rows" in repr(chosen)
    assert chosen.select([1, 0]).targets.tolist() == [2, 2]
    again = pickle.loads(pickle.dumps(chosen))
    assert same(list(again[:]), list(chosen[:]))
    with refused(IndexError, "row 4", path, "4 rows"):
        chosen[4]


def test_rows_are_selected_by_values(path: Path) -> None:
    dataset = open_dataset(path)
    prices = dataset.column("price")
    assert dataset.select(prices > 1).targets.tolist() == [5 % 3, 6 % 3, 8 % 3, 9 % 3]
    assert len(dataset.select(dataset.targets == 0)) == 4
    assert len(dataset.select([])) == 0
    assert len(dataset.select(dataset.has("mask"))) == ROWS - 1
    with refused(IndexError, "(3,)", "10 rows"):
        dataset.select([True, False, True])
    with refused(IndexError, "row 10"):
        dataset.select([10])
    with refused(UsageError, 'dataset.column("label")'):
        dataset.select("label == 'cat'")  # type: ignore[arg-type]


@pytest.mark.parametrize("engine", ["thread", "helper", "process"])
def test_a_selection_reads_what_a_subset_reads(path: Path, engine: str) -> None:
    rows = [3, 9, 3, 1, 6]  # one row twice, which must draw different numbers
    dataset = open_dataset(path, decode=RandomResizedCrop(8), fields=("image", "mask", "boxes"))
    options: dict[str, Any] = {"engine": engine, "num_workers": 2, "start_method": "fork"}
    found = [
        list(make_loader(each, 2, shuffle=True, seed=1, **options))
        for each in (dataset.select(rows), Subset(dataset, rows))
    ]
    assert same(*found)
    sampler = EpochBatchSampler(dataset.select(rows), 2, shuffle=True, seed=1)
    plain = DataLoader(dataset.select(rows), batch_sampler=sampler, collate_fn=collate)
    iterable = IterableShardDataset(dataset.select(rows), shuffle=True, seed=1, batch_size=2)
    assert same(found[0], list(plain))
    assert same(found[0], list(iterable))
    chosen = dataset.select([3, 3])
    first, second = next(iter(make_loader(chosen, 2, num_workers=0)))[0]
    assert not torch.equal(first, second)


def test_a_selection_has_an_epoch_of_its_own(path: Path) -> None:
    dataset = open_dataset(path, decode=RandomResizedCrop(8))
    dataset.set_epoch(2, 5)
    chosen = dataset.select([4])
    assert torch.equal(chosen[0][0], dataset[4][0])
    chosen.set_epoch(3, 5)
    assert (dataset.epoch, chosen.epoch) == (2, 3)


def test_a_state_of_another_selection_is_refused(path: Path) -> None:
    dataset = open_dataset(path)
    state = make_loader(dataset.select(range(5)), 2).state_dict()
    make_loader(dataset.select(range(5)), 2).load_state_dict(state)
    with pytest.raises(StateMismatch, match="dataset"):
        make_loader(dataset.select(range(1, 6)), 2).load_state_dict(state)


# Loaders.


def loader_of(path: Path, engine: str, num_workers: int) -> Any:
    dataset = open_dataset(path, decode=RandomResizedCrop(8), fields=ALL, as_dict=True)
    options: dict[str, Any] = {"engine": engine, "num_workers": num_workers, "start_method": "fork"}
    dataset = dataset.select(dataset.has("mask"))
    return make_loader(dataset, 2, shuffle=True, seed=7, **options)


def by_hand(path: Path, epoch: int) -> list[Any]:
    """Return the batches of an epoch without a loader."""
    dataset = open_dataset(path, decode=RandomResizedCrop(8), fields=ALL, as_dict=True)
    dataset = dataset.select(WHOLE)
    dataset.set_epoch(epoch, 7)
    prices = open_dataset(path, fields=("price",)).select(WHOLE)
    loader = make_loader(prices, 2, shuffle=True, seed=7, num_workers=0)
    loader.set_epoch(epoch)
    batches = [(4 * values).int().tolist() for (values,) in loader]
    return [collate(dataset[[WHOLE.index(row) for row in rows]]) for rows in batches]


def test_both_engines_and_a_resumed_run_give_the_same_batches(path: Path) -> None:
    wanted = by_hand(path, 0), by_hand(path, 1)
    for engine, num_workers in (("thread", 2), ("process", 1)):
        loader = loader_of(path, engine, num_workers)
        assert same(list(loader), wanted[0])
        batches = iter(loader)
        assert same([next(batches), next(batches)], wanted[1][:2])
        state = loader.state_dict()
        batches.close()
        other = loader_of(path, "thread" if engine == "process" else "process", 1)
        other.load_state_dict(state)
        assert same(list(other), wanted[1][2:])


def test_iterable_datasets_read_fields(path: Path) -> None:
    names = ("mask", "caption", "latent")
    op = CenterCrop(8)
    dataset = IterableShardDataset(path, decode=op, fields=names, as_dict=True, batch_size=4)
    plain = open_dataset(path, decode=op, fields=names, as_dict=True)
    wanted = [collate(plain[rows]) for rows in (range(4), range(4, 7))]
    batches = iter(DataLoader(dataset, batch_size=None))
    assert same([next(batches)], wanted[:1])
    samples = IterableShardDataset(plain)
    assert [sample["caption"] for sample in samples] == [sample["caption"] for sample in plain[:]]
    with refused(UsageError, "fields"):
        IterableShardDataset(plain, fields=names)


# Columns.


def test_columns_are_read_from_the_index(path: Path) -> None:
    dataset = open_dataset(path)
    prices = dataset.column("price")
    assert isinstance(prices, np.ma.MaskedArray)
    assert prices.dtype == np.float32
    assert prices.tolist() == [None if row == LACKING else row / 4 for row in range(ROWS)]
    assert dataset.column("label").tolist() == [row % 3 for row in range(ROWS)]
    captions = dataset.column("caption")
    assert captions[3] == sample_of(3)["caption"]
    assert captions[LACKING] is None


# Errors.


WRONG: list[tuple[dict[str, Any], tuple[str, ...]]] = [
    ({"fields": ("image", "depth")}, ("'depth'", "image (image)", "blob (bytes)")),
    ({"fields": ()}, ("fields=()",)),
    ({"fields": ("image", "image")}, ("fields=('image', 'image')",)),
    ({"fields": "image"}, ("a list such as ['image']",)),
    ({"decode": {"depth": "pil"}}, ("decode={'depth'", "image")),
    ({"decode": {"mask": "pil"}}, ("decode={'mask'", "image")),
    ({"decode": {"image": "rgb"}}, ("decode='rgb'",)),
    ({"transform": {"mask": str}}, ("transform={'mask'", "image, label")),
    ({"transform": {"image": 1}}, ("image=1",)),
    ({"transform": {("image", "mask"): str}}, ("transform={'mask'", "image")),
    ({"transform": {("image", "label"): str, "label": str}}, ("image, label",)),
    ({"transform": str, "fields": ("mask",)}, ("'image'",)),
    ({"target_transform": str, "fields": ("image",)}, ("'label'",)),
    ({"transform": {"label": str}, "target_transform": str}, ("label",)),
]


def test_wrong_options_are_explained(path: Path) -> None:
    for options, facts in WRONG:
        with refused(UsageError, *facts):
            open_dataset(path, **options)
    dataset = open_dataset(path)
    with refused(UsageError, "'mask'", "fields=('mask',)"):
        dataset.column("mask")
    for ask in (dataset.column, dataset.has):
        with refused(UsageError, "'prise'", "price"):
            ask("prise")


def test_images_that_differ_in_size_are_not_collated(path: Path) -> None:
    view = open_dataset(path, decode="torch", fields=("mask",))[[0, 1]]
    assert view[0][0].shape == size_of(0)[::-1]
    with pytest.raises(RuntimeError, match="'mask'"):
        collate(view)


@pytest.mark.parametrize("name", ["latent", "mask", "wave", "blob"])
def test_a_changed_byte_of_any_field_is_found(path: Path, tmp_path: Path, name: str) -> None:
    copy = Path(shutil.copytree(path, tmp_path / "ds"))
    dataset = open_dataset(copy, fields=(name,), verify=True, decode="bytes")
    value = dataset[6][0]
    content = value if isinstance(value, bytes) else value.numpy().tobytes()
    shard = dataset.shard_paths[1]  # of rows 4 to 7
    data = bytearray(shard.read_bytes())
    assert data.count(content) == 1
    data[data.index(content) + len(content) - 1] ^= 1
    shard.write_bytes(data)
    with pytest.raises(CorruptRecord, match=r"row 6, .*checksum"):
        dataset[[4, 6]]
    unasked = open_dataset(copy, fields=(name,), decode="bytes")
    if name == "latent":  # an array of one shape: comparing it would take half the epoch again
        assert len(unasked[[4, 6]]) == 2
        assert not verify(copy).ok
    else:
        with pytest.raises(CorruptRecord, match=r"row 6, .*checksum"):
            unasked[[4, 6]]
