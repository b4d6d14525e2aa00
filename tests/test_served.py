"""A measuring process from outside: its answers, its end, and its last words."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers import make_folder

from shardkit.errors import MeasurementFailed, UsageError
from shardkit.measure.served import Served
from shardkit.measure.spec import Loading, Subject, parse_loading
from shardkit.measure.timing import Span

EPOCH = Span(epochs=1, whole=True)

TRANSFORMS = """
import os, sys, threading
def hangs(image): threading.Event().wait()
def dies(image):
    print("planted last words", file=sys.stderr, flush=True)
    os._exit(7)
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("served")
    (path / "planted.py").write_text(TRANSFORMS)
    make_folder(path / "photos")
    return path


@pytest.fixture
def plain() -> Loading:
    return parse_loading("plain", 4)


@pytest.fixture
def served(place: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Served]]:
    """Three processes that start together: one that works, one that hangs, one that dies."""
    monkeypatch.chdir(place)
    path = str(place / "photos")
    subjects = [
        Subject(path=path, decode="CenterCrop(8)"),
        Subject(path=path, transform="planted:hangs"),
        Subject(path=path, transform="planted:dies"),
    ]
    started = [Served(subject) for subject in subjects]
    yield started
    for each in started:
        each.close()


def test_it_works_is_killed_when_it_hangs_and_is_heard_when_it_dies(
    served: list[Served], plain: Loading
) -> None:
    good, hanging, dying = served

    assert [each.open()["images"] for each in served] == [6, 6, 6]
    good.warm()
    assert 0 <= good.drop() <= 1
    seen = good.look(parse_loading("plain:workers=1", 4), EPOCH)
    assert (seen.look.images, seen.engine, seen.workers) == (6, "plain", 1)
    assert not good.ended
    with pytest.raises(UsageError, match="there is no module"):
        good.ask("look", loading=_plain(plain), span={}, step={"model": "nowhere:model"})

    hanging.patience = 0.3
    with pytest.raises(MeasurementFailed, match=r"no answer came for \d+ s"):
        hanging.look(plain, Span(seconds=0.1))
    assert hanging.ended

    with pytest.raises(MeasurementFailed, match=r"exit code 7\): planted last words"):
        dying.look(plain, EPOCH)
    assert dying.ended
    with pytest.raises(MeasurementFailed, match="ended"):
        dying.look(plain, EPOCH)

    good.close()
    assert good.ended


def _plain(loading: Loading) -> dict[str, object]:
    return {"engine": loading.engine, "batch_size": loading.batch_size, "options": {}}
