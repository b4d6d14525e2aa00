"""Damage to datasets by disks, copies and users, and the expected findings."""

from __future__ import annotations

import hashlib
import json
import os
import random
import shutil
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from manifests import sealed

from shardkit.dataset.manifest import FORMAT_VERSION, MANIFEST_NAME, load_manifest

PAGE = 4096
"""What a disk or the kernel loses at once."""

INDEX_FILES = tuple(
    f"index/{name}.npy" for name in ("rows", "keys", "keys-ends", "paths", "paths-ends")
)


class Stock(NamedTuple):
    """Read-only datasets to damage copies of. All shards have one size."""

    made: Path
    """The dataset that is damaged: one, or two splits."""
    older: Path
    """Made from the same files when other pixels stood in them, otherwise the same."""
    other: Path
    """Made with another seed, so that its rows stand in another order."""


@dataclass(kw_only=True)
class Outcome:
    """One damage and the expected finding."""

    files: set[str] = field(default_factory=set)
    """One of these must be blamed, and nothing else."""
    quick: bool = True
    """Whether sizes, names, manifest and index show it."""
    rows: set[tuple[str, int]] = field(default_factory=set)
    """Rows that ``full`` must name, each with the folder, in the dataset, of what it blames."""
    sound: bool = False
    """Whether it does no harm."""
    usage: bool = False
    """Whether nothing is left that this version can call a dataset."""
    whole: bool = False
    """Whether each dataset is whole in itself, so that readers give it."""


class Damage(NamedTuple):
    """One way to damage a dataset."""

    name: str
    apply: Callable[[Path, Stock, random.Random], Outcome]
    """Damages the dataset, a copy of ``made``, and tells what must be found."""


# Where things are.


def place_of(dataset: Path) -> Path:
    """Return the dataset, or one of its splits."""
    return dataset / "val" if (dataset / "val").exists() else dataset


def prefix_of(dataset: Path) -> str:
    """Return the prefix of file names in the `place_of` a dataset."""
    return "val/" if (dataset / "val").exists() else ""


def shards_of(place: Path) -> list[str]:
    """Return the names of the shards of one dataset."""
    return [shard.name for shard in load_manifest(place).shards]


def kinds_of(dataset: Path) -> dict[str, str]:
    """Return the name of one file of each kind, by kind."""
    place, prefix = place_of(dataset), prefix_of(dataset)
    kinds = {"shard": shards_of(place)[1], "report": "ignored.jsonl", "manifest": MANIFEST_NAME}
    kinds |= {Path(name).stem: name for name in INDEX_FILES}
    named = {kind: prefix + name for kind, name in kinds.items()}
    return named | ({"splits": MANIFEST_NAME} if prefix else {})


def values_of(place: Path) -> tuple[np.ndarray[Any, Any], int]:
    """Return the rows of an index, writable, and their offset in the file."""
    content = (place / "index/rows.npy").read_bytes()
    rows = np.load(place / "index/rows.npy")
    return rows, len(content) - rows.nbytes


def rewrite(path: Path, value: dict[str, Any]) -> None:
    """Write a manifest with its correct digest."""
    path.write_bytes(sealed(value))


