"""A measuring process from outside: its answers, its end, and its last words."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import forked
import psutil
import pytest
from helpers import DEADLINE, make_folder, python, wait_until
from refusals import refused

from shardkit.errors import MeasurementFailed, MeasurementTimeout, UsageError
from shardkit.measure.runner import session
from shardkit.measure.runner.process import MeasurementProcess
from shardkit.measure.runner.session import Session
from shardkit.measure.runner.spec import LoaderSpec, StepSpec, StopCondition, Subject, parse_loader
from shardkit.system import helper
from shardkit.torch.engine.workers import choose_start_method

pytestmark = pytest.mark.slow  # each process imports torch

EPOCH = StopCondition(epochs=1, whole=True)

TRANSFORMS = """
import os, sys, threading
from pathlib import Path
def hangs(image): threading.Event().wait()
def dies(image):
    print("planted last words", file=sys.stderr, flush=True)
    os._exit(7)
def dies_once(image):
    if not Path("died").exists():
        Path("died").touch()
        os._exit(7)
    return 1
def leaves_its_name(image):
    Path(f"worker-{os.getpid()}").touch()
    threading.Event().wait()
"""

HOSTILE = "from pathlib import Path; Path('was_run').touch()"


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("served")
    (path / "planted.py").write_text(TRANSFORMS)
    make_folder(path / "photos")
    return path


@pytest.fixture
def plain() -> LoaderSpec:
    return parse_loader("plain", 4)


@pytest.fixture
def served(place: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[MeasurementProcess]]:
    """Three processes that start together: one that works, one that hangs, one that dies."""
    monkeypatch.chdir(place)
    monkeypatch.setattr(sys, "path", [str(Path(__file__).parent), *sys.path])
    path = str(place / "photos")
    subjects = [
        Subject(path=path, decode="CenterCrop(8)"),
        Subject(path=path, transform="planted:hangs"),
        Subject(path=path, transform="planted:dies"),
    ]
    started = [MeasurementProcess(subject, patience=2 * DEADLINE) for subject in subjects]
    yield started
    for each in started:
        each.close()


def double(session: Session, *, number: int) -> tuple[int, str]:
    return 2 * number, session.subject.path


def refuse(session: Session) -> object:
    return lambda: None  # cannot be pickled


def start_method(session: Session) -> str:
    return choose_start_method()


def ended(process: MeasurementProcess) -> bool:
    return process._helper.process is None


def test_a_process_measures_is_killed_if_it_hangs_and_reports_its_end(
    served: list[MeasurementProcess], plain: LoaderSpec, place: Path
) -> None:
    good, hanging, dying = served

    assert [each.open().images for each in served] == [6, 6, 6]
    good.call(session.warm)
    assert 0 <= (good.call(session.drop) or 0) <= 1
    seen = good.measure(parse_loader("plain:num_workers=1", 4), EPOCH)
    assert (seen.images, seen.engine, seen.workers) == (6, "plain", 1)
    assert good.call(double, number=21) == (42, str(place / "photos"))
    # Workers start as they would in the user's process: without a fork server.
    assert sys.platform != "linux" or good.call(start_method) == "fork"
    assert good._helper.process is not None
    os.kill(good._helper.process.pid, signal.SIGINT)  # as Ctrl-C does: the parent decides
    with refused(MeasurementFailed):
        good.call(refuse)
    assert not ended(good)
    with refused(UsageError):
        good.measure(plain, EPOCH, StepSpec(model="nowhere:model"))

    hanging.patience = 0.3
    with pytest.raises(MeasurementTimeout, match="no answer"):
        hanging.measure(plain, StopCondition(seconds=0.1))
    assert ended(hanging)

    with refused(MeasurementFailed, "7"):
        dying.measure(plain, EPOCH)
    assert ended(dying)

    good.close()
    assert ended(good)


def test_a_process_that_ended_is_started_again(
    place: Path, plain: LoaderSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(place)
    subject = Subject(path=str(place / "photos"), transform="planted:dies_once")
    with MeasurementProcess(subject) as served:
        served.open()
        with pytest.raises(MeasurementFailed, match="exit code 7"):
            served.measure(plain, EPOCH)
        assert served.measure(plain, EPOCH).images == 6


def test_it_never_imports_shadowing_modules_of_the_current_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("statistics", "json", "random", "torch", "shardkit"):
        (tmp_path / f"{name}.py").write_text(HOSTILE)
    (tmp_path / "planted.py").write_text(TRANSFORMS)
    make_folder(tmp_path / "photos")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("shardkit.system.helper._launch", forked.launch)

    subject = Subject(path="photos", decode="CenterCrop(8)", transform="planted:dies")
    with MeasurementProcess(subject) as served:  # the transform is found here
        assert served.open().images == 6

    assert not (tmp_path / "was_run").exists()


def hanging_workers(place: Path) -> list[psutil.Process]:
    """Return the workers that began to hang, two of them."""
    wait_until(lambda: len(list(place.glob("worker-*"))) == 2, "two workers")
    return [psutil.Process(int(each.name.split("-")[1])) for each in place.glob("worker-*")]


HANGING = """
import sys
from shardkit.measure.runner.process import MeasurementProcess
from shardkit.measure.runner.spec import StopCondition, Subject, parse_loader
with MeasurementProcess(Subject(path=sys.argv[1], transform="planted:leaves_its_name")) as served:
    served.open()
    served.measure(parse_loader("plain:num_workers=2", 1), StopCondition(seconds=0.1))
