"""`shardkit tune` with real loaders, in short looks: what it says is what was measured."""

from __future__ import annotations

import json
import textwrap
from pathlib import Path
from typing import Any

import pytest
from helpers import invoke, jpeg, make_dataset, make_tree

from shardkit import (
    CenterCrop,
    LoaderOptions,
    MeasurementFailed,
    UsageError,
    make_loader,
    open_dataset,
)
from shardkit.cli.tune import duration
from shardkit.cli.tune_report import show_report, show_written
from shardkit.measure.runner.gil import HOLDS
from shardkit.measure.runner.process import MeasurementProcess
from shardkit.measure.runner.spec import Subject
from shardkit.measure.runner.steps import StepSpec
from shardkit.measure.tune.candidate import Candidate
from shardkit.measure.tune.ledger import IN_TURN, Ledger, Rates, Ratio
from shardkit.measure.tune.limits import LeftOut
from shardkit.measure.tune.search import SearchResult
from shardkit.measure.tune.trials import Tick
from shardkit.measure.tune.tune import (
    Loop,
    Tried,
    TuneReport,
    TuneRequest,
    _all_tried,
    tune,
)
from shardkit.system.machine import OtherLoad
from shardkit.torch.engine.preflight import default_workers
from shardkit.torch.tuned import load_tuned

CROP = "CenterCrop(16)"

TRANSFORMS = """
import os, signal, time
import torch

def hold(image):
    total = 0
    for number in range(200_000):
        total += number
    return torch.zeros(3, 8, 8)

def wait(image):
    time.sleep(0.01)
    return torch.zeros(3, 8, 8)

def fail(image):
    raise ValueError("this one is planted")

def die(image):
    os.kill(os.getpid(), signal.SIGKILL)

def crowded(image):
    worker = torch.utils.data.get_worker_info()
    if worker is not None and worker.num_workers > 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return torch.zeros(3, 8, 8)
"""


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dataset of 160 small images, and a module of transforms beside it."""
    root = tmp_path_factory.mktemp("tune")
    files: dict[str, bytes | None] = {f"a/{n:03d}.jpg": jpeg(24, 20, n) for n in range(160)}
    (root / "planted_transforms.py").write_text(TRANSFORMS)
    return make_dataset(make_tree(root / "photos", files), root / "made")


def request(made: Path, budget: float = 3.0, **more: Any) -> TuneRequest:
    subject = Subject(path=str(made), decode=CROP)
    return TuneRequest(subject=subject, budget=budget, batch_sizes=(8,), **more)


@pytest.fixture(scope="module")
def seen(made: Path) -> tuple[TuneReport, list[Tick]]:
    """What a short search finds, and what it tells meanwhile."""
    ticks: list[Tick] = []
    return tune(request(made), ticks.append), ticks


def test_settings_are_found_and_fit_a_loader(
    made: Path, seen: tuple[TuneReport, list[Tick]]
) -> None:
    report, ticks = seen

    assert report.images == 160
    assert report.default is not None
    assert report.default.candidate.engine == "thread"
    assert report.chosen.rates.median > 0
    assert {each.candidate for each in report.tried} >= {report.chosen.candidate}
    assert ticks[0].candidate == report.default.candidate
    assert report.batch_bytes >= 8 * 16 * 16 * 3
    names = {"make_loader": make_loader, "LoaderOptions": LoaderOptions}
    dataset = open_dataset(made, decode=CenterCrop(16))
    loader = eval(report.call(), {**names, "dataset": dataset})
    assert loader.batch_size == report.tuned().batch_size == 8
    assert loader.engine == report.chosen.candidate.engine


@pytest.mark.slow
def test_a_transform_that_holds_the_lock_is_recognised(
    made: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(made.parent)
    shares = []
    for name in ("hold", "wait"):
        subject = Subject(path=str(made), transform=f"planted_transforms:{name}")
        with MeasurementProcess(subject) as served:
            served.open()
            assert served.resident() is not None
            shares.append(min(served.held(0.3) for _ in range(3)))

    assert shares[0] >= HOLDS
    assert shares[1] < shares[0] / 3


def test_with_a_long_step_the_cheapest_is_enough(made: Path) -> None:
    report = tune(request(made, budget=3.0, step=StepSpec(milliseconds=800.0)))

    assert report.step_seconds == 0.8
    assert report.headroom is not None
    assert report.headroom == pytest.approx(report.chosen.rates.median * 0.8 / 8)
    assert report.headroom > 3
    assert report.default is not None
    assert report.chosen.candidate.cost <= report.default.candidate.cost


@pytest.mark.parametrize(
    ("name", "said"), [("fail", "ValueError: this one is planted"), ("die", "SIGKILL")]
)
def test_a_transform_that_fails_is_an_error_in_one_line(
    name: str, said: str, made: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(made.parent)
    subject = Subject(path=str(made), transform=f"planted_transforms:{name}")

    with pytest.raises(MeasurementFailed, match=said) as caught:
        tune(TuneRequest(subject=subject, budget=3.0))

    assert "Traceback" not in str(caught.value)


@pytest.mark.skipif(default_workers() < 2, reason="one worker is the default here")
def test_where_the_defaults_fail_something_else_is_found(
    made: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where there is memory for one worker, but not for two."""
    monkeypatch.chdir(made.parent)
    subject = Subject(path=str(made), transform="planted_transforms:crowded")

    report = tune(TuneRequest(subject=subject, budget=5.0, batch_sizes=(8,)))

    chosen = report.chosen.candidate
    assert chosen.engine == "thread" or chosen.workers == 1
    assert report.default is None
    assert not report.is_default
    assert "SIGKILL" in report.left_out[0].reason


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"budget": 0.5}, "1 s is the least"),
        ({"budget": float("nan")}, "out of range"),
        ({"batch_sizes": (0,)}, "not integers from 1 on"),
        ({"batch_sizes": (8, 16), "step": StepSpec(milliseconds=1.0)}, "belongs to one batch size"),
    ],
)
def test_what_cannot_be_asked_for_is_refused(wrong: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        TuneRequest(subject=Subject(path="x"), **wrong)


def test_batch_sizes_are_a_choice_unless_one_is_named_or_a_step_is_known() -> None:
    def sizes(**more: Any) -> tuple[int, tuple[int, ...]]:
        asked = TuneRequest(subject=Subject(path="x"), **more)
        return asked.first_size, asked.other_sizes

    assert sizes() == (64, (32, 128, 256))
    assert sizes(batch_sizes=(16,)) == (16, ())
    assert sizes(batch_sizes=(128, 64)) == (64, (128,))
    assert sizes(batch_sizes=(128, 32)) == (128, (32,))
    assert sizes(step=StepSpec(milliseconds=5.0)) == (64, ())


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("60", 60.0), ("60s", 60.0), ("1.5m", 90.0), ("2 min", 120.0), ("1H", 3600.0)],
)
def test_a_length_of_time_may_have_a_unit(text: str, seconds: float) -> None:
    assert duration(None, None, text) == seconds  # type: ignore[arg-type]


