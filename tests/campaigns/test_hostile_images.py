"""Each odd and hostile file becomes what is written down for it, and its neighbours are stored.

The files and their outcomes are in `tests/support/hostile/images.py`.
"""

from __future__ import annotations

import io
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
from campaign import cases
from helpers import FORMATS, Pixels, encoded
from hostile.cases import LEVELS, Case, Ignored, Outcome, Problem, Rejected, Stored, at_level
from hostile.folder import NEIGHBOURS, make_source
from hostile.images import CASES
from PIL import Image

from shardkit import ShardDataset, open_dataset, verify
from shardkit.conversion.convert import convert_scan
from shardkit.conversion.plan import ConvertOptions
from shardkit.errors import BadImage, BadImages, CorruptRecord
from shardkit.errors import Problem as Reported
from shardkit.recipe import Recipe
from shardkit.record import load_json
from shardkit.registry import get_format
from shardkit.sources.imagefolder import scan_imagefolder

RECIPES = {
    "decode": Recipe(),
    "header": Recipe(check="header"),
    "none": Recipe(check="none"),
    "resize": Recipe(resize=8),
    "raw": Recipe(resize=(8, 8), resize_mode="stretch", enlarge=True, encode="raw"),
}

TRIED = ["decode", *cases([level for level in LEVELS if level != "decode"], 1)]
"""Levels, each in LMDB."""

STORED = ["lmdb", *cases([to for to in FORMATS if to != "lmdb"], 1)]
"""Formats, each with the level `decode`."""

PAIRS = list(
    dict.fromkeys([("lmdb", level) for level in TRIED] + [(to, "decode") for to in STORED])
)

NEIGHBOUR = Stored(kind="jpg")
UNSEEN = ("header", "none")
"""Levels at which damaged images may be stored."""

TURNS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}


class Made(NamedTuple):
    """A dataset of all cases, and what the conversion said of those that are not in it."""

    dataset: ShardDataset
    rows: dict[str, int]
    skipped: dict[str, str]
    ignored: dict[str, str]
    outcomes: dict[str, Outcome]


def convert_all(root: Path, source: Path, to: str, level: str) -> Made:
    """Scan, let happen what happens then, convert, and restore the files."""
    scan = scan_imagefolder(source)
    for case in CASES:
        if case.later:
            case.later(source / "odd" / case.folder)
    options = ConvertOptions(
        to=to, recipe=RECIPES[level], on_error="skip", shard_samples=100, shuffle=True
    )
    done = convert_scan(scan, root / f"{to}-{level}", options)
    dataset = open_dataset(root / f"{to}-{level}", decode="numpy")
    return Made(
        dataset,
        {path: row for row, path in enumerate(dataset.paths)},
        {problem.path: problem.reason for problem in done.manifests[""].skipped},
        _ignored(root / f"{to}-{level}"),
        {
            f"odd/{case.folder}/{path}": at_level(case, path, level)
            for case in CASES
            for path in case.outcomes
        },
    )


def _ignored(directory: Path) -> dict[str, str]:
    lines = (directory / "ignored.jsonl").read_bytes().splitlines()
    problems = [Reported(**load_json(line)) for line in lines]
    return {problem.path: problem.reason for problem in problems}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Mapping[tuple[str, str], Made]:
    """Conversions by format and level."""
    root = tmp_path_factory.mktemp("hostile")
    return {
        (to, level): convert_all(root, make_source(root / f"source-{to}-{level}"), to, level)
        for to, level in PAIRS
    }


def named(path: str) -> str:
    """Return what a failure says of a case."""
    case = next((case for case in CASES if f"/{case.folder}/" in f"/{path}/"), None)
    return f"{case.group}: {case.name} ({path!r})" if case else path


def shown(sample: object) -> Pixels:
    assert isinstance(sample, tuple)
    image = sample[0]
    assert isinstance(image, np.ndarray)
    return image


