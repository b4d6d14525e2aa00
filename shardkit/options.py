"""Options: each is stated once, as a field of a frozen dataclass, and all else derives from it.

Signatures, docstrings, commands, manifests and suggested commands ask the functions below. They
know neither Click nor what an option means.
"""

from __future__ import annotations

import builtins
import functools
import inspect
import math
import operator
import re
import sys
import textwrap
import types
import typing
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, field, fields, replace
from difflib import get_close_matches
from numbers import Real
from os import PathLike
from pathlib import Path
from typing import Any, SupportsIndex, TypeVar, cast

from shardkit.errors import UsageError, setting, spelled

_Type = TypeVar("_Type")
_Result = TypeVar("_Result")

_WIDTH = 96
"""Columns of the generated lines of a docstring."""


@dataclass(frozen=True, kw_only=True)
class Option:
    """An option, as `option` states it."""

    help: str
    """It has other options by reference; see `shardkit.errors.setting`."""
    heading: str = ""
    """Its heading in the help; "" is `HEADING` of the class."""
    choices: tuple[str, ...] = ()
    """Its values, in the types of the stub, too."""
    is_open: bool = False
    """Whether other packages may add choices, which `require_valid` does not check."""
    minimum: int | None = None
    """The smallest value of an integer."""
    is_positive: bool = False
    """Whether a number must be above 0."""
    metavar: str | None = None
    shown: str = ""
    """The meaning of the default, if it is None on the command line."""
    parse: Callable[[Any], Any] | None = None
    """Converts a user's value; returns other values unchanged."""
    spell: Callable[[Any], str] = str
    """Returns the user's text for a value."""
    requires: str = ""
    """Another option, without which this one has no effect."""
    left_out: bool = False
    """Whether descriptions leave it out at its default."""
    stored: str | None = None
    """Its name in the description of a source; "" for none, and None for `name`."""
    store: Callable[[Any], Any] = lambda value: value
    """Returns the JSON value for that description, None to leave it out; of that value, itself."""
    is_repeated: bool = False
    """Whether the command takes it several times."""
    is_keyword_only: bool = False
    """Whether only Python has it."""
    name: str = ""
    default: Any = None
    type: str = ""
    """The field's type, as written."""
    parameter_kind: Any = inspect.Parameter.KEYWORD_ONLY
    """Whether functions take it by name alone."""
    module: str = ""
    """The module in which it is stated, with the names in its type."""

    @property
    def flag(self) -> str:
        """The option of a command."""
        return f"--{self.name.replace('_', '-')}"

    @property
    def parameter(self) -> inspect.Parameter:
        """The parameter of a function."""
        return inspect.Parameter(
            self.name,
            self.parameter_kind,
            default=inspect.Parameter.empty if self.default is MISSING else self.default,
            annotation=self.type,
        )


def option(default: Any, *, help: str, **details: Any) -> Any:  # noqa: A002
    """Return a dataclass field that is an option.

    Args:
        default: The field's default.
        help: Its description.
        **details: See `Option`.
    """
    return field(default=default, metadata=about(help, **details))


def about(help: str, **details: Any) -> dict[str, Any]:  # noqa: A002
    """Return the metadata of an option that users must give: ``field(metadata=about(...))``.

    `option` cannot make such a field: to type checkers, any call but that of ``field`` is a
    default. For ``details``, see `Option`.
    """
    return {"option": Option(help=help, **details)}


def same_option(kind: type[Any], name: str, **details: Any) -> Any:
    """Return a dataclass field that is the same option as one of another class.

    Args:
        kind: The other class.
        name: The option's name.
        **details: What differs: ``default``, or see `Option`.
    """
    (source,) = (item for item in fields(kind) if item.name == name)
    default = details.pop("default", source.default)
    shared = replace(source.metadata["option"], heading=_heading(kind, source), **details)
    return field(default=default, metadata={"option": shared})


def options_of(kind: type[Any]) -> tuple[Option, ...]:
    """Return the options of a class, in order. ``HEADING`` of the class is their heading."""
    return _options_of(cast(Any, kind))


@functools.cache  # a tenth of a millisecond, for each object that is made
def _options_of(kind: Any) -> tuple[Option, ...]:
    return tuple(
        Option(
            **{
                **vars(item.metadata["option"]),
                "name": item.name,
                "heading": _heading(kind, item),
                "default": item.default,
                "type": item.type,
                "module": _owner(kind, item).__module__,
                "parameter_kind": inspect.Parameter.KEYWORD_ONLY
                if item.kw_only
                else inspect.Parameter.POSITIONAL_OR_KEYWORD,
            }
        )
        for item in fields(kind)
        if "option" in item.metadata
    )


