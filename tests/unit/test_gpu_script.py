"""`scripts/bench/gpu.py`: parts that fail, hang or lack something, its table, and what it checks.

There is no GPU: the checks are given loaders that do what they must find.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from forked import start_script
from helpers import DEADLINE, wait_until

BENCH = Path(__file__).parents[2] / "scripts" / "bench"

PLANTED = """
import os, signal, time
from isolation import NotAvailable


def works(job, progress):
    progress.add("sum", sum(job["numbers"]) + job["more"], "things")


def fails(job, progress):
    progress.add("before", 1)
    raise ValueError("planted\\nhere")


def lacks(job, progress):
    raise NotAvailable("no torchcodec")


def hangs(job, progress):
    if os.fork():  # the other one is a worker
        progress.add("before", 1)
    time.sleep(600)


def crashes(job, progress):
    os.kill(os.getpid(), signal.SIGSEGV)


def exits(job, progress):
    print("a library gave up")
    os._exit(3)


def cases(job, progress):
    with progress.case("wrong"):
        raise ValueError("planted")
    with progress.case("missing"):
        raise NotAvailable("no events")
    progress.add("right")
"""


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The scripts' folder can be imported from; what was imported is forgotten afterwards."""
    monkeypatch.syspath_prepend(BENCH)
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        file = getattr(sys.modules[name], "__file__", None) or ""
        if file.startswith(str(BENCH)) or name == "gpu_parts":
            del sys.modules[name]


@pytest.fixture
def isolation(bench: None) -> ModuleType:
    return importlib.import_module("isolation")


@pytest.fixture
def gpu(isolation: ModuleType) -> ModuleType:
    return importlib.import_module("gpu")