def reference(case: Case, path: str, level: str) -> Pixels | None:
    """Return the pixels that a stored file is to show, computed without shardkit."""
    outcome = at_level(case, path, level)
    if not isinstance(outcome, Stored) or outcome.pixels is None:
        return None
    values = np.ascontiguousarray(outcome.pixels())
    if level not in ("resize", "raw"):
        return values
    image = Image.fromarray(values)
    turn = TURNS.get(outcome.notes.get("orientation", 1))
    if turn is not None:
        image = image.transpose(turn)
    if level == "raw":
        return np.asarray(image.resize((8, 8), Image.Resampling.BICUBIC))
    width, height = image.size
    short = min(width, height)
    size = (8, 8 * height // width) if width == short else (8 * width // height, 8)
    small = image.resize(size, Image.Resampling.BICUBIC)
    kind, options = {"jpg": ("JPEG", {"quality": 90}), "webp": ("WEBP", {"quality": 90})}.get(
        outcome.kind, ("PNG", {})
    )
    return np.asarray(Image.open(io.BytesIO(encoded(small, kind, **options))).convert("RGB"))


def cases_by_path() -> Iterator[tuple[str, Case, str]]:
    for case in CASES:
        for path in case.outcomes:
            yield f"odd/{case.folder}/{path}", case, path


@pytest.mark.parametrize("level", TRIED)
def test_each_file_becomes_what_is_written_down(
    made: Mapping[tuple[str, str], Made], level: str
) -> None:
    found = made["lmdb", level]
    wrong = []
    for path, outcome in found.outcomes.items():
        if isinstance(outcome, Stored):
            reason = found.skipped.get(path, found.ignored.get(path))
            right = path in found.rows and reason is None
        else:
            place = found.ignored if isinstance(outcome, Ignored) else found.skipped
            reason = place.get(path)
            right = reason is not None and outcome.words in reason and path not in found.rows
        if not right:
            wrong.append(f"{named(path)}: {outcome}, found {reason}")
    known = {*found.outcomes, *NEIGHBOURS}
    wrong += [
        f"{named(path)} is in no case: {reason}"
        for place in (found.skipped, found.ignored)
        for path, reason in place.items()
        if path not in known
    ]
    wrong += [f"{named(path)} is stored and in no case" for path in found.rows if path not in known]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("to", STORED)
def test_each_format_rejects_the_same_for_the_same_reasons(
    made: Mapping[tuple[str, str], Made], to: str
) -> None:
    one, other = made["lmdb", "decode"], made[to, "decode"]
    assert other.skipped == one.skipped
    assert other.ignored == one.ignored
    assert other.rows == one.rows


@pytest.mark.parametrize(("to", "level"), PAIRS)
def test_each_image_shows_its_own_pixels(
    made: Mapping[tuple[str, str], Made], to: str, level: str
) -> None:
    found = made[to, level]
    wrong = []
    for path, case, name in cases_by_path():
        outcome = found.outcomes[path]
        if not isinstance(outcome, Stored):
            continue
        expected = reference(case, name, level)
        try:
            values = shown(found.dataset[found.rows[path]])
        except (BadImage, CorruptRecord) as error:  # the latter: of another size than stated
            if expected is not None:
                wrong.append(f"{named(path)}: {error}")
            continue
        if expected is None:
            # Nobody looked at it when it was stored, and it can be decoded after all.
            if level in ("decode", "resize", "raw"):
                wrong.append(f"{named(path)}: no pixels were expected")
        elif values.shape != expected.shape:
            wrong.append(f"{named(path)}: {values.shape} and not {expected.shape}")
        elif (off := np.abs(values.astype(int) - expected.astype(int)).max()) > outcome.near:
            wrong.append(f"{named(path)}: off by {off}")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("level", TRIED)
def test_what_was_noticed_of_an_image_stands_beside_it(
    made: Mapping[tuple[str, str], Made], level: str
) -> None:
    """Orientation and number of frames; a plain copy keeps the orientation, all others apply it."""
    found = made["lmdb", level]
    wrong = []
    for shard in found.dataset.manifest.shards:
        reader = get_format("lmdb").read(found.dataset.path / shard.name)
        for record in reader.read(range(shard.rows)):
            meta = record.meta
            outcome = found.outcomes.get(meta["path"], NEIGHBOUR)
            assert isinstance(outcome, Stored)
            expected = dict(outcome.notes)
            if level in ("resize", "raw"):
                expected.pop("orientation", None)
            noted = {name: meta[name] for name in ("frames", "orientation") if name in meta}
            if noted != expected and (outcome.pixels is not None or level not in UNSEEN):
                wrong.append(f"{named(meta['path'])}: {noted} and not {expected}")
        reader.close()
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(("to", "level"), PAIRS)
def test_the_neighbours_are_stored_whole(
    made: Mapping[tuple[str, str], Made], to: str, level: str
) -> None:
    found = made[to, level]
    for path, data in NEIGHBOURS.items():
        sample = found.dataset[found.rows[path]]
        assert sample[1] == found.dataset.class_to_idx[path.partition("/")[0]]
        if level not in ("resize", "raw"):
            whole = np.asarray(Image.open(io.BytesIO(data)).convert("RGB"))
            assert np.array_equal(shown(sample), whole), path


@pytest.mark.parametrize("level", TRIED)
def test_a_reason_says_what_is_wrong_in_words(
    made: Mapping[tuple[str, str], Made], level: str
) -> None:
    found = made["lmdb", level]
    for path, reason in {**found.skipped, **found.ignored}.items():
        assert not re.search(r"0x[0-9a-f]{6}|<[_a-zA-Z. ]+>|\bNone\b|Traceback", reason), (
            f"{named(path)}: {reason}"
        )
        assert re.fullmatch(r"[^\x00-\x1f]+", reason), f"{named(path)}: {reason!r}"
        assert len(reason) <= 200, f"{named(path)}: {reason}"
        # A class's name may stand there, for who reports it, but beside words.
        assert len(re.findall(r"\b[a-z]{2,}\b", reason)) >= 2 or reason == "hidden", (
            f"{named(path)}: {reason}"
        )


@pytest.mark.parametrize("to", STORED)
def test_nothing_that_was_stored_is_found_damaged(
    made: Mapping[tuple[str, str], Made], to: str
) -> None:
    found = verify(made[to, "decode"].dataset.path, "decode")
    assert found.findings == []
    assert found.records == len(made[to, "decode"].rows)


def test_all_bad_files_are_named_at_once(
    made: Mapping[tuple[str, str], Made], tmp_path: Path
) -> None:
    source = make_source(tmp_path / "source")
    scan = scan_imagefolder(source)
    for case in CASES:
        if case.later:
            case.later(source / "odd" / case.folder)
    with pytest.raises(BadImages) as caught:
        convert_scan(scan, tmp_path / "target", ConvertOptions(to="lmdb"))
    named_bad = {problem.path: problem.reason for problem in caught.value.problems}
    assert named_bad == made["lmdb", "decode"].skipped
    assert not (tmp_path / "target" / "shardkit.json").exists()
    assert not list((tmp_path / "target").glob("*.mdb"))


def test_the_corpus_is_as_large_as_the_docs_say() -> None:
    names = [(case.group, case.name) for case in CASES]
    assert len(set(names)) == len(names) >= 250
    kinds = {type(outcome) for case in CASES for outcome in case.outcomes.values()}
    assert kinds == {Stored, Rejected, Problem, Ignored}
