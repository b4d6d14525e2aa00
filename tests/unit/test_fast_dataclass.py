"""Classes behave as those of `dataclasses.dataclass` do."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import pickle
from collections.abc import Callable
from dataclasses import field
from typing import Any, ClassVar

import pytest

from shardkit.fast_dataclass import dataclass


def classes(define: Callable[..., Any]) -> tuple[Any, Any]:
    """Return a class with fields of all kinds, and one derived from it."""

    @define(frozen=True, kw_only=True)
    class Plain:
        HEADING: ClassVar[str] = "none"

        must: int
        may: str = "x"
        each: list[int] = field(default_factory=list)
        hidden: Any = field(default=None, repr=False, compare=False)

        def __post_init__(self) -> None:
            if self.must < 0:
                raise ValueError

    @define(frozen=True, kw_only=True)
    class Longer(Plain):
        more: int = 1

    return Plain, Longer


OURS, OURS_LONGER = classes(dataclass)
PYTHON, PYTHON_LONGER = classes(dataclasses.dataclass)
PAIRS = [(OURS, PYTHON), (OURS_LONGER, PYTHON_LONGER)]


@dataclass(frozen=True, kw_only=True)
class Stated:
    """Found by pickle."""

    value: int
    rest: tuple[int, ...] = ()


@pytest.mark.parametrize(("ours", "python"), PAIRS)
def test_values_text_equality_and_signature_are_those_of_python(ours: Any, python: Any) -> None:
    for given in ({"must": 1}, {"must": 2, "may": "y", "each": [1], "hidden": 3}):
        one, other = ours(**given), python(**given)
        assert vars(one) == vars(other)
        assert repr(one) == repr(other)
        assert dataclasses.replace(one, may="z") == ours(**{**given, "may": "z"})
        assert one == ours(**{**given, "hidden": 9}) != ours(must=0)
        assert one != other
        assert dataclasses.asdict(one) == dataclasses.asdict(other)
    assert ours(must=1).each is not ours(must=1).each
    shown, expected = inspect.signature(ours), inspect.signature(python)
    assert [*shown.parameters] == [*expected.parameters]
    for name, item in shown.parameters.items():
        assert item.kind is expected.parameters[name].kind
        assert item.annotation == expected.parameters[name].annotation
    assert shown.parameters["must"].default is inspect.Parameter.empty


@pytest.mark.parametrize("kind", [OURS, PYTHON, OURS_LONGER])
def test_wrong_arguments_and_changes_are_refused(kind: Any) -> None:
    for given in ({}, {"must": 1, "none": 2}):
        with pytest.raises(TypeError, match=r"must|none"):
            kind(**given)
    with pytest.raises(TypeError):
        kind(1)
    with pytest.raises(ValueError):  # noqa: PT011 - it has no text
        kind(must=-1)
    with pytest.raises(dataclasses.FrozenInstanceError):
        kind(must=1).must = 2
    with pytest.raises(dataclasses.FrozenInstanceError):
        del kind(must=1).must


def test_objects_are_hashed_pickled_and_copied() -> None:
    stated = Stated(value=1, rest=(2,))

    assert pickle.loads(pickle.dumps(stated)) == copy.copy(stated) == stated
    assert len({stated, Stated(value=1, rest=(2,)), Stated(value=3)}) == 2


def test_a_class_of_another_package_may_derive_from_ours() -> None:
    derived = dataclasses.make_dataclass(
        "derived", [("own", int, 5)], bases=(OURS,), frozen=True, kw_only=True
    )

    assert vars(derived(must=1, own=6))["own"] == 6
    assert [*inspect.signature(derived).parameters][-1] == "own"