@pytest.mark.parametrize("text", ["", "s", "-5s", "1e9", "5 days", "nan", "5s5s"])
def test_what_is_no_length_of_time_is_refused(text: str) -> None:
    done = invoke("tune", ".", f"--budget={text}")

    assert done.exit_code == 2
    assert "is not a time such as 60s or 2m" in done.output


@pytest.mark.slow
def test_the_command_writes_a_file_and_tells_all_as_json(made: Path, tmp_path: Path) -> None:
    out = tmp_path / "tuned.json"
    words = ["--decode", CROP, "--batch-size", 8, "--budget", "2s", "--json", "--out", out]

    done = invoke("tune", made, *words)

    assert done.exception is None
    told = json.loads(done.stdout)
    assert told["paste"].startswith("make_loader(dataset, 8, shuffle=True")
    assert told["chosen"]["rates"]["median"] > 0
    assert told["headroom"] is None
    assert {"default", "gain", "held", "tried", "left_out", "seconds"} <= set(told)
    assert done.stderr == "", "no live view, where there is no terminal"
    loader = make_loader(open_dataset(made, decode=CenterCrop(16)), tuned=out)
    assert loader.batch_size == load_tuned(out).batch_size == 8


def test_a_file_that_is_not_ours_stops_it_before_anything_is_measured(
    made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shardkit.cli.tune.tune", lambda *_: pytest.fail("it was measured"))
    (tmp_path / "notes").write_text("precious")

    done = invoke("tune", made, "--out", tmp_path / "notes")

    assert isinstance(done.exception, UsageError)
    assert "It was not changed" in str(done.exception)
    assert (tmp_path / "notes").read_text() == "precious"


def report_of(**changed: Any) -> TuneReport:
    """A report that was made up, of a transform that holds the lock."""
    rates = Rates(median=1234.0, low=1200.0, high=1300.0, rounds=5)
    chosen = Candidate(engine="process", workers=4, batch_size=64)
    default = chosen.changed(workers=2)
    slow = Rates(median=617.0, low=600.0, high=650.0, rounds=5)
    left = [
        LeftOut(candidate=chosen.changed(workers=n), reason="it is too large", remedy="buy more")
        for n in (8, 16)
    ]
    tried = [Tried(candidate=chosen, rates=rates), Tried(candidate=default, rates=slow)]
    known: dict[str, Any] = {
        "name": "photos\x1b",
        "split": "",
        "images": 5000,
        "mean_bytes": 20480.0,
        "measured": 5000,
        "resident": 1.0,
        "from_memory": True,
        "chosen": tried[0],
        "default": tried[1],
        "gain": ratio(2.0, low=1.9, rounds=5),
        "first": 0.5,
        "batch_bytes": 1000,
        "held": 0.97,
        "has_transform": True,
        "processes": "the transform train may hold the GIL",
        "step_seconds": None,
        "in_loop": None,
        "starts": {"auto": 0.5, "spawn": 3.0},
        "tried": tried,
        "left_out": left,
        "warnings": [],
        "load": OtherLoad(busy=0.1, present=2),
        "seconds": 59.0,
        "budget": 60.0,
        "out_of_time": False,
    }
    return TuneReport(**{**known, **changed})


def ratio(middle: float, *, low: float, rounds: int) -> Ratio:
    """Return a ratio whose rounds are within a tenth of its middle."""
    return Ratio(
        low=low,
        likely=low,
        middle=middle,
        high=2.1,
        rounds=rounds,
        lowest=0.9 * middle,
        highest=1.1 * middle,
    )


def test_on_a_noisy_machine_one_value_of_each_quantity_is_shown(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The median rate of the choice is 2.5 times as high; of the rounds' ratios it is 0.9."""
    ledger = Ledger()
    default, chosen = (Candidate(engine="thread", workers=n, batch_size=64) for n in (1, 2))
    for candidate, rates in (default, (500, 100, 100, 300)), (chosen, (9000, 90, 250, 270)):
        for number, rate in enumerate(rates):
            ledger.add(candidate, number, rate)
    gain = ledger.ratio(chosen, default, IN_TURN)
    assert gain is not None
    assert (gain.middle, gain.lowest, gain.highest) == pytest.approx((0.9, 0.9, 2.5))
    found = SearchResult(
        chosen=chosen, gain=gain, ledger=ledger, left_out=[], firsts={}, out_of_time=False
    )
    tried = _all_tried(found)
    best = next(each for each in tried if each.candidate == chosen)
    base = next(each for each in tried if each.candidate == default)
    text = shown(report_of(chosen=best, default=base, gain=gain, tried=tried), capsys)

    assert "0.90x (0.90x to 2.50x in 3 rounds), compared with the defaults" in text
    assert "9,000" not in text
    assert "250 images/s (90 to 270 in 3 rounds)" in text


def shown(report: TuneReport, capsys: pytest.CaptureFixture[str]) -> str:
    show_report(report)
    show_written(Path("tuned.json"))
    return capsys.readouterr().out


def test_the_answer_is_one_screen(capsys: pytest.CaptureFixture[str]) -> None:
    assert shown(report_of(), capsys) == textwrap.dedent("""\
        photos\\x1b: 5,000 images, 20.0 KiB each (measured for 59.0 s)
          best      process, 4 workers, batches of 64
          speed     1,234 images/s (1,200 to 1,300 in 5 rounds); the first batch after 0.50 s
          gain      2.00x (1.80x to 2.20x in 5 rounds), certainly 1.90x or more, compared with \
the defaults (process, 2 workers, batches of 64)
          GIL       the transform holds the GIL 97 % of a sample's time: worker processes
          start     the first batch comes after: auto 0.50 s, spawn 3.00 s
          tried     images/s: median, lowest, highest, rounds; one round is a first, short look
            process, 4 workers, batches of 64  1,234  1,200  1,300  5
            process, 2 workers, batches of 64    617    600    650  5
          left out  process, 8 workers, batches of 64 and 1 more: it is too large (buy more)
          paste     make_loader(dataset, 64, shuffle=True, \
options=LoaderOptions(engine="process", num_workers=4))
          written   tuned.json; or paste make_loader(dataset, shuffle=True, tuned='tuned.json')
        """)


@pytest.mark.parametrize(
    ("low", "rounds", "said"), [(1.9, 3, True), (1.9, 2, False), (0.99, 7, False)]
)
def test_a_bound_is_told_only_where_there_is_one(
    low: float, rounds: int, said: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    gain = ratio(2.0, low=low, rounds=rounds)

    assert ("certainly" in shown(report_of(gain=gain), capsys)) == said


def test_the_defaults_are_kept_where_they_are_as_good(capsys: pytest.CaptureFixture[str]) -> None:
    report = report_of(chosen=report_of().default)

    text = shown(report, capsys)

    assert "batches of 64 (the defaults)\n" in text
    assert "no candidate is likely to beat the defaults; keeping them" in text
    assert "paste     make_loader(dataset, 64, shuffle=True)\n" in text
    assert report.tuned().settings == {}


@pytest.mark.parametrize(
    ("milliseconds", "said"),
    [
        (200.0, "loading could feed 3.9 x what the step takes"),
        (60.0, "loading keeps up, with little to spare: 1.16 x what the step takes"),
        (10.0, "the step waits for data: loading gives 0.19 x what it takes"),
    ],
)
def test_the_headroom_is_told(
    milliseconds: float, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    loop = Loop(rate=300.0, waiting=0.25)
    text = shown(report_of(step_seconds=milliseconds / 1000, in_loop=loop), capsys)

    assert f"step      {milliseconds:.1f} ms for 64 images: {said}" in text
    assert "300 images/s with the step; it waits for data 25 % of the time" in text


def test_threads_of_an_unmarked_transform_are_noted(capsys: pytest.CaptureFixture[str]) -> None:
    said = "random numbers of the transform do not repeat in threads: mark it with"
    threads = Candidate(engine="thread", workers=2, batch_size=64)
    chosen = Tried(candidate=threads, rates=report_of().chosen.rates)

    assert said in shown(report_of(chosen=chosen), capsys)
    assert said not in shown(report_of(chosen=chosen, processes=""), capsys)
    assert said not in shown(report_of(), capsys)


@pytest.mark.parametrize(
    ("resident", "from_memory", "said"),
    [
        (0.4, False, "40 % of the files were cached at the start, and no file was read"),
        (None, False, "note      no file was read before: rates are at disk speed"),
        (None, True, None),
        (1.0, False, None),
    ],
)
def test_rates_of_the_disk_are_noted(
    resident: float | None,
    from_memory: bool,
    said: str | None,
    capsys: pytest.CaptureFixture[str],
) -> None:
    text = shown(report_of(resident=resident, from_memory=from_memory), capsys)

    assert (said or "") in text
    assert ("note" in text) == (said is not None)


def watched(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int | None]]:
    """Note what the measuring process is asked, and the limit of the sample then."""
    asked: list[tuple[str, int | None]] = []
    ask = MeasurementProcess.ask

    def noted(self: MeasurementProcess, what: str, **more: Any) -> dict[str, Any]:
        asked.append((what, self.subject.limit))
        return ask(self, what, **more)

    monkeypatch.setattr(MeasurementProcess, "ask", noted)
    return asked


def test_what_fits_in_memory_is_read_before_the_first_look(
    made: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of many images a sample, always the same."""
    asked = watched(monkeypatch)
    for name, value in {"LIMIT": 40, "_LEAST_BATCHES": 0, "_DISK": 0}.items():
        monkeypatch.setattr(f"shardkit.measure.tune.tune.{name}", value)

    report = tune(request(made, budget=1.5))

    looked = [what for what, _ in asked].index("look")
    assert ("warm", 40) in asked[:looked]
    assert asked[looked] == ("look", 40)
    assert (report.images, report.measured, report.from_memory) == (160, 40, True)


def test_what_does_not_fit_in_memory_is_not_read_before(
    made: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is in memory cannot be known here, either."""
    asked = watched(monkeypatch)
    monkeypatch.setattr("shardkit.measure.tune.limits.MEMORY_SHARE", 0)

    def unknown(self: MeasurementProcess) -> float | None:
        raise MeasurementFailed("mincore is planted")

    monkeypatch.setattr(MeasurementProcess, "resident", unknown)

    report = tune(request(made, budget=1.0))

    assert "warm" not in [what for what, _ in asked]
    assert (report.measured, report.from_memory, report.resident) == (160, False, None)


def test_what_should_be_known_is_noted(capsys: pytest.CaptureFixture[str]) -> None:
    larger = Candidate(engine="thread", workers=2, batch_size=256)
    warning = "Our suggested max number of worker in current system is 2"
    report = report_of(
        chosen=Tried(candidate=larger, rates=report_of().chosen.rates),
        gain=None,
        resident=0.4,
        out_of_time=True,
        warnings=[warning, "mine"],
        load=OtherLoad(busy=1.0, present=2),
        default=None,
    )

    text = shown(report, capsys)

    assert "the defaults cannot be measured here" in text
    assert warning not in text
    assert "note      mine\n" in text
    assert "40 % of the files were cached at the start: rates are for cached files" in text
    assert "note      other processes used 1.0 of 2 CPUs at the start: what is best" in text
    assert "a longer --budget may find more" in text
    assert "--batch-size 64 keeps it" in shown(
        report_of(chosen=Tried(candidate=larger, rates=report_of().chosen.rates)), capsys
    )
