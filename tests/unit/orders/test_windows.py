"""Windows and neighbors of frames, compared with loops over the samples of each episode."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import numpy.typing as npt
import pytest
import torch
from helpers import FORMATS, png
from pairwise import pairwise
from refusals import refused
from torch.utils.data import DataLoader

from shardkit import (
    CenterCrop,
    RandomResizedCrop,
    Windows,
    convert,
    make_loader,
    open_dataset,
    with_rng,
)
from shardkit.errors import UsageError
from shardkit.orders.neighbors import Neighbors

EPISODES, FRAMES = 3, 7
OFFSETS = (-2, 0, 1)
IMAGES = Windows(by="episode", order="frame", fields={"image": OFFSETS, "action": range(4)})


class Frames:
    """Frames of several episodes, mixed; row n has the frame 10 * (n // 3) of the episode n % 3."""

    def __init__(self, *, twice: int | None = None, lacking: int | None = None) -> None:
        self._twice, self._lacking = twice, lacking

    def __len__(self) -> int:
        return EPISODES * FRAMES

    def __getitem__(self, row: int) -> dict[str, Any]:
        frame = 10 * (row // EPISODES)
        sample = {
            "image": png(20, 16, row),
            "action": np.arange(2, dtype=np.float32) + row,
            "episode": f"e{row % EPISODES}",
            "frame": 0 if row == self._twice else frame,
            "note": f"note {row}",
        }
        if row == self._lacking:
            del sample["frame"]
        return sample


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(tmp_path_factory.mktemp("windows") / "lmdb")


def make(path: Path, to: Any = "lmdb", **options: Any) -> Path:
    convert(Frames(**options), path, to=to, shuffle=False, shard_samples=5)
    return path


def window_of(row: int, offsets: Any) -> tuple[list[int], list[bool]]:
    """Return the rows of a window, and which are padded."""
    frames = [row // EPISODES + offset for offset in offsets]
    clipped = [min(max(frame, 0), FRAMES - 1) for frame in frames]
    rows = [frame * EPISODES + row % EPISODES for frame in clipped]
    return rows, [frame != inside for frame, inside in zip(frames, clipped, strict=True)]


def image_of(path: Path, row: int) -> npt.NDArray[np.uint8]:
    image: npt.NDArray[np.uint8] = open_dataset(path, decode="torch", fields=("image",))[row][0]
    return np.asarray(image)


@pytest.mark.parametrize("to", FORMATS)
def test_a_sample_has_the_frames_around_it(to: str, path: Path, tmp_path: Path) -> None:
    dataset = open_dataset(make(tmp_path / to, to), windows=IMAGES)
    images = [image_of(path, row) for row in range(len(dataset))]

    for row in range(len(dataset)):
        sample = dataset[row]
        assert list(sample) == ["image", "action", "image_is_pad", "action_is_pad"]
        rows, padded = window_of(row, OFFSETS)
        np.testing.assert_array_equal(sample["image"], [images[frame] for frame in rows])
        assert sample["image_is_pad"].tolist() == padded
        rows, padded = window_of(row, range(4))
        np.testing.assert_array_equal(sample["action"], [[r, r + 1] for r in rows])
        assert sample["action_is_pad"].tolist() == padded


@pytest.mark.parametrize(
    ("engine", "decode"),
    [("thread", None), ("helper", CenterCrop(12)), ("process", RandomResizedCrop(8))],
)
def test_batches_are_their_samples(engine: Any, decode: Any, path: Path) -> None:
    options = {} if decode is None else {"decode": decode}
    dataset = open_dataset(path, windows=IMAGES, fields=("image", "action", "note"), **options)
    loader = make_loader(dataset, 4, shuffle=True, seed=3, engine=engine, num_workers=2)
    alone = make_loader(dataset, 1, shuffle=True, seed=3, num_workers=0)
    batches, samples = list(loader), list(alone)
    for name in ("image", "action", "image_is_pad", "action_is_pad"):
        together = torch.cat([batch[name] for batch in batches])
        assert together.equal(torch.cat([sample[name] for sample in samples]))
    assert [n for batch in batches for n in batch["note"]] == [s["note"][0] for s in samples]


def test_frames_of_a_window_share_one_crop(tmp_path: Path) -> None:
    class Equal(Frames):
        def __getitem__(self, row: int) -> dict[str, Any]:
            return super().__getitem__(row) | {"image": png(20, 16, 1)}

    convert(Equal(), tmp_path / "equal", to="lmdb", shuffle=False)
    dataset = open_dataset(tmp_path / "equal", windows=IMAGES, decode=RandomResizedCrop(8))
    loader = make_loader(dataset, 7, shuffle=True, seed=1, num_workers=0)
    windows = torch.cat([batch["image"] for batch in loader])
    assert all(window[0].equal(frame) for window in windows for frame in window)
    assert len({tuple(window[0].flatten().tolist()) for window in windows}) > 15


@pytest.mark.usefixtures("without_native")
def test_a_frame_of_several_windows_is_read_once(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dataset = open_dataset(path, windows=IMAGES)
    dataset[0]
    monkeypatch.setattr(os, "preadv", reads := Mock(wraps=os.preadv))
    dataset[list(range(0, 12, 3))]  # 4 frames of one episode
    places = [(call.args[0], call.args[2]) for call in reads.mock_calls]
    assert len(set(places)) == 5 + 7  # of 12 images and 16 actions
    assert len(places) <= 2 * (5 + 7)  # what is not in memory is read again, now waiting for it


def test_a_transform_gets_a_window(path: Path) -> None:
    @with_rng
    def shifted(images: torch.Tensor, rng: np.random.Generator) -> torch.Tensor:
        assert images.shape == (3, 3, 16, 20)
        return images.float() + rng.uniform()

    dataset = open_dataset(path, windows=IMAGES, transform=shifted)
    plain = open_dataset(path, windows=IMAGES)
    shifts = {float((dataset[row]["image"] - plain[row]["image"].float()).max()) for row in (3, 9)}
    assert len(shifts) == 2


def test_selected_rows_still_reach_the_others(path: Path) -> None:
    dataset = open_dataset(path, windows=IMAGES)
    chosen = dataset.select([9, 3])
    assert chosen[0]["action"].equal(dataset[9]["action"])
    assert chosen[1]["image"].equal(dataset[3]["image"])


def test_gaps_end_a_window_only_if_strict(path: Path) -> None:
    strict = Windows(by="episode", order="frame", fields={"action": (-1, 0)}, strict=True)
    assert open_dataset(path, windows=strict)[9]["action_is_pad"].tolist() == [True, False]
    assert open_dataset(path, windows=IMAGES)[9]["action_is_pad"].tolist()[:2] == [False, False]


def test_views_of_windows(path: Path) -> None:
    dataset = open_dataset(path, windows=IMAGES)
    views = [RandomResizedCrop(8), CenterCrop(6)]
    for large, small in make_loader(dataset, 4, views=views, num_workers=0):
        assert large["image"].shape[1:] == (3, 3, 8, 8)
        assert small["image"].shape[1:] == (3, 3, 6, 6)
        assert large["action"].equal(small["action"])


def test_a_dataloader_of_pytorch_collates_windows(path: Path) -> None:
    batch = next(iter(DataLoader(open_dataset(path, windows=IMAGES), batch_size=4)))
    assert batch["image"].shape == (4, 3, 3, 16, 20)


WRONG: list[tuple[dict[str, Any], tuple[str, ...]]] = [
    ({"fields": {}}, ("fields=",)),
    ({"fields": {"image": 3}}, ("{'image': 3}",)),
    ({"fields": {"image": ()}}, ("{'image': ()}",)),
    ({"fields": {"image": (0.5,)}}, ("0.5",)),
    ({"fields": {"image": (10**30,)}}, ("1,000,000,000",)),
    ({"by": "none"}, ("by='none'", "episode, frame, note")),
    ({"order": "action"}, ("order='action'",)),
    ({"fields": {"pose": (0,)}}, ("'pose'",)),
    ({"by": "frame", "order": "frame"}, ("row 0", "same episode and order")),
    ({"order": "episode", "strict": True}, ("strict=True", "integers")),
]


@pytest.mark.parametrize(("given", "facts"), WRONG)
def test_wrong_windows_are_refused(given: Any, facts: tuple[str, ...], path: Path) -> None:
    options = {"by": "episode", "order": "frame", "fields": {"image": OFFSETS}} | given
    with refused(UsageError, *facts):
        open_dataset(path, windows=Windows(**options))


def test_frames_without_an_order_are_named(tmp_path: Path) -> None:
    twice = make(tmp_path / "twice", twice=6)
    with refused(UsageError, "row 0,", "row 6,"):
        open_dataset(twice, windows=IMAGES)
    lacking = make(tmp_path / "lacking", lacking=4)
    with refused(UsageError, "row 4"):
        open_dataset(lacking, windows=IMAGES)


def test_options_that_contradict_windows_are_refused(path: Path) -> None:
    with refused(UsageError, "'action'", "windows=", "fields="):
        open_dataset(path, windows=IMAGES, fields=("image",))
    with refused(UsageError, "shardkit.Windows"):
        open_dataset(path, windows={"image": (0, 1)})  # type: ignore[arg-type]
    with refused(UsageError, "resident="):
        make_loader(open_dataset(path, windows=IMAGES), 2, resident="cpu")


# Neighbors of rows, compared with loops over each episode.


def _oracle(
    episodes: list[Any], order: list[Any], row: int, offset: int, strict: bool
) -> tuple[int, bool]:
    """Return the row of a frame and whether it is padded, one step at a time."""
    step, padded = (1 if offset > 0 else -1), False
    for _ in range(abs(offset)):
        others = [n for n in range(len(order)) if episodes[n] == episodes[row]]
        beyond = [n for n in others if (order[n] - order[row]) * step > 0]
        near = min(beyond, key=lambda n: abs(order[n] - order[row]), default=None)
        if near is None or (strict and abs(order[near] - order[row]) != 1):
            padded = True
            break
        row = near
    return row, padded


@pytest.mark.parametrize(("seed", "texts", "strict"), pairwise(range(3), *[[False, True]] * 2))
def test_windows_equal_those_of_a_loop(seed: Any, texts: Any, strict: Any) -> None:
    rng = np.random.default_rng(seed)
    count, offsets = 40, (-3, -1, 0, 2)
    frames = rng.permutation(60)[:count] - 20
    episodes = rng.integers(0, 4, count)
    names = np.array([f"e{n}" for n in episodes], object) if texts else episodes
    rows, padded = Neighbors(names, frames, str, strict=strict).of(np.arange(count), offsets)
    for row in range(count):
        for place, offset in enumerate(offsets):
            expected = _oracle(episodes.tolist(), frames.tolist(), row, offset, strict)
            assert (rows[row, place], padded[row, place]) == expected


def test_two_rows_with_one_order_are_named() -> None:
    with pytest.raises(UsageError, match="row 0 and row 2"):
        Neighbors(np.array([1, 1, 1]), np.array([5, 6, 5]), "row {}".format)


def test_rows_without_order_are_named() -> None:
    texts: Any = np.array(["a", None], object)
    for order in (np.ma.MaskedArray([1, 2], [False, True]), texts, np.array([1.0, np.nan])):
        with refused(UsageError, "row 1"):
            Neighbors(np.array([1, 1]), order, "row {}".format)


def test_strict_needs_integers() -> None:
    with refused(UsageError, "strict=True", "integers"):
        Neighbors(np.array([1, 1]), np.array([0.5, 1.5]), str, strict=True)


def test_no_rows_have_no_windows() -> None:
    empty = np.zeros(0, np.int64)
    rows, padded = Neighbors(empty, empty, str).of(empty, (-1, 0))
    assert rows.shape == padded.shape == (0, 2)
