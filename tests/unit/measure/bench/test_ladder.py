"""The ladder: which rungs there are, how gains are told, and a climb on tiny data."""

from __future__ import annotations

import dataclasses
import itertools
import json
import re
from pathlib import Path
from typing import Any

import pytest
from helpers import make_dataset, make_folder

from shardkit import MeasurementFailed, UsageError
from shardkit.cli import ladder as cli_ladder
from shardkit.cli.ladder import conclusion, show_ladder
from shardkit.measure.bench import ladder as room
from shardkit.measure.bench.ladder import (
    ALONE,
    NO_ACCELERATOR,
    TRAINED,
    Extent,
    LadderReport,
    LadderRequest,
    Rung,
    ladder,
    make_rungs,
)
from shardkit.measure.runner import material
from shardkit.measure.runner.process import Seen
from shardkit.measure.runner.spec import LoaderSpec, Subject
from shardkit.measure.runner.steps import StepSpec
from shardkit.measure.runner.timing import Look
from shardkit.system.machine import OtherLoad

TUTORIAL = LadderRequest(subject=Subject(case="tutorial"))


# The rungs.


def test_a_case_has_its_own_numbers_and_a_folder_those_of_the_machine() -> None:
    case = TUTORIAL.resolved()
    assert (case.batch_size, case.workers, case.epochs) == (32, 4, 10)
    given = LadderRequest(subject=TUTORIAL.subject, batch_size=8, workers=1, epochs=2).resolved()
    assert (given.batch_size, given.workers, given.epochs) == (8, 1, 2)
    folder = LadderRequest(subject=Subject(path="x")).resolved()
    assert (folder.batch_size, folder.epochs) == (32, None)
    assert (folder.workers or 0) >= 2


@pytest.mark.parametrize(
    "wrong", [{"rounds": 0}, {"workers": -1}, {"epochs": 1.5}, {"batch_size": 0}, {"seconds": 0.0}]
)
def test_a_request_that_makes_no_sense_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=next(iter(wrong))):
        LadderRequest(subject=TUTORIAL.subject, **wrong)


def test_each_rung_has_all_that_is_below_it() -> None:
    rungs = make_rungs(TUTORIAL.resolved(), accelerator=True)
    assert [rung.missing for rung in rungs] == [""] * 7
    options = [dict(rung.loading.options) for rung in rungs]
    assert options[0] == {"num_workers": 0}
    pairs = list(itertools.pairwise(options[:6]))
    for lower, upper in pairs[1:]:
        assert lower.items() <= upper.items()
    new = [set(upper) - set(lower) for lower, upper in pairs]
    assert new == [{"prefetch_factor"}, {"pin_memory"}, {"persistent_workers"}, set(), {"batched"}]
    assert [rung.loading.device for rung in rungs] == [None] * 4 + ["cuda"] * 3
    assert [rung.loading.engine for rung in rungs] == ["plain"] * 6 + ["auto"]
    assert {rung.loading.batch_size for rung in rungs} == {32}
    assert options[6] == {"num_workers": 4}


def test_without_an_accelerator_the_rungs_above_do_without_it_too() -> None:
    rungs = make_rungs(TUTORIAL.resolved(), accelerator=False)
    missing = [rung.name for rung in rungs if rung.missing == NO_ACCELERATOR]
    assert missing == ["+ pinned memory", "+ device prefetcher"]
    for rung in rungs:
        if not rung.missing:
            assert "pin_memory" not in rung.loading.options
            assert rung.loading.device is None
    assert rungs[5].loading.options["persistent_workers"] is True


def test_a_prefetcher_stands_around_the_loader_and_is_closed_through(tmp_path: Path) -> None:
    dataset = material.open_subject(Subject(path=str(make_folder(tmp_path / "p")), decode="bytes"))
    loading = LoaderSpec(engine="plain", batch_size=2, device="cpu")
    loader = material.build_loader(dataset, loading)
    assert material.bare_loader(loader) is not loader
    assert sum(len(labels) for _, labels in loader) == len(material.first_rows(dataset, None)) == 6
    assert len(material.first_rows(dataset, 4)) == 4
    material.close_loader(loader)


# How gains are told.


def report_of(**rates: list[float]) -> LadderReport:
    """Return a report without an accelerator whose rungs have these rates alone."""
    rungs = make_rungs(TUTORIAL.resolved(), accelerator=False)
    for rung, found in zip([r for r in rungs if not r.missing], rates.values(), strict=False):
        rung.rates[ALONE] = found
    return LadderReport(
        request=TUTORIAL.resolved(),
        extent=Extent(images=512, rows=512, epochs=10, seconds=30.0),
        device="cpu",
        step_seconds=None,
        model_problem="",
        rungs=rungs,
        load=OtherLoad(busy=0.1, present=2),
    )


