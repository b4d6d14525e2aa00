"""Damaged datasets: `verify` finds all damage, and no reader returns a wrong sample or crashes."""

from __future__ import annotations

import contextlib
import json
import shutil
import signal
import sys
import traceback
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import numpy as np
import pytest
from campaign import cases, draw, points
from helpers import (
    DEADLINE,
    FORMATS,
    encoded,
    invoke,
    jpeg,
    limit_memory,
    make_dataset,
    make_tree,
    picture,
    png,
    png_chunk,
)
from hostile.damage import Damage, Outcome, Stock, damages, place_of

from shardkit import ShardkitError, make_loader, open_dataset, verify
from shardkit.errors import CorruptDataset, CorruptRecord, CorruptShard, UsageError
from shardkit.recipe import Recipe
from shardkit.testing.tools import call_in

SIZE = (31, 30)
"""Width and height of all images."""

BYTES = len(encoded(picture(*SIZE), "BMP"))
"""Bytes of all image files: so that shards of different content have one size."""

RAW = Recipe(resize=(SIZE[1], SIZE[0]), resize_mode="stretch", encode="raw")

VARIANTS = [(to, kind) for to in FORMATS for kind in ("encoded", "raw", "splits")]

FIGURES: Counter[str] = Counter()
"""What all cases came to; `pytest -s` prints it."""


class Variant(NamedTuple):
    """A kind of dataset, with all that is needed to damage it."""

    stock: Stock
    raw: bool

    @property
    def splits(self) -> tuple[str, ...]:
        return ("train", "val") if (self.stock.made / "val").exists() else ("",)


class Sample(NamedTuple):
    """What a row of a dataset must give."""

    data: bytes
    label: int
    key: str
    path: str


def image_file(name: str, seed: int) -> bytes:
    """Return an image of `BYTES` bytes, of the kind that its name says."""
    if name.endswith(".bmp"):
        return encoded(picture(*SIZE, seed), "BMP")
    if name.endswith(".png"):
        content = png(*SIZE, seed)
        pad = BYTES - len(content) - 12
        return content[:-12] + png_chunk(b"paDd", bytes(pad)) + content[-12:]
    content = jpeg(*SIZE, seed)
    pad = BYTES - len(content) - 2
    return content[:2] + b"\xff\xfe" + pad.to_bytes(2, "big") + bytes(pad - 2) + content[2:]


def make_photos(root: Path, *, splits: bool, seed: int) -> Path:
    """Make an image folder whose files have one size; another seed gives other pixels."""
    files: dict[str, bytes | None] = {"notes.txt": b"no image"}
    for split in ("train/", "val/") if splits else ("",):
        files[f"{split}notes.txt"] = b"no image"
        for number in range(10):
            suffix = ("bmp", "jpg", "bmp", "png")[number % 4]
            name = f"{split}{('ant', 'bee', 'cat')[number % 3]}/{number:02d}.{suffix}"
            files[name] = image_file(name, seed + number + len(split))
    return make_tree(root, files)


def make_variant(root: Path, to: str, kind: str) -> Variant:
    splits = kind == "splits"
    recipe = {"recipe": RAW} if kind == "raw" else {}
    photos = make_photos(root / "photos", splits=splits, seed=0)
    before = make_photos(root / "old/photos", splits=splits, seed=50)
    return Variant(
        Stock(
            make_dataset(photos, root / "made", to=to, **recipe),
            make_dataset(before, root / "older", to=to, **recipe),
            make_dataset(photos, root / "other", to=to, seed=1, **recipe),
        ),
        kind == "raw",
    )


