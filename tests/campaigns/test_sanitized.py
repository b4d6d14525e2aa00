"""The compiled module under ASan and UBSan, and wheels and reading without it."""

from __future__ import annotations

import os
import random
import shutil
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from campaign import cases, draw, in_full, points
from helpers import DEADLINE, execute, python
from hostile import jpegs, pngs
from hostile.cases import Case, files_of

from scripts.fuzzing.pieces import mutated_jpeg
from scripts.fuzzing.pngs import mutated_png
from shardkit.record import IMAGE_FIELDS

ROOT = Path(__file__).parents[2]
MUTATED = points(100, 3000)

PRELOADED = """
import array, importlib.util, sys

spec = importlib.util.spec_from_file_location("shardkit._native", {path!r})
module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)


def exactly(function):
    # A bytes object ends with one byte more than it has, which hides that this is read.
    return lambda data, *given: function(array.array("B", data), *given)


for name in "decode_jpeg decode_png jpeg_header measure_jpeg measure_png scale_jpeg".split():
    setattr(module, name, exactly(getattr(module, name)))
"""
"""Each Python process imports this first, as `sitecustomize`."""

CONVERTED = """
import sys
from contextlib import suppress
from pathlib import Path

from shardkit import CenterCrop, RandomResizedCrop, Resize, convert, open_dataset, verify
from shardkit.errors import ShardkitError

source, target = map(Path, sys.argv[1:])
recipes = (
    {"check": "none", "to": "lmdb"},
    {"resize": 40, "to": "hdf5", "facts": True},
    {"resize": (9, 30), "resize_mode": "crop", "encode": "jpeg", "orient": True},
    {"resize": (300, 5), "resize_mode": "stretch", "enlarge": True, "encode": "raw"},
    {"encode": "planes", "to": "lmdb"},
)
operations = ("torch", CenterCrop(24), RandomResizedCrop(24), Resize((5, 8)))
read = 0
for number, recipe in enumerate(recipes):
    place = target / str(number)
    with suppress(ShardkitError):  # none of the images can be decoded
        convert(source, place, **{"to": "webdataset", "on_error": "skip", **recipe})
        verify(place, "decode")
        for decode in operations:
            dataset = open_dataset(place, decode=decode)
            for row in range(len(dataset)):
                with suppress(ShardkitError):
                    dataset.__getitems__([row, row])
                    read += 1
print(read)
"""
"""Converts a folder of images in all ways, and reads what was made, image by image."""

