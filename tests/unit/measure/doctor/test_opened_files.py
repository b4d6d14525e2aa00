"""Image files that a dataset opens are found, and each planted condition of the machine."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers import jpeg, make_tree
from PIL import Image
from torch.utils.data import DataLoader, Dataset

from shardkit.measure.doctor import checks
from shardkit.measure.doctor.checks import CHECKS, SEVERITIES, Finding, Plan, run_checks
from shardkit.measure.doctor.opened_files import only_image, opened_paths
from shardkit.measure.doctor.pipeline import Loading, Pipeline
from shardkit.measure.doctor.profile import Profile
from shardkit.measure.doctor.profiling import profile
from shardkit.measure.doctor.remedies import propose
from shardkit.measure.doctor.stored import convert_images, to_convert, write_images
from shardkit.measure.runner.session import Session
from shardkit.measure.runner.spec import StepSpec, Subject

ROWS = 12


class Own(Dataset[Any]):
    """Images, and for each a file that is none."""

    def __init__(self, folder: Path, *, masks: bool = False, files: int = ROWS) -> None:
        self.folder, self.masks, self.files = folder, masks, files

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, row: int) -> tuple[torch.Tensor, int]:
        (self.folder / "notes.txt").read_text()
        if self.masks:
            Image.open(self.folder / f"a/{(row + 1) % ROWS}.jpg").load()
        with open(self.folder / f"a/{row % self.files}.jpg", "rb") as file:
            image = Image.open(file).convert("RGB")
        return torch.full((3, 32, 32), image.width, dtype=torch.uint8), row


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    files: dict[str, bytes | None] = {f"a/{n}.jpg": jpeg(64, 48, n) for n in range(ROWS)}
    return make_tree(tmp_path_factory.mktemp("opened") / "photos", {**files, "notes.txt": b"none"})


def session(dataset: Any) -> Session:
    loader = DataLoader(dataset, 4)
    return Session(subject=Subject(loader="made:up"), dataset=dataset, loader=loader)


def profiled(dataset: Any) -> Profile:
    return profile(session(dataset), loading=Loading(), seconds=60.0, step=StepSpec())


def test_paths_are_collected_within_the_context_only(photos: Path) -> None:
    one, two = photos / "a/1.jpg", photos / "a/2.jpg"
    with opened_paths() as paths:
        one.read_bytes()
        with open(os.fsencode(two), "rb"):
            pass
    (photos / "a/3.jpg").read_bytes()
    assert paths == [str(one), str(two)]


@pytest.mark.parametrize(
    ("names", "found"),
    [
        (["a/1.jpg"], "a/1.jpg"),
        (["notes.txt", "a/1.jpg", "a/1.jpg", "missing", "a"], "a/1.jpg"),
        (["a/1.jpg", "a/2.jpg"], ""),
        (["notes.txt"], ""),
        ([], ""),
    ],
)
def test_the_only_image_is_told_from_other_files(
    names: list[str], found: str, photos: Path
) -> None:
    expected = str(photos / found) if found else ""
    assert only_image([str(photos / name) for name in names]) == expected


def test_the_images_of_an_own_dataset_are_found_and_converted(photos: Path, tmp_path: Path) -> None:
    dataset = Own(photos)
    found = profiled(dataset)
    assert list(found.stages) == ["dataset", "collate"]
    assert found.files == [str(photos / f"a/{row}.jpg") for row in found.rows]
    assert (found.kind, found.side, found.crop) == ("jpg", 48, 32)

    (remedy,) = [each for each in propose(found) if each.recipe is not None]
    assert remedy.name == "the same images as a shardkit dataset"
    assert remedy.decode == "RandomResizedCrop(32)"
    assert remedy.price.endswith("of disk space; skips everything else that Own does")

    given = session(dataset)
    write_images(given, rows=found.rows, files=found.files, folder=tmp_path / "source")
    assert remedy.recipe is not None
    convert_images(tmp_path / "source", tmp_path / "made", remedy.recipe)
    loader = Pipeline(given, Loading(batch_size=4)).loader(remedy, str(tmp_path / "made"), [0])
    images, labels = next(iter(loader))
    assert (tuple(images.shape), labels.tolist()) == ((4, 3, 32, 32), [0] * 4)

    converted = to_convert(given, files=found.files)
    assert (converted.path, converted.kind) == (str(photos / "a"), "imagefolder")
    then, labels = converted.hints("made", remedy.decode)
    assert "decode=RandomResizedCrop(32)" in then
    assert labels.startswith("labels are the folders in ")


@pytest.mark.parametrize("options", [{"masks": True}, {"files": 3}])
def test_a_row_without_a_file_of_its_own_is_not_taken_for_it(
    options: dict[str, Any], photos: Path
) -> None:
    found = profiled(Own(photos, **options))
    assert not found.kind
    assert [remedy for remedy in propose(found) if remedy.recipe] == []


# The checks of the machine: each planted condition is found, with its evidence and remedy.

GB, MB = 1 << 30, 1 << 20

MACHINE: dict[str, Any] = {
    "machine.affinity": 8,
    "machine.cpu_quota": None,
    "machine.memory_limit": 32 * GB,
    "machine.filesystem": ("ext4", "/"),
    "preflight.shared_memory": (16 * GB, 16 * GB),
    "preflight.open_files_limit": 65536,
    "features.check": True,
    "native.describe": "libjpeg-turbo",
    "os.cpu_count": 8,
}
"""What a machine without faults returns."""

PLANTED: list[tuple[dict[str, Any], str, str, str]] = [
    ({"machine.affinity": 2}, "processors", "note", "affinity 2 of 8"),
    ({"machine.cpu_quota": 3.0}, "processors", "note", "3 CPUs"),
    ({"preflight.shared_memory": (64 * MB, 64 * MB)}, "shared memory", "warning", "64.0 MiB"),
    ({"preflight.shared_memory": (16 * GB, MB)}, "shared memory", "problem", "1.0 MiB free of"),
    ({"preflight.open_files_limit": 256}, "open files", "warning", "`ulimit -n` is 256"),
    ({"preflight.open_files_limit": 99}, "open files", "problem", "worker processes need 80"),
    ({"machine.memory_limit": GB}, "memory", "note", "data 1.0 GiB"),
    ({"machine.filesystem": ("nfs4", "/data")}, "file system", "note", "nfs4 at /data"),
    ({"machine.filesystem": ("fuse.gcsfuse", "/data")}, "file system", "note", "fuse.gcsfuse"),
    ({"machine.filesystem": ("overlay", "/")}, "file system", "note", "overlay"),
    ({"features.check": False}, "libraries", "warning", "libjpeg-turbo in Pillow: no"),
    ({"native.describe": "not built"}, "libraries", "note", "compiled module: not built"),
]


@pytest.fixture
def found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """Run the checks on a machine with planted conditions."""
    for name in checks._THREAD_VARIABLES:
        monkeypatch.delenv(name, raising=False)

    def run(planted: dict[str, Any], **plan: Any) -> dict[str, Finding]:
        for place, value in (MACHINE | planted).items():
            monkeypatch.setattr(
                f"shardkit.measure.doctor.checks.{place}", lambda *_, value=value: value
            )
        data = {"workers": 8, "processes": True, "files": [tmp_path], "bytes": GB}
        given = Plan(**{**data, "batch_bytes": MB, **plan})
        return {each.name: each for each in run_checks(given)}

    return run


@pytest.mark.parametrize(("planted", "name", "severity", "evidence"), PLANTED)
def test_a_planted_condition_is_found(
    found: Any, planted: dict[str, Any], name: str, severity: str, evidence: str
) -> None:
    findings = found(planted)

    assert findings[name].severity == severity
    assert evidence in findings[name].evidence
    assert findings[name].remedy or severity == "note"
    assert {each.severity for each in findings.values() if each.name != name} <= {"ok"}


def test_too_many_threads_are_found(found: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "64")
    assert found({})["threads"].what == "libraries are set to use 64 threads on 8 CPUs"
    monkeypatch.setitem(sys.modules, "cv2", SimpleNamespace(getNumThreads=lambda: 8))
    assert "8 OpenCV threads each" in found({}, processes=False)["threads"].what


def test_a_machine_without_faults_passes_all_checks(found: Any) -> None:
    assert [*found({})] == [*CHECKS]
    assert {each.severity for each in found({}).values()} == {"ok"}
    assert [*found({}, files=[], bytes=0)] == [name for name in CHECKS if name != "file system"]


def test_the_worst_comes_first(found: Any) -> None:
    planted = {
        "native.describe": "not built",
        "machine.affinity": 2,
        "features.check": False,
        "preflight.open_files_limit": 99,
    }
    order = [SEVERITIES.index(each.severity) for each in found(planted).values()]

    assert order == sorted(order)
    assert len(set(order)) == 4


def test_this_machine_can_be_checked() -> None:
    assert {each.name for each in run_checks(Plan())} >= {"processors", "libraries"}
