"""Hostile datasets: nothing in them is unpickled or executed, and nothing outside is read."""

from __future__ import annotations

import ast
import contextlib
import ctypes
import functools
import io
import json
import os
import pickle
import random
import shutil
import struct
import sys
import tarfile
import tempfile
import traceback
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import click
import h5py
import numpy as np
import pytest
from campaign import cases, draw, points
from helpers import FORMATS, invoke, jpeg, make_dataset, make_folder, make_tree
from hostile.damage import EDITS, edit, restate_files, rewrite, with_checks
from hostile.forging import WRONG, changed, leaves

from scripts.fuzzing.targets import make
from shardkit import (
    ShardkitError,
    attach,
    convert,
    export,
    fields,
    make_loader,
    merge,
    open_dataset,
    verify,
)
from shardkit.dataset.index import row_check
from shardkit.dataset.manifest import load_manifest
from shardkit.errors import CorruptDataset, UsageError
from shardkit.sources import library_process
from shardkit.system.files import sha256_of
from shardkit.testing.tools import call_in

PACKAGE = Path(__file__).parents[2] / "shardkit"
CORPUS = Path(__file__).parents[1] / "fuzz_corpus"

FORBIDDEN = {"marshal", "shelve", "dill", "cloudpickle", "joblib", "runpy", "code"}
"""Modules that make code or objects of data."""

CALLS = {"eval", "exec", "compile", "__import__", "input"}

OURS = ("failure.py", "helper.py", "process.py", "ring.py", "spool.py")
"""Files that unpickle what our own processes wrote: exceptions and batches of a worker, calls of a
parent, and samples that a process spooled to an unnamed place."""

MESSAGES = ("crew.py", "ring.py")
"""Files that use marshal for messages between a loader and its workers, over their own socket."""

SECRET = b"a secret that stands in a file outside of the dataset " * 8


class Bomb:
    """Makes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.path),)


def test_the_package_makes_no_code_and_no_objects_of_data() -> None:
    found = [
        f"{path.relative_to(PACKAGE)}:{node.lineno} {ast.unparse(node)}"
        for path in sorted(PACKAGE.rglob("*.py"))
        if "testing" not in path.parts
        for node in ast.walk(ast.parse(path.read_text("utf-8")))
        if isinstance(node, ast.Import | ast.ImportFrom | ast.Call) and makes(node, path.name)
    ]
    assert found == []


def makes(node: ast.Import | ast.ImportFrom | ast.Call, name: str) -> bool:
    """Return whether a statement of the file ``name`` makes code or objects of data."""
    if isinstance(node, ast.Import):
        allowed = {"marshal"} if name in MESSAGES else set[str]()
        return any(alias.name.split(".")[0] in FORBIDDEN - allowed for alias in node.names)
    if isinstance(node, ast.ImportFrom):
        return (node.module or "").split(".")[0] in {*FORBIDDEN, "pickle"}
    for keyword in node.keywords:
        if keyword.arg == "allow_pickle" and ast.unparse(keyword.value) != "False":
            return True
    called = node.func
    if isinstance(called, ast.Attribute):
        if ast.unparse(called.value) == "pickle" and called.attr != "dumps":
            return name not in OURS
        return called.attr in ("extractall", "extract")
    return isinstance(called, ast.Name) and called.id in CALLS


@pytest.mark.parametrize(
    "text",
    [
        *("import marshal", "from pickle import loads", "import code.x", "eval(x)", "a.extract(b)"),
        *("pickle.loads(x)", "np.load(x, allow_pickle=True)", "from dill import load"),
    ],
)
def test_what_makes_code_or_objects_is_noticed(text: str) -> None:
    (node, *_) = [
        node
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Import | ast.ImportFrom | ast.Call)
    ]
    assert makes(node, "a.py")


@pytest.fixture(scope="module")
def _all_loaded(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Read before the watch begins: what is imported at first use is no event."""
    root = tmp_path_factory.mktemp("loaded")
    for to in FORMATS:
        made = make_dataset(make_folder(root / "photos"), root / to, to=to)
        for content in (b"", b"junk" * 10):
            with_outcome(lambda: verify(made, "decode"))  # noqa: B023
            with_outcome(lambda: read(made, [], verify=None))  # noqa: B023
            (made / load_manifest(made).shards[0].name).write_bytes(content)


# Hostile datasets, whose digests are all right.