@pytest.fixture
def run(isolation: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Runs functions of `PLANTED` as parts; returns their outcomes by name."""
    (tmp_path / "planted.py").write_text(PLANTED, "utf-8")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))

    def run_planted(*names: str) -> dict[str, Any]:
        parts = [
            isolation.Part(name=name, function=f"planted:{name}", weight=1.0, options={"more": 4})
            for name in names
        ]
        outcomes = isolation.run_parts(parts, {"numbers": [1, 2]}, tmp_path, 100 * DEADLINE)
        assert [outcome.name for outcome in outcomes] == list(names)
        return {outcome.name: outcome for outcome in outcomes}

    return run_planted


def rows(outcome: Any) -> list[tuple[str, Any]]:
    return [(row["case"], row["value"]) for row in outcome.rows]


# Parts.


def test_a_part_that_fails_leaves_the_others_alone(run: Any) -> None:
    outcomes = run("fails", "crashes", "exits", "lacks", "works")
    status = {name: outcome.status for name, outcome in outcomes.items()}
    assert status == {
        "fails": "failed",
        "crashes": "failed",
        "exits": "failed",
        "lacks": "not available",
        "works": "complete",
    }
    assert outcomes["fails"].remark == "ValueError: planted here"
    assert outcomes["crashes"].remark.startswith("its process ended with SIGSEGV")
    assert outcomes["exits"].remark == "its process ended with exit code 3: a library gave up"
    assert outcomes["lacks"].remark == "no torchcodec"
    assert rows(outcomes["fails"]) == [("before", 1)], "results before the failure count"
    assert rows(outcomes["works"]) == [("sum", 7)]


def test_a_part_that_hangs_is_killed_with_its_workers(
    run: Any, isolation: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    groups: list[int] = []

    def wait_for(process: subprocess.Popen[bytes], seconds: float) -> int:
        """Time is up as soon as the part hangs."""
        if groups:
            return process.wait(DEADLINE)
        groups.append(process.pid)
        wait_until((tmp_path / "hangs.json").exists, "the first result")
        raise subprocess.TimeoutExpired("part", seconds)

    monkeypatch.setattr(isolation, "wait_for", wait_for)
    outcomes = run("hangs", "works")
    assert outcomes["hangs"].status == "stopped"
    assert outcomes["hangs"].remark.startswith("killed after ")
    assert rows(outcomes["hangs"]) == [("before", 1)]
    assert outcomes["works"].status == "complete"
    wait_until(lambda: not exists(groups[0]), "the end of its workers")


def exists(group: int) -> bool:
    """Return whether a process of a group runs; one that waits for its parent does not."""
    for entry in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, its_group = entry.read_text().rpartition(")")[2].split()[:3]
        except (OSError, ValueError):
            continue
        if int(its_group) == group and state != "Z":
            return True
    return False


def test_ctrl_c_keeps_the_results_and_ends_the_parts(
    run: Any, isolation: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[int] = []

    def wait_for(process: subprocess.Popen[bytes], seconds: float) -> int:
        calls.append(process.pid)
        if len(calls) == 1:
            return process.wait(DEADLINE)
        raise KeyboardInterrupt

    monkeypatch.setattr(isolation, "wait_for", wait_for)
    outcomes = run("works", "hangs", "cases")
    assert [outcome.status for outcome in outcomes.values()] == ["complete", "stopped", "not run"]
    assert outcomes["hangs"].remark == "interrupted"


def test_a_case_that_fails_ends_no_other(run: Any) -> None:
    cases = run("cases")["cases"]
    assert cases.status == "complete"
    assert [(row["case"], row["remark"], row["is_failure"]) for row in cases.rows] == [
        ("wrong", "failed: ValueError: planted", True),
        ("missing", "not available: no events", False),
        ("right", "", False),
    ]


# The command.


def test_the_table_has_a_line_for_each_result_and_each_problem(
    gpu: ModuleType, isolation: ModuleType
) -> None:
    def row(case: str, **values: Any) -> dict[str, Any]:
        return dict(vars(isolation.Row(case=case, **values)))

    outcomes = [
        isolation.Outcome(
            name="training",
            status="complete",
            rows=[row("thread", value=1234.5, unit="images/s", ratio=0.987, remark="idle | 1%")],
        ),
        isolation.Outcome(name="scaling", status="not available", remark="no\ntorchcodec"),
        isolation.Outcome(
            name="checks", status="stopped", remark="killed", rows=[row("a", value=3)]
        ),
        isolation.Outcome(name="memory"),
    ]
    table, _, notes = gpu.markdown(outcomes).partition("\n\n")
    assert table.splitlines() == [
        "| part | case | result | ratio | remark |",
        "|---|---|---:|---:|---|",
        "| training | thread | 1,234 images/s | 0.99 | idle \\| 1% |",
        "| scaling | | | | not available: no torchcodec |",
        "| checks | a | 3 |  |  |",
        "| checks | | | | stopped: killed |",
        "| memory | | | | not run |",
    ]
    assert "training: of one cached batch" in notes
    assert [gpu.has_failed(outcome) for outcome in outcomes] == [False, False, True, True]
    wrong = isolation.Outcome(name="checks", status="complete", rows=[row("a", is_failure=True)])
    assert gpu.has_failed(wrong)


@pytest.mark.parametrize("interrupted", [False, True])
def test_the_results_are_written_whatever_happens(
    gpu: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    interrupted: bool,
) -> None:
    jobs: list[Any] = []

    def run_part(part: Any, job: Any, folder: Path, seconds: float, outcome: Any) -> None:
        jobs.append(job)
        if interrupted and part.name == "checks":
            raise KeyboardInterrupt
        outcome.status = "complete"

    monkeypatch.setattr("isolation.run_part", run_part)
    monkeypatch.setattr(gpu.signal, "signal", lambda *_: None)  # of this process
    code = gpu.main(["--device", "cpu", "--results", str(tmp_path / "results")])
    assert code == int(interrupted)
    values = json.loads((tmp_path / "results" / "gpu.json").read_text())
    statuses = {part["name"]: part["status"] for part in values["parts"]}
    assert list(statuses) == [part.name for part in gpu.PARTS]
    assert (statuses["memory"] == "not run") is interrupted
    table = (tmp_path / "results" / "gpu.md").read_text()
    assert capsys.readouterr().out == table
    assert jobs[0]["is_small"]
    assert not Path(jobs[0]["work"]).exists(), "the datasets are removed"


# What the parts compute.


# The checks find what they are for.


@pytest.fixture
def checks(bench: None) -> ModuleType:
    return importlib.import_module("gpu_parts.checks")


class Batches(list[Any]):
    """A loader of given batches."""

    def close(self) -> None:
        pass


def batches(*changes: int) -> Batches:
    """Return three batches; those whose numbers are given have one pixel changed."""
    pairs = Batches()
    for number in range(3):
        images = torch.arange(2 * 3 * 4 * 4, dtype=torch.uint8).view(2, 4, 4, 3) + number
        images = images.permute(0, 3, 1, 2)
        if number in changes:
            images[1, 2, 3, 0] += 1
        pairs.append((images, torch.tensor([number, number + 1])))
    return pairs


@pytest.mark.parametrize("name", ["pixels", "complete", "plain_copies", "normalized"])
def test_a_changed_pixel_is_noticed(
    checks: ModuleType, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    job = SimpleNamespace(device=torch.device("cpu"))
    monkeypatch.setattr(checks, "_expected", lambda job: batches())
    monkeypatch.setattr(checks, "_loader", lambda job, **_: batches())
    getattr(checks, name)(job)
    monkeypatch.setattr(checks, "_loader", lambda job, **_: batches(1))
    with pytest.raises(checks.Wrong):
        getattr(checks, name)(job)


def test_without_a_gpu_a_part_says_so(
    bench: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    job = importlib.import_module("gpu_parts.job")
    isolation = importlib.import_module("isolation")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    values = {"work": str(tmp_path), "device_name": "cuda", "photos": None}
    with pytest.raises(isolation.NotAvailable, match="no CUDA device"):
        _ = job.Job.of(values).device
    with pytest.raises(isolation.NotAvailable, match="no dataset"):
        job.Job.of(values).dataset("jpeg")


@pytest.mark.slow
def test_all_parts_run_on_a_cpu(
    gpu: ModuleType, isolation: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(isolation.subprocess, "Popen", start_script)
    monkeypatch.setenv("PYTHONPATH", f"{BENCH}:{os.environ.get('PYTHONPATH', '')}")
    # The others differ in options alone.
    parts = ["environment", "data", "training-18-4", "checks", "scaling-raw", "memory"]
    only = [word for part in parts for word in ("--only", part)]

    code = gpu.main(["--device", "cpu", "--minutes", "60", "--results", str(tmp_path), *only])

    values = json.loads((tmp_path / "gpu.json").read_text())
    assert code == 0, values
    status = {part["name"]: part["status"] for part in values["parts"]}
    assert set(status.values()) == {"complete"}, values
    cases = {(part["name"], row["case"]) for part in values["parts"] for row in part["rows"]}
    expected = {("checks", "pixels, thread, not pinned"), ("scaling-raw", "process, 2 workers")}
    assert expected <= cases, cases
    assert any(name == "training-18-4" and "one cached batch" in case for name, case in cases)