def edit(place: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change a manifest and correct its digest, and that in the manifest of splits."""
    value = json.loads((place / MANIFEST_NAME).read_bytes())
    change(value)
    rewrite(place / MANIFEST_NAME, value)
    splits = place.parent / MANIFEST_NAME
    if splits.exists():
        outer = json.loads(splits.read_bytes())
        changed = json.loads((place / MANIFEST_NAME).read_bytes())["digest"]
        outer["splits"][place.name] = changed
        rewrite(splits, outer)


def restate_files(place: Path, *names: str) -> None:
    """Make a manifest state the size and SHA-256 that these files have, as a forger would."""

    def state(value: dict[str, Any]) -> None:
        for entry in value["files"]:
            if entry["name"] in names:
                content = (place / entry["name"]).read_bytes()
                digest = hashlib.sha256(content).hexdigest()
                entry.update(bytes=len(content), sha256=digest)

    edit(place, state)


def with_checks(rows: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Return entries of an index with their correct checks: 3 bytes of the CRC-32 of 29."""
    entries = bytearray(rows.tobytes())
    for start in range(0, len(entries), 32):
        check = zlib.crc32(entries[start : start + 29]).to_bytes(4, "little")
        entries[start + 29 : start + 32] = check[:3]
    return np.frombuffer(entries, rows.dtype)


# Damage to the bytes of one file of any kind.

Change = Callable[[bytes, random.Random], bytes]


def _cut_to(share: Callable[[int], int]) -> Change:
    return lambda content, _: content[: share(len(content))]


def _zero_a_page(content: bytes, rng: random.Random) -> bytes:
    start = rng.choice([at for at in range(0, len(content), PAGE) if any(content[at : at + PAGE])])
    size = len(content[start : start + PAGE])
    return content[:start] + bytes(size) + content[start + size :]


def _misplace_a_page(content: bytes, rng: random.Random) -> bytes:
    size = min(PAGE, max(1, len(content) // 4))
    pages = [(at, content[at : at + size]) for at in range(0, len(content) - size + 1, size)]
    at, page = rng.choice(pages)
    others = [other for _, other in pages if other != page]
    return content[:at] + (rng.choice(others) if others else bytes(size)) + content[at + size :]


def _flip_a_bit(content: bytes, rng: random.Random) -> bytes:
    at = rng.randrange(len(content))
    return content[:at] + bytes([content[at] ^ 1 << rng.randrange(8)]) + content[at + 1 :]


CHANGES: dict[str, tuple[Change, bool]] = {
    "cut to nothing": (_cut_to(lambda size: 0), True),
    "cut by a byte": (_cut_to(lambda size: size - 1), True),
    "cut at 512": (_cut_to(lambda size: (size - 1) // 512 * 512), True),
    "cut at a page": (_cut_to(lambda size: (size - 1) // PAGE * PAGE), True),
    "cut in the middle": (_cut_to(lambda size: size // 2 + 1), True),
    "longer by junk": (lambda content, rng: content + rng.randbytes(512), True),
    "longer by zeros": (lambda content, _: content + bytes(PAGE), True),
    "longer by itself": (lambda content, _: content * 2, True),
    "a page of zeros": (_zero_a_page, False),
    "all zeros": (lambda content, _: bytes(len(content)), False),
    "a page of itself": (_misplace_a_page, False),
    "a bit": (_flip_a_bit, False),
    "other bytes": (lambda content, rng: rng.randbytes(len(content)), False),
}
"""What becomes of a file's content; whether its size tells (``quick`` reads all but shards)."""


def _changed(kind: str, change: Change, by_size: bool) -> Callable[..., Outcome]:
    def apply(dataset: Path, stock: Stock, rng: random.Random) -> Outcome:
        name = kinds_of(dataset)[kind]
        content = (dataset / name).read_bytes()
        damaged = change(content, rng)
        assert damaged != content
        (dataset / name).write_bytes(damaged)
        # Text and ends of a column show in one another.
        files = {name, name.replace("-ends", "")}
        return Outcome(files=files, quick=by_size or kind != "shard")

    return apply


# Other things in the place of a file.


def _nothing(path: Path, content: bytes) -> None:
    path.unlink()


def _upper_case(path: Path, content: bytes) -> None:
    path.rename(path.with_name(path.name.upper()))


def _text(path: Path, content: bytes) -> None:
    path.write_bytes(b"this is no dataset\n" * (1 + len(content) // 19))


def _text_of_that_size(path: Path, content: bytes) -> None:
    path.write_bytes((b"this is no dataset\n" * (1 + len(content) // 19))[: len(content)])


def _directory(path: Path, content: bytes) -> None:
    path.unlink()
    path.mkdir()


def _circle(path: Path, content: bytes) -> None:
    path.unlink()
    path.symlink_to(path.name)


def _dangling(path: Path, content: bytes) -> None:
    path.unlink()
    path.symlink_to("nowhere")


def _pipe(path: Path, content: bytes) -> None:
    path.unlink()
    os.mkfifo(path)


def _endless(path: Path, content: bytes) -> None:
    path.unlink()
    path.symlink_to("/dev/zero")


def _link(path: Path, content: bytes) -> None:
    elsewhere = path.parent / ".elsewhere"
    path.rename(elsewhere)
    path.symlink_to(elsewhere.name)


REPLACEMENTS: dict[str, Callable[[Path, bytes], None]] = {
    "missing": _nothing,
    "in upper case": _upper_case,
    "a text": _text,
    "a text of that size": _text_of_that_size,
    "a directory": _directory,
    "a link in a circle": _circle,
    "a link to nothing": _dangling,
    "a pipe": _pipe,
    "an endless device": _endless,
    "a link to the right file": _link,
}


def _replaced(kind: str, name: str) -> Callable[..., Outcome]:
    def apply(dataset: Path, stock: Stock, rng: random.Random) -> Outcome:
        file = kinds_of(dataset)[kind]
        REPLACEMENTS[name](dataset / file, (dataset / file).read_bytes())
        top = file == MANIFEST_NAME
        return Outcome(
            files={file},
            quick=not (kind == "shard" and name == "a text of that size"),
            sound=False,
            usage=top and name in ("missing", "in upper case", "a directory", "a pipe"),
        )

    return apply


# Whole files in the wrong place.


def _swap(one: Path, two: Path) -> None:
    aside = one.with_name("aside")
    one.rename(aside)
    two.rename(one)
    aside.rename(two)


def swap_shards(dataset: Path, stock: Stock, rng: random.Random) -> Outcome:
    place, prefix = place_of(dataset), prefix_of(dataset)
    one, two = shards_of(place)[:2]
    _swap(place / one, place / two)
    return Outcome(files={prefix + one, prefix + two}, quick=False)


def swap_shards_of_splits(dataset: Path, stock: Stock, rng: random.Random) -> Outcome:
    one, two = (f"{split}/{shards_of(dataset / split)[0]}" for split in ("train", "val"))
    _swap(dataset / one, dataset / two)
    return Outcome(files={one, two}, quick=False)


def _shard_of(which: str) -> Callable[..., Outcome]:
    def apply(dataset: Path, stock: Stock, rng: random.Random) -> Outcome:
        place, prefix = place_of(dataset), prefix_of(dataset)
        number = rng.randrange(2)
        name = shards_of(place)[number]
        shutil.copy(place_of(getattr(stock, which)) / name, place / name)
        size = load_manifest(place).shards[number].bytes
        return Outcome(files={prefix + name}, quick=(place / name).stat().st_size != size)

    return apply


def page_of_another_shard(dataset: Path, stock: Stock, rng: random.Random) -> Outcome:
    """A write that went to the right place of the wrong file."""
    place, prefix = place_of(dataset), prefix_of(dataset)
    one, two = rng.sample(shards_of(place), 2)
    mine, other = (place / one).read_bytes(), (place / two).read_bytes()
    pages = [at for at in range(0, len(mine), PAGE) if mine[at:][:PAGE] != other[at:][:PAGE]]
    at = rng.choice(pages)
    damaged = mine[:at] + other[at : at + PAGE] + mine[at + PAGE :]
    (place / one).write_bytes(damaged[: len(mine)])
    return Outcome(files={prefix + one}, quick=len(damaged) < len(mine))


def _index_of(which: str, *names: str) -> Callable[..., Outcome]:
    def apply(dataset: Path, stock: Stock, rng: random.Random) -> Outcome:
        place, prefix = place_of(dataset), prefix_of(dataset)
        changed = set()
        for name in names:
            new = (place_of(getattr(stock, which)) / name).read_bytes()
            if (place / name).read_bytes() != new:
                changed.add(prefix + name)
                (place / name).write_bytes(new)
        return Outcome(files=changed, sound=not changed)

    return apply


def _rows_swapped(one: int, two: int) -> Callable[..., Outcome]:
    def apply(dataset: Path, stock: Stock, rng: random.Random) -> Outcome:
        place, prefix = place_of(dataset), prefix_of(dataset)
        rows, _ = values_of(place)
        rows[[one, two]] = rows[[two, one]]
        np.save(place / "index/rows.npy", rows)
        folder = prefix.rstrip("/") or "index"
        named = {(folder, one), (folder, two)}
        return Outcome(files={f"{prefix}index/rows.npy"}, rows=named)

    return apply


def keys_and_paths_swapped(dataset: Path, stock: Stock, rng: random.Random) -> Outcome:
    place, prefix = place_of(dataset), prefix_of(dataset)
    for one, two in (("keys", "paths"), ("keys-ends", "paths-ends")):
        _swap(place / f"index/{one}.npy", place / f"index/{two}.npy")
    return Outcome(files={prefix + name for name in INDEX_FILES})


def splits_swapped(dataset: Path, stock: Stock, rng: random.Random) -> Outcome:
    _swap(dataset / "train", dataset / "val")
    return Outcome(files={f"{split}/{MANIFEST_NAME}" for split in ("train", "val")}, whole=True)


# Manifests.


def _manifest_of(which: str) -> Callable[..., Outcome]:
    def apply(dataset: Path, stock: Stock, rng: random.Random) -> Outcome:
        place, prefix = place_of(dataset), prefix_of(dataset)
        shutil.copy(place_of(getattr(stock, which)) / MANIFEST_NAME, place / MANIFEST_NAME)
        shards = {prefix + name for name in shards_of(place)}
        index = {prefix + name for name in INDEX_FILES}
        return Outcome(files={f"{prefix}{MANIFEST_NAME}", *shards, *index})

    return apply


def a_newer_manifest(dataset: Path, stock: Stock, rng: random.Random) -> Outcome:
    place, prefix = place_of(dataset), prefix_of(dataset)
    edit(place, lambda value: value.update(format_version=FORMAT_VERSION + 1, news={}))
    return Outcome(files={f"{prefix}{MANIFEST_NAME}"}, usage=not prefix)


def _edited(change: Callable[[dict[str, Any]], object], *, quick: bool) -> Callable[..., Outcome]:
    """Edit a manifest and correct its digest, as an attacker or a clever user would."""

    def apply(dataset: Path, stock: Stock, rng: random.Random) -> Outcome:
        place, prefix = place_of(dataset), prefix_of(dataset)
        shards = {prefix + name for name in shards_of(place)}
        edit(place, change)
        index = {prefix + name for name in INDEX_FILES}
        return Outcome(files={f"{prefix}{MANIFEST_NAME}", *shards, *index}, quick=quick)

    return apply


def _plainly_edited(dataset: Path, stock: Stock, rng: random.Random) -> Outcome:
    place, prefix = place_of(dataset), prefix_of(dataset)
    text = (place / MANIFEST_NAME).read_text()
    (place / MANIFEST_NAME).write_text(text.replace('"ant"', '"ape"'))
    return Outcome(files={f"{prefix}{MANIFEST_NAME}"})


def _move_a_row(value: dict[str, Any]) -> None:
    value["shards"][0]["rows"] += 1
    value["shards"][1]["rows"] -= 1


def _rename(value: dict[str, Any]) -> None:
    value["classes"] = sorted(value["classes"], reverse=True)


def _permute(value: dict[str, Any]) -> None:
    value["class_counts"] = value["class_counts"][1:] + value["class_counts"][:1]


def _shorten(value: dict[str, Any]) -> None:
    value["rows"] -= value["shards"].pop()["rows"]


def _more_bytes(value: dict[str, Any]) -> None:
    value["shards"][0]["bytes"] += 1


def _other_sha(value: dict[str, Any]) -> None:
    value["shards"][0]["sha256"] = "0" * 64


def _other_shape(value: dict[str, Any]) -> None:
    value["raw_shape"] = [7, 5, 3]


def _other_format(value: dict[str, Any]) -> None:
    value["format"] = {"lmdb": "hdf5", "hdf5": "webdataset", "webdataset": "lmdb"}[value["format"]]


def _endless_rows(value: dict[str, Any]) -> None:
    value["rows"] += 2**70
    value["shards"][0]["rows"] += 2**70


def _endless_bytes(value: dict[str, Any]) -> None:
    value["shards"][0]["bytes"] = 2**70


def _odd_background(value: dict[str, Any]) -> None:
    value["recipe"]["background"] = "white"


def _named(name: str) -> Callable[[dict[str, Any]], None]:
    def change(value: dict[str, Any]) -> None:
        value["shards"][0]["name"] = name

    return change


EDITS: dict[str, tuple[Callable[[dict[str, Any]], object], bool]] = {
    "rows moved between shards": (_move_a_row, False),
    "classes renamed": (_rename, False),
    "class counts permuted": (_permute, True),
    "a shard left out": (_shorten, True),
    "a shard's size": (_more_bytes, True),
    "a shard's digest": (_other_sha, False),
    "the shape": (_other_shape, False),
    "the format": (_other_format, False),
    "rows without end": (_endless_rows, True),
    "bytes without end": (_endless_bytes, True),
    "the background": (_odd_background, True),
    "a name that climbs": (_named("../secret"), True),
    "a name that climbs inside": (_named("index/../../secret"), True),
    "an absolute name": (_named("/etc/passwd"), True),
    "a name with a zero byte": (_named("shard\0"), True),
    "a name without end": (_named("x" * 5000), True),
    "no name": (_named(""), True),
    "the name of the directory": (_named("."), True),
    "a lone surrogate": (_named("\ud800"), True),
}
"""Edits of a manifest with a corrected digest; whether ``quick`` finds them."""


def _splits_edited(change: Callable[[dict[str, str]], object]) -> Callable[..., Outcome]:
    def apply(dataset: Path, stock: Stock, rng: random.Random) -> Outcome:
        value = json.loads((dataset / MANIFEST_NAME).read_bytes())
        change(value["splits"])
        rewrite(dataset / MANIFEST_NAME, value)
        names = {f"{split}/{MANIFEST_NAME}" for split in ("val", "test")}
        return Outcome(files={MANIFEST_NAME, *names})

    return apply


SPLITS_EDITS: dict[str, Callable[[dict[str, str]], object]] = {
    "another digest": lambda splits: splits.update(val="0" * 64),
    "a split more": lambda splits: splits.update(test=splits["val"]),
    "a split that climbs": lambda splits: splits.update({"../val": splits["val"]}),
    "an absolute split": lambda splits: splits.update({"/val": splits["val"]}),
    "a split with a zero byte": lambda splits: splits.update({"val\0": splits["val"]}),
    "no splits": lambda splits: splits.clear(),
}

_WHOLE: dict[str, Callable[..., Outcome]] = {
    "two shards swapped": swap_shards,
    "a shard of an older version": _shard_of("older"),
    "a shard of another dataset": _shard_of("other"),
    "a page of another shard": page_of_another_shard,
    "the index of an older version": _index_of("older", *INDEX_FILES),
    "the index of another dataset": _index_of("other", *INDEX_FILES),
    "the rows of another dataset": _index_of("other", INDEX_FILES[0]),
    "the keys of another dataset": _index_of("other", *INDEX_FILES[1:3]),
    "two rows of a shard swapped": _rows_swapped(0, 2),
    "two rows of different shards swapped": _rows_swapped(1, 4),
    "keys and paths swapped": keys_and_paths_swapped,
    "the manifest of an older version": _manifest_of("older"),
    "the manifest of another dataset": _manifest_of("other"),
    "a newer manifest": a_newer_manifest,
    "a manifest edited": _plainly_edited,
}

_OF_SPLITS: dict[str, Callable[..., Outcome]] = {
    "two shards of splits swapped": swap_shards_of_splits,
    "two splits swapped": splits_swapped,
    **{f"splits: {name}": _splits_edited(change) for name, change in SPLITS_EDITS.items()},
}


def damages(*, splits: bool) -> Iterator[Damage]:
    """Yield all kinds of damage, for a dataset with or without splits."""
    kinds = ["shard", "report", "manifest", *(Path(name).stem for name in INDEX_FILES)]
    for kind in kinds + ["splits"] * splits:
        for name, (change, by_size) in CHANGES.items():
            yield Damage(f"{kind}: {name}", _changed(kind, change, by_size))
        for name in REPLACEMENTS:
            yield Damage(f"{kind}: {name}", _replaced(kind, name))
    for name, (alter, quick) in EDITS.items():
        yield Damage(f"manifest and digest: {name}", _edited(alter, quick=quick))
    for name, apply in {**_WHOLE, **(_OF_SPLITS if splits else {})}.items():
        yield Damage(name, apply)