def sign(place: Path) -> None:
    """Give the manifest the sizes and digests of the files as they are."""

    def change(value: dict[str, Any]) -> None:
        for entry in [*value["shards"], *value["files"]]:
            entry["bytes"] = (place / entry["name"]).stat().st_size
            entry["sha256"] = sha256_of(place / entry["name"])

    edit(place, change)


def unpack(place: Path) -> None:
    """Let the index send every image through the format's own library."""
    rows = np.load(place / "index/rows.npy")
    rows["offset"] = -1
    for row in range(len(rows)):
        rows["check"][row] = tuple(row_check(rows[row : row + 1].tobytes()))
    np.save(place / "index/rows.npy", rows)


def pickled_index(place: Path, secret: Path) -> None:
    count = load_manifest(place).rows
    np.save(place / "index/rows.npy", np.array([Bomb(place / "bomb")] * count, object))


def pickled_keys(place: Path, secret: Path) -> None:
    np.save(place / "index/keys.npy", np.array([Bomb(place / "bomb")], object))


def pickled_manifest(place: Path, secret: Path) -> None:
    (place / "shardkit.json").write_bytes(pickle.dumps(Bomb(place / "bomb")))


def index_header_of_code(place: Path, secret: Path) -> None:
    content = (place / "index/rows.npy").read_bytes()
    code = b"{'descr': __import__('os').mkdir('bomb'), 'fortran_order': False, 'shape': (6,)}"
    header = content[:10] + code.ljust(int.from_bytes(content[8:10], "little") - 1) + b"\n"
    (place / "index/rows.npy").write_bytes(header + content[len(header) :])


def shard_of_another_kind(place: Path, secret: Path) -> None:
    shard = load_manifest(place).shards[0].name
    (place / shard).write_bytes(pickle.dumps(Bomb(place / "bomb")))


def climbing_members(place: Path, secret: Path) -> None:
    shard = load_manifest(place).shards[0].name
    with tarfile.open(place / shard, "w") as archive:
        for name in ("../climbed.jpg", "/climbed.jpg", "a/../../climbed.jpg"):
            info = tarfile.TarInfo(name)
            info.size = len(SECRET)
            archive.addfile(info, io.BytesIO(SECRET))
        for kind in (tarfile.SYMTYPE, tarfile.LNKTYPE):
            info = tarfile.TarInfo("link.jpg")
            info.type, info.linkname = kind, str(secret)
            archive.addfile(info)


def climbing_name(place: Path, secret: Path) -> None:
    edit(place, EDITS["a name that climbs"][0])


def _field_of(file: h5py.File) -> str:
    return "jpg" if "jpg" in file else "png"


def external_link(place: Path, secret: Path) -> None:
    with _shard(place) as file:
        name = _field_of(file)
        with h5py.File(secret.with_suffix(".h5"), "w") as other:
            file.copy(name, other)
        del file[name]
        file[name] = h5py.ExternalLink(str(secret.with_suffix(".h5")), f"/{name}")


def external_storage(place: Path, secret: Path) -> None:
    with _shard(place) as file:
        name = _field_of(file)
        size = len(file[name]["data"])
        del file[name]["data"]
        file[name].create_dataset(
            "data", (size,), np.uint8, external=[(str(secret), 0, h5py.h5f.UNLIMITED)]
        )


def virtual_dataset(place: Path, secret: Path) -> None:
    with _shard(place) as file:
        name = _field_of(file)
        size = len(file[name]["data"])
        with h5py.File(secret.with_suffix(".h5"), "w") as other:
            other["x"] = np.frombuffer((SECRET * size)[:size], np.uint8)
        layout = h5py.VirtualLayout((size,), np.uint8)
        layout[:] = h5py.VirtualSource(str(secret.with_suffix(".h5")), "x", (size,))
        del file[name]["data"]
        file[name].create_virtual_dataset("data", layout)


def soft_link(place: Path, secret: Path) -> None:
    with _shard(place) as file:
        name = _field_of(file)
        file["link"] = h5py.ExternalLink(str(secret.with_suffix(".h5")), "/x")
        with h5py.File(secret.with_suffix(".h5"), "w") as other:
            other["x"] = np.frombuffer(SECRET, np.uint8)
        del file[name]["data"]
        file[name]["data"] = h5py.SoftLink("/link")


