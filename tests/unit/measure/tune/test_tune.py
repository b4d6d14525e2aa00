"""`shardkit tune` with real loaders and a small budget, and reports of made-up measurements."""

from __future__ import annotations

import json
import textwrap
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import invoke, jpeg, make_tree, run_main
from refusals import refused, refuses

from shardkit import CenterCrop, convert, make_loader, open_dataset, tune
from shardkit.cli.options import duration
from shardkit.errors import MeasurementFailed, MeasurementTimeout, UsageError
from shardkit.measure.runner import session
from shardkit.measure.runner.material import SubjectInfo
from shardkit.measure.runner.other_load import OtherLoad
from shardkit.measure.runner.process import MeasurementProcess
from shardkit.measure.runner.rounds import Spread
from shardkit.measure.runner.spec import LoaderSpec
from shardkit.measure.tune.report import TuneReport
from shardkit.measure.tune.search import Tried, cost, loop_variants, name_of
from shardkit.torch.engine.preflight import default_workers
from shardkit.torch.tuned import load_tuned

CROP = "CenterCrop(16)"

TRANSFORMS = """
import os, signal
import torch

def fail(image):
    raise ValueError("this one is planted")

def crowded(image):
    worker = torch.utils.data.get_worker_info()
    if worker is not None and worker.num_workers > 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return torch.zeros(3, 8, 8)
"""


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dataset of 160 small images, with a module of transforms."""
    root = tmp_path_factory.mktemp("tune")
    files: dict[str, bytes | None] = {f"a/{n:03d}.jpg": jpeg(24, 20, n) for n in range(160)}
    (root / "planted_transforms.py").write_text(TRANSFORMS)
    convert(make_tree(root / "photos", files), root / "made", to="lmdb", workers=1)
    return root / "made"


@pytest.mark.measures
def test_with_a_long_step_the_cheapest_setting_is_enough(made: Path) -> None:
    report = tune(made, decode=CROP, batch_size=8, budget=3.0, step_ms=800.0)

    assert report.step_seconds == 0.8
    assert report.headroom == pytest.approx(report.chosen.images_per_second.median * 0.8 / 8)
    assert (report.headroom or 0.0) > 3
    assert cost(report.chosen.setting) <= cost(report.default)


@pytest.mark.slow
def test_a_transform_that_fails_is_an_error_in_one_line(
    made: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(made.parent)

    with refused(MeasurementFailed) as caught:
        tune(made, transform="planted_transforms:fail", budget=3.0)
    assert "Traceback" not in str(caught.value)


@pytest.mark.measures
@pytest.mark.skipif(default_workers() < 2, reason="one worker is the default here")
def test_where_the_defaults_fail_another_setting_is_found(
    made: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where there is memory for one worker, but not for two. Threads are excluded."""
    monkeypatch.chdir(made.parent)

    report = tune(
        made, transform="planted_transforms:crowded", budget=60.0, batch_size=8, step_ms=1000.0
    )

    assert (report.chosen.setting.engine, report.chosen.setting.workers) == ("process", 1)
    assert report.chosen.speedup is None
    assert not report.is_default
    assert "SIGKILL" in next(iter(report.left_out.values()))
    assert "crowded may hold the GIL" in report.opened.processes
    assert "cannot be measured here" in report.describe()


@pytest.mark.slow
def test_of_many_images_a_sample_is_read_first(made: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shardkit.measure.tune.tune._LIMIT", 40)

    call = MeasurementProcess.call

    def slow(self: MeasurementProcess, function: Any, **arguments: Any) -> Any:
        if function is session.warm:
            raise MeasurementTimeout("a slow disk")
        return call(self, function, **arguments)

    monkeypatch.setattr(MeasurementProcess, "call", slow)

    told: list[str] = []
    report = tune(made, decode=CROP, batch_size=8, budget=1.0, watch=lambda *it: told.append(it[0]))

    assert (report.opened.total, report.opened.images, report.cached) == (160, 40, False)
    default = LoaderSpec(engine="thread", num_workers=default_workers(), batch_size=8)
    assert report.default == default
    assert told[0] == name_of(default)


def test_invalid_options_are_refused(tmp_path: Path) -> None:
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"budget": 0.5}, "0.5 s"),
        ({"budget": float("nan")}, "budget=nan"),
        ({"batch_size": 0}, "batch_size=0"),
        ({"step_ms": 1.0, "model": "small"}, "model"),
    ]
    for options, fact in wrong:
        with refused(UsageError, fact):
            tune(tmp_path, **options)
    for text in ("", "-5s", "1e9", "5 days", "nan"):
        assert "--budget" in run_main("tune", ".", f"--budget={text}").stderr


