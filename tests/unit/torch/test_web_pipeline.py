"""`to_webdataset` yields what WebDataset reads from the same shards, in the order of shardkit."""

from __future__ import annotations

import gc
import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import FORMATS, copy_dataset
from PIL import Image
from refusals import refused

from shardkit import CenterCrop, IterableTarDataset, Rank
from shardkit.errors import UsageError
from shardkit.torch.web_pipeline import to_webdataset

wds = pytest.importorskip("webdataset")

OWN = ("__url__", "__local_path__", "json")
"""What WebDataset adds, and where shards keep other fields."""


@pytest.mark.filterwarnings("ignore::ResourceWarning")  # webdataset leaves its files open
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_samples_are_those_of_webdataset(folder: Path, tmp_path: Path) -> None:
    tars = copy_dataset(folder, tmp_path / "tars", to="webdataset")
    theirs = {
        sample["__key__"]: {name: sample[name] for name in sample.keys() - OWN}
        for sample in wds.WebDataset(sorted(map(str, tars.glob("*.tar"))), shardshuffle=False)
        if "cls" in sample
    }
    gc.collect()  # closes them here, not in another test
    for to in FORMATS:
        dataset = copy_dataset(folder, tmp_path / to, to=to)
        ours = list(to_webdataset(dataset, decode="bytes"))
        assert {sample["__key__"]: sample for sample in ours} == theirs
        assert len(ours) == 6


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_the_order_is_that_of_the_iterable_dataset(
    folder: Path, tmp_path: Path, workers: int
) -> None:
    path = copy_dataset(folder, tmp_path / str(workers), to="webdataset")
    keys: dict[int, list[str]] = {0: [], 1: []}
    for number in range(2):
        rank = Rank(rank=number, world_size=2)
        options: dict[str, Any] = {"shuffle": True, "seed": 3, "rank": rank}
        expected = IterableTarDataset(path, decode="numpy", **options)
        source = to_webdataset(path, decode="bytes", **options)
        pipeline = source.decode("pilrgb").to_tuple("jpg;png", "cls")
        for epoch in (0, 1):
            expected.set_epoch(epoch)
            pipeline.set_epoch(epoch)
            loader = wds.WebLoader(pipeline, batch_size=None, num_workers=workers)
            found = [(image.tobytes(), label) for image, label in map(_arrays, loader)]
            wanted = [(image.tobytes(), label) for image, label in expected]
            # DataLoader takes one sample of each worker in turn, as shardkit divides them.
            assert found == wanted
            keys[epoch] += [sample["__key__"] for sample in source]
    files = sorted(str(file.relative_to(folder).with_suffix("")) for file in folder.rglob("*.*"))
    assert [sorted(read) for read in keys.values()] == [files, files]


def _arrays(sample: Any) -> tuple[np.ndarray[Any, Any], int]:
    return np.asarray(sample[0]), int(sample[1])


def test_images_may_be_decoded_by_shardkit(folder: Path, tmp_path: Path) -> None:
    path = copy_dataset(folder, tmp_path / "set")
    batches = to_webdataset(path, decode=CenterCrop(8)).to_tuple("image", "cls").batched(4)
    stored = list(to_webdataset(path, decode="bytes"))
    images = np.concatenate([np.stack([np.asarray(each) for each in b[0]]) for b in batches])
    for image, sample in zip(images, stored, strict=True):
        data = next(value for name, value in sample.items() if name in ("jpg", "png"))
        whole = np.asarray(Image.open(io.BytesIO(data)).convert("RGB"))
        top, left = (whole.shape[0] - 8) // 2, (whole.shape[1] - 8) // 2
        crop = whole[top : top + 8, left : left + 8]
        np.testing.assert_array_equal(image.transpose(1, 2, 0), crop)


def test_wrong_options_are_refused(tmp_path: Path) -> None:
    with refused(UsageError, tmp_path / "none"):
        to_webdataset(tmp_path / "none")