def test_gains_are_over_the_baseline_and_the_last_rung_that_was_measured() -> None:
    report = report_of(a=[90, 100, 130], b=[200], c=[600], d=[500], e=[1000])
    gains = [report.gain(rung, ALONE) for rung in report.rungs]
    before = [report.gain(rung, ALONE, before=True) for rung in report.rungs]
    assert gains == [None, 2, None, 6, None, 5, 10]
    assert before == [None, 2, None, 3, None, pytest.approx(5 / 6), 2]
    largest = report.largest(ALONE)
    assert largest is not None
    assert largest.name == "+ persistent workers"
    assert report.largest(TRAINED) is None
    assert conclusion(report)[ALONE] == (
        "10.0x with shardkit's engine; largest improvement: persistent workers, 3.0x"
    )


def test_a_folder_has_no_batches_to_ask_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert not any(rung.note for rung in report_of().rungs)
    request = LadderRequest(subject=Subject(path=str(tmp_path))).resolved()
    report = report_of(a=[100.0], b=[200.0], c=[300.0], d=[300.0], e=[500.0])
    told = dataclasses.replace(report, rungs=make_rungs(request, accelerator=False))
    monkeypatch.setattr(cli_ladder, "ladder", lambda request, watch: told)
    show_ladder(request, as_json=False, quiet=False)
    assert "+ batched __getitems__ (a folder has none) " in capsys.readouterr().out


def test_no_gain_is_called_none() -> None:
    for report in (report_of(a=[100], b=[101], c=[109], d=[90], e=[80]), report_of(a=[100])):
        assert conclusion(report)[ALONE] == "no improvement makes it faster"


# The climb.


class Played:
    """A process that answers at once, and remembers what it was asked."""

    def __init__(self, fails: str = "", images: int = 512, model: Exception | None = None) -> None:
        self.asked: list[tuple[str, int | None, Any]] = []
        self._fails = fails
        self._images = images
        self._model = model
        self.ended = False

    def __enter__(self) -> Played:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def open(self) -> dict[str, Any]:
        return {"images": self._images}

    def restart_if_ended(self) -> None:
        pass

    def step_seconds(self, loading: LoaderSpec, step: Any) -> float:
        if self._model is not None:
            raise self._model
        return 0.01

    def look(self, loading: LoaderSpec, span: Any, step: Any = None) -> Seen:
        if self._fails and self._fails in str(loading):
            raise MeasurementFailed("a disk hangs")
        self.asked.append((str(loading), span.epochs, step))
        seen = Look(
            images=100 * (span.epochs or 1),
            seconds=1.0,
            waits=[],
            first=0.0,
            cpu=0.0,
            peak=0,
            worker_peak=0,
            batch_bytes=0,
        )
        return Seen(look=seen, engine="thread", reason="so", workers=1, warnings=[])


class One:
    """A pair that is one process."""

    def __init__(self, played: Played) -> None:
        self._played = played

    def process(self, loading: LoaderSpec) -> Played:
        return self._played


def climb(played: Played, rungs: list[Rung], rounds: int) -> list[tuple[str, int, int]]:
    told: list[tuple[str, int, int]] = []
    extent = Extent(images=64, rows=64, epochs=5, seconds=1.0)
    steps = {ALONE: StepSpec(), TRAINED: StepSpec(model="small")}
    pair: Any = One(played)
    work = room._Climb(pair=pair, extent=extent, steps=steps, patience=1.0)
    work.all_rounds(rungs, rounds, lambda *what: told.append(what))
    return told


def test_rounds_take_turns_and_the_first_does_not_count() -> None:
    rungs = make_rungs(TUTORIAL.resolved(), accelerator=False)
    played = Played()
    told = climb(played, rungs, rounds=2)
    assert [epochs for _, epochs, _ in played.asked] == [1] * 10 + [5] * 20
    assert [done for _, done, _ in told] == list(range(30))
    assert {total for _, _, total in told} == {30}
    rounds = [played.asked[start : start + 10] for start in (0, 10, 20)]
    assert rounds[1][0][0] == rounds[0][1][0]
    assert rounds[2][0][:1] == rounds[0][2][:1]
    for rung in rungs:
        count = 0 if rung.missing else 2
        assert [len(rung.rates[column]) for column in (ALONE, TRAINED)] == [count, count]
    assert rungs[-1].engine == "thread"


def test_a_rung_that_fails_is_told_and_the_others_go_on() -> None:
    rungs = make_rungs(TUTORIAL.resolved(), accelerator=False)
    climb(Played(fails="batched"), rungs, rounds=1)
    assert rungs[5].missing == "a disk hangs"
    assert rungs[5].rate(ALONE) is None
    assert rungs[6].rate(ALONE) == 500


def tiny(path: Path, **more: Any) -> LadderRequest:
    subject = Subject(path=str(path), decode="CenterCrop(8)", transform=more.pop("transform", None))
    given = {"batch_size": 2, "workers": 1, "rounds": 1, "seconds": 0.1, **more}
    return LadderRequest(subject=subject, **given)


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("ladder")
    return make_dataset(make_folder(root / "photos"), root / "made")


