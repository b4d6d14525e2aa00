"""The compiled core under ASan and UBSan, and wheels and reading without it."""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
from campaign import draw, in_full, points
from helpers import DEADLINE
from hostile import jpegs, pngs
from hostile.cases import Case

from scripts.fuzzing.pieces import mutated_jpeg
from scripts.fuzzing.pngs import mutated_png
from shardkit.registry import get_format
from shardkit.system import native
from shardkit.testing.tools import write_sample

ROOT = Path(__file__).parents[2]
MUTATED = points(100, 3000)
FLAGS = ("-std=gnu11", "-g", "-O1", "-fsanitize=address,undefined", "-fno-sanitize-recover=all")


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The compiled core without Python, with sanitizers."""
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler")
    target = tmp_path_factory.mktemp("sanitized") / "native"
    core = ROOT / "shardkit" / "native"
    sources = [path for path in core.glob("*.c") if "module" not in path.name]
    source = ROOT / "scripts" / "fuzzing" / "native.c"
    command = [compiler, *FLAGS, f"-I{core}", source, *sources, "-o", target]
    if getattr(native.module(), "LIBDEFLATE", ""):
        command += ["-DSK_LIBDEFLATE", "-ldeflate"]
    done = subprocess.run(
        [*map(str, command), "-ljpeg", "-lm"], capture_output=True, text=True, check=False
    )
    if "jpeglib.h" in done.stderr or "cannot find -l" in done.stderr:
        pytest.skip("no headers of libjpeg-turbo, or no sanitizers")
    assert done.returncode == 0, done.stderr
    return target


def run(program: Path, files: list[Path]) -> int:
    """Run files through the program, and return how many regions and records it read."""
    done = subprocess.run(
        [str(program), *map(str, files)],
        capture_output=True,
        text=True,
        check=False,
        timeout=2 * DEADLINE,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return int(done.stdout.split()[0])


def test_the_corpus_and_the_samples_are_clean(program: Path) -> None:
    files = sorted((ROOT / "tests" / "fuzz_corpus").glob("*/*"))
    files += sorted((ROOT / "sample_data").rglob("*.jp*g"))

    assert run(program, files) > 100


@pytest.mark.parametrize("cases", [jpegs.CASES, pngs.CASES], ids=["jpeg", "png"])
def test_hostile_images_are_clean(program: Path, tmp_path: Path, cases: tuple[Case, ...]) -> None:
    for number, case in enumerate(cases):
        (tmp_path / str(number)).mkdir()
        case.make(tmp_path / str(number))

    assert run(program, sorted(path for path in tmp_path.rglob("*") if path.is_file())) > 100


@pytest.mark.parametrize("mutated", [mutated_jpeg, mutated_png])
def test_mutated_images_are_clean(
    program: Path, tmp_path: Path, mutated: Callable[[random.Random], bytes]
) -> None:
    for number in range(MUTATED):
        (tmp_path / str(number)).write_bytes(mutated(draw(number)))

    assert run(program, sorted(tmp_path.iterdir())) > MUTATED


@pytest.mark.parametrize("name", ["lmdb", "webdataset"])
def test_damaged_shards_are_clean(program: Path, tmp_path: Path, name: str) -> None:
    storage = get_format(name)
    intact = write_sample(storage, tmp_path / "shard").read_bytes()
    for number in range(MUTATED):
        rng, data = draw(name, number), bytearray(intact)
        for _ in range(rng.randint(0, 6)):
            data[rng.randrange(len(data))] = rng.choice((0, 1, 0xFF, rng.randrange(256)))
        if number % 5 == 0:
            del data[rng.randrange(len(data)) :]
        (tmp_path / str(number)).write_bytes(data)

    assert run(program, sorted(tmp_path.iterdir())) > MUTATED // 10


@in_full
@pytest.mark.parametrize("changed", [{"CC": "no-such-compiler"}, {"SHARDKIT_BUILD_NATIVE": "off"}])
def test_a_wheel_without_the_module_is_built_where_it_cannot_be(
    tmp_path: Path, changed: dict[str, str]
) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", tmp_path, ROOT],
        env={**os.environ, **changed},
        capture_output=True,
        text=True,
        check=False,
        timeout=2 * DEADLINE,
    )

    assert done.returncode == 0, done.stderr
    (wheel,) = tmp_path.glob("*.whl")
    assert wheel.name.endswith("-py3-none-any.whl")
    with zipfile.ZipFile(wheel) as content:
        assert not [name for name in content.namelist() if name.endswith(".so")]
    assert ("shardkit._native was skipped" in done.stdout + done.stderr) == ("CC" in changed)


@in_full
def test_reading_passes_its_tests_without_the_module() -> None:
    """Where the module is built, all other tests run with it."""
    names = [
        "dataset/test_decode.py",
        "dataset/test_shardset.py",
        "torch/data/test_datasets.py",
        "torch/data/test_ops.py",
        "torch/test_loader.py",
    ]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-m", "not slow", "-p", "no:cacheprovider", *names],
        cwd=ROOT / "tests" / "unit",
        env={**os.environ, "SHARDKIT_NATIVE": "off"},
        capture_output=True,
        text=True,
        check=False,
        timeout=8 * DEADLINE,
    )
    assert done.returncode == 0, done.stdout[-3000:]
    assert " passed" in done.stdout
