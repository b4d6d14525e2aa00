"""Tables of cases that are too quick to be tests of their own."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable
from typing import Any


def for_each(
    names: str | tuple[str, ...], values: Iterable[Any]
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Call a test for each row of a table, as one test; the first case that fails is named.

    `pytest.mark.parametrize` makes a test of each, which takes longer to collect and to report than
    most of them run. Several tables multiply. Fixtures are shared by all rows.
    """
    columns = tuple(names.replace(",", " ").split()) if isinstance(names, str) else names
    rows = [(row,) if len(columns) == 1 else tuple(row) for row in values]

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(test)
        def call_each(*arguments: Any, **fixtures: Any) -> None:
            for row in rows:
                try:
                    test(*arguments, **fixtures, **dict(zip(columns, row, strict=True)))
                except Exception as error:
                    error.add_note(f"with {', '.join(columns)} = {str(row)[:500]}")
                    raise

        signature = inspect.signature(test)
        others = [value for name, value in signature.parameters.items() if name not in columns]
        call_each.__signature__ = signature.replace(parameters=others)  # type: ignore[attr-defined]
        return call_each

    return decorate
