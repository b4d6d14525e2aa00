"""The options of commands: Click's parameters for classes of options, and shared classes."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import click

from shardkit.errors import spelled
from shardkit.options import Option, option, options_of, same_option
from shardkit.registry import OWN_FORMATS, format_hint, format_names
from shardkit.system.machine import usable_cpus
from shardkit.system.text import parse_bytes


class LocalOrUrl(click.Path):
    """A path or URL that is not empty: an empty one, as of an unset variable, would be ``.``."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return the path."""
        if value == "" and param is not None:
            raise click.BadParameter("it is empty: pass a path or URL", ctx, param)
        return super().convert(value, param, ctx)


_TYPES: dict[str, Any] = {"int": int, "float": float, "Path": LocalOrUrl(path_type=Path)}
"""Types of values by those in a field's annotation; all others are texts."""


_CPUS = "number of CPUs"
"""A default of a command that Python does not have: `usable_cpus`."""


class FormatChoice(click.Choice):  # type: ignore[type-arg]
    """A choice of formats that suggests the one that is meant."""

    def __init__(self) -> None:
        self.case_sensitive = True

    @cached_property
    def choices(self) -> tuple[str, ...]:  # type: ignore[override]
        """All formats; those of other packages are found where they matter."""
        return tuple(format_names())

    def convert(self, value: str, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """Return the name of the format."""
        if value in OWN_FORMATS:
            return value
        try:
            return str(super().convert(value, param, ctx))
        except click.BadParameter as error:
            self.fail(error.message + format_hint(value), param, ctx)


class GroupedOption(click.Option):
    """An option of a command, under a heading of its help."""

    def __init__(self, flags: list[str], *, heading: str, **details: Any) -> None:
        super().__init__(flags, **details)
        self.heading = heading


def command_option(default: Any = MISSING, *, help: str, **details: Any) -> Any:  # noqa: A002
    """Return a dataclass field that is an option of a command alone.

    Without a default, users must give the option. For ``details``, see `Option`; or give ``flags``,
    and other details of `click.Option`.
    """
    return _with_details(option(default, help=help, **_ours(details)), details)


def restated(kind: type[Any], name: str, **details: Any) -> Any:
    """Return a dataclass field that is the same option as one of another class.

    ``details`` are what differs; see `command_option`.
    """
    return _with_details(same_option(kind, name, **_ours(details)), details)


def duration_option(kind: type[Any], name: str, *, help: str) -> Any:  # noqa: A002
    """Return a dataclass field that is an option of another class in seconds, as a time like 2m."""
    (seconds,) = (item.default for item in fields(kind) if item.name == name)
    details = {"default": f"{seconds:g}s", "type": str, "callback": duration}
    return _with_details(same_option(kind, name, help=help, metavar="TIME"), details)


def _ours(details: dict[str, Any]) -> dict[str, Any]:
    """Take the details of `Option` out of those of an option, which leaves Click's."""
    names = Option.__annotations__.keys() - {"type"}  # Click's; ours is the field's
    return {name: details.pop(name) for name in [*details] if name in names}


def _with_details(item: Any, details: dict[str, Any]) -> Any:
    return field(default=item.default, metadata={**item.metadata, "click": details})


def click_options(*kinds: type[Any]) -> list[click.Option]:
    """Return the options of classes as those of a command."""
    return [
        _click_option(item, details.get(item.name, {}))
        for kind in kinds
        for details in [{item.name: item.metadata.get("click", {}) for item in fields(kind)}]
        for item in options_of(kind)
        if not item.is_keyword_only
    ]


def _click_option(item: Option, more: Mapping[str, Any]) -> click.Option:
    flags = [item.flag]
    help_text = spelled(item.help, lambda name, value: f"--{name.replace('_', '-')}")
    details = dict[str, Any]()
    if item.shown:
        help_text += f"  [default: {item.shown}]"
        if item.shown == _CPUS:
            details["default"] = usable_cpus
    elif item.default is MISSING:
        details["required"] = True
    elif not item.is_repeated and item.default is not None:
        details["default"] = item.default if item.parse is None else item.spell(item.default)
        details["show_default"] = item.is_positive or type(item.default) not in (bool, float)
    if item.type == "bool":
        details["is_flag"] = True
    elif item.type == "bool | None":
        flags = [f"{item.flag}/--no-{item.flag[2:]}"]
        details["default"] = None
    elif item.name == "to":
        details["type"] = FormatChoice()
    elif item.choices:
        details["type"] = click.Choice(item.choices)
    elif item.minimum is not None:
        details["type"] = click.IntRange(item.minimum)
    elif item.is_positive:
        details["type"] = click.FloatRange(0, min_open=True)
    elif item.parse is None and (match := re.search(r"\b(int|float|Path)\b", item.type)):
        details["type"] = _TYPES[match[1]]
    details |= more
    return GroupedOption(
        [*details.pop("flags", flags), item.name],
        heading=item.heading,
        help=help_text,
        metavar=item.metavar,
        multiple=item.is_repeated,
        **details,
    )


def argument(name: str, **details: Any) -> click.Argument:
    """Return an argument of a command: a path, unless ``details`` give another type."""
    return click.Argument([name], **{"type": LocalOrUrl(path_type=Path), **details})


class Options:
    """Base class of the options of one command."""

    HEADING: ClassVar[str] = "Options"


@dataclass(frozen=True, kw_only=True)
class Workers(Options):
    """Worker processes."""

    workers: int = option(1, help="Number of processes.", metavar="N", minimum=1, shown=_CPUS)


_SECONDS = {"": 1.0, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0}


def duration(ctx: click.Context, param: click.Parameter, value: str) -> float:
    """Return a time in seconds above 0, from ``60``, ``60s``, ``2m`` or ``1h``."""
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?) *([a-z]*)", value.strip().lower())
    seconds = float(match[1]) * _SECONDS.get(match[2], 0) if match else 0
    if not seconds:
        raise click.BadParameter(f"{value!r} is not a time such as 60s or 2m", ctx, param)
    return seconds


def byte_size(ctx: click.Context, param: click.Parameter, value: str | None) -> int | None:
    """Return a number of bytes, from ``500MB`` or ``4GiB``."""
    return None if value is None else parse_bytes(value, param.opts[0])


def one_or_all(paths: Sequence[Path]) -> Path | list[Path] | None:
    """Return the only path that was given, all of several, or None."""
    if len(paths) > 1:
        return list(paths)
    return paths[0] if paths else None
