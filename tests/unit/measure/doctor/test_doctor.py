"""`shardkit doctor` names planted bottlenecks first, through the command and its own process."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from faulty import compiler
from helpers import DEADLINE, encoded, invoke, jpeg, make_dataset, make_folder, make_tree
from PIL import Image

from shardkit import MeasurementFailed, UsageError
from shardkit.measure.doctor import doctor
from shardkit.measure.doctor.trial import Trial

SLOW_C = Path(__file__).parents[3] / "support" / "faults" / "slow.c"

ROWS = 16

TRANSFORMS = """
import os
import threading
import time

import torch
from shardkit import with_rng


def spin(image):
    end = time.perf_counter() + 0.004
    while time.perf_counter() < end:
        pass
    return torch.zeros(3, 64, 64)


@with_rng
def spin_in_threads(image, rng):
    return spin(image)


def die(image):
    os._exit(7)


def die_in_threads(image):
    if threading.current_thread() is not threading.main_thread():
        os._exit(7)
    return torch.zeros(3, 64, 64)


def quick(image):
    return torch.zeros(3, 64, 64)
"""


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A current folder with transforms in it; looks are short."""
    (tmp_path / "transforms.py").write_text(TRANSFORMS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(doctor, "SECONDS", 0.1)
    monkeypatch.setattr(doctor, "ROUNDS", 1)
    return tmp_path


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dataset that is quickly read."""
    root = tmp_path_factory.mktemp("doctor")
    files: dict[str, bytes | None] = {f"a/{n}.jpg": jpeg(64, 48, n) for n in range(ROWS)}
    return make_dataset(make_tree(root / "photos", files), root / "made")


def examined(*arguments: object) -> dict[str, Any]:
    """Return what the command says as JSON."""
    done = invoke("doctor", *arguments, "--json", "--batch-size", "4")
    assert done.exit_code == 0, done.output
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.mark.skipif(compiler() is None, reason="it needs Linux and gcc")
@pytest.mark.slow
def test_a_slow_disk_is_named(made: Path, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    library = place / "slow.so"
    command = [compiler() or "", "-shared", "-fPIC", "-O1", "-o", str(library), str(SLOW_C), "-ldl"]
    subprocess.run(command, check=True, timeout=DEADLINE)
    monkeypatch.setenv("LD_PRELOAD", str(library))
    monkeypatch.setenv("SLOW_ROOT", str(made))
    monkeypatch.setenv("SLOW_MICROSECONDS", "4000")
    found = examined(made, "--decode", "CenterCrop(32)")

    assert found["diagnosis"]["bottleneck"] == "read"
    assert found["diagnosis"]["verdict"].startswith("Reading limits: it is ")
    assert found["measured"]["profile"]["warm"]["read"] > 0.003
    assert found["measured"]["profile"]["cold_read"] > 0.003
    told = [each["what"] for each in found["diagnosis"]["remedies"]]
    assert any("faster or a local disk" in each for each in told)


@pytest.mark.slow
def test_a_transform_that_holds_the_lock_is_named(made: Path) -> None:
    found = examined(made, "--transform", "transforms:spin_in_threads", "--workers", "2")

    assert found["diagnosis"]["bottleneck"] == "interpreter lock"
    assert "threads cannot share it" in found["diagnosis"]["verdict"]
    assert found["measured"]["engine"] == "thread"
    assert found["measured"]["profile"]["held"] > 0.5
    assert found["measured"]["alternatives"]["process"]
    assert found["measured"]["profile"]["sample"] == [3, 64, 64]


@pytest.mark.slow
def test_a_huge_decode_is_named_with_the_command_that_helps(place: Path) -> None:
    noise = np.random.default_rng(0).integers(0, 255, (300, 400, 3), np.uint8)
    huge = encoded(Image.fromarray(noise).resize((4000, 3000)), "JPEG")
    files: dict[str, bytes | None] = {f"a/{n}.jpg": huge for n in range(4)}
    made = make_dataset(make_tree(place / "photos", files), place / "my data")
    found = examined("my data", "--decode", "CenterCrop(64)", "--workers", "1")
    best = found["diagnosis"]["remedies"][0]

    assert found["diagnosis"]["bottleneck"] == "decode"
    assert found["diagnosis"]["shares"]["decode"] > 0.8
    assert best["gain"] > 3
    assert best["basis"] == "measured on 4 images, re-encoded in memory"
    assert "sees something else" in best["what"]
    words = shlex.split(found["command"])
    assert words[:4] == ["shardkit", "convert", "imagefolder", "SRC"]
    assert words[4].startswith("my data-")
    assert "--resize" in words
    assert found["source"] == "photos"
    words[3:5] = ["photos", "again"]
    assert invoke(*words[1:]).exit_code == 0  # the command can be given as it is
    assert made.is_dir()


@pytest.mark.slow
def test_a_step_that_is_longer_than_loading_is_named(made: Path) -> None:
    found = examined(made, "--decode", "CenterCrop(32)", "--step-ms", "800", "--workers", "1")

    assert found["diagnosis"]["bottleneck"] == "step"
    assert found["diagnosis"]["headroom"] > 3
    assert found["diagnosis"]["remedies"] == []
    assert found["command"] == ""


SMALL_MEMORY = (
    "unshare",
    "--mount",
    "sh",
    "-c",
    'mount -t tmpfs -o size=1m tmpfs /dev/shm && exec "$0" "$@"',
)
"""Runs a command that has 1 MB of shared memory and does not disturb others."""

QUICKLY = """
import sys
from shardkit.cli.main import main
from shardkit.measure.doctor import doctor
from shardkit.measure.doctor.facts import Facts, gather
doctor.SECONDS, doctor.ROUNDS = 0.1, 1
main()
"""


@pytest.mark.slow
def test_a_starved_shared_memory_is_named(made: Path) -> None:
    trial = [*SMALL_MEMORY, "true"]
    if shutil.which("unshare") is None or subprocess.run(trial, check=False).returncode:
        pytest.skip("only root may mount a file system; planted values stand elsewhere")
    options = ["--transform", "transforms:quick", "--json", "--batch-size", "8", "--workers", "2"]
    done = subprocess.run(
        [*SMALL_MEMORY, sys.executable, "-c", QUICKLY, "doctor", str(made), *options],
        capture_output=True,
        text=True,
        timeout=DEADLINE,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)

    assert found["diagnosis"]["bottleneck"] == "shared memory"
    assert found["diagnosis"]["verdict"].startswith("/dev/shm is too small for the worker")
    assert found["findings"][0]["severity"] == "problem"
    assert "--shm-size" in found["diagnosis"]["remedies"][0]["what"]
    assert found["measured"]["engine"] == "thread"
    assert "process" not in found["measured"]["alternatives"]


def test_a_plain_folder_works_and_is_to_be_converted(place: Path) -> None:
    photos = make_tree(place / "photos", {f"a/{n}.jpg": jpeg(64, 48, n) for n in range(ROWS)})
    done = invoke("doctor", photos, "--batch-size", "4", "--decode", "CenterCrop(48)")

    assert done.exit_code == 0, done.output
    first, *_ = done.stdout.splitlines()
    assert first.startswith(f"{photos}: ")
    assert "files have none" in done.stdout
    assert "PlainFolder is not a dataset of shardkit" in " ".join(done.stdout.split())


@pytest.mark.slow
def test_a_trial_may_disprove_the_command(made: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def try_out(*given: Any) -> Trial:
        asked.append(given)
        return Trial(
            images=16,
            batch_size=2,
            before=100.0,
            after=250.0,  # a median that one round gave; the verdict compares round with round
            ratios=(0.9, 2.5, 0.9),
            bytes_before=9,
            bytes_after=3,
        )

    monkeypatch.setattr(doctor, "try_out", try_out)
    options = ("--decode", "CenterCrop(8)", "--trial", "--workers", "1")
    worse = invoke("doctor", made, "--batch-size", "4", *options).stdout

    subject, loading, recipe, storage = asked[0]
    assert subject.path == str(made)
    assert loading.options == {"num_workers": 1}
    assert recipe.resize
    assert storage == "lmdb"
    assert "trial     0.90x (0.90x to 2.50x in 3 rounds) on 16 images" in worse
    assert "250" not in worse.partition("trial  ")[2]
    assert "the conversion does not help here" in worse
    assert "shardkit convert" not in worse


def test_without_data_the_machine_alone_is_looked_at() -> None:
    done = invoke("doctor", "--workers", "2")
    assert done.exit_code == 0
    assert done.stdout.startswith("this machine: ")
    assert "versions" in done.stdout
    found = json.loads(invoke("doctor", "--json").stdout)
    assert found["subject"] is found["diagnosis"] is found["measured"] is None
    assert {each["name"] for each in found["findings"]} >= {"processors", "shared memory"}
    assert invoke("doctor", "--quiet").output == ""


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--trial"], "--trial requires DATASET"),
        (["--step-ms", "5"], "--step-ms requires DATASET"),
        (["missing"], "missing does not exist"),
        (["transforms.py"], r"transforms\.py is not a folder"),
        (["empty"], "there are no images in empty"),
        (["photos", "--decode", "Crop"], "decode 'Crop' is unknown"),
        (["photos", "--step-ms", "5", "--model", "small"], "either a time in ms or a model"),
    ],
)
def test_what_cannot_be_done_is_refused(place: Path, arguments: list[str], message: str) -> None:
    (place / "empty").mkdir()
    make_folder(place / "photos")

    refused(UsageError, message, *arguments)


def refused(error: type[Exception], message: str, *arguments: object) -> None:
    done = invoke("doctor", *arguments)
    assert isinstance(done.exception, error), done.output
    assert re.search(message, str(done.exception))
    assert not done.stdout


@pytest.mark.slow
def test_a_transform_that_ends_its_process_is_told(made: Path) -> None:
    refused(MeasurementFailed, "exit code 7", made, "--transform", "transforms:die")


@pytest.mark.slow
def test_a_transform_that_no_thread_bears_is_examined_nevertheless(
    made: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "ROUNDS", 2)
    found = examined(made, "--transform", "transforms:die_in_threads", "--workers", "1")

    assert found["measured"]["engine"] == "process"
    assert found["measured"]["single"] > 0
    assert len(found["measured"]["rates"]) == 2  # the second after a thread ended the process
    assert "thread" not in found["measured"]["alternatives"]