PARSED = """
import sys
from contextlib import suppress
from pathlib import Path

from scripts.fuzzing.targets import make

name, place, *files = sys.argv[1:]
target = make(name, Path(place))
for data in [*target.seeds, *(Path(path).read_bytes() for path in files)]:
    with suppress(*target.allowed):
        target.check(data)
        print("read")
"""
"""Has inputs parsed by a target of `scripts/fuzz`, which also compares what comes of them."""


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The variables with which Python uses a module that is built with sanitizers."""
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler")
    folder = tmp_path_factory.mktemp("sanitized")
    build = "import sys; from pathlib import Path; from scripts.hatch_build import compile_to; "
    build += "compile_to(*map(Path, sys.argv[1:]))"
    path = folder / "_native.abi3.so"
    variables = {"SHARDKIT_BUILD_NATIVE": "sanitize", "CFLAGS": "-O1"}
    done = python(build, path, ROOT / "shardkit" / "native", env=variables, cwd=ROOT)
    if "jpeglib.h" in done.stderr or "cannot find -l" in done.stderr:
        pytest.skip("no headers of libjpeg-turbo, or no sanitizers")
    assert done.returncode == 0, done.stderr
    (folder / "sitecustomize.py").write_text(PRELOADED.format(path=str(path)))
    libraries = [
        execute(compiler, f"-print-file-name={name}", check=True).stdout.strip()
        for name in ("libasan.so", "libubsan.so")
    ]
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join((str(folder), str(ROOT), str(ROOT / "tests/support"))),
        "LD_PRELOAD": " ".join(libraries),
        "PYTHONMALLOC": "malloc",  # each object in memory of its own
        "ASAN_OPTIONS": "detect_leaks=0:allocator_may_return_null=1",
        "UBSAN_OPTIONS": "print_stacktrace=1",
        "SHARDKIT_NATIVE": "on",
    }


def run(environment: dict[str, str], *arguments: object) -> str:
    """Run Python with the module; return what it prints."""
    done = execute(sys.executable, *arguments, cwd=ROOT, env=environment, timeout=20 * DEADLINE)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


UNIT_TESTS = (
    *("codecs/test_compiled_png.py", "codecs/test_image.py", "codecs/test_libjpeg.py"),
    *("codecs/test_measures.py", "codecs/test_planes.py", "codecs/test_png16.py"),
    *("conversion/test_bulk.py", "conversion/test_read_together.py"),
    *("conversion/test_scaled_jpegs.py", "dataset/test_filling.py", "formats/test_table.py"),
    *("test_record_columns.py", "torch/data/test_reading_planes.py"),
    "torch/data/test_view_operations.py",
)
"""Those that call the compiled module most."""


@pytest.mark.parametrize("name", cases(UNIT_TESTS, 1))
def test_its_unit_tests_are_clean(environment: dict[str, str], name: str) -> None:
    options = ("-q", "-n", "0", "--cpu-limit=inf", "-p", "no:cacheprovider", "-m", "not measures")

    assert " passed" in run(environment, "-m", "pytest", *options, f"tests/unit/{name}")


@pytest.mark.parametrize(
    ("name", "least"), [("native", 90), ("image", 65), ("index", 8), ("lmdb", 5), ("tar", 10)]
)
def test_inputs_of_the_fuzzer_are_clean(
    environment: dict[str, str], tmp_path: Path, name: str, least: int
) -> None:
    place = tmp_path / "place"
    place.mkdir()
    files = sorted((ROOT / "tests" / "fuzz_corpus" / name).iterdir())

    assert run(environment, "-c", PARSED, name, place, *files).count("read") >= least


@pytest.mark.parametrize("name", ["lmdb", "tar"])
def test_damaged_shards_are_clean(environment: dict[str, str], tmp_path: Path, name: str) -> None:
    from scripts.fuzzing.targets import make

    place, files = tmp_path / "place", list[Path]()
    place.mkdir()
    seeds = make(name, place).seeds
    for number in range(MUTATED):
        rng = draw(name, number)
        data = bytearray(rng.choice(seeds))
        for _ in range(rng.randint(0, 6)):
            data[rng.randrange(len(data))] = rng.choice((0, 1, 0xFF, rng.randrange(256)))
        if number % 5 == 0:
            del data[rng.randrange(len(data)) :]
        files.append(tmp_path / str(number))
        files[-1].write_bytes(data)

    assert run(environment, "-c", PARSED, name, place, *files).count("read") > MUTATED // 10


@pytest.mark.parametrize(("field", "every"), [("jpg", jpegs.CASES), ("png", pngs.CASES)])
def test_hostile_images_are_clean(
    environment: dict[str, str], tmp_path: Path, field: str, every: tuple[Case, ...]
) -> None:
    place, files = tmp_path / "place", list[Path]()
    place.mkdir()
    kind = [kind for kind in IMAGE_FIELDS if kind != "raw"].index(field)
    for number, (_, path) in enumerate(files_of(every, tmp_path)):
        files.append(tmp_path / f"input-{number}")
        files[-1].write_bytes(bytes((kind, number % 256)) + path.read_bytes())

    assert run(environment, "-c", PARSED, "image", place, *files).count("read") >= 90


@pytest.mark.parametrize("mutated", [mutated_jpeg, mutated_png])
def test_mutated_images_are_clean(
    environment: dict[str, str], tmp_path: Path, mutated: Callable[[random.Random], bytes]
) -> None:
    suffix = mutated.__name__[-4:].replace("jpeg", "jpg").replace("_", "")
    (tmp_path / "source/a").mkdir(parents=True)
    for number in range(MUTATED):
        (tmp_path / f"source/a/{number}.{suffix}").write_bytes(mutated(draw(number)))

    done = run(environment, "-c", CONVERTED, tmp_path / "source", tmp_path / "target")

    assert int(done) > MUTATED


@in_full
@pytest.mark.parametrize("changed", [{"CC": "no-such-compiler"}, {"SHARDKIT_BUILD_NATIVE": "off"}])
def test_a_wheel_without_the_module_is_built_where_it_cannot_be(
    tmp_path: Path, changed: dict[str, str]
) -> None:
    words = ("-m", "build", "--wheel", "--no-isolation", "--outdir", tmp_path, ROOT)
    done = execute(sys.executable, *words, env=changed, timeout=2 * DEADLINE)

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
    words = ("-m", "pytest", "-q", "-m", "not slow", "-p", "no:cacheprovider", *names)
    settings: dict[str, Any] = {"env": {"SHARDKIT_NATIVE": "off"}, "timeout": 8 * DEADLINE}
    done = execute(sys.executable, *words, cwd=ROOT / "tests" / "unit", **settings)
    assert done.returncode == 0, done.stdout[-3000:]
    assert " passed" in done.stdout
