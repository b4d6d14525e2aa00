"""Hostile inputs: the corpus, some thousands more, and bugs that the fuzzer must find.

`scripts/fuzz` runs for longer. Inputs that may crash are tried in processes of their own.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from campaign import SEED, cases, in_full, points
from helpers import DEADLINE, execute
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy
from refusals import refused

from scripts.fuzzing.target import Target
from scripts.fuzzing.targets import TARGETS, make
from scripts.fuzzing.watch import environment, fuzz, replay

ROOT = Path(__file__).parents[2]
CORPUS = ROOT / "tests" / "fuzz_corpus"

ROW = re.compile(r"\| `([^`]+)` \| ([^|]+) \| [^|]+ \|")

DECIDED_ELSEWHERE = (
    *("image", "native", "dataset-hdf5", "dataset-lmdb", "dataset-tar"),
    *("source-arrow", "source-parquet", "source-parquet-table"),
)
"""What comes of an input of these depends on the version of Pillow, libjpeg or pyarrow as well."""


needs_atheris = pytest.mark.skipif(not find_spec("atheris"), reason="no atheris for this Python")


def table() -> dict[str, str]:
    """Return the inputs of the corpus, and what comes of each."""
    rows = map(ROW.fullmatch, (CORPUS / "README.md").read_text("utf-8").splitlines())
    return {row[1]: row[2] for row in rows if row and row[1] != "input"}


def test_every_input_of_the_corpus_is_described() -> None:
    found = {str(path.relative_to(CORPUS)) for path in CORPUS.glob("*/*")}

    assert set(table()) == found
    assert {name.partition("/")[0] for name in found} == set(TARGETS)


@pytest.mark.timeout(1200)
def test_the_corpus_breaks_no_promise(tmp_path: Path) -> None:
    names = list(table())
    jobs = [
        {"target": name.partition("/")[0], "data": (CORPUS / name).read_bytes().hex()}
        for name in names
    ]

    results = replay(jobs, tmp_path)

    for name, result in zip(names, results, strict=True):
        assert result["finding"] is None, (name, result["finding"])
        if name.partition("/")[0] not in DECIDED_ELSEWHERE:
            assert result["outcome"] == table()[name], name


@needs_atheris
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", cases(TARGETS, 1))
def test_a_few_hundred_new_inputs_break_no_promise(name: str) -> None:
    count = points(60, 300)
    summary = fuzz(name, seconds=1500, count=count, seed=SEED)

    assert summary.found == {}
    assert summary.executions == count
    assert len(summary.outcomes) > 1


# --- properties ---


def changed(seeds: list[bytes]) -> SearchStrategy[bytes]:
    """Give one of ``seeds`` with pieces overwritten, put in or taken out, or something else."""
    numbers = st.integers(0, (1 << 64) - 1).map(lambda number: number.to_bytes(8, "little"))
    piece = st.binary(min_size=1, max_size=12) | numbers | numbers.map(lambda word: word[::-1])
    change = st.tuples(st.floats(0, 1), st.integers(0, 16), piece)

    def apply(seed: bytes, changes: list[tuple[float, int, bytes]]) -> bytes:
        data = bytearray(seed)
        for place, length, new in changes:
            start = int(place * len(data))
            data[start : start + length] = new
        return bytes(data)

    several = st.lists(change, max_size=4)
    return st.builds(apply, st.sampled_from(seeds), several) | st.binary(max_size=600)


@pytest.fixture
def target(request: pytest.FixtureRequest, tmp_path: Path) -> Target:
    """The target of the name that a test is given, in a folder of its own."""
    place = tmp_path / "place"
    place.mkdir()
    made: Target = make(request.param, place)
    return made


@pytest.mark.parametrize(
    "target", ["manifest", "index", "tar", "lmdb", "hdf5", "image"], indirect=True
)
@seed(SEED)
@settings(max_examples=points(30, 500), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_input_is_read_right_or_refused(target: Target, data: st.DataObject) -> None:
    content = data.draw(changed(target.seeds))
    try:
        target.check(content)
    except target.allowed:
        return


def nested(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = [value]
    return value


@pytest.mark.parametrize("depth", [31, 40, 330, 500, 900])
def test_a_recipe_that_is_nested_too_deeply_is_refused(tmp_path: Path, depth: int) -> None:
    """Some were taken, and their digest then failed with a RecursionError."""
    from scripts.fuzzing.targets.manifest import sealed

    target = make("manifest", tmp_path)
    value = json.loads(target.seeds[0])
    value["recipe"]["encode"] = nested(depth)
    with refused(target.allowed):
        target.check(sealed(value))


# --- the fuzzer itself ---

FINDINGS = {
    "RaisesKeyError": ("exception", "faulty KeyError in manifest._parse"),
    "Loops": ("hang", "faulty hangs in dataset/manifest._parse"),
    "Allocates": ("memory", "faulty grew in"),
    "AllocatesTooMuch": ("memory", "faulty MemoryError in manifest._parse"),
    "OpensAnotherFile": ("deed", "faulty it opened"),
    "ReadsAnotherFile": ("deed", "faulty it opened /etc/passwd"),
    "RemovesAnotherFile": ("deed", "faulty it changed files elsewhere"),
    "Unpickles": ("deed", "faulty it unpickled something"),
    "Executes": ("deed", "faulty it executed text"),
    "RunsACommand": ("deed", "faulty it ran a command"),
    "Crashes": ("crash", "faulty SIGSEGV in dataset/manifest._parse"),
    "ReadsWrong": ("wrong", "faulty another sample is read"),
}
"""Kind and signature of the finding, by class of `faulty_targets`."""


@pytest.fixture
def beside(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], str]:
    """Have children find `faulty_targets`; give the name of a target in it."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "tests/support"))
    return lambda name: f"faulty_targets:{name}"


