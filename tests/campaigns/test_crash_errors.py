"""A disk that is full or fails at any call: one clear line, and a rerun resumes."""

from __future__ import annotations

import errno
import itertools
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from campaign import FULL, cases, points
from faulty import FAIL, FOREVER, SHORTEN, Bench, Fault, compiler
from helpers import DEADLINE, FORMATS, execute
from oracle import NAMES, Oracles, different, error_points

needs_compiler = pytest.mark.skipif(compiler() is None, reason="it needs Linux and gcc")

ERRORS = (errno.ENOSPC, errno.EIO, errno.EDQUOT)


@pytest.fixture(scope="module")
def oracles(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Oracles]:
    bench = Bench(tmp_path_factory.mktemp("errors"))
    yield Oracles(bench)
    bench.close()


@needs_compiler
@pytest.mark.parametrize(
    ("to", "code", "times"), cases(itertools.product(FORMATS, ERRORS, (1, FOREVER)), 4)
)
def test_an_error_of_the_disk_is_told_and_the_same_command_goes_on(
    oracles: Oracles, to: str, code: int, times: int
) -> None:
    oracle = oracles.of(NAMES[0], to)
    for fault in error_points(oracle, [code], points(3, 20), times):
        point = oracle.fail(fault)
        assert not point.wrong, (fault, oracle.kinds.get(fault.at), point.wrong)


@needs_compiler
@pytest.mark.parametrize(("to", "name"), cases(itertools.product(FORMATS, NAMES[1:]), 3))
def test_an_error_of_the_disk_leaves_the_older_dataset_or_none(
    oracles: Oracles, to: str, name: str
) -> None:
    oracle = oracles.of(name, to)
    for times in (1, FOREVER):
        for fault in error_points(oracle, ERRORS, points(2, 12), times):
            point = oracle.fail(fault)
            assert not point.wrong, (fault, oracle.kinds.get(fault.at), point.wrong)


@needs_compiler
@pytest.mark.parametrize(("to", "code"), cases(itertools.product(FORMATS, ERRORS), 3))
def test_every_write_of_a_shard_may_fail(oracles: Oracles, to: str, code: int) -> None:
    """Among them are those of HDF5 itself, which is known to crash, and of LMDB."""
    oracle = oracles.of(NAMES[0], to)
    writes = [at for at, kind in oracle.kinds.items() if kind == "write"]
    for at in writes[2:] if FULL else writes[2:30:14]:
        # LMDB calls it an input/output error; a trial tells, if the disk is still full then.
        times = FOREVER if to == "lmdb" else 1
        point = oracle.fail(Fault(action=FAIL, at=at, code=code, times=times))
        assert not point.wrong, (at, point.wrong)


@needs_compiler
@pytest.mark.parametrize("to", FORMATS)
def test_calls_that_a_signal_interrupts_are_made_again(oracles: Oracles, to: str) -> None:
    oracle = oracles.of(NAMES[0], to)
    interruptible = [at for at, kind in oracle.kinds.items() if kind in ("write", "sync")]
    for at in interruptible[:: points(20, 3)]:
        oracle.reset()
        outcome = oracle.run(Fault(action=FAIL, at=at, code=errno.EINTR))
        assert outcome.code == 0, (at, outcome.story())
        assert outcome.acted == 1
        assert not different(oracle.expected, oracle.found())


@needs_compiler
@pytest.mark.parametrize("to", FORMATS)
def test_writes_that_take_half_are_completed_or_told(oracles: Oracles, to: str) -> None:
    """A signal can cut a write short; LMDB takes that for an error of the disk."""
    oracle = oracles.of(NAMES[0], to)
    oracle.reset()
    outcome = oracle.run(Fault(action=SHORTEN, at=1, times=FOREVER))
    assert outcome.acted > 3
    if to == "lmdb":
        assert outcome.code == 1
        assert outcome.stderr.count("\n") == 1
    else:
        assert outcome.code == 0, outcome.story()
        assert not different(oracle.expected, oracle.found())


# --- a disk that is really full ---

_FULL = """
import json, subprocess, sys
from pathlib import Path
from helpers import jpeg, make_tree, run_main, tree

root = Path(sys.argv[1])
for each in ("source", "disk"):
    (root / each).mkdir()
photos = make_tree(
    root / "source", {f"{c}/{n}.jpg": jpeg(160, 120, n) for c in ("cat", "dog") for n in range(40)}
)
size = sum(path.stat().st_size for path in photos.rglob("*.jpg"))


def mount(size, *options):
    size = -(-size // 4096) * 4096
    command = ["mount", "-t", "tmpfs", "-o", ",".join((f"size={size}", *options)), "none"]
    subprocess.run([*command, str(root / "disk")], check=True)


found = {"size": size}
for to in ("hdf5", "lmdb", "webdataset"):
    given = ["--to", to, "--workers", 1, "--json", "--shard-samples", 10]

    def convert(target, *more):
        done = run_main("convert", "imagefolder", photos, target, *given, *more)
        return [done.returncode, done.stdout, done.stderr]

    convert(root / to)
    expected = tree(root / to)
    mount(size // 2)
    target = root / "disk" / "out"
    steps = [convert(target)]
    mount(int(size * 1.02), "remount")
    steps.append(convert(target))
    mount(size * 4, "remount")
    steps.append(convert(target))
    found[to] = {"steps": steps, "equal": tree(target) == expected, "target": str(target)}
    subprocess.run(["umount", str(root / "disk")], check=True)
print(json.dumps(found))
"""


def unshared() -> list[str]:
    """Return the command that gives a process mounts of its own, or nothing if it may not."""
    command = ["unshare", "-m"] if os.geteuid() == 0 else ["unshare", "-r", "-m"]
    trial = "mount -t tmpfs -o size=64k none /tmp"
    try:
        tried = execute(*command, "sh", "-c", trial)
    except OSError:
        return []
    return [] if tried.returncode else command


def test_a_full_disk_is_told_and_with_more_room_the_same_command_finishes(tmp_path: Path) -> None:
    """First the disk is too small, then it becomes full, then there is room."""
    command = unshared()
    if not command:
        pytest.skip("this user may mount nothing")
    support = str(Path(__file__).parents[1] / "support")
    places = os.pathsep.join([support, os.environ.get("PYTHONPATH", "")])
    words = (*command, sys.executable, "-c", _FULL, tmp_path)
    done = execute(*words, env={"PYTHONPATH": places}, timeout=2 * DEADLINE)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    for to in FORMATS:
        *failed, last = found[to]["steps"]
        for (code, stdout, stderr), word in zip(failed, ("Free ", "full"), strict=True):
            assert code == json.loads(stdout)["exit_code"] == 1, (to, stderr)
            assert stderr.startswith("shardkit: error: ")
            assert stderr.count("\n") == 1
            assert found[to]["target"] in stderr
            assert word in stderr
        assert (last[0], last[2]) == (0, ""), to
        assert found[to]["equal"], to
