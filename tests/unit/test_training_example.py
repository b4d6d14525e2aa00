"""The training script of the docs survives SIGKILL, and runs under torchrun.

That it learns is shown by `tests/campaigns/test_examples.py`.
"""

from __future__ import annotations

import json
import os
import re
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from forked import run_forked, run_script, start_script
from helpers import execute, wait_until

from shardkit import convert

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "docs" / "examples" / "train.py"
ODD = 91

SECONDS = 250.0
"""After them a run is taken for hung; the longest needs 12 of one processor."""

SHORT = ("--epochs", "6", "--save-every", "4")
"""36 batches, six in an epoch; a checkpoint after the fourth and the last of each."""

TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """``sample_data``, converted as the script's docstring says."""
    target = tmp_path_factory.mktemp("training") / "dataset"
    convert(ROOT / "sample_data", target, to="lmdb")
    return target


_LAUNCHER = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def accuracy_of(*command: object) -> float:
    """Run Python, the script itself in a fork; return the accuracy that it prints."""
    if command[0] == SCRIPT:
        done = run_forked(run_script, command, deadline=SECONDS)
    else:
        environment = {name: value for name, value in os.environ.items() if name not in _LAUNCHER}
        done = execute(sys.executable, *command, env=environment, timeout=SECONDS)
    assert done.returncode == 0, done.stderr
    (found,) = re.findall(r"^accuracy ([0-9.]+)%$", done.stdout, re.MULTILINE)
    return float(found) / 100


def lines_of(log: Path) -> int:
    """Return the number of complete lines in a log."""
    return log.read_bytes().count(b"\n") if log.exists() else 0


def kill_at(line: int, *command: object, log: Path) -> None:
    """Start the script, and kill it with SIGKILL when its log has ``line`` lines."""
    with Path(os.devnull).open("wb") as nowhere:
        process = start_script([sys.executable, *map(str, command)], stdout=nowhere)
    wait_until(
        lambda: lines_of(log) >= line or process.poll() is not None, f"line {line} of the log"
    )
    os.kill(process.pid, signal.SIGKILL)
    assert process.wait(SECONDS) == -signal.SIGKILL, "it ended before it could be killed"


def network_in(output: Path) -> dict[str, torch.Tensor]:
    saved: dict[str, Any] = torch.load(output / "checkpoint.pt", weights_only=True)
    network: dict[str, torch.Tensor] = saved["network"]
    return network


@pytest.mark.slow
def test_killed_repeatedly_it_writes_the_log_of_an_uninterrupted_run(
    dataset: Path, tmp_path: Path
) -> None:
    calm, killed = tmp_path / "calm", tmp_path / "killed"
    log = killed / "log.jsonl"
    undisturbed = accuracy_of(SCRIPT, dataset, calm, *SHORT)
    expected = (calm / "log.jsonl").read_bytes()
    assert [(line["epoch"], line["batch"]) for line in map(json.loads, expected.splitlines())] == [
        (epoch, batch) for epoch in range(6) for batch in range(1, 7)
    ]

    kill_at(2, SCRIPT, dataset, killed, *SHORT, log=log)
    kill_at(15, SCRIPT, dataset, killed, *SHORT, log=log)
    assert lines_of(log) < 36
    (killed / "checkpoint.new").write_bytes(b"half")  # killed while it was written
    with log.open("r+b") as file:
        file.write(b"!")  # stays if the run goes on, and would not if it began anew
        file.seek(0, os.SEEK_END)
        file.write(b'{"epoch": 1, "ba')
    kill_at(29, SCRIPT, dataset, killed, *SHORT, log=log)
    accuracy = accuracy_of(SCRIPT, dataset, killed, *SHORT)

    assert log.read_bytes() == b"!" + expected[1:]
    assert accuracy == undisturbed
    ours, theirs = network_in(killed), network_in(calm)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


@pytest.mark.slow
def test_a_complete_run_is_evaluated_but_not_trained_further(dataset: Path, tmp_path: Path) -> None:
    options = (SCRIPT, dataset, tmp_path / "run", "--epochs", "1")
    accuracy = accuracy_of(*options)
    log = (tmp_path / "run" / "log.jsonl").read_bytes()

    assert accuracy_of(*options) == accuracy
    assert (tmp_path / "run" / "log.jsonl").read_bytes() == log

    accuracy_of(*options, "--no-resume", "--seed", "1")

    anew = (tmp_path / "run" / "log.jsonl").read_bytes()
    assert anew.count(b"\n") == 6
    assert anew != log


@pytest.mark.slow
def test_two_processes_of_torchrun_train_one_network(dataset: Path, tmp_path: Path) -> None:
    odd = tmp_path / "odd"  # no two processes can divide it evenly
    convert(ROOT / "sample_data", odd, to="lmdb", limit=ODD)
    options = (SCRIPT, dataset, tmp_path / "run", "--validation", odd, "--epochs", "24")

    accuracy = accuracy_of(*TORCHRUN, *options)

    log = (tmp_path / "run" / "log.jsonl").read_bytes()
    lines = [json.loads(line) for line in log.splitlines()]
    assert [(line["epoch"], line["batch"]) for line in lines] == [
        (epoch, batch) for epoch in range(24) for batch in range(1, 4)
    ]
    assert accuracy >= 0.5  # a quarter is chance
    assert round(accuracy * ODD) / ODD == pytest.approx(accuracy, abs=0.0006)
    assert accuracy_of(*options) == accuracy, "one process counts as two do"
    assert (tmp_path / "run" / "log.jsonl").read_bytes() == log