def _heading(kind: type[Any], item: Field[Any]) -> str:
    """Return an option's heading, of the class that states it."""
    owner = _owner(kind, item)
    heading: str = item.metadata["option"].heading or getattr(owner, "HEADING", "")
    return heading


def _owner(kind: type[Any], item: Field[Any]) -> type[Any]:
    """Return the class that states a field."""
    return next(base for base in kind.__mro__ if item.name in inspect.get_annotations(base))


def require_valid(values: Any) -> None:
    """Parse and check an object's options, in its ``__post_init__``.

    UsageError if a text cannot be parsed, a choice is unknown, a number too small, or an option has
    no effect.
    """
    for item in options_of(type(values)):
        value = getattr(values, item.name)
        _require_type(item, value)
        if item.parse is not None and value is not None:
            value = item.parse(value)
            object.__setattr__(values, item.name, value)
        if item.minimum is not None and (value is not None or "None" not in item.type):
            require_integer(item.name, value, item.minimum)
        if item.is_positive and value is not None and not 0 < value < math.inf:
            raise UsageError(f"{setting(item.name, value)} must be a positive number")
        if item.requires and value != item.default and getattr(values, item.requires) is None:
            raise UsageError(f"{setting(item.name)} requires {setting(item.requires)}")


def _require_type(item: Option, value: object) -> None:
    """Check that a value is one of the choices, or has the type that is written in the code.

    An empty path has not: to `Path`, it is the current folder.
    """
    if value is item.default or item.parse is not None:  # which checks values itself
        return
    if item.choices and not (isinstance(value, str) and (item.is_open or value in item.choices)):
        remedy = f"choose from {', '.join(item.choices)}"
        raise UsageError(f"{setting(item.name, value)} is unknown;", remedy=remedy)
    kinds = _kinds(item.type, item.module)
    if not any(fits(value) for _, fits in kinds):
        first, comma, last = ", ".join(dict.fromkeys(word for word, _ in kinds)).rpartition(", ")
        raise UsageError(f"{setting(item.name, value)} must be {first}{comma and ' or '}{last}")
    if "Path" in item.type and isinstance(value, str) and not value:
        raise UsageError(f"{item.name} is empty", remedy="pass a path or URL", where=item.name)


_Kind = tuple[str, Callable[[Any], bool]]
"""Words for the values of a type, and a function that returns whether a value is one."""


def _is_list(value: Any, kind: type[Any], part: type[Any] = object) -> bool:
    is_list = isinstance(value, kind) and not isinstance(value, str | bytes)
    return is_list and all(isinstance(item, part) for item in value)


_KINDS: dict[Any, _Kind] = {
    Any: ("anything", lambda value: True),
    type(None): ("None", lambda value: value is None),
    bool: ("True, False", lambda value: type(value) is bool),
    int: ("an integer", lambda value: isinstance(value, SupportsIndex) and type(value) is not bool),
    float: ("a number", lambda value: isinstance(value, Real) and not isinstance(value, bool)),
    str: ("text", lambda value: isinstance(value, str)),
    Path: ("a path", lambda value: isinstance(value, str | PathLike)),
    PathLike: ("a path", lambda value: isinstance(value, str | PathLike)),
    Callable: ("a function", callable),
    Mapping: ("a dict", lambda value: isinstance(value, Mapping)),
    Sequence: ("a list", lambda value: _is_list(value, Sequence)),
    Sequence[str]: ("a list such as ['image']", lambda value: _is_list(value, Collection, str)),
}


_NAMES = {"None": type(None), "Path": Path, "PathLike": PathLike, "Names": Sequence[str]}


@functools.cache
def _kinds(type_: str, module: str) -> tuple[_Kind, ...]:
    """Return the kinds of values of a type, as written in a module.

    Of a part of a union, only the name before a bracket counts.
    """
    names = type_.replace("Sequence[str]", "Names")
    while "[" in names:
        names = re.sub(r"\[[^][]*\]", "", names)
    known = vars(builtins) | vars(sys.modules[module]) | _NAMES
    kinds: list[_Kind] = []
    for name in names.split(" | "):
        part = known.get(name.rpartition(".")[2], Any)  # some are imported for type checkers only
        is_union = typing.get_origin(part) in (typing.Union, types.UnionType)
        kinds += map(_kind, typing.get_args(part) if is_union else (part,))
    return tuple(kinds)