@pytest.mark.slow
def test_a_dataset_is_climbed_and_the_table_shows_it(
    dataset: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert show_ladder(tiny(dataset, epochs=2), as_json=False, quiet=False) == 0
    shown = capsys.readouterr().out
    assert f"{dataset}: 6 images, 2 epochs, batches of 2; the model small on " in shown
    names = re.findall(r"^    (\S.*?)  +\S", shown, re.MULTILINE)
    expected = [rung.name for rung in make_rungs(tiny(dataset).resolved(), accelerator=True)]
    assert names[-7:-1] == expected[:-1]
    assert re.search(r"\+ shardkit's engine \(thread\) +[\d,]+ +[\d.]+ +[\d.]+ +[\d,]+ ", shown)
    assert re.search(r"^  loading   \S.*\n  training  .* a step alone takes", shown, re.MULTILINE)


@pytest.mark.slow
def test_a_part_of_a_folder_is_read_as_json(
    dataset: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The model does not take what this transform makes: the other column is there all the same."""
    code = "def flat(image):\n    return image.reshape(-1)\n"
    (dataset.parent / "flattens.py").write_text(code)
    monkeypatch.chdir(dataset.parent)
    folder = make_folder(dataset.parent / "many", each=40)
    request = tiny(folder, transform="flattens:flat", seconds=0.001)
    assert show_ladder(request, as_json=True, quiet=True) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["extent"]["images"] == 80
    assert 4 <= told["extent"]["rows"] < 80
    assert told["extent"]["epochs"] == 3
    assert told["step_seconds"] is None
    assert told["conclusion"]["trained"].startswith("not measured: ")
    assert [rung["missing"] for rung in told["rungs"]].count("") >= 5
    last = told["rungs"][-1]
    assert last["images_per_second"]["alone"] > 0
    assert last["images_per_second"]["trained"] is None
    assert last["over_baseline"]["alone"] == pytest.approx(
        last["images_per_second"]["alone"] / told["rungs"][0]["images_per_second"]["alone"]
    )


def test_what_cannot_be_opened_or_trained_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = UsageError("there is no module")
    monkeypatch.setattr(room, "MeasurementProcess", lambda subject: Played(model=wrong))
    with pytest.raises(UsageError, match="no module"):
        ladder(TUTORIAL)
    monkeypatch.setattr(room, "MeasurementProcess", lambda subject: Played(images=0))
    with pytest.raises(UsageError, match="tutorial: there is no image in it"):
        ladder(TUTORIAL)


@pytest.mark.parametrize("fails", ["num_workers=0", "persistent"])
def test_only_a_baseline_that_fails_is_an_error(
    fails: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(room, "MeasurementProcess", lambda subject: Played(fails))
    if fails == "num_workers=0":
        with pytest.raises(MeasurementFailed, match="a disk hangs"):
            ladder(TUTORIAL)
        return
    report = ladder(TUTORIAL)
    assert [rung.missing for rung in report.rungs].count("a disk hangs") >= 2
    assert report.gain(report.rungs[-1], TRAINED) == 1.0
    assert (report.extent.rows, report.extent.epochs, report.extent.seconds) == (512, 10, 51.2)


class Mortal(Played):
    """A process that ends with the batched rung and, till it is started anew, answers no more."""

    restarts = 0

    def restart_if_ended(self) -> None:
        self.restarts += self.ended
        self.ended = False

    def look(self, loading: LoaderSpec, span: Any, step: Any = None) -> Seen:
        self.ended = self.ended or "batched" in str(loading)
        if self.ended:
            raise MeasurementFailed("its process ended")
        return super().look(loading, span, step)


def test_a_rung_that_ends_its_process_ends_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[Mortal] = []

    def start(subject: Subject) -> Mortal:
        started.append(Mortal())
        return started[-1]

    monkeypatch.setattr(room, "MeasurementProcess", start)
    report = ladder(TUTORIAL)
    failed = [rung.name for rung in report.rungs if rung.missing == "its process ended"]
    assert failed == ["+ batched __getitems__"]
    assert all(rung.rate(TRAINED) for rung in report.rungs if not rung.missing)
    assert [each.restarts for each in started] == [1, 0]


def test_a_model_that_ends_the_process_costs_its_column_alone(
    dataset: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = "import os\n\n\ndef dies():\n    os._exit(3)\n"
    (dataset.parent / "deadly.py").write_text(code)
    monkeypatch.chdir(dataset.parent)
    report = ladder(tiny(dataset, epochs=1, model="deadly:dies"))
    assert "exit code 3" in report.model_problem
    assert [rung.missing for rung in report.rungs if rung.rate(ALONE) is None] == [
        NO_ACCELERATOR for rung in report.rungs if rung.missing == NO_ACCELERATOR
    ]


def test_what_failed_is_shown_and_counts(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    report = report_of(a=[100.0, 200.0, 110.0], b=[200.0], c=[300.0], d=[400.0], e=[500.0])
    report.rungs[5].missing, report.rungs[5].rates = "a disk\nhangs", {ALONE: [], TRAINED: []}
    monkeypatch.setattr(cli_ladder, "ladder", lambda request, watch: report)
    assert show_ladder(TUTORIAL, as_json=False, quiet=False) == 1
    shown = capsys.readouterr().out
    assert r"failed    batched __getitems__: a disk\nhangs" in shown
    assert "rates varied by up to ±45%" in shown
    assert "with the model " not in shown