def objects(place: Path, secret: Path) -> None:
    with _shard(place) as file:
        name = _field_of(file)
        del file[name]["data"]
        values = np.array([pickle.dumps(Bomb(place / "bomb")).hex()], object)
        file[name].create_dataset("data", data=values, dtype=h5py.string_dtype())


def _shard(place: Path) -> h5py.File:
    return h5py.File(place / load_manifest(place).shards[0].name, "r+")


Attack = Callable[[Path, Path], None]

ATTACKS: dict[str, list[Attack]] = {
    "lmdb": [],
    "webdataset": [climbing_members],
    "hdf5": [external_link, external_storage, virtual_dataset, soft_link, objects],
}
for _attacks in ATTACKS.values():
    _attacks += [pickled_index, pickled_keys, pickled_manifest]
    _attacks += [index_header_of_code, shard_of_another_kind, climbing_name]

CASES = cases(
    [
        (to, attack, through)
        for to in FORMATS
        for attack in ATTACKS[to]
        for through in (False, True)
    ],
    14,
)


@pytest.mark.usefixtures("_all_loaded")
@pytest.mark.parametrize(
    ("to", "attack", "through"),
    CASES,
    ids=[f"{to}-{attack.__name__}{'-library' * through}" for to, attack, through in CASES],
)
def test_nothing_of_a_hostile_dataset_is_run_and_nothing_outside_is_read(
    tmp_path: Path, to: str, attack: Attack, *, through: bool
) -> None:
    """Once as it is, once with an index that asks the format's library for every image."""
    place = make_dataset(make_folder(tmp_path / "photos"), tmp_path / "made", to=to)
    secret = tmp_path / "secret"
    secret.write_bytes(SECRET)
    if through:
        unpack(place)
    attack(place, secret)
    if attack not in (pickled_manifest, climbing_name):
        sign(place)
    events, given = call_in("fork", watched, place)
    assert not any(SECRET[:20] in data for data in given), "a secret is given out"
    assert events == []
    assert not (place / "bomb").exists()
    assert not (tmp_path / "climbed.jpg").exists()


def watched(place: Path) -> tuple[list[str], list[bytes]]:
    """Read and verify a dataset; return what the interpreter did that data must not bring about."""
    events: list[str] = []
    root = str(place)
    inside: list[bool] = []  # the hook itself must not be seen

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if inside:
            return
        inside.append(True)
        try:
            if event in ("pickle.find_class", "exec", "compile", "marshal.loads", "os.system"):
                events.append(f"{event} {arguments!r:.200}")
            elif event == "open" and isinstance(arguments[0], str | bytes):
                name = os.fsdecode(arguments[0])
                # A plain name, of which no link is followed, is one in an open folder.
                plain = "/" not in name and arguments[2] & os.O_NOFOLLOW
                if not plain and not name.startswith((root, "/proc/")):
                    events.append(f"open {name}")
        finally:
            inside.clear()

    outside = Opened(path for path in place.parent.iterdir() if path.name.startswith("secret"))
    sys.addaudithook(hook)
    given: list[bytes] = []
    with_outcome(lambda: verify(place, "decode"))
    for checks in (None, False):
        with_outcome(lambda: read(place, given, verify=checks))  # noqa: B023
    events += [f"open {name}" for name in outside.opened()]
    inside.append(True)
    return events, given