def test_each_kind_of_bug_is_a_finding(beside: Callable[[str], str], tmp_path: Path) -> None:
    names = [*FINDINGS, "Sound"]
    jobs = [{"target": beside(name), "data": b"\0\0".hex()} for name in names]

    *results, sound = (result["finding"] for result in replay(jobs, tmp_path))

    for name, finding in zip(FINDINGS, results, strict=True):
        kind, signature = FINDINGS[name]
        assert finding["kind"] == kind, (name, finding)
        assert finding["signature"].startswith(signature), (name, finding)
    assert sound is None


@needs_atheris
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("name", cases(["Crashes", "Sound"], 1))
def test_the_fuzzer_starts_again_after_a_crash(beside: Callable[[str], str], name: str) -> None:
    summary = fuzz(beside(name), seconds=1000, count=8, seed=0)

    assert {finding.kind for finding, _ in summary.found.values()} <= {"crash"}
    assert summary.restarts == summary.outcomes["crash"]
    assert bool(summary.found) == (name == "Crashes")


def script(*arguments: object) -> subprocess.CompletedProcess[str]:
    words = (sys.executable, ROOT / "scripts" / "fuzz.py", *arguments)
    return execute(*words, cwd=ROOT, env=environment(), timeout=2 * DEADLINE)


@in_full
@needs_atheris
def test_the_script_saves_what_it_finds_as_small_as_it_can(
    beside: Callable[[str], str], tmp_path: Path
) -> None:
    done = script(
        *("--target", beside("RaisesKeyError"), "--count", 200),
        *("--corpus", tmp_path),
    )

    assert done.returncode == 1, done.stderr
    (saved,) = (tmp_path / "RaisesKeyError").iterdir()
    assert saved.read_bytes() == bytes(2)
    assert "200 inputs in all, 1 findings" in done.stdout
    assert re.search(r"FOUND \d+ times: exception: faulty KeyError", done.stdout)


def test_without_atheris_the_script_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    from scripts import fuzz as command

    monkeypatch.setattr(command, "find_spec", lambda _: None)
    with pytest.raises(SystemExit, match="atheris"):
        command.main(["--target", "fields"])


def test_an_unknown_target_is_refused() -> None:
    done = script("--target", "nothing")

    assert done.returncode == 2
    assert "choose from manifest, index" in done.stderr
