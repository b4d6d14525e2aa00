"""An extension of Griffe, by which mkdocstrings reads sources: options are shown as `help` does."""

from __future__ import annotations

import inspect
from typing import Any

import griffe

_KINDS: dict[Any, griffe.ParameterKind] = {
    inspect.Parameter.POSITIONAL_OR_KEYWORD: griffe.ParameterKind.positional_or_keyword,
    inspect.Parameter.KEYWORD_ONLY: griffe.ParameterKind.keyword_only,
}


class Options(griffe.Extension):
    """Replaces what the sources state of options by what `shardkit.options` makes of them."""

    def on_function(self, *, func: griffe.Function, **_: Any) -> None:
        """Give a function that `takes` a dataclass its parameters, and their help."""
        if func.docstring and any("takes" in str(each.value) for each in func.decorators):
            made: Any = griffe.dynamic_import(func.path)
            func.docstring.value = inspect.getdoc(made) or ""
            parameters = inspect.signature(made).parameters.values()
            func.parameters = griffe.Parameters(*map(_parameter, parameters))

    def on_attribute_instance(self, *, attr: griffe.Attribute, **_: Any) -> None:
        """Give a field of options its help, and show its default alone."""
        if isinstance(attr.value, griffe.ExprCall) and str(attr.value.function) == "option":
            parent, name = attr.path.rsplit(".", 1)
            field: Any = griffe.dynamic_import(parent).__dataclass_fields__[name]
            attr.value = repr(field.default)
            attr.docstring = griffe.Docstring(field.metadata["option"].help, parent=attr)


def _parameter(item: inspect.Parameter) -> griffe.Parameter:
    return griffe.Parameter(
        item.name,
        annotation=None if item.annotation is item.empty else str(item.annotation),
        kind=_KINDS[item.kind],
        default=None if item.default is item.empty else repr(item.default),
    )
