"""Exceptions that cross from a worker process: type, message, causes and traceback."""

from __future__ import annotations

import pickle
import traceback

import pytest

from shardkit.errors import TransformFailed
from shardkit.torch.engine.failure import Failure, WorkerTraceback


class Picky(Exception):
    """Cannot be rebuilt from its arguments."""

    def __init__(self, one: int, two: int) -> None:
        super().__init__(f"{one} and {two}")


def sent(error: BaseException) -> BaseException:
    failure: Failure = pickle.loads(pickle.dumps(Failure(error)))
    return failure.rebuild()


def raised(cause: BaseException) -> TransformFailed:
    try:
        try:
            raise cause
        except BaseException as error:
            raise TransformFailed("the transform failed") from error
    except TransformFailed as error:
        return error


def test_the_exception_and_its_causes_arrive_with_the_worker_s_traceback() -> None:
    error = sent(raised(ValueError("wrong", 3)))

    assert type(error) is TransformFailed
    assert str(error) == "the transform failed"
    assert type(error.__cause__) is ValueError
    assert error.__cause__.args == ("wrong", 3)
    last = error.__cause__.__cause__
    assert isinstance(last, WorkerTraceback)
    assert "raise cause" in str(last)
    assert traceback.format_exception(error)[-1].endswith("TransformFailed: the transform failed\n")


@pytest.mark.parametrize("local", [False, True])
def test_an_unpicklable_exception_arrives_as_its_type_and_message(local: bool) -> None:
    class Local(Exception):
        pass

    error = sent(raised(Local("here") if local else Picky(1, 2)))

    assert type(error) is TransformFailed
    assert type(error.__cause__) is RuntimeError
    assert str(error.__cause__) == ("Local: here" if local else "Picky: 1 and 2")