def _kind(part: Any) -> _Kind:
    """Return the kind of values of a type that is no union; of most, only the origin counts."""
    origin = typing.get_origin(part) or part
    if known := _KINDS.get(part) or _KINDS.get(origin):
        return known
    if not isinstance(origin, type) or getattr(origin, "_is_protocol", False):
        return _KINDS[Any]
    return origin.__name__, lambda value: isinstance(value, origin)


def require_integer(option: str, value: object, minimum: int | None = None) -> int:
    """Return an option's value; UsageError if it is not an integer, or less than the minimum."""
    if type(value) is not int:
        raise UsageError(f"{setting(option, value)} must be an integer")
    if minimum is not None and value < minimum:
        raise UsageError(f"{setting(option, value)} must be at least {minimum}")
    return value


def check_integer(name: str, value: object, least: int) -> int:
    """Return ``value``, an integer of any type, as an int that fits 64 bits."""
    try:
        number = operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        number = least - 1
    if isinstance(value, bool) or not least <= number < 2**63:
        kind = {0: "a non-negative integer", 1: "a positive integer"}.get(least, "a 64-bit integer")
        raise UsageError(f"{setting(name, value)} must be {kind}")
    return number


def make(kind: type[_Type], arguments: dict[str, Any]) -> _Type:
    """Return the options of a class, and remove them from a command's ``arguments``."""
    values = {}
    for item in options_of(kind):
        if item.name in arguments:
            value = arguments.pop(item.name)
            values[item.name] = item.default if value is None and item.shown else value
    return kind(**values)


def describe(values: Any) -> dict[str, Any]:
    """Return the fields of an object as JSON values; `restored` is the inverse."""
    hidden = {item.name: item.default for item in options_of(type(values)) if item.left_out}
    return {
        name: list(value) if isinstance(value, tuple) else value
        for name, value in vars(values).items()
        if name not in hidden or value != hidden[name]
    }


def restored(kind: type[_Type], described: Mapping[str, Any]) -> _Type:
    """Return the object that `describe` described.

    UsageError if a value is out of range; TypeError if ``described`` is no description.
    """
    for item in options_of(kind):
        if item.parse is not None and isinstance(described.get(item.name), str):
            raise TypeError(f"{item.name} cannot be text")
    values = {
        name: tuple(value) if isinstance(value, list) else value
        for name, value in described.items()
    }
    items = fields(kind)  # type: ignore[arg-type]
    known = {item.name: _kinds(str(item.type), _owner(kind, item).__module__) for item in items}
    for name, value in values.items():
        if name not in known:
            raise TypeError(f"{name!r} is unknown")
        if not any(fits(value) for _, fits in known[name]):
            raise TypeError(f"{name} cannot be {described[name]!r}")
    return kind(**values)


def changed(values: Any) -> dict[str, Any]:
    """Return the options of an object that are not at their defaults, by name."""
    return {
        item.name: getattr(values, item.name)
        for item in options_of(type(values))
        if item.default is not MISSING and getattr(values, item.name) != item.default
    }


def words(kind: type[Any], values: Mapping[str, Any]) -> list[str]:
    """Return the words of a command that give options of a class these values."""
    result = []
    for item in options_of(kind):
        if item.name in values:
            value = values[item.name]
            result += [item.flag] if value is True else [item.flag, item.spell(value)]
    return result


def group(kind: type[Any]) -> Any:
    """Return a dataclass field with an object of another class of options.

    Args:
        kind: The other class, which checks its own options.
    """
    return field(default_factory=kind, metadata={"group": kind})


