"""`shardkit attach` killed at any call: a rerun writes exactly the same files."""

from __future__ import annotations

import io
import shutil
import tarfile
from pathlib import Path

import pytest
from campaign import draw, points
from faulty import SIGNAL_BEFORE, Bench, Fault, compiler
from helpers import jpeg, tree

from shardkit import ShardkitError, describe

pytestmark = pytest.mark.skipif(compiler() is None, reason="it needs Linux and gcc")


@pytest.mark.parametrize("update", [False, True])
def test_a_killed_run_is_finished_by_the_same_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, update: bool
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    tars, bench = tmp_path / "tars", Bench(tmp_path / "bench")
    tars.mkdir()
    for number in range(3):
        with tarfile.open(tars / f"x-{number}.tar", "w") as archive:
            for row in range(3):
                info = tarfile.TarInfo(f"s{number}{row}.jpg")
                info.size = len(data := jpeg(8, 8, row))
                archive.addfile(info, io.BytesIO(data))
    before, target = tree(tars), bench.root / "index"

    def attach(place: Path, names: str = "x-{0..2}.tar", fault: Fault | None = None) -> int:
        words = ("attach", tars / names, place, "--workers", 1, "--quiet")
        outcome = bench.run(*words, fault=fault)
        assert outcome.killed if fault else outcome.code == 0, outcome.story()
        return outcome.calls

    def prepare() -> None:
        shutil.rmtree(target, ignore_errors=True)
        if update:
            shutil.copytree(bench.root / "old", target)

    attach(bench.root / "old", "x-{0..1}.tar")
    prepare()
    calls = attach(target)
    expected = tree(target)
    for at in {1, calls, *draw(update).sample(range(2, calls), points(3, 40))}:
        prepare()
        attach(target, fault=Fault(action=SIGNAL_BEFORE, at=at))
        try:
            assert describe(target)[""]["rows"] in ((6, 9) if update else (9,))
        except ShardkitError:
            assert not update, at
        attach(target)
        assert tree(target) == expected, at
    bench.close()
    assert tree(tars) == before
