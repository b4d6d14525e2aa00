"""A trial conversion: what is measured, and that nothing of it stays behind."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pytest
from helpers import jpeg, make_dataset, make_tree

from shardkit import ConversionFailed, MeasurementFailed, ShardDataset, open_dataset
from shardkit.conversion.convert import convert_scan
from shardkit.conversion.recipe import Recipe
from shardkit.measure.doctor import trial
from shardkit.measure.doctor.trial import size_of_trial, try_out
from shardkit.measure.runner.rounds import Candidate, Result, Rounds
from shardkit.measure.runner.spec import LoaderSpec, Subject

SMALL = Recipe(resize=(24, 24))


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where temporary folders are made."""
    place = tmp_path / "temporary"
    place.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(place))
    monkeypatch.setattr(trial, "SECONDS", 0.05)
    monkeypatch.setattr(trial, "ROUNDS", 1)
    return place


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    large = {name: jpeg(1000, 750, seed) for seed, name in enumerate("ab")}
    files: dict[str, bytes | None] = {
        f"{name}/{n}.jpg": data for name, data in large.items() for n in range(8)
    }
    return make_tree(tmp_path_factory.mktemp("trial") / "photos", files)


def test_its_size_is_a_hundredth_within_limits() -> None:
    sizes = {count: size_of_trial(count) for count in (3, 64, 6_400, 20_000, 1_281_167)}

    assert sizes == {3: 3, 64: 64, 6_400: 64, 20_000: 200, 1_281_167: 1_000}


@pytest.mark.slow
def test_a_folder_is_converted_and_both_are_read(photos: Path, temporary: Path) -> None:
    subject = Subject(path=str(photos), decode="CenterCrop(16)")
    loading = LoaderSpec(engine="thread", options={"num_workers": 1})
    found = try_out(subject, loading, SMALL, "hdf5")

    assert found.images == 16
    assert found.batch_size == 2
    assert found.gain == pytest.approx(found.after / found.before)
    assert found.gain > 1.5  # decoding alone takes several times as long
    assert found.bytes_before == sum(path.stat().st_size for path in photos.rglob("*.jpg"))
    assert found.bytes_after < found.bytes_before
    assert list(temporary.iterdir()) == []


def test_the_images_of_a_dataset_are_the_source(
    photos: Path, tmp_path: Path, temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = make_dataset(photos, tmp_path / "made", to="webdataset")
    seen: dict[str, Any] = {}

    def run_interleaved(contenders: list[Candidate], **_: Any) -> Rounds:
        for each in contenders:
            dataset = open_dataset(each.subject.path, decode="bytes")
            seen[each.name] = dataset.manifest
            seen[f"{each.name} samples"] = samples_of(dataset)
        raise KeyboardInterrupt

    monkeypatch.setattr(trial, "run_interleaved", run_interleaved)
    with pytest.raises(KeyboardInterrupt):
        try_out(Subject(path=str(made)), LoaderSpec(), SMALL, "webdataset")

    assert seen["before"].format == seen["after"].format == "webdataset"
    assert seen["after"].recipe["resize"] == [24, 24]
    assert seen["before samples"] == samples_of(open_dataset(made, decode="bytes"))
    labels = [label for label, _ in seen["before samples"]]
    assert labels == [label for label, _ in seen["after samples"]] == [0] * 8 + [1] * 8
    assert list(temporary.iterdir()) == []


def samples_of(dataset: ShardDataset) -> list[tuple[int, bytes]]:
    samples = [dataset[row] for row in range(len(dataset))]
    return sorted((label, data) for data, label in samples)


def test_a_dataset_without_labels_has_none_in_the_trial(
    photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = make_dataset(photos / "a", tmp_path / "made")
    seen = []

    def run_interleaved(contenders: list[Candidate], **_: Any) -> Rounds:
        for each in contenders:
            dataset = open_dataset(each.subject.path)
            seen.append((len(dataset), dataset.classes))
        failed = [Result(candidate=each, problem="a reason") for each in contenders]
        return Rounds(results=failed, complete=1)

    monkeypatch.setattr(trial, "run_interleaved", run_interleaved)
    with pytest.raises(MeasurementFailed, match="the trial could not be measured: a reason"):
        try_out(Subject(path=str(made)), LoaderSpec(), SMALL, "lmdb")
    assert seen == [(8, []), (8, [])]


def test_an_image_that_cannot_be_converted_ends_it_cleanly(tmp_path: Path, temporary: Path) -> None:
    files: dict[str, bytes | None] = {f"a/{n}.jpg": jpeg(40, 30, n) for n in range(4)}
    root = make_tree(tmp_path / "photos", {**files, "a/bad.jpg": jpeg(40, 30)[:200]})

    with pytest.raises(ConversionFailed):
        try_out(Subject(path=str(root)), LoaderSpec(), SMALL, "lmdb")
    assert list(temporary.iterdir()) == []


def test_a_damaged_trial_is_not_measured(
    photos: Path, temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def convert(scan: Any, target: Path, *given: Any, **named: Any) -> Any:
        made = convert_scan(scan, target, *given, **named)
        shard = next(target.glob("shard-*"))
        data = bytearray(shard.read_bytes())
        data[len(data) // 2] ^= 1
        shard.write_bytes(data)
        return made

    monkeypatch.setattr(trial, "convert_scan", convert)
    with pytest.raises(MeasurementFailed, match="the trial's dataset is damaged"):
        try_out(Subject(path=str(photos)), LoaderSpec(), SMALL, "webdataset")
    assert list(temporary.iterdir()) == []