def takes(*kinds: type[Any]) -> Callable[[Callable[..., _Result]], Callable[..., _Result]]:
    """Return a decorator of functions and methods, which users call with the options of classes.

    The function's first parameters are an object of each class; those that follow are the user's,
    too. Options and their help join its signature and the ``Args`` of its docstring, so ``help``
    lists them. The stub of the package states them for editors and type checkers.

    Args:
        *kinds: The classes. The attribute ``INSTEAD`` of one has the way to do what options of
            other libraries do.
    """
    items = _arguments_of(kinds)

    def decorate(function: Callable[..., Any]) -> Any:
        plain = inspect.signature(function)
        parameters = list(plain.parameters.values())
        count = int(parameters[0].name == "self")
        before = parameters[:count]
        after = parameters[count + len(kinds) :]
        own = [
            Option(
                help="",
                name=p.name,
                default=p.default,
                type=p.annotation,
                module=function.__module__,
            )
            for p in after
        ]
        named = [item for item in after if item.kind is item.KEYWORD_ONLY]
        arranged = [*after[: len(after) - len(named)], *[item.parameter for item in items], *named]
        signature = inspect.Signature(sorted(arranged, key=lambda item: item.kind))

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            try:
                values = signature.bind(*args[count:], **kwargs).arguments
            except TypeError as error:
                way = _way(kinds, kwargs, signature.parameters)
                raise TypeError(f"{function.__qualname__}() {error}{way}") from None
            objects = [_build(kind, values) for kind in kinds]
            keywords = {item.name: values[item.name] for item in after if item.name in values}
            for item in own:
                _require_type(item, keywords.get(item.name, item.default))
            return function(*args[:count], *objects, **keywords)

        taken = _Signature(
            [*before, *signature.parameters.values()], return_annotation=plain.return_annotation
        )
        vars(call).update(__signature__=taken, __options__=items)
        call.__annotations__ = {item.name: item.annotation for item in taken.parameters.values()}
        call.__annotations__["return"] = taken.return_annotation
        if call.__doc__ is not None:  # without -OO
            call.__doc__ = _with_arguments(call.__doc__, items)
        return call

    return decorate


def _arguments_of(kinds: Iterable[type[Any]]) -> list[Option]:
    """Return the options of classes and of their groups, in order; no two have one name."""
    items: list[Option] = []
    for kind in kinds:
        items += [*_arguments_of(_groups(kind).values()), *options_of(kind)]
    names = Counter(item.name for item in items)
    if names and (repeated := names.most_common(1)[0])[1] > 1:
        raise TypeError(f"two options have the name {repeated[0]}")
    return items


def _groups(kind: type[Any]) -> dict[str, type[Any]]:
    """Return the classes of a class's groups, by name."""
    return {item.name: item.metadata["group"] for item in fields(kind) if "group" in item.metadata}


def _way(kinds: Iterable[type[Any]], names: Iterable[str], known: Iterable[str]) -> str:
    """Return the end of a message: the replacement for an unknown option, or a similar name."""
    ways = {name: way for kind in kinds for name, way in getattr(kind, "INSTEAD", {}).items()}
    unknown = next((name for name in names if name not in known), "")
    if unknown in ways:
        return f": {ways[unknown]}"
    return "".join(f". Did you mean {name}?" for name in get_close_matches(unknown, known, 1))


def _build(kind: type[_Type], keywords: Mapping[str, Any]) -> _Type:
    """Return an object with its own options and groups of options, taken from ``keywords``."""
    values = {item.name: keywords[item.name] for item in options_of(kind) if item.name in keywords}
    for item in options_of(kind):
        _require_type(item, keywords.get(item.name, item.default))
    groups = {name: _build(group, keywords) for name, group in _groups(kind).items()}
    return kind(**values, **groups)


class _Signature(inspect.Signature):
    """A signature of many parameters, which `help` shows on a line each, as of Python 3.13."""

    def __str__(self) -> str:
        names = [str(item) for item in self.parameters.values()]
        kinds = [item.kind for item in self.parameters.values()]
        if inspect.Parameter.KEYWORD_ONLY in kinds:
            names.insert(kinds.index(inspect.Parameter.KEYWORD_ONLY), "*")
        lines = "".join(f"\n    {name}," for name in names)
        text = f"({lines}\n) -> {inspect.formatannotation(self.return_annotation)}"
        return re.sub(r"(: |-> )'([^']*)'", r"\1\2", text)  # annotations are texts, so quoted


def _with_arguments(doc: str, items: Iterable[Option]) -> str:
    """Return a docstring with the help of each option, after the arguments that it has."""
    lines = "".join(f"\n{_line(item)}" for item in items)
    head, *sections = re.split(r"(?=\n\n(?:Returns|Raises):)", inspect.cleandoc(doc), maxsplit=1)
    heading = "" if "\n\nArgs:" in head else "\n\nArgs:"
    return f"{head}{heading}{lines}{''.join(sections)}"


def _line(item: Option) -> str:
    """Return an entry of a docstring's arguments."""
    text = item.help
    if item.choices and not item.is_open:
        text += f" One of {', '.join(f'``{name}``' for name in item.choices)}."
    if item.shown and item.default is None:
        text += f" Default: {item.shown}."
    text = spelled(text, lambda name, value: f"``{name}``")
    return textwrap.fill(
        f"{item.name}: {text}", _WIDTH, initial_indent=" " * 4, subsequent_indent=" " * 8
    )
