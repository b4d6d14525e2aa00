"""Where the time goes: planted delays are seen where they are; stages do what readers do."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers import jpeg, make_dataset, make_folder, make_tree
from PIL import Image

from shardkit import BadImage, CenterCrop, UsageError, open_dataset
from shardkit.dataset.shardset import EncodedImage
from shardkit.measure.doctor import profiling, stages
from shardkit.measure.doctor.profiling import Plan, profile
from shardkit.measure.doctor.stages import STAGES, Batch, identified, staged
from shardkit.measure.runner import page_cache as pages
from shardkit.measure.runner.folder import PlainFolder
from shardkit.torch.data.collate import collate

SLOW = 0.005
"""Seconds of a planted delay, which is ten times what everything else takes together."""


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("stages") / "photos", each=6)


@pytest.fixture(scope="module")
def made(photos: Path) -> Path:
    return make_dataset(photos, photos.parent / "made")


def largest(found: profiling.Profile) -> str:
    return max(found.warm, key=lambda stage: found.warm[stage])


def plan(**changed: Any) -> Plan:
    return Plan(**{"batch_size": 4, "rows": 8, "seconds": 1.0, **changed})


def delayed(function: Callable[..., Any], times: int = 1) -> Callable[..., Any]:
    def slow(*given: Any, **named: Any) -> Any:
        time.sleep(SLOW * times)
        return function(*given, **named)

    return slow


@pytest.mark.parametrize("kind", ["dataset", "folder"])
def test_each_stage_has_its_time(photos: Path, made: Path, kind: str) -> None:
    crop = CenterCrop(12)
    dataset = open_dataset(made, decode=crop) if kind == "dataset" else PlainFolder(photos, crop)
    found = profile(dataset, plan())

    expected = ["read", "checksum", "decode", "collate"]
    if kind == "folder":
        expected.remove("checksum")
        assert found.skipped["checksum"] == "files have none"
    assert list(found.warm) == expected
    assert all(seconds > 0 for seconds in found.warm.values())
    assert found.images == 8
    assert found.batch_size == 4
    assert found.total == pytest.approx(sum(found.warm.values()))
    assert found.skipped["transport"] == "not needed: threads share memory"
    assert found.skipped["transform"] == "none"
    assert found.sample == (3, 12, 12)
    assert found.dtype == "torch.uint8"
    assert set(found.kinds) == {"jpg", "png"}
    assert sum(found.kinds.values()) == 8
    assert found.height == 18
    assert 20 <= found.width <= 25
    assert found.stored_bytes > 100
    assert found.held is None


@pytest.mark.parametrize(
    ("stage", "owner", "name"),
    [
        ("read", stages.StagedShards, "read"),
        ("checksum", stages, "checksum"),
        ("decode", stages, "decode_batch"),
        ("collate", profiling, "collate"),
    ],
)
def test_a_planted_delay_is_seen_where_it_is(
    made: Path, monkeypatch: pytest.MonkeyPatch, stage: str, owner: Any, name: str
) -> None:
    each = 1 if name == "checksum" else 4
    monkeypatch.setattr(owner, name, delayed(getattr(owner, name), each))
    found = profile(open_dataset(made, decode=CenterCrop(12)), plan())

    assert largest(found) == stage
    assert found.warm[stage] > SLOW / 2
    assert found.warm[stage] > 3 * sum(found.warm[other] for other in found.warm if other != stage)


def test_a_transform_is_timed_and_watched(made: Path) -> None:
    def spin(image: Any) -> torch.Tensor:
        end = time.perf_counter() + SLOW
        while time.perf_counter() < end:
            pass
        return torch.zeros(3, 8, 8)

    def wait(image: Any) -> torch.Tensor:
        time.sleep(SLOW)
        return torch.zeros(3, 8, 8)

    spinning = profile(open_dataset(made, spin), plan())
    waiting = profile(open_dataset(made, wait), plan())

    assert largest(spinning) == largest(waiting) == "transform"
    assert spinning.held is not None
    assert waiting.held is not None
    assert spinning.held > 0.5
    assert waiting.held < 0.5
    assert spinning.sample == (3, 8, 8)
    assert spinning.dtype == "torch.float32"


def test_batches_come_from_a_process_if_they_have_to(made: Path) -> None:
    block = profile(open_dataset(made, decode=CenterCrop(64)), plan(processes=True))
    samples = profile(
        open_dataset(made, lambda _: torch.zeros(3, 64, 64), decode="numpy"), plan(processes=True)
    )

    for found in (block, samples):
        assert 0 < found.warm["transport"] < 1
        assert list(found.warm) == [stage for stage in STAGES if stage in found.warm]
        assert found.total < sum(found.warm.values())  # a worker does not wait for it


def test_a_dataset_smaller_than_a_batch_is_one_batch(made: Path) -> None:
    found = profile(open_dataset(made, decode=CenterCrop(8)), Plan(batch_size=64, rows=256))

    assert found.images == found.batch_size == 12


def test_it_ends_when_the_time_is_up(made: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stages, "decode_batch", delayed(stages.decode_batch, 20))
    found = profile(open_dataset(made, decode=CenterCrop(8)), plan(rows=12, seconds=0.01))

    assert found.images == 4


def test_reading_cold_ends_when_the_time_is_up(made: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dataset = open_dataset(made, decode=CenterCrop(8))
    reads: list[int] = []
    read = stages.StagedShards.read

    def slow(self: stages.StagedShards, batch: Batch) -> None:
        reads.append(len(batch.rows))
        time.sleep(SLOW * len(batch.rows))
        read(self, batch)

    monkeypatch.setattr(stages.StagedShards, "read", slow)
    work = staged(dataset)
    chosen = [np.arange(start, start + 2) for start in range(0, 12, 2)]
    cold, _ = profiling._read_cold(dataset, work, chosen, SLOW)

    assert reads == [1, 2]  # the first opens the shards
    assert cold is not None
    assert cold >= SLOW


def test_files_that_cannot_be_dropped_have_no_cold_time(
    made: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(_: object) -> None:
        raise OSError

    dataset = open_dataset(made, decode=CenterCrop(8))
    monkeypatch.setattr(pages, "resident", lambda _: 0.75)
    kept = profile(dataset, plan())
    assert kept.resident == 0.75
    assert kept.cold_read is not None
    monkeypatch.setattr(pages, "drop", refused)
    assert profile(dataset, plan()).cold_read is None


def test_the_copy_to_a_device_is_timed_where_there_is_one(
    made: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def to(images: torch.Tensor, device: str, **_: Any) -> torch.Tensor:
        assert device == "cuda"
        time.sleep(SLOW)
        return images

    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.synchronize", lambda: None)
    monkeypatch.setattr("torch.Tensor.pin_memory", lambda images: images)
    monkeypatch.setattr("torch.Tensor.to", to)
    found = profile(open_dataset(made, decode=CenterCrop(12)), plan())
    stored = profile(open_dataset(made, decode="bytes"), plan())

    assert found.warm["copy to the device"] >= SLOW / 4
    assert stored.skipped["copy to the device"] == "not a tensor"


def test_raw_pixels_have_no_checksum_to_compare(photos: Path, tmp_path: Path) -> None:
    made = make_dataset(photos, tmp_path / "raw", recipe=raw())
    found = profile(open_dataset(made, decode="torch"), plan())
    cropped = profile(open_dataset(made, decode=CenterCrop(8)), plan())

    assert found.skipped["checksum"] == "not compared for raw pixels"
    assert found.skipped["decode"].startswith("none: pixels are read straight into")
    assert list(found.warm) == ["read", "collate"]
    assert list(cropped.warm) == ["read", "decode", "collate"]
    assert found.kinds == {"raw": 8}
    dataset, batch = open_dataset(made, decode="torch"), Batch(rows=np.array([3, 0]))
    staged(dataset).read(batch)
    assert torch.equal(batch.view[0][0], dataset[3][0])
    assert torch.equal(collate(batch.view)[0], torch.stack([dataset[3][0], dataset[0][0]]))


def raw() -> Any:
    from shardkit.conversion.recipe import Recipe

    return Recipe(encode="raw", resize=(16, 16), resize_mode="crop", enlarge=True)


@pytest.mark.parametrize("decode", ["pil", "numpy", "torch", "bytes", CenterCrop(12)])
@pytest.mark.parametrize("kind", ["dataset", "folder"])
def test_the_stages_make_what_the_dataset_gives(
    photos: Path, made: Path, kind: str, decode: Any
) -> None:
    dataset: Any = open_dataset(made, decode=decode)
    if kind == "folder":
        dataset = PlainFolder(photos, decode)
    work, batch = staged(dataset), Batch(rows=np.array([3, 0, 5]))
    work.read(batch)
    work.checksum(batch)
    work.decode(batch)

    for (image, label), row in zip(batch.view, batch.rows.tolist(), strict=True):
        expected, known = dataset[row]
        assert label == known
        if isinstance(expected, torch.Tensor):
            assert torch.equal(image, expected)
        elif isinstance(expected, Image.Image):
            assert image.tobytes() == expected.tobytes()
        else:
            assert np.array_equal(image, expected)


def test_images_of_one_size_are_decoded_into_one_block(tmp_path: Path) -> None:
    files: dict[str, bytes | None] = {f"a/{n}.jpg": jpeg(24, 16, n) for n in range(4)}
    made = make_dataset(make_tree(tmp_path / "same", files), tmp_path / "made")
    work, batch = staged(open_dataset(made, decode="torch")), Batch(rows=np.arange(4))
    work.read(batch)
    work.decode(batch)

    assert batch.block is not None
    assert collate(batch.view)[0].data_ptr() == batch.block.data_ptr()


def test_what_has_no_stages_is_refused() -> None:
    with pytest.raises(UsageError, match="list has no stages"):
        staged([])


@pytest.mark.slow
def test_a_file_that_is_no_image_is_named(tmp_path: Path) -> None:
    root = make_tree(tmp_path / "photos", {"a/1.jpg": jpeg()[:100], "a/2.jpg": jpeg()})
    with pytest.raises(BadImage, match=r"1\.jpg cannot be decoded"):
        profile(PlainFolder(root, CenterCrop(8)), plan())


def test_what_a_file_does_not_state_is_looked_up() -> None:
    unknown = EncodedImage(jpeg(24, 16), "", 0, 0, 0)
    known = unknown._replace(field="png")

    assert identified(unknown)[1:] == ("jpg", 0, 24, 16)
    assert identified(known) is known
