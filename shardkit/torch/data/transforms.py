"""The user's transforms of a dataset: of one field each, or of several fields together."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from shardkit.errors import TransformFailed, UsageError, setting
from shardkit.record import IMAGE, LABEL
from shardkit.system.text import name_list
from shardkit.torch.data.batch_rows import BatchRows
from shardkit.torch.data.collate import Values
from shardkit.torch.data.reader_options import Function, Transforms


class FieldTransforms(NamedTuple):
    """The options ``transform`` and ``target_transform``."""

    transform: Function | Transforms | None = None
    target_transform: Function | None = None

    @property
    def named(self) -> dict[str, Function]:
        """The transforms, by option or field."""
        named = {"transform": self.transform}
        if isinstance(self.transform, Mapping):
            named = {", ".join(_names(key)): value for key, value in self.transform.items()}
        named["target_transform"] = self.target_transform
        return {name: value for name, value in named.items() if value is not None}  # type: ignore[misc]

    def of(self, name: str) -> Function | None:
        """Return the transform of a field, unless it applies to other fields too."""
        if name == LABEL and self.target_transform is not None:
            return self.target_transform
        if isinstance(self.transform, Mapping):
            return self.transform.get(name)
        return self.transform if name == IMAGE else None

    @property
    def joint(self) -> dict[tuple[str, ...], Function]:
        """The transforms of several fields together."""
        if not isinstance(self.transform, Mapping):
            return {}
        return {key: function for key, function in self.transform.items() if isinstance(key, tuple)}

    def change(self, name: str) -> bool:
        """Return whether a transform applies to a field."""
        return self.of(name) is not None or any(name in names for names in self.joint)

    def applied(self, batch: BatchRows, name: str, values: Values) -> Values:
        """Return the values of a field after its own transform."""
        function = self.of(name)
        if function is None:
            return values
        numbered = enumerate(values.values)
        return Values([batch.transformed(name, function, value, n) for n, value in numbered])

    def apply_jointly(self, batch: BatchRows, columns: dict[str, Values]) -> None:
        """Replace the values of fields that have a transform together.

        Raises TransformFailed if one does not return a value for each of its fields.
        """
        for names, function in self.joint.items():
            what = ", ".join(names)
            results = []
            rows = zip(*(columns[name].values for name in names), strict=True)
            for number, values in enumerate(rows):
                result = batch.apply(what, function, values, number)
                if not isinstance(result, (tuple, list)) or len(result) != len(names):
                    raise TransformFailed(
                        f"the transform of {what} must return a tuple of {len(names)} values, in "
                        f"this order; it returned {type(result).__name__} for "
                        f"{batch.describe(number)}"
                    )
                results.append(result)
            for position, name in enumerate(names):
                columns[name] = Values([result[position] for result in results])

    def require_valid(self, fields: Sequence[str]) -> None:
        """Refuse transforms of other fields than those that are read, and two of one field."""
        if isinstance(self.transform, Mapping):
            names = [name for key in self.transform for name in _names(key)]
            require_known("transform", names, fields)
            if self.target_transform is not None and LABEL in names:
                raise UsageError(
                    f"{setting('transform')} and target_transform= both apply to the label",
                    remedy="leave one out",
                )
            if len(set(names)) < len(names):
                raise UsageError(
                    f"{setting('transform')} applies twice to a field: {', '.join(names)}"
                )
        for name, function in self.named.items():
            if not callable(function):
                raise UsageError(f"{setting(name, function)} is not a function")
        for keyword, name in (("transform", IMAGE), ("target_transform", LABEL)):
            value = getattr(self, keyword)
            if value is not None and not isinstance(value, Mapping) and name not in fields:
                raise UsageError(
                    f"{setting(keyword)} applies to the field {name!r}, which is not read: "
                    f"fields= is {fields}",
                    remedy="Use transform={NAME: function} for other fields",
                )


def require_known(option: str, names: Iterable[str], choices: Sequence[str]) -> None:
    """Refuse names of a mapping that are not among the choices."""
    for name in names:
        if name not in choices:
            raise UsageError(
                f"{option}={{{name!r}: ...}}",
                remedy=f"choose from {name_list(choices) or 'no field'}, of the fields that are "
                "read",
            )


def _names(key: str | tuple[str, ...]) -> tuple[str, ...]:
    """Return the fields that a key of ``transform`` names."""
    return key if isinstance(key, tuple) else (key,)