@pytest.mark.parametrize("name", ["source-arrow", "source-parquet", "source-parquet-table"])
def test_no_arrow_or_parquet_file_leads_to_another(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process of its own reads them, so only the kernel sees what is opened."""
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setattr(library_process.HELPER, "seconds", library_process.HELPER.seconds)
    (tmp_path / "place").mkdir()
    target = make(name, tmp_path / "place")
    secret = tmp_path / "secret.parquet"
    outside = Opened([secret])
    for path in sorted((CORPUS / name).iterdir()):
        with contextlib.suppress(*target.allowed):
            target.check(path.read_bytes())
    assert outside.opened() == set()
    secret.read_bytes()
    assert outside.opened() == {secret.name}


class Opened:
    """Notes who opens some files, by inotify: libraries in C tell no hook of Python's."""

    def __init__(self, paths: Iterable[Path]) -> None:
        library = ctypes.CDLL(None)
        self._descriptor = library.inotify_init1(os.O_NONBLOCK)
        self._names = {
            library.inotify_add_watch(self._descriptor, os.fsencode(path), 0x20): path.name
            for path in paths
        }

    def opened(self) -> set[str]:
        """Return the names of those that were opened."""
        try:
            found = os.read(self._descriptor, 1 << 16)
        except BlockingIOError:
            return set()
        return {self._names[event[0]] for event in struct.iter_unpack("iIII", found)}


def with_outcome(work: Callable[[], object]) -> None:
    with contextlib.suppress(CorruptDataset, UsageError):
        work()


def read(place: Path, given: list[bytes], *, verify: bool | None) -> None:
    dataset = open_dataset(place, decode="bytes", verify=verify)
    for row in range(len(dataset)):
        try:
            given.append(dataset[row][0])
        except CorruptDataset:
            continue
    assert len(list(dataset.keys)) == len(list(dataset.paths))


# Datasets with one forged value, whose digests are all right: every verb ends with a message.

VERBS = (
    *(("info", "{place}", "--json"), ("show", "{place}"), ("show", "{place}", "0")),
    *(("verify", "{place}"), ("verify", "{place}", "--level", "decode")),
    *(("verify", "{place}", "--against", "{source}"), ("repair", "{place}", "--from", "{source}")),
    *(("index", "{place}"), ("report", "{place}", "-o", "{new}.html")),
    *(("export", "{place}", "{new}"), ("export", "{place}", "{new}", "--raw-as-png")),
    *(("export", "{place}", "{new}", "--layout", to) for to in ("csv", "parquet", "webdataset")),
    ("append", "{place}", "--from", "{source}", "--skip-existing"),
    *(("append", "{place}", "--from", "{more}"), ("merge", "{place}", "{other}", "{new}")),
    *(("convert", "dataset", "{place}", "{new}", "--workers", "1", "--to", to) for to in FORMATS),
    ("convert", "dataset", "{place}", "{new}", "--workers", "1", "--to", "lmdb", "--encode", "png"),
    *(("diff", "{place}", "{other}"), ("diff", "{other}", "{place}")),
    ("fields", "add", "{place}", "--from", "{table}", "--field", "cap"),
    ("fields", "replace", "{place}", "--from", "{table}", "--field", "caption=cap"),
    *(("fields", "remove", "{place}", "label"), ("fields", "undo", "{place}")),
    ("split", "{place}", "--val", "0.3"),
    ("load", "{place}"),
)
"""Commands, and the calls of a training script."""


@pytest.fixture(scope="module")
def stock(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make datasets of all kinds, and what the verbs need; return their folder."""
    root = tmp_path_factory.mktemp("stock")
    source = make_folder(root / "source", each=2)
    more = make_tree(root / "more", {"cat/900.jpg": jpeg(seed=8), "dog/901.jpg": jpeg(seed=9)})
    (root / "table.csv").write_text("path,cap\ncat/000.jpg,x\ndog/001.jpg,y\n")
    small: dict[str, Any] = {"resize": "16x16", "shard_samples": 2}
    make_dataset(more, root / "other", **small)
    make_dataset(source, root / "resized", **small)
    make_dataset(source, root / "raw", to="hdf5", encode="raw", resize=(16, 16))
    make_dataset(source, root / "planes", to="webdataset", encode="planes")
    merge([root / "resized", root / "other"], root / "parts")
    shutil.copytree(root / "resized", root / "layered")
    fields.add(root / "layered", {"caption": ["a", "b", "c", "d"]})
    image = np.arange(216, dtype=np.uint8).reshape(9, 8, 3)
    samples = [
        {
            "image": image,
            "vector": np.ones(3, np.float32),
            "text": f"t{n}",
            "n": n,
            "meta": {"a": n},
        }
        for n in range(3)
    ]
    convert(samples, root / "fields", to="hdf5", workers=1)
    typed = [{"image": image.astype(np.uint16)} for _ in range(2)]
    convert(typed, root / "typed", to="webdataset", workers=1, pixels="keep")
    make_tree(root / "halves", {f"{split}/cat/1.jpg": jpeg() for split in ("train", "val")})
    make_dataset(root / "halves", root / "splits", to="webdataset")
    export(root / "resized", root / "tars", layout="webdataset")
    attach(root / "tars", root / "attached")
    return root


KINDS = ("resized", "raw", "planes", "parts", "layered", "fields", "typed", "splits", "attached")


@pytest.mark.timeout(300)
@pytest.mark.parametrize("what", ["manifest", "index"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_forged_value_gives_no_verb_a_traceback(
    kind: str, what: str, stock: Path, tmp_path: Path
) -> None:
    forge = {"manifest": forge_manifest, "index": forge_index}[what]
    names = {"splits": "halves", "attached": "tars"}
    paths = {"source": stock / names.get(kind, "source"), "table": stock / "table.csv"}
    paths |= {name: stock / name for name in ("more", "other")}
    wrong = []
    for number in range(points(12, 400)):
        wrong += with_verbs(stock / kind, tmp_path, forge, draw(kind, what, number), paths)
    assert wrong == []


def forge_manifest(place: Path, rng: random.Random) -> str:
    """Change one value of one manifest; return which."""
    path = rng.choice(sorted(place.rglob("shardkit.json")))
    value = json.loads(path.read_bytes())
    at = rng.choice([at for at in leaves(value) if at != ("digest",)])
    old = functools.reduce(lambda inner, name: inner[name], at, value)
    new = rng.choice([*WRONG, *likely(old)])
    forged = changed(value, at, new)
    rewrite(path, forged)
    if path.parent != place and place.joinpath("shardkit.json").exists():
        edit(path.parent, dict)  # the manifest of all splits follows
    return f"{path.relative_to(place)}: {at} = {str(new)[:40]}"


def likely(value: Any) -> list[Any]:
    """Return other values of the type of one, twice as many as there are wrong ones."""
    likely: list[Any] = [[3], "int64", 1]
    if isinstance(value, bool):
        likely = [not value]
    elif isinstance(value, int):
        likely = [value + 1, max(0, value - 1), 2 * value, value + 1000, 255]
    elif isinstance(value, str):
        likely = [
            *("float32", "image", "mask", "array", "label", "lmdb", "hdf5", "png"),
            f"{value}x",
        ]
    elif isinstance(value, list):
        likely = [value[::-1], value[:-1], value + value, [*value, 1]]
    elif isinstance(value, dict):
        likely = [{**value, "more": 1}, dict(list(value.items())[1:])]
    return likely * (2 * len(WRONG) // len(likely))


def forge_index(place: Path, rng: random.Random) -> str:
    """Change one number of one file of an index, with its check; return which."""
    path = rng.choice(sorted(path for path in place.rglob("*.npy") if "index" in path.parts))
    values = np.load(path)
    if not values.size:
        return "nothing"
    names = [name for name in values.dtype.names or () if name != "check"]
    part = values[rng.choice(names)] if names else values
    at = rng.randrange(len(part))
    if part.dtype.kind in "iu" and part.ndim == 1:
        limits = np.iinfo(part.dtype)
        new = rng.choice([0, 1, int(limits.max), int(limits.min), int(part[at]) + 1, 47, 255])
        part[at] = min(max(new, int(limits.min)), int(limits.max))
    np.save(path, with_checks(values) if names else values)
    folder = path
    while folder.name != "index":
        folder = folder.parent
    restate_files(folder.parent, path.relative_to(folder.parent).as_posix())
    return f"{path.relative_to(place)}: row {at}"


Forge = Callable[[Path, random.Random], str]


def with_verbs(
    made: Path, root: Path, forge: Forge, rng: random.Random, paths: dict[str, Path]
) -> list[str]:
    """Use forged copies of a dataset with some verbs; return errors that nobody expects."""
    wrong, seed = [], rng.random()
    for verb in rng.sample(VERBS, 3):
        shutil.rmtree(root)
        place = Path(shutil.copytree(made, root / "made"))
        change = forge(place, random.Random(seed))
        words = [word.format(place=place, new=root / "new", **paths) for word in verb]
        error = loaded(place) if verb[0] == "load" else invoke(*words).exception
        expected = isinstance(error, (ShardkitError, SystemExit, click.ClickException))
        if error is not None and not (expected and len(str(error)) < 3000):
            frame = traceback.extract_tb(error.__traceback__)[-1]
            wrong.append(f"{change}: {verb}: {error!r:.300} at {frame}")
    return wrong


def loaded(place: Path) -> BaseException | None:
    """Read a dataset as a training script does; return what that raises."""
    try:
        dataset = open_dataset(place, decode="torch")
        for _ in make_loader(dataset, batch_size=2, shuffle=True, num_workers=0, collate_fn=list):
            pass
    except Exception as error:
        return error
    return None