@pytest.fixture(scope="module", params=cases(VARIANTS, 3), ids="-".join)
def variant(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Variant:
    to, kind = request.param
    return make_variant(tmp_path_factory.mktemp(f"{to}-{kind}"), to, kind)


@pytest.fixture(scope="module", autouse=True)
def _figures() -> Iterator[None]:
    yield
    sys.stdout.writelines(f"\n{name}: {count}" for name, count in sorted(FIGURES.items()))


def samples_of(place: Path) -> list[Sample]:
    dataset = open_dataset(place, decode="bytes", verify=True)
    return [
        Sample(dataset[row][0], dataset[row][1], key, path)
        for row, (key, path) in enumerate(zip(dataset.keys, dataset.paths, strict=True))
    ]


def pixels_of(place: Path, engine: str, num_workers: int) -> Iterator[np.ndarray[Any, Any]]:
    options: dict[str, Any] = {"engine": engine, "num_workers": num_workers}
    loader = make_loader(open_dataset(place, decode="numpy"), 4, **options)
    with contextlib.closing(loader):
        for images, _ in loader:
            yield np.array(images)


def test_the_datasets_are_what_the_damages_need(variant: Variant) -> None:
    made, older, other = (place_of(place) for place in variant.stock)
    shards = sorted(path.name for path in made.glob("shard-*"))
    assert len(shards) == 3
    for name in shards:
        assert (older / name).stat().st_size == (made / name).stat().st_size
        assert len({(place / name).read_bytes() for place in (made, older, other)}) == 3
    for place in variant.stock:
        assert verify(place, "decode").ok


def test_all_damage_is_found_and_no_wrong_sample_is_read(variant: Variant, tmp_path: Path) -> None:
    failures, figures = call_in("fork", try_all, variant, tmp_path)
    FIGURES.update(figures)
    assert "\n".join(failures) == ""


def try_all(variant: Variant, folder: Path) -> tuple[list[str], dict[str, int]]:
    """Do each damage to a copy of its own; return what went wrong, and the figures."""
    limit_memory(1 << 30)  # what would take all memory is an error: an endless device
    trial = Trial(variant)
    every = list(damages(splits=len(variant.splits) > 1))
    for number, damage in enumerate(cases(every, 40) * points(1, 5)):
        dataset = folder / f"{number}/made"
        shutil.copytree(variant.stock.made, dataset)
        signal.signal(signal.SIGALRM, hang)
        signal.setitimer(signal.ITIMER_REAL, DEADLINE)
        try:
            outcome = damage.apply(dataset, variant.stock, draw(damage.name, number))
            trial.begin(damage, dataset, outcome)
            trial.verify()
            if not outcome.whole:
                trial.read_splits()
        except BaseException as error:
            signal.setitimer(signal.ITIMER_REAL, 0)
            trial.fail(f"{type(error).__name__}: {error}")
        signal.setitimer(signal.ITIMER_REAL, 0)
        shutil.rmtree(folder / str(number))
    return trial.failures, dict(trial.figures)


class Hang(BaseException):
    """No reader catches it."""


def hang(number: int, frame: FrameType | None) -> None:
    raise Hang(f"it hangs: {''.join(traceback.format_stack(frame)[-3:])}")


class Trial:
    """One damaged dataset after the other, and what became of it."""

    def __init__(self, variant: Variant) -> None:
        self._raw = variant.raw
        self._splits = variant.splits
        made = variant.stock.made
        self._samples = {split: samples_of(made / split) for split in variant.splits}
        self._pixels = {split: list(pixels_of(made / split, "thread", 2)) for split in self._splits}
        self.failures: list[str] = []
        self.figures: Counter[str] = Counter()

    def begin(self, damage: Damage, dataset: Path, outcome: Outcome) -> None:
        self._damage, self._dataset, self._outcome = damage, dataset, outcome
        self.figures["damages"] += 1

    def fail(self, reason: str) -> None:
        self.failures.append(f"{self._damage.name}: {reason}")

    def verify(self) -> None:
        outcome = self._outcome
        if outcome.usage:
            self._check_usage()
            return
        result = invoke("verify", self._dataset, "--workers", 1, "--json")
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        found = json.loads(result.stdout)["findings"]
        files = {finding["file"] for finding in found}
        if outcome.sound:
            if files or result.exit_code:
                self.fail(f"full finds {found}")
            return
        if result.exit_code != 1:
            self.fail(f"full exits with {result.exit_code}")
        elif not files & outcome.files or files - outcome.files:
            self.fail(f"full blames {sorted(files)}, not {sorted(outcome.files)}")
        named = {(Path(finding["file"]).parts[0], finding["row"]) for finding in found}
        if not outcome.rows <= named:
            self.fail(f"full names {named}, not {outcome.rows}")
        levels = ["quick"] * outcome.quick + ["decode"] * (self.figures["damages"] % 4 == 0)
        for level in levels:
            found = {finding.file for finding in verify(self._dataset, level).findings}  # type: ignore[arg-type]
            if not found & outcome.files or found - outcome.files:
                self.fail(f"{level} blames {sorted(found)}, not {sorted(outcome.files)}")

    def _check_usage(self) -> None:
        try:
            result = verify(self._dataset)
        except (UsageError, CorruptDataset):
            return
        if result.ok:
            self.fail("full finds nothing")

    def read_splits(self) -> None:
        for split in self._splits:
            place = self._dataset / split
            self._read(place, self._samples[split], checked=True)
            if self._raw:
                self._read(place, self._samples[split], checked=False)
            self._load(place, self._pixels[split])

    def _read(self, place: Path, samples: list[Sample], *, checked: bool) -> None:
        """Read each row: the right sample, or an error that names it."""
        try:
            dataset = open_dataset(place, decode="bytes", verify=True if checked else None)
        except (CorruptDataset, UsageError) as error:
            self.figures["rows refused"] += len(samples)
            if str(place) not in str(error):
                self.fail(f"opening does not name the dataset: {error}")
            return
        for row, sample in enumerate(samples):
            self._read_row(dataset, row, sample, checked=checked)

    def _read_row(self, dataset: Any, row: int, sample: Sample, *, checked: bool) -> None:
        try:
            data, label = dataset[row]
        except (CorruptDataset, UsageError) as error:
            self.figures["rows refused"] += 1
            self._check_error(error, dataset.path, sample)
        except IndexError:
            if row < len(dataset):
                raise
        else:
            wrong = (label != sample.label) or (data != sample.data and checked)
            self.figures["rows WRONG" if wrong else "rows right"] += 1
            if wrong:
                self.fail(f"row {row} gives another sample")
            elif data != sample.data:
                self.figures["raw pixels not compared, as documented"] += 1
        for table, right in (("keys", sample.key), ("paths", sample.path)):
            try:
                found = getattr(dataset, table)[row]
            except (CorruptDataset, IndexError):
                continue
            if found != right:
                self.fail(f"{table}[{row}] is {found!r}")

    def _check_error(self, error: ShardkitError, place: Path, sample: Sample) -> None:
        text = str(error)
        expected = [str(place)]
        if isinstance(error, CorruptShard | CorruptRecord):
            expected = [f"{place}/"]
        if isinstance(error, CorruptRecord):
            expected += ["byte ", sample.key, sample.path]
            if "unknown: the index is damaged too" in text:
                expected = expected[:2]
        if missing := [part for part in expected if part not in text]:
            self.fail(f"{type(error).__name__} does not name {missing}: {text}")

    def _load(self, place: Path, expected: list[np.ndarray[Any, Any]]) -> None:
        """Read with a loader: all right, or right up to an error."""
        try:
            batches = list(pixels_of(place, "thread", 2))
        except (CorruptDataset, UsageError):
            self.figures["epochs refused"] += 1
            return
        right = all(map(np.array_equal, batches, expected))
        self.figures["epochs right" if right else "epochs not right"] += 1
        if not right and not self._raw:
            self.fail("a loader gives wrong samples")