"""


@pytest.mark.parametrize("killed", ["the child", "the command"])
def test_hanging_workers_end_with_their_parents(killed: str, place: Path, tmp_path: Path) -> None:
    (tmp_path / "planted.py").write_text(TRANSFORMS)
    command = [sys.executable, "-c", HANGING, str(place / "photos")]
    with subprocess.Popen(command, cwd=tmp_path) as asking:
        workers = hanging_workers(tmp_path)
        (child,) = psutil.Process(asking.pid).children()
        if killed == "the command":
            asking.kill()
        else:
            child.kill()

    _, alive = psutil.wait_procs([child, *workers], timeout=DEADLINE)
    for each in alive:
        each.kill()
    assert not alive


def test_hanging_workers_are_killed_with_their_process(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "planted.py").write_text(TRANSFORMS)
    monkeypatch.chdir(tmp_path)
    subject = Subject(path=str(place / "photos"), transform="planted:leaves_its_name")
    with MeasurementProcess(subject) as served:
        served.open()
        request = session.measure, (), look_request()
        served._helper._write(helper._CALL, session.answer, request, {})
        workers = hanging_workers(tmp_path)
        for each in workers:
            each.suspend()  # so that it does not end by itself
        served.patience = 0.1
        with pytest.raises(MeasurementTimeout, match="no answer"):
            served.call(session.warm)

        assert ended(served)
        assert not psutil.wait_procs(workers, timeout=DEADLINE)[1]


def look_request() -> dict[str, object]:
    loader = parse_loader("plain:num_workers=2", 1)
    return {"loader": loader, "stop": StopCondition(seconds=0.1), "step": StepSpec()}


MANY_FILES = """
import os, resource, sys
from shardkit.measure.runner.process import MeasurementProcess
from shardkit.measure.runner.spec import Subject
_, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (2048, hard))
while os.dup(0) <= 1024:
    pass
with MeasurementProcess(Subject(path=sys.argv[1])) as it:
    print(it.open().images)
"""


def test_a_parent_with_many_open_files_receives_answers(place: Path) -> None:
    """The system's ``select`` takes no descriptor above 1023."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if 0 <= hard < 2048:
        pytest.skip(f"this system lets a process open {hard} files only")
    done = python(MANY_FILES, place / "photos")
    assert (done.stdout, done.stderr) == ("6\n", "")
