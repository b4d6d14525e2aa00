"""What the measuring process answers, asked without a process around it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from helpers import jpeg, make_dataset, make_tree

from shardkit.measure.runner import material
from shardkit.measure.runner import page_cache as pages
from shardkit.measure.server import MeasurementServer, last_words

PLAIN = {"engine": "plain", "batch_size": 4, "options": {}}
EPOCH = {"epochs": 1, "whole": True}


def opened(path: Path, **more: Any) -> tuple[MeasurementServer, dict[str, Any]]:
    child = MeasurementServer()
    subject = {"path": str(path), "decode": "CenterCrop(8)", **more}
    return child, child.answer({"ask": "open", "subject": subject})


@pytest.mark.parametrize("kind", ["folder", "dataset"])
def test_a_subject_is_opened_and_looked_at(kind: str, folder: Path, tmp_path: Path) -> None:
    path = folder if kind == "folder" else make_dataset(folder, tmp_path / "made")
    child, found = opened(path)
    seen = child.answer({"ask": "look", "loading": PLAIN, "span": EPOCH, "step": {}})

    stored = sum(each.stat().st_size for each in folder.rglob("*.*"))
    assert (found["images"], found["total"]) == (6, 6)
    assert found["mean_bytes"] == pytest.approx(stored / 6)
    assert seen["look"]["images"] == 6
    assert len(seen["look"]["waits"]) == 2
    assert seen["warnings"] == []
    json.dumps(seen)


@pytest.mark.parametrize("kind", ["folder", "dataset"])
def test_a_sample_is_the_same_each_time(kind: str, folder: Path, tmp_path: Path) -> None:
    path = folder if kind == "folder" else make_dataset(folder, tmp_path / "made")
    child, found = opened(path, limit=4)
    seen = child.answer({"ask": "look", "loading": PLAIN, "span": EPOCH, "step": {}})

    assert (found["images"], found["total"]) == (4, 6)
    assert seen["look"]["images"] == 4
    assert opened(path, limit=4)[1] == found
    assert opened(path, limit=40)[1]["images"] == 6


@pytest.mark.parametrize("kind", ["folder", "dataset"])
def test_it_says_which_split_is_read(kind: str, tmp_path: Path) -> None:
    images = {f"train/a/{number}.jpg": jpeg(seed=number) for number in range(3)}
    path = make_tree(tmp_path / "splits", {**images, "val/a/0.jpg": jpeg(seed=9)})
    if kind == "dataset":
        path = make_dataset(path, tmp_path / "made")

    assert (opened(path)[1]["split"], opened(path)[1]["images"]) == ("train", 3)
    assert opened(path / "val")[1]["split"] == ""


def test_it_says_what_asks_for_processes(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = make_dataset(folder, tmp_path / "made")
    (tmp_path / "planted_unmarked.py").write_text("def unmarked(image): return image\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)

    assert opened(made)[1]["processes"] == ""
    unmarked = opened(made, decode="pil", transform="planted_unmarked:unmarked")[1]
    assert "unmarked may hold the GIL" in unmarked["processes"]


def test_reading_once_brings_the_files_into_memory(folder: Path) -> None:
    child, _ = opened(folder)
    child.answer({"ask": "drop"})

    assert child.answer({"ask": "warm"}) == {"warnings": []}
    assert all(child.answer({"ask": "drop"})["resident"] <= 1 for _ in range(2))


def test_pages_that_come_back_are_dropped_again(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thread of the look before was still reading."""
    drops: list[int] = []
    parts = iter([0.5, 0.2, 0.0])
    monkeypatch.setattr(pages, "drop", lambda files: drops.append(len(files)))
    monkeypatch.setattr(pages, "resident", lambda files: next(parts))
    child, _ = opened(folder)

    assert child.answer({"ask": "drop"})["resident"] == 0.0
    assert drops == [6, 6, 6]


def test_pages_that_stay_are_told(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pages, "resident", lambda files: 1.0)
    child, _ = opened(folder)

    assert child.answer({"ask": "drop"})["resident"] == 1.0


def test_the_time_of_a_step_is_told(folder: Path) -> None:
    child, _ = opened(folder)

    found = child.answer({"ask": "step", "loading": PLAIN, "step": {"milliseconds": 20.0}})

    assert 0.02 <= found["seconds"] < 0.2


def test_what_cannot_be_done_is_refused(folder: Path) -> None:
    assert "does not exist" in opened(folder / "nowhere")[1]["refused"]
    assert "unknown" in opened(folder, decode="flip")[1]["refused"]
    child, _ = opened(folder)
    options = {**PLAIN, "options": {"num_workers": -1}}
    asked = {"ask": "look", "loading": options, "span": EPOCH, "step": {}}
    assert "below 0" in child.answer(asked)["refused"]


def test_what_fails_is_told(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "planted_failure.py").write_text("def fails(image): raise ValueError('planted')\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    child, _ = opened(folder, decode="pil", transform="planted_failure:fails")

    found = child.answer({"ask": "look", "loading": PLAIN, "span": EPOCH, "step": {}})

    assert found["failed"] == "ValueError: planted"


def test_images_of_several_sizes_get_a_remedy(folder: Path) -> None:
    child, _ = opened(folder, decode="torch")

    found = child.answer({"ask": "look", "loading": PLAIN, "span": EPOCH, "step": {}})

    assert "equal size" in found["failed"]
    assert "CenterCrop(224)" in found["failed"]


def test_a_workers_error_is_told_without_its_traceback() -> None:
    message = (
        "ValueError: Caught ValueError in DataLoader worker process 0.\n"
        "Original Traceback (most recent call last):\n"
        '  File "fetch.py", line 1, in fetch\n'
        "    raise ValueError\n"
        "ValueError: first\nsecond\n"
    )

    assert last_words(message) == "ValueError: first\nsecond"
    assert last_words("one\n  two") == "one\n  two"


def test_bytes_are_of_all_files_and_the_mean_is_of_all_classes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small, large = jpeg(8, 8), jpeg(8, 8) + bytes(50_000)
    photos = make_tree(
        tmp_path / "photos",
        {
            f"{kind}/{number}.jpg": content
            for kind, content in (("a", small), ("b", large))
            for number in range(6)
        },
    )
    made = make_dataset(photos, tmp_path / "made")
    stored = 6 * len(small) + 6 * len(large)
    monkeypatch.setattr(material, "_LOOKED_AT", 4)

    for path in (photos, made):
        found = opened(path, limit=3)[1]
        assert (found["images"], found["total"]) == (3, 12)
        assert found["bytes"] >= stored
    assert opened(photos, limit=3)[1]["bytes"] == stored
    assert opened(photos)[1]["mean_bytes"] == stored / 12