def test_a_time_may_have_a_unit() -> None:
    for text, seconds in {"60": 60, "60s": 60, "1.5m": 90, "2 min": 120, "1H": 3600}.items():
        assert duration(None, None, text) == seconds  # type: ignore[arg-type]


@pytest.mark.slow
def test_the_command_writes_a_file_and_json(made: Path, tmp_path: Path) -> None:
    out = tmp_path / "tuned.json"
    words = ["--decode", CROP, "--batch-size", 8, "--budget", "2s", "--json", "--out", out]

    done = invoke("tune", made, *words)

    assert done.exception is None
    told = json.loads(done.stdout)
    assert told["ranking"][0]["images_per_second"]["median"] > 0
    assert told["headroom"] is None
    assert done.stderr == "", "no progress without a terminal"
    dataset = open_dataset(made, decode=CenterCrop(16))
    pasted = eval(told["paste"], {"make_loader": make_loader, "dataset": dataset})
    loader = make_loader(dataset, tuned=out)
    assert pasted.batch_size == loader.batch_size == load_tuned(out).batch_size == 8
    assert (pasted.engine, pasted.num_workers) == (loader.engine, loader.num_workers)


def test_another_file_is_refused_before_anything_is_measured(
    made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shardkit.cli.tune.tune", lambda *_, **__: pytest.fail("it was measured"))
    (tmp_path / "notes").write_text("precious")

    refuses(2, "tune", made, "--out", tmp_path / "notes", facts=("/notes",))
    assert (tmp_path / "notes").read_text() == "precious"


OPENED = SubjectInfo(path="photos\x1b", total=5000, images=2000, bytes=5000 * 20480)
DEFAULT = LoaderSpec(engine="thread", num_workers=2, batch_size=64)


def spread(median: float, rounds: int = 5) -> Spread:
    return Spread(median=median, lowest=0.9 * median, highest=1.1 * median, rounds=rounds)


def tried(setting: LoaderSpec, rate: float, rounds: int = 5) -> Tried:
    return Tried(
        setting=setting, images_per_second=spread(rate, rounds), speedup=spread(rate / 600, rounds)
    )


def report_of(**changed: Any) -> TuneReport:
    """Return a made-up report in which processes are faster."""
    known: dict[str, Any] = {
        "opened": OPENED,
        "cached": True,
        "default": DEFAULT,
        "ranking": [tried(replace(DEFAULT, engine="process"), 1200), tried(DEFAULT, 600)],
        "left_out": {name_of(replace(DEFAULT, num_workers=n)): "too slow" for n in (8, 9)},
        "step_seconds": None,
        "load": OtherLoad(busy=0.1, present=2),
        "seconds": 59.0,
        "budget": 60.0,
        "out_of_time": False,
        "warnings": (),
    }
    return TuneReport(**{**known, **changed})


def test_the_report_is_one_screen() -> None:
    assert report_of().describe() == textwrap.dedent("""\
        photos\\x1b  dataset, 5,000 images, 97.7 MiB (measured: 2,000); took 59 s
          best      process, 2 workers, batches of 64
          why       2.00x (1.80x to 2.20x in 5 rounds) the speed of the defaults
          compared  speedup over the defaults in the same rounds; images/s
            process, 2 workers, batches of 64  2.00x (1.80x to 2.20x in 5 rounds)      1,200
            thread, 2 workers, batches of 64   the defaults                              600
            not measured: thread, 8 workers, batches of 64 and 1 more: too slow
          paste     make_loader(dataset, 64, shuffle=True, \
engine="process", num_workers=2)""")


def test_the_loop_decides_about_what_does_not_load_faster() -> None:
    fast = replace(DEFAULT, num_workers=4)
    low = replace(fast, priority="low")
    report = report_of(
        ranking=[tried(fast, 1200), tried(DEFAULT, 600)],
        loops=[tried(low, 660), replace(tried(fast, 500), speedup=None)],
    )
    assert report.setting == low
    assert report.options == {"engine": "thread", "num_workers": 4, "priority": "low"}
    text = report.describe()
    assert "  best      thread, 4 workers, low priority, batches of 64\n" in text
    assert text.index("  compared") < text.index("  loop      speedup of the training loop")
    assert "thread, 4 workers, batches of 64                as chosen by loading" in text
    assert "the speed of the defaults; the training loop: 1.10x (0.99x to 1.21x" in text
    assert "rounds to change the choice" not in text
    assert text.endswith('engine="thread", num_workers=4, priority="low")')


def test_what_a_loop_decides_can_be_stored(tmp_path: Path) -> None:
    low = replace(DEFAULT, priority="low", pin_memory=False)
    report_of(loops=[tried(low, 660)]).tuned().save(tmp_path / "tuned.json")
    stored = load_tuned(tmp_path / "tuned.json").settings
    assert (stored["priority"], stored["pin_memory"]) == ("low", False)


@pytest.mark.measures
def test_a_model_is_trained_beside_the_loaders(made: Path) -> None:
    report = tune(made, decode=CROP, batch_size=8, budget=20.0, model="small")
    best = report.chosen.setting
    assert {tried.setting for tried in report.loops} == {
        best,
        *loop_variants(best, has_cuda=torch.cuda.is_available()),
    }
    assert "training loop with the model" in report.describe()


MANY = [tried(replace(DEFAULT, num_workers=n), 600 - n, 5 if n < 5 else 1) for n in range(1, 9)]
FEW = [tried(replace(DEFAULT, batch_size=256), 1200, 2), tried(DEFAULT, 600)]


@pytest.mark.parametrize(
    ("changed", "facts"),
    [
        ({"loops": [tried(DEFAULT, 600, 2)]}, ("loop needs 3 rounds",)),
        ({"ranking": MANY}, ("\n    and 2 more, 0.99x to 0.99x\n",)),
        ({"step_seconds": 0.2}, ("3.75x that: enough",)),
        ({"step_seconds": 0.06}, ("1.12x that: little margin",)),
        ({"step_seconds": 0.01}, ("0.19x that: too",)),
        ({"ranking": FEW}, ("not certain",)),
        ({"warnings": ("mine",)}, ("note      mine\n",)),
        ({"opened": replace(OPENED, processes="the reason")}, ("threads were not", "the reason")),
        ({"cached": False}, ("of the disk",)),
        ({"load": OtherLoad(busy=1.0, present=2)}, ("other processes used 1.0 of 2 CPUs",)),
        ({"out_of_time": True}, ("a longer --budget",)),
        ({"budget": 5.0}, ("longer than its 5 s budget",)),
    ],
)
def test_what_limits_the_result_is_noted(changed: dict[str, Any], facts: tuple[str, ...]) -> None:
    usual, noted = report_of().describe(), report_of(**changed).describe()
    for fact in facts:
        assert fact in noted
        assert fact not in usual


def test_the_defaults_stay_if_nothing_is_clearly_faster() -> None:
    report = report_of(ranking=[tried(DEFAULT, 600), tried(replace(DEFAULT, num_workers=4), 610)])

    assert "  best      thread, 2 workers, batches of 64 (the defaults)\n" in report.describe()
    assert "by 5% or more" in report.describe()
    assert report.call() == "make_loader(dataset, 64, shuffle=True)"
    assert report.tuned().settings == {}
